"""What deleting entries from a softmax changes: one closed form, for all who ask what matters, not what is looked at.

One head at one query, with q, k and v as they are: without a set S of entries the rest is normalised anew. With the
removed mass m = sum over S of a_i and the removed contribution c = sum over S of a_i v_i, the output o becomes
o' = (o - c) / (1 - m), so o' - o = (m o - c) / (1 - m); for one entry alone a / (1 - a) (o - v).

Pure tensor code. Shapes: B rows, H query heads, G KV heads, R = H / G, D head size, U queries, n entries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CELLS = 2**24  # most logits that are held at once
_DIRECT = "donot_use_mm_for_euclid_dist"  # a product of matrices loses what is near


class Deletion(NamedTuple):
    """What the deletion of a set removes and changes.

    mass: [B, H, U], m.   contribution: [B, H, U, D], c.   output: [B, H, U, D], o.
    change: [B, H, U, D], o' - o; minus the output where nothing is left.
    """

    mass: Tensor
    contribution: Tensor
    output: Tensor
    change: Tensor


def deletion_effect(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    evicted: Tensor,
    *,
    lengths: Tensor | None = None,
    at: Tensor | None = None,
    scale: float | None = None,
    cells: int = CELLS,
) -> Deletion:
    """What attention loses where each KV head is without a set of its entries.

    Beside its arguments and results it holds a few tensors of `cells` elements: entries and queries come in pieces, and
    what is kept and what is evicted are summed up apart, so that nothing cancels where nearly all mass is evicted.

    Args:
        queries: [B, H, U, D] after RoPE.
        keys, values: [B, G, n, D], G divides H; entry i stands at position i.
        evicted: [B, G, n] bool, the set of each KV head; broadcastable to it.
        lengths: [B] int64, entries of each row; None: n.
        at: [B, U] int64, positions of the queries, which meet what stands there and before; None: the last ones. Of one
            that meets nothing all is zero.
        scale: of the logits; D ** -0.5 if None.
        cells: most logits of one piece.

    Returns:
        `Deletion`, float32 or wider. Nothing is changed.

    Raises:
        ValueError: for shapes that do not fit, naming the argument.
    """
    batch, heads, count, width = _checked(queries, keys, values, evicted, lengths, at)
    groups, n = keys.shape[1:3]
    wide, device = torch.promote_types(queries.dtype, torch.float32), queries.device
    scale = width**-0.5 if scale is None else scale
    lengths = torch.full((batch,), n, device=device) if lengths is None else lengths
    at = lengths[:, None] - count + torch.arange(count, device=device) if at is None else at
    packed = queries.reshape(batch, groups, heads // groups, count, width)
    evicted = evicted.expand(batch, groups, n)
    entries = max(1, min(n, cells // (batch * max(heads, groups * width))))
    piece = max(1, min(count, cells // (batch * heads * entries)))
    found = []
    for first in range(0, count, piece):
        some = slice(first, first + piece)
        sums = _Sums(packed[:, :, :, some].to(wide))
        for start in range(0, n, entries):
            part = slice(start, start + entries)
            places = torch.arange(start, min(start + entries, n), device=device)
            meets = (places < lengths[:, None])[:, None] & (places <= at[:, some, None])
            gone = evicted[:, :, part]
            sums.add(keys[:, :, part].to(wide), values[:, :, part].to(wide), meets, gone, scale)
        found.append(sums.result())
    parts = (torch.cat(one, 3) for one in zip(*found, strict=True))
    return Deletion(*(one.reshape(batch, heads, count, *one.shape[4:]) for one in parts))


class _Sums:
    """Attention of queries [B, G, R, U, D], summed over what is kept and what is evicted apart, piece after piece."""

    def __init__(self, queries: Tensor):
        self.queries = queries
        self.peak = torch.full_like(queries[..., 0], -torch.inf)
        self.weights = [torch.zeros_like(self.peak) for _ in range(2)]  # kept, evicted
        self.values = [torch.zeros_like(queries) for _ in range(2)]

    def add(self, keys: Tensor, values: Tensor, meets: Tensor, gone: Tensor, scale: float) -> None:
        """keys, values [B, G, n, D]; meets [B, U, n], gone [B, G, n] bool."""
        logits = torch.einsum("bgrud,bgnd->bgrun", self.queries, keys) * scale
        logits = logits.masked_fill(~meets[:, None, None], -torch.inf)
        peak = torch.maximum(self.peak, logits.amax(-1))
        safe = torch.where(peak == -torch.inf, 0.0, peak)
        shrink, weights = torch.exp(self.peak - safe), torch.exp(logits - safe[..., None])
        for number, side in enumerate((~gone, gone)):
            part = weights * side[:, :, None, None]
            self.weights[number] = self.weights[number] * shrink + part.sum(-1)
            added = torch.einsum("bgrun,bgnd->bgrud", part, values)
            self.values[number] = self.values[number] * shrink[..., None] + added
        self.peak = peak

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """m, c, o and o' - o."""
        total = self.weights[0] + self.weights[1]
        total = torch.where(total > 0, total, 1.0)  # of a query that meets nothing all is zero
        mass, contribution = self.weights[1] / total, self.values[1] / total[..., None]
        output = (self.values[0] + self.values[1]) / total[..., None]
        left, right = (
            sums / torch.where(weights > 0, weights, 1.0)[..., None]
            for sums, weights in zip(self.values, self.weights, strict=True)
        )
        change = mass[..., None] * (left - right)
        return mass, contribution, output, change


def to_residual(change: Tensor, output: Tensor) -> Tensor:
    """What a layer adds to the residual stream otherwise: sum over heads of W_O^h (o' - o).

    Args:
        change: [B, H, U, D].   output: [E, H * D], weight of the output projection.

    Returns:
        [B, U, E] in change's dtype.
    """
    return change.transpose(1, 2).flatten(2) @ output.to(change.dtype).T


def alone(weights: Tensor, values: Tensor) -> Tensor:
    """How far the output moves where one entry alone is deleted, a / (1 - a) ||o - v||_2.

    Args:
        weights: [B, G, R, n], attention of one query.   values: [B, G, n, D] in its dtype.

    Returns:
        [B, G, R, n], 0 where the weight is.
    """
    change = weights / (1 - weights) * torch.cdist(weights @ values, values, compute_mode=_DIRECT)
    # 1 - a and o - v lose all their digits where one entry has nearly everything: there by what the others have.
    most, peak = weights.max(-1, keepdim=True)
    others = weights.scatter(-1, peak, 0.0)
    left = others.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    of_peak = values.gather(2, peak.expand(*peak.shape[:-1], values.shape[-1]))
    apart = ((others / left) @ values - of_peak).norm(dim=-1, keepdim=True)
    return change.scatter(-1, peak, most * apart)


def _checked(queries, keys, values, evicted, lengths, at) -> tuple[int, int, int, int]:
    if queries.ndim != 4:
        raise ValueError(f"queries must be [rows, heads, queries, head size], got {list(queries.shape)}")
    batch, heads, count, width = queries.shape
    if keys.ndim != 4 or keys.shape[0] != batch or keys.shape[3] != width or heads % max(1, keys.shape[1]):
        raise ValueError(
            f"keys must be [{batch}, KV heads that divide {heads}, entries, {width}] to fit queries, "
            f"got {list(keys.shape)}"
        )
    if values.shape != keys.shape:
        raise ValueError(f"values must have keys' shape {list(keys.shape)}, got {list(values.shape)}")
    try:
        evicted.expand(keys.shape[:3])
    except RuntimeError:
        wanted = list(keys.shape[:3])
        raise ValueError(f"evicted must be broadcastable to {wanted}, got {list(evicted.shape)}") from None
    if evicted.dtype != torch.bool:
        raise ValueError(f"evicted must be bool, got {evicted.dtype}")
    for name, tensor, size in (("lengths", lengths, (batch,)), ("at", at, (batch, count))):
        if tensor is not None and (tensor.shape != size or tensor.is_floating_point()):
            raise ValueError(f"{name} must be {list(size)} integers, got {tensor.dtype} {list(tensor.shape)}")
    return batch, heads, count, width
