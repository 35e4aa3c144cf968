"""How a prompt is cut once it has been read: one frozen dataclass, its presets, and the cut itself.

Pure tensor code; shapes as in `kvpatch.compression.prompt`. L layers.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch.compression import allocation, behavior, scores
from kvpatch.compression.behavior import Behavior
from kvpatch.compression.prompt import Exit, Prompt, accumulation
from kvpatch.compression.watch import Needs
from kvpatch.ranking import check_part, check_seed, is_int, is_real, one_of, part_of
from kvpatch.scoring import check_new

ALLOCATIONS = ("uniform", "pyramid", "cake", "adaptive", "global", "table")


class Method(NamedTuple):
    """A registered score: (prompt, rule) -> [B, G, n], and what it asks of the prompt.

    window: whether it looks at the rule's window of queries.
    """

    score: Callable[[Prompt, "Prefill"], Tensor]
    window: bool = False
    law: bool = False
    mass: bool = False
    repeat: bool = False
    bounds: bool = False
    exit: bool = False


_METHODS: dict[str, Method] = {}


def register_method(
    name: str, score: Callable, *, window=False, law=False, mass=False, repeat=False, bounds=False, replace=False
) -> None:
    """Make `score` usable as `Prefill(score=name)`.

    Args:
        name: a new name; an existing one raises ValueError unless `replace`.
        score: a function of a `Prompt` and the `Prefill` that gives [B, G, n]; pure tensor code.
        window, law, mass, repeat, bounds: what it reads of the prompt beside keys, values and length. Bounds are there
            when a method cuts again; at the prompt's end the queries have met all that is there.
    """
    check_new("method", name, score, "a Prompt and a Prefill", () if replace else _METHODS)
    if bounds and not window:
        raise ValueError(f"bounds={bounds!r} with window={window!r}: bounds are those of the window's queries")
    _METHODS[name] = Method(score, bool(window), bool(law), bool(mass), bool(repeat), bool(bounds))


def _of_scorer(name: str) -> Callable[[Prompt, "Prefill"], Tensor]:
    score = scores.of_scorer(name)
    return lambda prompt, rule: score(prompt, rule.seed)


for _name, _score, _asks in (
    ("snapkv", lambda prompt, rule: scores.snapkv(prompt, rule.width, rule.pool), {"window": True}),
    ("cake", lambda prompt, rule: scores.cake(prompt, rule.width), {"window": True}),
    ("restkv", lambda prompt, rule: scores.restkv(prompt, rule.width), {"window": True}),
    ("rkv", lambda prompt, rule: scores.rkv(prompt), {"window": True}),
    ("expected-attention", lambda prompt, rule: scores.expected_attention(prompt), {"law": True}),
    ("scissorhands", lambda prompt, rule: scores.scissorhands(prompt), {"window": True, "bounds": True}),
    ("kvzip", lambda prompt, rule: prompt.peak, {"repeat": True}),
    ("last-query", lambda prompt, rule: scores.last_query(prompt), {"window": True}),
    ("accumulated", lambda prompt, rule: scores.accumulated(prompt), {"mass": True}),
    ("accumulated-vnorm", lambda prompt, rule: scores.accumulated_vnorm(prompt), {"mass": True}),
    *((name, _of_scorer(name), {}) for name in ("keydiff", "knorm", "recency", "random")),
):
    register_method(_name, _score, **_asks)
# Not a score of each entry by itself: `cut` leaves the choice to the search.
_METHODS[behavior.NAME] = Method(lambda prompt, rule: torch.zeros_like(prompt.keys[..., 0]), window=True, exit=True)


def list_methods() -> list[str]:
    """Names of the registered scores."""
    return sorted(_METHODS)


@dataclass(frozen=True)
class Prefill:
    """A cut of the prompt to the budget, once it has been read and before anything is decoded.

    Args:
        score: a name of `list_methods()`.
        window: last queries that are looked at.
        width, pool: of the pooling of attention over neighbours: an odd number of entries, "mean" or "max".
        sinks, recent: first and last tokens that always stay: counts, or shares of the budget.
        allocation: how the budget is shared out: "uniform" (every layer and head has it), "pyramid" (falling from
            layer to layer), "cake" (by the layers' own entropy and variance), "adaptive" (heads of a layer compete),
            "global" (all heads of all layers compete), "table" (by `table`).
        table: for each layer, or for each layer's KV heads, what part of the budget it has beside the others': numbers
            >= 0 of any sum, or lists of them.
        chunk: entries stay in runs of so many, by their mean score (ChunkKV, arXiv 2502.00299); 1: each by its own.
        floor: share of the budget that each head keeps where heads compete.
        critical: share of the competing entries that go by the score alone; the others go by score times the size of
            what the entry's value gives to the layer's output. None: all by the score.
        carries: eviction while decoding begins with these scores, instead of none.
        block: the prompt is read so many tokens at a time and cut after each of them, so that no more than the budget
            and a block are ever held; None: it is read whole. Only with budgets that are all alike, and for scores that
            look at the last queries or at none: a block's own.
        seed: for "random".
        behavior: of the score "behavior", how entries are searched for; None: as `Behavior` says.

    Raises:
        ValueError: for a value outside its axis.
    """

    name: str = "custom"
    score: str = "snapkv"
    window: int = 32
    width: int = 5
    pool: str = "mean"
    sinks: int | float = 0
    recent: int | float = 0
    allocation: str = "uniform"
    floor: float = 0.0
    critical: float | None = None
    carries: bool = False
    table: Sequence | None = None
    chunk: int = 1
    block: int | None = None
    seed: int = 0
    behavior: Behavior | None = None

    def __post_init__(self):
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a str, got {self.name!r}")
        if not isinstance(self.carries, bool):
            raise ValueError(f"carries must be True or False, got {self.carries!r}")
        check_seed(self.seed)
        if not isinstance(self.score, str) or self.score not in _METHODS:
            raise ValueError(f"score must be one of {', '.join(list_methods())}, got {self.score!r}")
        if not (is_int(self.window) and self.window >= 1):
            raise ValueError(f"window must be an int >= 1, got {self.window!r}")
        if not (is_int(self.width) and self.width >= 1 and self.width % 2):
            raise ValueError(f"width must be an odd int >= 1, got {self.width!r}")
        one_of("pool", self.pool, ("mean", "max"))
        one_of("allocation", self.allocation, ALLOCATIONS)
        for field in ("sinks", "recent"):
            check_part(field, getattr(self, field))
        if not (is_real(self.floor) and 0.0 <= self.floor <= 1.0):
            raise ValueError(f"floor must be a number in [0, 1], got {self.floor!r}")
        if self.critical is not None and not (is_real(self.critical) and 0.0 <= self.critical <= 1.0):
            raise ValueError(f"critical must be None or a number in [0, 1], got {self.critical!r}")
        if not (is_int(self.chunk) and self.chunk >= 1):
            raise ValueError(f"chunk must be an int >= 1, got {self.chunk!r}")
        if (self.table is not None) != (self.allocation == "table"):
            raise ValueError(f"table={self.table!r} with allocation={self.allocation!r}: the one needs the other")
        if self.table is not None:
            object.__setattr__(self, "table", allocation.checked_table(self.table))
        if self.block is not None:
            self._check_block()
        self._check_behavior()

    def _check_behavior(self) -> None:
        if self.score != behavior.NAME:
            if self.behavior is not None:
                raise ValueError(f"behavior={self.behavior!r} with score={self.score!r}: leave it out")
            return
        if isinstance(self.behavior, Mapping):  # from a file
            try:
                object.__setattr__(self, "behavior", Behavior(**self.behavior))
            except TypeError as error:
                raise ValueError(f"behavior={dict(self.behavior)!r} is no kvpatch.Behavior: {error}") from None
        if not isinstance(self.behavior, Behavior | None):
            raise ValueError(f"behavior must be a kvpatch.Behavior or None, got {self.behavior!r}")
        if self.allocation not in ("uniform", "adaptive", "global"):
            raise ValueError(
                f"score={self.score!r} with allocation={self.allocation!r}, of which it asks nothing: use 'uniform', "
                "'adaptive' or 'global'"
            )
        for field, nothing in (("critical", None), ("chunk", 1), ("floor", 0.0), ("carries", False)):
            if getattr(self, field) != nothing:
                raise ValueError(
                    f"{field}={getattr(self, field)!r} with score={self.score!r}, which weighs sets of entries, not "
                    f"single ones: leave {field} out"
                )

    def _check_block(self) -> None:
        if not (is_int(self.block) and self.block >= 1):
            raise ValueError(f"block must be None or an int >= 1, got {self.block!r}")
        if self.needs.all_queries:
            raise ValueError(
                f"block={self.block!r} with score={self.score!r}, which looks at all queries: use block=None"
            )
        if not self.even:
            raise ValueError(
                f"block={self.block!r} with allocation={self.allocation!r}: what is held between blocks must be alike "
                "in all layers and heads; use allocation='uniform'"
            )

    def replace(self, **fields) -> "Prefill":
        """A copy with other fields."""
        return dataclasses.replace(self, **fields)

    @property
    def needs(self) -> Needs:
        """What it asks of the prompt."""
        method = _METHODS[self.score]
        window = self.window if method.window or self.allocation == "cake" else 0
        output = self.critical is not None or method.exit
        return Needs(window, method.law, method.mass, output, method.repeat, method.bounds, method.exit)

    @property
    def search(self) -> Behavior | None:
        """How entries are searched for; None where they are ranked."""
        return (self.behavior or Behavior()) if self.score == behavior.NAME else None

    @property
    def even(self) -> bool:
        """Whether every layer and head keeps equally many."""
        return self.allocation == "uniform"

    def check_shape(self, layers: int, heads: int) -> None:
        """Whether the table is one for a model of so many layers and KV heads.

        Raises:
            ValueError: if not.
        """
        if self.table is None:
            return
        if len(self.table) != layers:
            raise ValueError(f"table has {len(self.table)} layers, the model has {layers}")
        found = len(self.table[0]) if self.by_head else heads
        if found != heads:
            raise ValueError(f"table has {found} KV heads a layer, the model has {heads}")

    @property
    def by_head(self) -> bool:
        """Whether heads of one layer may keep unlike numbers."""
        if self.table is not None:
            return isinstance(self.table[0], tuple)
        return self.allocation in ("adaptive", "global")

    def protected(self, budget: int) -> tuple[int, int]:
        """(sinks, recent) as counts under a budget of that many tokens.

        Raises:
            ValueError: if they do not fit.
        """
        sinks, recent = part_of(self.sinks, budget), part_of(self.recent, budget)
        if sinks + recent > budget:
            raise ValueError(
                f"prefill {self.name!r} keeps the first {sinks} and the last {recent} tokens, which must fit the "
                f"budget of {budget} tokens"
            )
        return sinks, recent


class Cut(NamedTuple):
    """What stays of a prompt, for each layer with a set of its own.

    keep: [B, heads, n] bool.   scores: [B, heads, n] by which it was chosen.
    """

    keep: list[Tensor]
    scores: list[Tensor]


def cut(
    rule: Prefill,
    prompts: list[Prompt],
    budgets: list[int],
    layers: int,
    heads: int,
    earlier: Tensor | None = None,
    lengths: list[int] | None = None,
    way: Exit | None = None,
    **more,
) -> Cut:
    """Choose what stays.

    Args:
        prompts: of each layer; what they spare follows from the rule.
        budgets: tokens that each row may hold.
        layers, heads: with sets of their own: 1 where all share one, else as many as there are.
        earlier: [layers, B, heads, n] scores of earlier queries, which are added; None: none.
        lengths: tokens of each row, where the host knows them and no layer has passed any; None: the device is asked.
        way: where the last layer's states go, for a rule that asks for it.
        **more: showing, as of `behavior.choose`.

    Raises:
        ValueError: if what is protected does not fit a row's budget.
    """
    device, places, ends = prompts[0].keys.device, prompts[0].places, prompts[0].length[:, None, None]
    passed = [prompt.passed() for prompt in prompts]
    held = (places < ends) & ~torch.stack(passed).all(0)  # but what no layer will meet again
    lengths = held[:, 0].sum(-1).tolist() if lengths is None else lengths
    pairs = [
        rule.protected(budget) if budget < length else (0, 0) for budget, length in zip(budgets, lengths, strict=True)
    ]
    sinks, recent = (torch.tensor(one, device=device) for one in zip(*pairs, strict=True))
    protected = held & ((places < sinks[:, None, None]) | (places >= ends - recent[:, None, None]))
    prompts = [prompt._replace(spared=recent) for prompt in prompts]
    if rule.search is not None:
        keep = behavior.choose(rule.search, rule.allocation, prompts, way, held, protected, lengths, budgets, **more)
        return Cut(keep, [torch.zeros_like(prompt.keys[..., 0]) for prompt in prompts])
    found, norms, preferences = _scored(rule, prompts, layers, heads)
    if rule.chunk > 1:
        found = [allocation.chunked(one, held & ~protected, rule.chunk) for one in found]
    if earlier is not None:
        found = [one + before for one, before in zip(found, earlier, strict=True)]
    # What a layer's own window has passed goes first, unless others may still meet it.
    ranked = found
    if layers > 1:
        ranked = [one.masked_fill(gone, -torch.inf) for one, gone in zip(found, passed, strict=True)]
    safe = torch.tensor([sum(pair) for pair in pairs], device=device)
    if rule.allocation in ("adaptive", "global"):
        secured = [
            allocation.adaptive_floor(budget, sum(pair), rule.floor)
            for budget, pair in zip(budgets, pairs, strict=True)
        ]
        secured, given = torch.tensor(secured, device=device), torch.tensor(budgets, device=device)
        rivals = [ranked] if rule.allocation == "global" else [[one] for one in ranked]
        masks = [one for some in rivals for one in allocation.competing(some, held, protected, given, secured)]
        if rule.critical is None:
            return Cut(masks, found)
        counts = [mask.sum(-1) for mask in masks]
    else:
        by_layer = _counts(rule, len(found), lengths, budgets, pairs, preferences)
        counts = [torch.tensor(one, device=device).view(len(lengths), -1) for one in by_layer]
    masks = []
    for number, (score, count) in enumerate(zip(ranked, counts, strict=True)):
        shielded = protected
        if rule.critical is not None:
            by_score = safe[:, None] + torch.floor(rule.critical * (count - safe[:, None]) + 1e-9).to(torch.int64)
            shielded = allocation.best_of(score, held, protected, by_score)
            score = (score + scores.CRITICAL) * norms[number]
        masks.append(allocation.best_of(score, held, shielded, count))
    return Cut(masks, found)


def _scored(rule: Prefill, prompts: list[Prompt], layers: int, heads: int) -> tuple[list, list, list]:
    """Scores, sizes of what values give to the output, and preferences, for each layer with a set of its own."""
    found, norms, preferences = [], [], []
    for prompt in prompts:
        score = _METHODS[rule.score].score(prompt, rule).to(accumulation(prompt.keys))
        found.append(score if heads > 1 else score.mean(1, keepdim=True))
        if rule.critical is not None:
            norm = scores.projected_norm(prompt)
            norms.append(norm if heads > 1 else norm.mean(1, keepdim=True))
        if rule.allocation == "cake":
            preferences.append(scores.cake_preference(prompt))
    if layers == 1 and len(found) > 1:
        found, norms = ([torch.stack(one).mean(0)] if one else [] for one in (found, norms))
    return found, norms, preferences


def _counts(rule: Prefill, layers: int, lengths, budgets, pairs, preferences) -> list[list]:
    """Entries of each layer and row: of each of its heads, or a list over the heads."""
    columns = []
    by_row = torch.stack(preferences, 1).tolist() if preferences else [None] * len(lengths)
    for length, budget, pair, preference in zip(lengths, budgets, pairs, by_row, strict=True):
        safe = sum(pair)
        if budget >= length:
            columns.append(allocation.alike(length, rule.table, layers))
        elif rule.allocation == "pyramid":
            columns.append(allocation.pyramid(layers, length, budget, safe))
        elif rule.allocation == "cake":
            shared = allocation.proportional(preference, layers * (budget - safe), length - safe)
            columns.append([safe + one for one in shared])
        elif rule.allocation == "table":
            columns.append(allocation.by_table(rule.table, length, budget, safe))
        else:
            columns.append([budget] * layers)
    return [list(row) for row in zip(*columns, strict=True)]


PRESETS = {
    rule.name: rule
    for rule in (
        Prefill("snapkv", recent=32),
        Prefill("pyramidkv", recent=32, allocation="pyramid"),
        Prefill("adakv", recent=32, allocation="adaptive", floor=0.2),
        Prefill("cake", score="cake", recent=32, allocation="cake"),
        Prefill("criticalkv", recent=32, critical=0.5),
        Prefill("restkv", score="restkv", recent=32),
        Prefill("rkv", score="rkv", window=8, recent=8),
        Prefill("scissorhands", score="scissorhands", window=400, recent=10),
        Prefill("expected-attention", score="expected-attention", sinks=4),
        Prefill("kvzip", score="kvzip", sinks=4, allocation="global"),
        Prefill("h2o", score="accumulated", recent=0.5, carries=True),
        Prefill("vatp", score="accumulated-vnorm", sinks=20, recent=0.5, carries=True),
        Prefill("tova", score="last-query"),
        Prefill("streaming-llm", score="recency", sinks=4),
        Prefill("keydiff", score="keydiff"),
        Prefill("knorm", score="knorm"),
        Prefill("random", score="random"),
        Prefill("behavior", score="behavior", recent=32, allocation="global"),
    )
}
