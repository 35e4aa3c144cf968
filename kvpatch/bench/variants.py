"""Ways to decode that are measured side by side, and what one call of each takes.

dynamic  model.generate as it is: a DynamicCache, eager.
static   generate(cache_implementation="static"), the forward compiled by transformers itself.
full     kvpatch without eviction; any other name: that policy of kvpatch at its budget.
"""

import copy
import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

import kvpatch
from kvpatch.bench.disturbance import Others, Peak, synchronize
from kvpatch.bench.record import Clock, CompileWatch
from kvpatch.cachelayer import heads_of, windows_of

PLAIN = ("dynamic", "static")


@dataclass(frozen=True)
class Workload:
    """What every variant does.

    prompt: tokens of each row.   steps: new tokens of a call.   slow_steps: those of a variant that takes more than
    slow_over seconds a step.   skip: first steps of a call that are left out.   warmup: new tokens of the first call.
    compile: whether kvpatch compiles.
    """

    prompt: int
    steps: int
    slow_steps: int
    slow_over: float
    skip: int
    warmup: int
    compile: bool = True

    def tokens_for(self, warm: "Call") -> int:
        """New tokens of a call, from how slow the first one was."""
        slow = statistics.median(warm.steps[len(warm.steps) // 2 :]) > self.slow_over
        return min(self.slow_steps, self.steps) if slow else self.steps


@dataclass
class Call:
    """Seconds of one generate call: until the first token, of each step after it, and in all."""

    first: float
    steps: list[float]
    whole: float


@dataclass
class Variant:
    """One way to decode, and what was measured of it so far."""

    name: str
    budget: kvpatch.Budget | None
    model: torch.nn.Module
    handle: kvpatch.Patch | None
    tokens: int = 0
    calls: list[Call] = field(default_factory=list)
    compiles: int = 0
    compile_seconds: float = 0.0
    timed_compiles: int = 0
    others: Others = field(default_factory=Others)
    peak_bytes: int | None = None

    @classmethod
    def over(cls, base, name: str, budget: kvpatch.Budget | None, compile: bool = True) -> "Variant":
        """A model object of its own that shares the base's parameters, patched if the variant is a policy."""
        model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
        if name in PLAIN:
            return cls(name, None, model, None)
        more = {} if budget is None else {"budget": budget}
        return cls(name, budget, model, kvpatch.patch(model, name, compile=compile, **more))

    def steps(self, skip: int) -> list[list[float]]:
        """Seconds of the measured steps, round by round."""
        return [call.steps[skip:] for call in self.calls]

    def warm_up(self, prompts: Tensor, work: Workload) -> None:
        """Compile, and see whether the variant is slow enough to be measured over fewer steps."""
        with CompileWatch() as watch:
            warm = self.call(prompts, work, min(work.warmup, work.steps))
        self.compiles, self.compile_seconds = watch.graphs, watch.seconds
        self.tokens = work.tokens_for(warm)
        if not watch.graphs and (self.name == "static" or (self.handle is not None and self.handle.compile)):
            raise RuntimeError(f"{self.name} was not compiled")
        if self.name == "static" and "_compiled_call" not in vars(self.model):
            raise RuntimeError("transformers did not make a compiled call for the static cache")

    def measure(self, prompts: Tensor, work: Workload) -> None:
        """One round."""
        with CompileWatch() as watch, self.others, Peak(prompts.device) as peak:
            call = self.call(prompts, work, self.tokens)
        self.timed_compiles += watch.graphs
        self.peak_bytes = max(self.peak_bytes or 0, peak.bytes) if peak.bytes else self.peak_bytes
        self.calls.append(call)

    def call(self, prompts: Tensor, work: Workload, tokens: int) -> Call:
        """Generate that many tokens."""
        more = {}
        if self.name == "static":
            # transformers compiles around a static cache, but on a CPU only where this private switch is set.
            config = CompileConfig(mode="default", fullgraph=False)
            config._compile_all_devices = True
            more = {"cache_implementation": "static", "compile_config": config}
        clock = Clock()
        synchronize(prompts.device)
        started = time.perf_counter()
        output = self.model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=work.steps,
            do_sample=False,
            streamer=clock,
            stopping_criteria=StoppingCriteriaList([StopAfter(work.prompt + tokens)]),
            **more,
        )
        synchronize(prompts.device)
        whole = time.perf_counter() - started
        made = output.shape[1] - work.prompt
        if made != tokens:
            raise RuntimeError(f"{self.name} made {made} tokens instead of {tokens}")
        return Call(clock.first_token_seconds(started), clock.step_seconds(), whole)

    def held(self, work: Workload) -> float:
        """Tokens a row that a measured step holds, on average; layers with a sliding window read fewer."""
        steps = range(work.skip + 1, self.tokens)
        held = (work.prompt + step if self.handle is None else self.handle.held_after(step) for step in steps)
        return sum(held) / len(steps)

    def cache_peak(self, batch: int, work: Workload) -> int:
        """Largest sum of cache buffers in bytes; of transformers' caches by their shape."""
        if self.handle is not None:
            return self.handle.stats.peak_cache_bytes
        tokens = work.prompt + (work.steps if self.name == "static" else self.tokens) - 1
        # transformers' sliding layers keep one token less than their window between steps.
        return batch * cache_bytes(self.model, tokens, beyond=-1 if self.name == "dynamic" else 0)


class StopAfter(StoppingCriteria):
    """End a call after some tokens, whatever max_new_tokens says: every call has the same shapes."""

    def __init__(self, columns: int):
        self.columns = columns

    def __call__(self, input_ids, scores, **_):
        done = input_ids.shape[1] >= self.columns
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)


def parameter_bytes(model) -> int:
    """Bytes of weights that a step reads: all, but of an untied embedding only a few rows (left out)."""
    read = sum(parameter.nbytes for parameter in model.parameters())  # a tied tensor comes once
    embedding = model.get_input_embeddings().weight
    return read if embedding is model.get_output_embeddings().weight else read - embedding.nbytes


def cache_bytes(model, tokens: float, beyond: int = 0) -> float:
    """Bytes of the keys and values that one row's layers meet of `tokens` held.

    Args:
        beyond: added to every sliding window.
    """
    _, groups, width = heads_of(model.config)
    met = sum(tokens if window is None else min(tokens, window + beyond) for window in windows_of(model.config))
    return met * 2 * groups * width * model.dtype.itemsize
