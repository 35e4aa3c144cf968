"""What is noted of a prompt's queries while it is read, a block of columns at a time.

Pure tensor code. Shapes: B rows, H query heads, G KV heads, D head size, q columns of a block, n columns stored so far.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch.compression.prompt import CELLS, SINKS, Exit, Law, accumulation

AHEAD = 512  # positions that Expected Attention looks ahead to


class Needs(NamedTuple):
    """What a method asks of a prompt: how many of its last queries; whether the law of all of them, the sum of their
    attention, the output projection; what queries that repeat the prompt look at; what the last ones' logits lie
    above, when they have met all that is there; the last layer's output at their positions, and the way on from it."""

    window: int = 0
    law: bool = False
    mass: bool = False
    output: bool = False
    repeat: bool = False
    bounds: bool = False
    exit: bool = False

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(max(self.window, other.window), *(a or b for a, b in zip(self[1:], other[1:], strict=True)))

    @property
    def all_queries(self) -> bool:
        """Whether every query counts."""
        return self.law or self.mass or self.repeat

    @property
    def anything(self) -> bool:
        """Whether the model's layers have to be watched at all."""
        return self.window > 0 or self.all_queries or self.output or self.exit


class Watch:
    """Notes of all layers of one prompt.

    Args:
        needs: what is noted.   layers: of the model.

    Attributes:
        queries: of each layer the last ones, [B, H, w, D].   asks: [B, w] bool, which of them are tokens'.
        masses, peaks: [B, G, n] by column; peaks of the queries that repeat the prompt.   outputs: [E, H * D].
        repeating: columns of the prompt while it is repeated, else None.
        scale: what logits are multiplied by.
        exit: `prompt.Exit` whose states stand at the queries' positions; None where it is not wanted.
    """

    _LISTS = ("queries", "asks", "outputs", "masses", "peaks", "_sums", "_squares", "_counts")

    def __init__(self, needs: Needs, layers: int):
        self.needs, self.scale, self.repeating = needs, 1.0, None
        self.exit: Exit | None = None
        self._exit_asks: Tensor | None = None
        self.peaks: list[Tensor | None] = [None] * layers
        self.asks: list[Tensor | None] = [None] * layers
        self.queries: list[Tensor | None] = [None] * layers
        self.outputs: list[Tensor | None] = [None] * layers
        self.masses: list[Tensor | None] = [None] * layers
        self._sums: list[Tensor | None] = [None] * layers
        self._squares: list[Tensor | None] = [None] * layers
        self._counts: list[Tensor | None] = [None] * layers

    def copy(self) -> "Watch":
        """Another one with the same notes, that goes its own way: what is noted is replaced, never written into."""
        other = Watch(self.needs, len(self.queries))
        other.scale, other.exit, other._exit_asks = self.scale, self.exit, self._exit_asks
        for name in self._LISTS:
            setattr(other, name, list(getattr(self, name)))
        return other

    def reorder(self, order: Tensor) -> None:
        """Row b becomes what row order[b] was."""
        for name in set(self._LISTS) - {"outputs"}:
            values = getattr(self, name)
            setattr(self, name, [None if one is None else one.index_select(0, order) for one in values])
        if self.exit is not None:
            self.exit = self.exit._replace(states=self.exit.states.index_select(0, order))
            self._exit_asks = self._exit_asks.index_select(0, order)

    def columns(self, block: int) -> int:
        """How many of a block's last columns are wanted."""
        every = self.repeating or self.needs.law or self.needs.mass
        return block if every else min(block, max(self.needs.window, 1))  # a model can't project none

    def note(
        self,
        layer: int,
        queries: Tensor,
        raw: Tensor | None,
        keys: Tensor,
        valid: Tensor,
        scale: float,
        reach: int | None = None,
    ) -> None:
        """One layer has read a block.

        Args:
            queries: [B, H, c, D] of the block's last c = `columns(block)` columns, after RoPE.
            raw: the same before RoPE, where the law is wanted.
            keys: [B, G, n, D], all that are stored, the block's last.
            valid: [B, n] bool, which of them are tokens.
            scale: what logits are multiplied by.   reach: sliding window of the layer.
        """
        self.scale = scale
        if self.repeating:
            self._note_peaks(layer, queries, keys, valid, reach)
            return
        if self.needs.window:
            self._note_window(layer, queries, valid[:, valid.shape[1] - queries.shape[2] :])
        if self.needs.law:
            self._note_law(layer, raw, valid)
        if self.needs.mass:
            self._note_mass(layer, queries, keys, valid, reach)

    def _note_window(self, layer: int, queries: Tensor, asks: Tensor) -> None:
        """Keep each row's last tokens, which other rows' pads may lie between."""
        if self.queries[layer] is not None:
            queries = torch.cat((self.queries[layer], queries), 2)
            asks = torch.cat((self.asks[layer], asks), 1)
        order = self._last(asks)
        at = order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
        self.queries[layer], self.asks[layer] = queries.gather(2, at), asks.gather(1, order)

    def _last(self, asks: Tensor) -> Tensor:
        """Places of each row's last tokens among columns of which [B, c] are tokens; at most a window."""
        return asks.to(torch.int8).argsort(dim=-1, stable=True)[:, -self.needs.window :]

    def note_exit(self, way: Exit, valid: Tensor) -> None:
        """The last layer has read a block.

        Args:
            way: its states [B, c, E] of the block's last c columns, and where they go.
            valid: [B, n] bool, which of all columns that are stored are tokens.
        """
        if self.repeating:
            return
        states, asks = way.states, valid[:, valid.shape[1] - way.states.shape[1] :]
        if self.exit is not None:
            states, asks = torch.cat((self.exit.states, states), 1), torch.cat((self._exit_asks, asks), 1)
        order = self._last(asks)
        states = states.gather(1, order[..., None].expand(-1, -1, states.shape[2]))
        self.exit, self._exit_asks = way._replace(states=states), asks.gather(1, order)

    def _note_law(self, layer: int, raw: Tensor, valid: Tensor) -> None:
        columns = raw.shape[2]
        ordinal = valid.cumsum(-1)  # 1, 2, ... of a row's tokens
        counts = (valid & (ordinal > SINKS))[:, -columns:]
        chosen = torch.where(counts[:, None, :, None], raw, 0.0).to(torch.float64 if raw.is_cpu else accumulation(raw))
        parts = (chosen.sum(2), chosen.transpose(2, 3) @ chosen, counts.sum(-1))
        for kept, part in zip((self._sums, self._squares, self._counts), parts, strict=True):
            kept[layer] = part if kept[layer] is None else kept[layer] + part

    def _note_mass(self, layer: int, queries: Tensor, keys: Tensor, valid: Tensor, reach: int | None) -> None:
        batch, groups, stored = keys.shape[:3]
        mass = torch.zeros(batch, groups, stored, dtype=accumulation(keys), device=keys.device)
        if self.masses[layer] is not None:
            mass[..., : self.masses[layer].shape[-1]] = self.masses[layer]
        for weights in self._attention(queries, keys, valid, reach):
            mass += weights.sum(3).mean(2)
        self.masses[layer] = mass

    def _note_peaks(self, layer: int, queries: Tensor, keys: Tensor, valid: Tensor, reach: int | None) -> None:
        for weights in self._attention(queries, keys, valid, reach):
            found = weights[..., : self.repeating].amax((2, 3))
            before = self.peaks[layer]
            self.peaks[layer] = found if before is None else torch.maximum(before, found)

    def _attention(self, queries: Tensor, keys: Tensor, valid: Tensor, reach: int | None) -> Iterator[Tensor]:
        """Attention of a block's queries over all that is stored, piece by piece: [B, G, R, some, n], 0 of pads."""
        batch, heads, columns, width = queries.shape
        groups, stored = keys.shape[1:3]
        wide, scale = accumulation(keys), self.scale
        packed = queries.view(batch, groups, heads // groups, columns, width).to(wide)
        keys = keys.to(wide)
        places = torch.arange(stored, device=keys.device)
        piece = max(1, CELLS // (batch * heads * stored))
        for start in range(0, columns, piece):
            some = packed[:, :, :, start : start + piece]
            own = stored - columns + start + torch.arange(some.shape[3], device=keys.device)
            meets = valid[:, None] & (places <= own[:, None])
            if reach is not None:
                meets = meets & (places > own[:, None] - reach)
            logits = torch.einsum("bgrqd,bgnd->bgrqn", some, keys) * scale
            weights = logits.masked_fill(~meets[:, None, None], -torch.inf).softmax(-1)
            asks = valid[:, own][:, None, None, :, None]  # a pad's own attention counts nothing
            yield torch.where(asks, weights, 0.0)

    def law(self, layer: int, cos: Tensor, sin: Tensor) -> Law:
        """The law of a layer's queries; cos and sin are the means [B, D] of the rotary factors ahead."""
        count = self._counts[layer].clamp_min(1).to(self._sums[layer].dtype)
        mean = self._sums[layer] / count[:, None, None]
        square = self._squares[layer] / count[:, None, None, None]
        return Law(mean, square - mean[..., :, None] * mean[..., None, :], cos, sin)


def factors_ahead(frequencies: Tensor, scaling: float, first: Tensor) -> tuple[Tensor, Tensor]:
    """Means [B, D] of the rotary factors cos and sin over the `AHEAD` positions from `first` [B] on, in float32.

    Args:
        frequencies: [D / 2], of the half-split layout.   scaling: what the model multiplies both factors by.
    """
    positions = first[:, None] + torch.arange(AHEAD, device=first.device)
    angles = positions[..., None].to(accumulation(frequencies)) * frequencies.to(accumulation(frequencies))
    angles = torch.cat((angles, angles), -1)
    return angles.cos().mean(1) * scaling, angles.sin().mean(1) * scaling
