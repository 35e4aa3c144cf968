"""What a prefill-time method sees of one layer when the prompt has been read, and attention of the last queries.

Pure tensor code. Shapes: B rows, H query heads, G KV heads, R = H / G, D head size, w window queries, n slots; a row's
tokens are its first slots, in order.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

SINKS = 4  # first tokens that Expected Attention leaves out of its statistics and its softmax
CELLS = 2**24  # of the largest piece that is made at once


class Prompt(NamedTuple):
    """One layer's prompt.

    queries: [B, H, w, D] after RoPE: of each row's last w tokens, the newest last.
    reach: sliding window of the layer, None: its queries meet every position.
    asks: [B, w] bool, which of them there are: the last ones of a row, one at least.
    spared: [B] int64, last tokens that scores leave out, because the method keeps them whatever they are worth.
    keys, values: [B, G, n, D], keys after RoPE.
    length: [B] int64, tokens of each row.
    scale: what logits are multiplied by.
    output: [E, H * D] weight of the output projection, where the method asks for it.
    law: what the prompt's queries look like, where the method asks for it.
    mass: [B, G, n] attention of all the prompt's queries, summed over them, mean over the group, where the method asks
        for it.
    peak: [B, G, n] the largest attention of the queries that repeat the prompt, over them and the group, where the
        method asks for it.
    at, positions: [B, w] and [B, 1 or G, n] int64, positions of the window's queries and of what is held; None: a
        token's position is its slot, and the queries are those of the last ones.
    bounds: [B, H, w], the logit below which a query's attention was less than one over what it met; None: as now.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    length: Tensor
    scale: float
    asks: Tensor
    spared: Tensor
    reach: int | None = None
    output: Tensor | None = None
    law: "Law | None" = None
    mass: Tensor | None = None
    peak: Tensor | None = None
    at: Tensor | None = None
    positions: Tensor | None = None
    bounds: Tensor | None = None

    @property
    def window(self) -> int:
        """Queries of the window."""
        return self.queries.shape[2]

    @property
    def places(self) -> Tensor:
        """[n] int64, 0..n-1."""
        return torch.arange(self.keys.shape[2], device=self.keys.device)

    def held(self) -> Tensor:
        """[B, 1, n] bool: slots that hold a token."""
        return self.places < self.length[:, None, None]

    def passed(self) -> Tensor:
        """[B, 1, n] bool: tokens that no later query of the layer meets."""
        if self.reach is None:
            return torch.zeros_like(self.held())
        return self.places <= self.length[:, None, None] - self.reach

    def outside(self) -> Tensor:
        """[B, 1, n] bool: the tokens before those that are spared."""
        return self.places < (self.length - self.spared)[:, None, None]


class Law(NamedTuple):
    """The queries of each row's prompt, before RoPE, as a normal law, and the rotations ahead of it.

    mean: [B, H, D].   covariance: [B, H, D, D], of the population.
    cos, sin: [B, D], means of the rotary factors over the positions that come next.
    """

    mean: Tensor
    covariance: Tensor
    cos: Tensor
    sin: Tensor


class Exit(NamedTuple):
    """The way from the last layer to the logits, y = gain x / sqrt(mean x^2 + epsilon) and z = head y + bias.

    states: [B, w, E], x at the positions of the window's queries.   gain: [E].   head: [V, E].   bias: [V] or None.
    """

    states: Tensor
    gain: Tensor
    epsilon: float
    head: Tensor
    bias: Tensor | None = None


def accumulation(tensor: Tensor) -> torch.dtype:
    """The dtype to compute scores of such a tensor in: float32 or wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def window_logits(prompt: Prompt) -> Tensor:
    """The window's queries times all keys, scaled: [B, G, R, w, n]."""
    batch, heads, window, width = prompt.queries.shape
    groups, wide = prompt.keys.shape[1], accumulation(prompt.keys)
    queries = prompt.queries.view(batch, groups, heads // groups, window, width).to(wide)
    return torch.einsum("bgrwd,bgnd->bgrwn", queries, prompt.keys.to(wide)) * prompt.scale


def window_attention(prompt: Prompt) -> Tensor:
    """Causal attention of the window's queries over all that they meet: [B, G, R, w, n]; 0 elsewhere, and for columns
    that ask nothing."""
    logits, meets = window_logits(prompt), window_meets(prompt, slice(None))
    asks = prompt.asks[:, None, None, :, None]
    # A query that asks nothing may meet nothing: it is given all, so that no row is empty, and then zero.
    return torch.where(asks, logits.masked_fill(~(meets | ~asks), -torch.inf).softmax(-1), 0.0)


def window_meets(prompt: Prompt, some: slice) -> Tensor:
    """What some of the window's queries meet of what is held: bool, broadcastable to [B, G, R, some, n]."""
    at, positions = prompt.at, prompt.positions
    if at is None:
        at = prompt.length[:, None] - prompt.window + torch.arange(prompt.window, device=prompt.keys.device)
    if positions is None:
        positions = prompt.places[None, None]
    own, positions = at[:, None, None, some, None], positions[:, :, None, None]
    meets = (positions <= own) & prompt.held()[:, :, None, None]
    return meets if prompt.reach is None else meets & (positions > own - prompt.reach)


def window_pieces(prompt: Prompt) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The window's queries a few at a time: which, their logits [B, G, R, some, n], and what they meet of that."""
    batch, heads, window, _ = prompt.queries.shape
    piece = max(1, CELLS // (batch * heads * prompt.keys.shape[2]))
    for start in range(0, window, piece):
        some = slice(start, start + piece)
        yield some, window_logits(prompt._replace(queries=prompt.queries[:, :, some])), window_meets(prompt, some)


def window_bounds(prompt: Prompt) -> Tensor:
    """`Prompt.bounds` of queries that meet what is there now: [B, H, w]."""
    found = []
    for _, logits, meets in window_pieces(prompt):
        whole = logits.masked_fill(~meets, -torch.inf).logsumexp(-1)
        found.append((whole - meets.sum(-1).to(whole.dtype).log()).flatten(1, 2))
    return torch.cat(found, -1)


def window_mean(prompt: Prompt, rows: Tensor) -> Tensor:
    """Mean over the queries that ask: [B, G, R, w, n] to [B, G, R, n]."""
    return rows.sum(3) / _askers(prompt)


def window_variance(prompt: Prompt, rows: Tensor) -> Tensor:
    """Variance of the population over the queries that ask: [B, G, R, w, n] to [B, G, R, n]."""
    apart = rows - window_mean(prompt, rows).unsqueeze(3)
    asks = prompt.asks[:, None, None, :, None]
    return torch.where(asks, apart, 0.0).square().sum(3) / _askers(prompt)


def _askers(prompt: Prompt) -> Tensor:
    return prompt.asks.sum(-1)[:, None, None, None]


def group_mean(per_head: Tensor) -> Tensor:
    """[B, G, R, n] to [B, G, n]."""
    return per_head.mean(2)


def pooled(scores: Tensor, counts: Tensor, width: int, kind: str = "mean") -> Tensor:
    """Centred pooling over neighbours that count; others are left out of the mean or maximum.

    Args:
        scores: [..., n].   counts: bool, broadcastable to it.   width: odd.   kind: "mean" or "max".
    """
    counts = counts.expand(scores.shape)
    shape, half = scores.shape, width // 2
    if kind == "max":
        flat = scores.masked_fill(~counts, -torch.inf).reshape(-1, 1, shape[-1])
        return functional.max_pool1d(flat, width, 1, half).view(shape)
    parts = torch.stack((scores.masked_fill(~counts, 0.0), counts.to(scores.dtype)))
    sums = functional.avg_pool1d(parts.reshape(-1, 1, shape[-1]), width, 1, half).view(2, *shape)
    return sums[0] / sums[1].clamp_min(torch.finfo(scores.dtype).tiny)
