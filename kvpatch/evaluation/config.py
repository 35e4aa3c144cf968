"""What is evaluated: every key of `kvpatch eval`, from a YAML file, the command line, or both."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import kvpatch
from kvpatch.policy import resolve

# Keys that a run which is taken up again may have otherwise: none of them changes what a sample gives.
FREE_KEYS = ("samples", "batch", "threads", "out", "lengths", "budgets", "policies", "tasks")


@dataclass(frozen=True)
class Config:
    """One evaluation.

    Attributes:
        model: folder or hub name, or "demo".   dtype: as `kvpatch generate`.   threads: CPU threads.
        tasks: families ("ruler", "niah", "needlebench", "wordings", "later", "longbench", "longbench-v2", "fidelity",
            "stability") or names of single tasks.
        policies: names, or mappings of a policy's fields with its "name" and the preset that is its "base".
        budgets: as text: "10%", "128".   min_budget: least tokens that a share comes to.
        lengths: length classes in tokens, prompt and answer together.
        samples: of each task and length.   batch: prompts that are decoded together.   seed: of the samples.
        data: folder of local datasets.   haystack: text file in place of the built-in prose.
        template: put the tokenizer's chat template around prompts ("auto": where it has one).
        forced: tokens behind the prompt in fidelity and stability.
        compile: compile the decode steps.
        out: folder of the run.
    """

    model: str = "demo"
    dtype: str = "auto"
    threads: int | None = None
    tasks: tuple[str, ...] = ("ruler",)
    policies: tuple = ("full", "inertia", "inertia-lazy", "tova", "streaming-llm")
    budgets: tuple[str, ...] = ("10%",)
    min_budget: int = 1
    lengths: tuple[int, ...] = (1024,)
    samples: int = 20
    batch: int = 8
    seed: int = 42
    data: str | None = None
    haystack: str | None = None
    template: bool | str = "auto"
    forced: int = 512
    compile: bool = True
    out: str = "runs/eval"

    def __post_init__(self):
        for field in ("tasks", "policies", "budgets", "lengths"):
            value = getattr(self, field)
            if isinstance(value, (str, int, float)) or not value:
                raise ValueError(f"{field} must be a non-empty list, got {value!r}")
            object.__setattr__(self, field, tuple(value))
        object.__setattr__(self, "budgets", tuple(map(str, self.budgets)))
        for field in ("samples", "batch", "forced", "min_budget"):
            _whole(field, getattr(self, field))
        for length in self.lengths:
            _whole("lengths", length)
        if self.template not in (True, False, "auto"):
            raise ValueError(f'template must be true, false or "auto", got {self.template!r}')
        for budget in self.budgets:
            if not kvpatch.Budget.parse(budget).evicts:
                raise ValueError(f'budgets must be those of policies that evict, got {budget!r}; add policy "full"')
        names = [name for name, _ in self.named_policies()]
        if len(set(names)) < len(names):
            raise ValueError(f"policies must have different names, got {', '.join(names)}")

    def named_policies(self) -> list[tuple[str, "str | kvpatch.Policy"]]:
        """Name and policy, "full" first so that the others can be held against it; "best" stays a name."""
        found = []
        for one in self.policies:
            if isinstance(one, str):
                found.append((one, one if one == "best" else resolve(one)))
            elif isinstance(one, dict) and isinstance(one.get("name"), str):
                found.append((one["name"], _of_fields(one)))
            else:
                raise ValueError(f'policies must be names or mappings with a "name", got {one!r}')
        return sorted(found, key=lambda pair: pair[0] != "full")

    def ways(self) -> list[tuple[str, "str | kvpatch.Policy", str]]:
        """Name, policy and budget as text of everything that each sample is run with."""
        found = []
        for name, policy in self.named_policies():
            evicts = policy == "best" or policy.evicts
            found += [(name, policy, budget) for budget in (self.budgets if evicts else ("full",))]
        return found

    def budget_of(self, text: str) -> "kvpatch.Budget":
        """The budget of that text, with this run's least number of tokens."""
        budget = kvpatch.Budget.parse(text)
        share = isinstance(budget.value, float)
        return kvpatch.Budget(budget.value, min_budget=self.min_budget) if share else budget

    def to_dict(self) -> dict:
        """Every key, in YAML's types."""
        found = dataclasses.asdict(self)
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}

    @classmethod
    def of(cls, given: dict, source: str = "the configuration") -> "Config":
        """From a mapping; unknown keys raise with all that there are."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"{source} has an unknown key {key!r}; keys: {', '.join(known)}")
        return cls(**given)

    @classmethod
    def load(cls, path: Path, **overrides) -> "Config":
        """From a YAML file, with some keys replaced.

        Raises:
            ValueError: naming file and key, or the line where it is no YAML.
        """
        return cls.of({**read_yaml(path), **overrides}, str(path))


def _of_fields(given: dict) -> "kvpatch.Policy":
    fields = dict(given)
    base = fields.pop("base", "inertia")
    if isinstance(fields.get("blend"), dict):
        fields["blend"] = kvpatch.Blend(**fields["blend"])
    if isinstance(fields.get("prefill"), dict):
        fields["prefill"] = kvpatch.Prefill(**fields["prefill"])
    return resolve(base, **fields)


def _whole(field: str, value) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} must be a whole number >= 1, got {value!r}")


def read_yaml(path: Path) -> dict:
    """A mapping from a YAML file; ValueError naming file and line otherwise."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise ModuleNotFoundError('YAML files need PyYAML: pip install "kvpatch[eval]"') from None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a mapping of keys to values")
    return found
