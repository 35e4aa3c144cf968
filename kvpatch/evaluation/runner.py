"""Running an evaluation: what is left to do, how long it will take, and doing it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from kvpatch import best
from kvpatch.bench.record import provenance
from kvpatch.cachelayer import heads_of, windows_of
from kvpatch.evaluation import continuation, stability, summary, tasks
from kvpatch.evaluation.answers import answers
from kvpatch.evaluation.config import FREE_KEYS, Config, read_yaml
from kvpatch.evaluation.reading import Clock, Reading, Way
from kvpatch.evaluation.runs import CONFIG, ENVIRONMENT, METRICS, Line, Run
from kvpatch.evaluation.samples import CellError, Sample, Sources
from kvpatch.policy import resolve

MEASURES = {"fidelity": continuation, "stability": stability}


@dataclass(frozen=True)
class Job:
    """Samples that are read together, and the ways that are still to be run over them."""

    task: str
    samples: list[Sample]
    ways: list[Way]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(one.prompt_ids) for one in self.samples)

    @property
    def steps(self) -> int:
        """Most decode steps of one way."""
        passes = 2 if self.task in MEASURES else 1  # what is fed, and free text
        return passes * max(one.free + len(one.then) + one.new_tokens for one in self.samples)


@dataclass(frozen=True)
class Pace:
    """Seconds: of reading a prompt token of one row, of one decode step of a batch, of compiling for one policy."""

    token: float
    step: float
    compiling: float

    def of(self, job: Job, way: Way | None = None) -> float:
        """Seconds of one way of a job, or of reading its prompts."""
        if way is None:
            return self.token * sum(len(one.prompt_ids) for one in job.samples)
        return self.step * job.steps


@dataclass
class Plan:
    """What is to be run. refused: cells that can't be made, with the reason. found: lines that are there already."""

    jobs: list[Job] = field(default_factory=list)
    refused: list[dict] = field(default_factory=list)
    found: int = 0

    @property
    def policies(self) -> set[str]:
        """Names of those that are to be run."""
        return {way.name for job in self.jobs for way in job.ways}

    def seconds(self, pace: Pace) -> float:
        """How long reading and decoding will take, about."""
        return sum(pace.of(job) + sum(pace.of(job, way) for way in job.ways) for job in self.jobs)


class Evaluation:
    """One run of a configuration.

    Args:
        config: what is evaluated.
        handle: of the patched model.
        tokenizer: the model's.

    Attributes:
        notes: what a reader of the results has to know, sentences.

    Raises:
        ValueError: if the folder holds a run of another configuration, naming the key.
    """

    def __init__(self, config: Config, handle, tokenizer):
        self.config, self.handle, self.tokenizer = config, handle, tokenizer
        self.sources = Sources(
            config.data and Path(config.data), config.haystack and Path(config.haystack), config.template
        )
        self.run = Run(Path(config.out))
        self.ways = [
            Way(name, text, resolved(policy, handle.model), None if text == "full" else config.budget_of(text))
            for name, policy, text in config.ways()
        ]
        self.notes = self._notes()
        self.clock = Clock()
        _check_same(self.run, config)

    def _notes(self) -> list[str]:
        notes = []
        if any(policy == best.NAME for _, policy, _ in self.config.ways()) and best.find(self.handle.model) is None:
            notes.append(f"{best.NAME}: {best.policy_for(self.handle.model)[1]}")
        once = {way.name for way in self.ways if resolve(way.policy).grows}
        if once and "stability" in tasks.chosen(self.config.tasks):
            notes.append(f"stability is of rankings at every step: {', '.join(sorted(once))} rank only when they cut")
        return notes

    def plan(self) -> Plan:
        """Make the samples and leave out what the folder holds already."""
        self.run.repair()
        plan, done = Plan(), {line.key for line in self.run.lines()}
        plan.found = len(done)
        for name in tasks.chosen(self.config.tasks):
            for length in self.config.lengths:
                try:
                    samples = self._samples(name, length)
                except CellError as error:
                    plan.refused.append({"task": name, "length": length, "reason": str(error)})
                    continue
                ways = self.ways
                if name == "stability":  # of what ranks at every step
                    ways = [way for way in ways if not resolve(way.policy).grows]
                ways = self._fitting(plan, name, length, samples, ways)
                for start in range(0, len(samples), self.config.batch):
                    batch = samples[start : start + self.config.batch]
                    plan.jobs += _missing(name, batch, ways, done)
        return plan

    def _fitting(self, plan: Plan, name: str, length: int, samples: list[Sample], ways: list[Way]) -> list[Way]:
        """The ways whose budget holds what their policy protects; the plan refuses the others."""
        fitting, shortest = [], min((len(one.prompt_ids) for one in samples), default=0)
        for way in ways:
            policy = resolve(way.policy)
            try:
                if way.budget is not None:
                    text = self.handle.model.config.get_text_config(decoder=True)
                    policy.check_model(windows_of(text), heads_of(text)[1])
                    policy.check_budget(way.budget.tokens(shortest), shortest)
            except ValueError as error:
                reason = f"{way.name} {way.text}: {error}"
                plan.refused.append({"task": name, "length": length, "reason": reason})
                continue
            fitting.append(way)
        return fitting

    def _samples(self, name: str, length: int) -> list[Sample]:
        config = self.config
        common = (self.tokenizer, length, config.samples, config.seed, self.sources)
        if name in MEASURES:
            return MEASURES[name].samples(*common, config.forced)
        return tasks.tasks()[name].samples(*common)

    def pace(self, plan: Plan) -> Pace:
        """Try out how fast the model reads and decodes."""
        longest = max((job.longest for job in plan.jobs), default=0)
        rows = max((len(job.samples) for job in plan.jobs), default=1)
        device, vocabulary = self.handle.model.device, self.handle.model.config.vocab_size

        way = next((way for way in self.ways if way.budget is not None), self.ways[0])

        def read(rows: int, columns: int) -> Reading:
            ids = torch.arange(rows * columns, device=device).view(rows, columns) % min(vocabulary, 1000)
            return Reading(self.handle, self.tokenizer, ids, policies=[way.policy])

        with read(1, 16):
            pass  # whatever is made once
        columns = min(longest, 2048)
        with read(1, columns) as reading:
            token = reading.seconds / columns
        budget = min(64, max(8, way.budget.tokens(longest))) if way.budget else None
        if resolve(way.policy).prefill is not None:
            budget = None  # what it protects may not fit so small a budget
        # Compiled with the first call, timed in the second one; a budget as in the run.
        with read(rows, 64) as reading:
            for _ in range(2):
                reading.generate(way.policy, budget, 8)
                times = self.handle.stats.step_seconds
                compiling = self.handle.stats.compile_seconds
        return Pace(token, sorted(times)[len(times) // 2], compiling)

    def execute(self, plan: Plan, tick: Callable[[Job, Way | None], None] = lambda job, way: None) -> None:
        """Run what is left; every line is on the disk before the next way begins.

        Args:
            tick: told of every way of a job that is done; of None when its prompts begin to be read.
        """
        self.run.write(CONFIG, _yaml(self.config.to_dict()))
        self.run.write(ENVIRONMENT, json.dumps(self._environment(), indent=1))
        for job in plan.jobs:
            tick(job, None)
            for way, lines in self._lines(job):
                self.run.add(lines)
                tick(job, way)

    def _lines(self, job: Job) -> Iterator[tuple[Way, list[Line]]]:
        if job.task in MEASURES:
            more = (self.config.forced, self.clock, self.run.folder)
            return MEASURES[job.task].lines(self.handle, self.tokenizer, job.samples, job.ways, *more)
        return answers(self.handle, self.tokenizer, tasks.tasks()[job.task], job.samples, job.ways, self.clock)

    def _environment(self) -> dict:
        policies = {way.name: repr(way.policy) for way in self.ways}
        return {
            **provenance(),
            "dtype": str(self.handle.model.dtype),
            "policies": policies,
            "notes": self.notes,
            "backend": self.handle.backend,
        }

    def finish(self, plan: Plan) -> dict:
        """Write metrics.json from everything in the folder; returns what it holds."""
        earlier = (self.run.read_json(METRICS) or {}).get("seconds", {})
        seconds = {name: value + earlier.get(name, 0.0) for name, value in asdict(self.clock).items()}
        metrics = summary.summarise(self.run, tasks.families()["ruler"], plan.refused)
        metrics["seconds"] = seconds
        self.run.write(METRICS, json.dumps(metrics, indent=1, allow_nan=False))
        return metrics


def resolved(policy, model):
    """The policy itself; "best" becomes what the model's profile says."""
    if policy != best.NAME:
        return policy
    return best.policy_for(model)[0]


def _missing(name: str, batch: list[Sample], ways: list[Way], done: set) -> list[Job]:
    """Jobs of one batch: one for all samples that lack the same ways."""
    groups: dict[tuple, list[Sample]] = {}
    for sample in batch:
        lacks = tuple(
            number
            for number, way in enumerate(ways)
            if (name, sample.length, sample.prompt_id, way.name, way.text) not in done
        )
        if lacks:
            groups.setdefault(lacks, []).append(sample)
    return [Job(name, samples, [ways[number] for number in lacks]) for lacks, samples in groups.items()]


def _check_same(run: Run, config: Config) -> None:
    path = run.folder / CONFIG
    if not path.exists():
        return
    earlier, now = read_yaml(path), config.to_dict()
    for key, value in now.items():
        if key not in FREE_KEYS and earlier.get(key, value) != value:
            raise ValueError(
                f"{run.folder} holds a run with {key}={earlier[key]!r}, this one has {key}={value!r}: choose another "
                "out, or take that run up with the same keys"
            )
    before = {one["name"]: one for one in earlier.get("policies", ()) if isinstance(one, dict)}
    for one in now["policies"]:
        if isinstance(one, dict) and before.get(one["name"], one) != one:
            raise ValueError(f"{run.folder} holds a run with another policy {one['name']!r}: choose another name")


def _yaml(values: dict) -> str:
    import yaml

    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
