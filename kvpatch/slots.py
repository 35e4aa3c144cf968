"""The slots of one batch: static buffers, utility, positions, the free slot, and what one decode step does to them.

Pure tensor code. Shapes: B rows, G KV heads, D head size, C capacity (slots allocated), n slots that a step reads; Lc
layers and Gc KV heads with a ranking of their own (1 where one is shared), Q rankings of the policy (two with a blend).

Invariant: when a step attends, the valid entries of a row are exactly slots 0..length-1. Between steps at most one of
them is free, the last victim; a growing row's free slot is the one behind its last entry.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch import aggregation, pages, scoring, selection
from kvpatch.pages import Map
from kvpatch.policy import Policy
from kvpatch.ranking import Ranking

MULTIPLE = 64  # capacities are rounded up to this


class LayerSlots(NamedTuple):
    """One layer's tensors during a decode step; `attend` updates keys, values and utility in place.

    keys, values: [B, G, C, D].   utility: [Q, B, Gc, C] (the coupling's own accumulator).
    positions: [B, Gc, C] int64.   free, length: [B, Gc] int64.   newest: [B] int64, position of the new token.
    active: [B] bool, False for rows that are done: they leave no trace but in their free slot.
    index: [n] int64, 0..n-1.
    heads: [Q, G, R] what each query head's attention is multiplied by before heads are pooled, None: nothing.
    attend: (slots, q [B, H, 1, D], k, v [B, G, 1, D], scale) -> output [B, 1, H, D].
    queries: [B, H, w, D], the last ones, that of position p at p % w; None where they are not wanted.
    anchors, turns: [B, G, S, D] keys of the sinks as they came, [2, B, D] cos and sin by which they are turned now;
        None where positions are those of the text.
    bounds: [B, H, w], as of `compression.prompt.Prompt`, in the order of queries; None where they are not wanted.
    pages: where the slots lie if keys and values are [B, P, page, D], of which the index tells those that a step
        reads; None where they are as above.
    """

    keys: Tensor
    values: Tensor
    utility: Tensor
    positions: Tensor
    free: Tensor
    length: Tensor
    newest: Tensor
    active: Tensor
    index: Tensor
    heads: Tensor | None
    attend: Callable
    queries: Tensor | None = None
    anchors: Tensor | None = None
    turns: Tensor | None = None
    bounds: Tensor | None = None
    pages: Map | None = None


def layer_rule(policy: Policy, ranking: Ranking) -> str:
    """How one layer's score enters the utility: with one update a step the layers only add up, and `finish` applies the
    ranking's own rule to their mean."""
    return "cumulative" if policy.coupling == "uniform" else ranking.aggregation


@functools.cache  # compiled code is guarded by this function's identity
def make_attend(
    policy: Policy,
    scorers: tuple[scoring.Scorer, ...],
    decode: Callable,
    scored: tuple[int, ...],
    window: int | None = None,
) -> Callable:
    """The attention of one layer at one kind of step, for `LayerSlots.attend`.

    A layer with a sliding `window` meets only the newest `window` positions; what is held beyond has weight 0 there.

    Args:
        scorers: of each ranking.   scored: rankings that take this layer's score at such a step.
    """
    rankings = policy.rankings

    def attend(slots: LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        n = slots.index.shape[0]
        write(slots, k, v)
        valid = valid_slots(slots, window)
        output, weights = decode(q, slots.keys[:, :, :n], slots.values[:, :, :n], valid, scale)
        for number in scored:
            score(slots, policy, number, rankings[number], scorers[number], weights, valid)
        return output

    return attend


@functools.cache
def make_paged(decode: Callable) -> Callable:
    """The attention of one layer whose slots lie in pages, at a step that does not score.

    Args:
        decode: as `kvpatch.attention.packed.decode_pages`.
    """

    def attend(slots: LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, groups = k.shape[:2]
        rows, heads = torch.arange(batch, device=k.device)[:, None], torch.arange(groups, device=k.device)[None]
        free = slots.free.expand(batch, groups)
        page, place = slots.pages.table[heads, free // pages.SIZE], free % pages.SIZE
        slots.keys[rows, page, place] = k[:, :, 0]
        slots.values[rows, page, place] = v[:, :, 0]
        return decode(q, slots.keys, slots.values, slots.pages, met(slots), slots.index, scale)

    return attend


@functools.cache
def noting(attend: Callable) -> Callable:
    """The same attention, which also keeps the query."""

    def attend_and_note(slots: LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, heads, window, _ = slots.queries.shape
        rows, every = torch.arange(batch, device=q.device)[:, None], torch.arange(heads, device=q.device)[None]
        at = (slots.newest % window)[:, None]
        new = torch.where(slots.active[:, None, None], q[:, :, 0], slots.queries[rows, every, at])
        slots.queries[rows, every, at] = new
        output = attend(slots, q, k, v, scale)
        if slots.bounds is not None:
            bound = torch.where(slots.active[:, None], bound_of(slots, q, scale), slots.bounds[rows, every, at])
            slots.bounds[rows, every, at] = bound
        return output

    return attend_and_note


def bound_of(slots: LayerSlots, q: Tensor, scale: float) -> Tensor:
    """The logit at which q [B, H, 1, D] pays one over what it meets, once its own key is written: [B, H]."""
    batch, heads, _, width = q.shape
    n, groups = slots.index.shape[0], slots.keys.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = q.reshape(batch, groups, heads // groups, width).to(wide)
    logits = packed @ slots.keys[:, :, :n].to(wide).transpose(2, 3) * scale
    held = (slots.index < slots.length[..., None])[:, :, None]
    whole = logits.masked_fill(~held, -torch.inf).logsumexp(-1)
    return (whole - slots.length[..., None].to(wide).log()).reshape(batch, heads)


def write(slots: LayerSlots, k: Tensor, v: Tensor) -> None:
    """Put the new token's k and v [B, G, 1, D] into the free slot of every row. Mutates keys and values."""
    rows = torch.arange(k.shape[0], device=k.device)[:, None]
    heads = torch.arange(k.shape[1], device=k.device)[None]
    # index_put, not scatter_: inductor clones the whole buffer for the latter.
    slots.keys[rows, heads, slots.free] = k[:, :, 0]
    slots.values[rows, heads, slots.free] = v[:, :, 0]


def met(slots: LayerSlots) -> Tensor:
    """How many slots each head meets, [B, Gc]: a row that ended with nothing in a head the first, for want of one."""
    return slots.length.clamp_min(1)


def valid_slots(slots: LayerSlots, window: int | None) -> Tensor:
    """Which slots the layer meets: [B, Gc, n] bool."""
    held = slots.index < met(slots)[..., None]
    if window is None:
        return held
    return held & (slots.positions[..., : slots.index.shape[0]] > slots.newest[:, None, None] - window)


def score(
    slots: LayerSlots,
    policy: Policy,
    number: int,
    ranking: Ranking,
    scorer: scoring.Scorer,
    weights: Tensor,
    valid: Tensor,
) -> None:
    """Let one layer's score into one ranking's utility of what active rows hold. Mutates the utility.

    Args:
        number, ranking, scorer: which of the policy's rankings.
        weights: [B, G, R, n] attention of the newest query, 0 outside the valid slots; for a scorer that does not use
            it, any tensor of the dtype to score in.
        valid: what `valid_slots` gives.
    """
    batch, groups = slots.keys.shape[:2]
    n = slots.index.shape[0]
    if ranking.score_heads != "all":
        weights = weights * slots.heads[number][:, :, None]
    scene = scoring.Scene(
        weights,
        slots.keys[:, :, :n],
        slots.values[:, :, :n],
        slots.positions[..., :n],
        valid,
        ranking.head_pool,
        policy.seed,
    )
    found = scorer.score(scene).expand(batch, groups, n)
    if policy.coupling != "per_head":
        found = scoring.pool(found, ranking.head_pool if scorer.uses_attention else "mean", 1)
    utility = slots.utility[number, :, :, :n]
    new = aggregation.aggregate(utility, found, layer_rule(policy, ranking), ranking.alpha)
    counts = (slots.index < slots.length[..., None]) & slots.active[:, None, None]
    slots.utility[number, :, :, :n] = torch.where(counts, new, utility)


class Ledger(NamedTuple):
    """Everything that decides who goes next, for all layers at once.

    utility: [Q, Lc, B, Gc, C].   pending: the same for coupling "uniform" (sums over layers), else no slots.
    positions: [Lc, B, Gc, C] int64.   free, length: [Lc, B, Gc] int64.   newest: [B] int64, its position.
    active: [B] bool, False for rows that are done.   rows: per-row limits.   index: [n] int64.
    window: that of every layer, None where one layer or more meets all positions.
    """

    utility: Tensor
    pending: Tensor
    positions: Tensor
    free: Tensor
    length: Tensor
    newest: Tensor
    active: Tensor
    rows: selection.Rows
    index: Tensor
    window: int | None


def begin(ledger: Ledger, policy: Policy) -> None:
    """Admit the new token: its slot, its position, its first utility. Mutates utility, positions, length, newest.

    A row that is done stays where it is: what is fed for it is not one of its tokens.
    """
    n = ledger.index.shape[0]
    ledger.newest.add_(ledger.active)
    free = ledger.free[..., None]
    ledger.positions.scatter_(-1, free, ledger.newest[None, :, None, None].expand_as(free))
    if policy.trims:
        utility = ledger.utility[..., :n]
        held = (ledger.index < ledger.length[..., None]) & (ledger.index != free)
        start = torch.where(held, utility, 0.0).sum(-1, keepdim=True) / held.sum(-1, keepdim=True).clamp_min(1)
        for number, ranking in enumerate(policy.rankings):
            if ranking.new_token == "zero":
                start[number] = 0.0
        ledger.utility.scatter_(-1, free.expand_as(start), start)
    torch.maximum(ledger.length, (ledger.free + 1) * ledger.active[None, :, None], out=ledger.length)


def finish(ledger: Ledger, policy: Policy, scored: tuple[int, ...]) -> None:
    """Choose each row's next free slot: the victim once the budget is exceeded. Mutates free, utility and pending.

    Args:
        scored: layers that scored in this step for each ranking (none of them on a plain step).
    """
    n = ledger.index.shape[0]
    if scored and policy.coupling == "uniform":
        for number, ranking in enumerate(policy.rankings):
            utility, mean = ledger.utility[number, ..., :n], ledger.pending[number, ..., :n] / scored[number]
            new = aggregation.aggregate(utility, mean, ranking.aggregation, ranking.alpha)
            ledger.utility[number, ..., :n] = torch.where(ledger.active[None, :, None, None], new, utility)
        ledger.pending.zero_()
    following, positions = ledger.length, ledger.positions[..., :n]
    held = ledger.index < ledger.length[..., None]
    if policy.trims:
        eligible = held
        if policy.sinks or policy.recent or policy.reserve:
            eligible = held & ~selection.protected(positions, ledger.newest, ledger.rows)
        if policy.blend is not None:
            second, least = ledger.utility[1, ..., :n], policy.blend.least
            eligible = eligible & ~selection.best(second, positions, held, ledger.rows.blended, least)
        victim = selection.victims(ledger.utility[0, ..., :n], positions, eligible)
        following = torch.where(ledger.length > ledger.rows.budget[None, :, None], victim, following)
    if ledger.window is not None:
        # What no layer will meet again goes first, whatever protects it: at most one entry leaves a window a step.
        gone = held & selection.passed(positions, ledger.newest + 1, ledger.window)
        following = torch.where(gone.any(-1), gone.to(torch.int8).argmax(-1), following)
    ledger.free.copy_(torch.where(ledger.active[None, :, None], following, ledger.free))


class Books(NamedTuple):
    """What is known per row; it lives as long as its buffers, so that captured graphs find it again.

    free, length: [Lc, B, Gc] int64.   newest: [B] int64.   active: [B] bool.   rows: per-row limits, each [B] int64.
    """

    free: Tensor
    length: Tensor
    newest: Tensor
    active: Tensor
    rows: selection.Rows

    @classmethod
    def of(cls, shape: "Shape", batch: int) -> "Books":
        """Books of rows that hold nothing."""
        lead = (shape.ranked_layers, batch, shape.ranked_heads)
        per_row = {"dtype": torch.int64, "device": shape.device}
        return cls(
            torch.zeros(lead, **per_row),
            torch.zeros(lead, **per_row),
            torch.zeros(batch, **per_row),
            torch.ones(batch, dtype=torch.bool, device=shape.device),
            selection.Rows(*(torch.zeros(batch, **per_row) for _ in selection.Rows._fields)),
        )

    def tensors(self) -> Iterator[Tensor]:
        """All of them."""
        yield from self[:4]
        yield from self.rows

    def take(self, other: "Books") -> None:
        """Become equal to the other's."""
        for own, theirs in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(theirs)


class Buffers:
    """Keys, values and per-slot bookkeeping of one capacity, or keys and values in pages.

    Args:
        counts: for each layer entries of each KV head, of the fullest row; None: no pages.
        room: slots that each head has pages for beside those.

    index: [C] int64, 0..C-1; of pages, if a layer has more of them.   books: as `Books`.   pages: per layer or None.

    queries, bounds, anchors: per layer, as in `LayerSlots`; none where they are not wanted.
    turns: as in `LayerSlots`.

    keys, values: per layer [B, G, C, D] or in pages [B, P, page, D]; None before `add_layer` and after `drop_layer`, so
        that a move from one capacity to another holds both for one layer at a time only.
    utility, pending, positions: as in `Ledger`.
    """

    def __init__(
        self, shape: "Shape", batch: int, capacity: int, counts: Sequence[Sequence[int]] | None = None, room: int = 0
    ):
        capacity = max(capacity, shape.sinks)  # sinks have a slot each, also of a shorter prompt
        self.shape, self.batch, self.capacity = shape, batch, capacity
        self.pages: list[pages.Pages] | None = None
        if counts is not None:
            self.room = room
            self.pages = [pages.Pages(one, room, shape.device) for one in counts]
        self.keys: list[Tensor | None] = [None] * shape.layers
        self.values: list[Tensor | None] = [None] * shape.layers
        accumulated = torch.promote_types(shape.dtype, torch.float32)
        lead = (shape.ranked_layers, batch, shape.ranked_heads)
        self.utility = torch.zeros(shape.rankings, *lead, capacity, dtype=accumulated, device=shape.device)
        self.positions = torch.zeros(*lead, capacity, dtype=torch.int64, device=shape.device)
        uniform = capacity if shape.uniform else 0
        self.pending = torch.zeros(shape.rankings, 1, batch, 1, uniform, dtype=accumulated, device=shape.device)
        most = max([capacity, *(one.total for one in self.pages or ())])
        self.index = torch.arange(most, device=shape.device)
        self.books = Books.of(shape, batch)
        self.turns = torch.zeros(2, batch, shape.head_dim, dtype=accumulated, device=shape.device)

        def of_layers(wanted: bool, dtype: torch.dtype, *size: int) -> list[Tensor]:
            layers = range(shape.layers if wanted else 0)
            return [torch.zeros(batch, *size, dtype=dtype, device=shape.device) for _ in layers]

        self.queries = of_layers(shape.window > 0, shape.dtype, shape.heads, shape.window, shape.head_dim)
        self.bounds = of_layers(shape.bounds, accumulated, shape.heads, shape.window)
        self.anchors = of_layers(shape.sinks > 0, shape.dtype, shape.kv_heads, shape.sinks, shape.head_dim)

    @property
    def notes(self) -> tuple[list[Tensor], ...]:
        """What is kept beside the slots, each a list over layers or empty, rows first."""
        return self.queries, self.bounds, self.anchors

    def assign(self, counts: Sequence[Sequence[int]], room: int) -> None:
        """Give every head pages; see `Pages.assign`."""
        self.room = room
        for own, needed in zip(self.pages, counts, strict=True):
            own.assign(needed, room)

    def fits(self, counts: Sequence[Sequence[int]], room: int) -> bool:
        """Whether there are pages for so many entries and so many more."""
        if self.pages is None or self.capacity < max(map(max, counts)) + room:
            return False
        return all(own.fits(some, room) for own, some in zip(self.pages, counts, strict=True))

    @property
    def layout(self) -> Hashable:
        """What of these buffers' shapes is not in their `Shape` and the number of rows."""
        return self.capacity, None if self.pages is None else tuple((one.total, one.width) for one in self.pages)

    def add_layer(self, layer: int) -> None:
        """Allocate one layer, unless it is there."""
        if self.keys[layer] is None:
            shape = self.shape
            size = (self.batch, shape.kv_heads, self.capacity, shape.head_dim)
            if self.pages is not None:
                size = (self.batch, self.pages[layer].total, pages.SIZE, shape.head_dim)
            # Zeros, not empty: a slot that no row has written is multiplied by a weight of 0 and must be finite.
            self.keys[layer] = torch.zeros(size, dtype=shape.dtype, device=shape.device)
            self.values[layer] = torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def drop_layer(self, layer: int) -> None:
        """Give one layer's memory back."""
        self.keys[layer] = self.values[layer] = None

    def by_row(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor that is there, and the dimension of its rows."""
        yield from ((tensor, 0) for tensor in (*self.keys, *self.values) if tensor is not None)
        yield from ((tensor, 0) for notes in self.notes for tensor in notes)
        yield from ((self.utility, 2), (self.pending, 2), (self.positions, 1))

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        notes = [tensor for some in self.notes for tensor in some]
        maps = [tensor for own in self.pages or () for tensor in own.map]
        tensors = [*self.keys, *self.values, *notes, *maps, self.utility, self.positions, self.pending]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class Shape(NamedTuple):
    """What the buffers' shapes follow from, beside batch and capacity."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    ranked_layers: int
    ranked_heads: int
    uniform: bool
    rankings: int
    window: int = 0
    heads: int = 0
    sinks: int = 0
    bounds: bool = False

    @classmethod
    def at(cls, policy: Policy, layers: int, kv_heads: int, head_dim: int, dtype, device, **more) -> "Shape":
        """The shape under a policy.

        Args:
            **more: window and heads, last queries that are kept and query heads; sinks whose keys are; 0: none are;
                bounds, whether those of the queries are.
        """
        own_layers = policy.coupling in ("per_layer", "per_head")
        return cls(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            ranked_layers=layers if own_layers else 1,
            ranked_heads=kv_heads if policy.coupling == "per_head" else 1,
            uniform=policy.coupling == "uniform",
            rankings=len(policy.rankings),
            **more,
        )


def mark_dynamic(tensor: Tensor, slots_dim: int | None, rows_dim: int | None) -> None:
    """Tell the compiler that these dimensions vary between calls, so that one graph serves all sizes."""
    for dim in (slots_dim, rows_dim):
        if dim is not None and tensor.shape[dim] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)


def round_up(slots: int) -> int:
    """The capacity for that many slots."""
    return -(-slots // MULTIPLE) * MULTIPLE
