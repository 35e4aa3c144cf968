"""How a budget is shared out over layers and KV heads, and which entries that leaves.

Shapes as in `kvpatch.compression.prompt`. A keep mask is [B, G, n] bool, for one layer. Of equal scores the entry at
the lower position goes first; where heads or layers compete, at equal positions that of the lower layer, then head.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn import functional

from kvpatch import selection
from kvpatch.ranking import is_real


def best_of(scores: Tensor, held: Tensor, protected: Tensor, count: Tensor) -> Tensor:
    """The protected entries, then the best of the others, up to `count` of each head.

    Args:
        scores: [B, G, n].   held, protected: bool, broadcastable to it.   count: [B, G] int64, or [B, 1].
    """
    held = held.expand(scores.shape)
    tier = held.to(torch.int8) + 2 * (protected & held).to(torch.int8)
    kept = torch.minimum(held.sum(-1, keepdim=True), count.expand(scores.shape[:2])[..., None])
    return selection.highest(scores, tier, kept)


def competing(scores: list[Tensor], held: Tensor, protected: Tensor, budget: Tensor, secured: Tensor) -> list[Tensor]:
    """Heads of one or several layers compete for `budget` times their number of entries.

    Args:
        scores: [B, G, n] of each layer.   held, protected: bool, broadcastable to it.
        budget: [B] int64, entries a head on average.
        secured: [B] int64, entries that each head has for itself: its protected ones and then its best.

    Returns:
        keep masks of the layers.
    """
    kept = [best_of(one, held, protected, secured[:, None]) for one in scores]
    held = held.expand(scores[0].shape)
    tokens = held[:, 0].sum(-1)
    heads = len(scores) * scores[0].shape[1]
    room = (torch.minimum(budget, tokens) - torch.minimum(secured, tokens)) * heads
    # [B, n, layers, G]: a later place in this order wins where scores are equal.
    open_ = torch.stack([held & ~one for one in kept], 1).permute(0, 3, 1, 2)
    ranked = torch.stack(scores, 1).permute(0, 3, 1, 2).masked_fill(~open_, -torch.inf)
    flat = ranked.flatten(1)
    order = flat.argsort(dim=-1, stable=True)
    places = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    won = torch.zeros_like(flat, dtype=torch.bool).scatter(-1, order, places >= flat.shape[1] - room[:, None])
    won = won.view(ranked.shape).permute(2, 0, 3, 1) & open_.permute(2, 0, 3, 1)
    return [one | more for one, more in zip(kept, won, strict=True)]


def adaptive_floor(budget: int, protected: int, share: float) -> int:
    """Entries that each head has for itself under Ada-KV (arXiv 2407.11550): a share of the budget, rounded up."""
    return max(min(budget, math.ceil(share * budget - 1e-9)), protected)


def pyramid(layers: int, length: int, budget: int, window: int, beta: int = 20) -> list[int]:
    """Entries a head in each layer, in a falling line, together layers * budget (PyramidKV, arXiv 2406.02069)."""
    if layers == 1:
        return [budget]
    low = Fraction(budget - window, beta)
    high = 2 * (budget - window) - low
    if high > length - window:
        high = Fraction(length - window)
        low = 2 * (budget - window) - high
    exact = [high - layer * (high - low) / (layers - 1) for layer in range(layers)]
    return [window + one for one in whole(exact, layers * (budget - window))]


def proportional(preference: Sequence[float], total: int, ceiling: int) -> list[int]:
    """`total` entries over the layers by preference, none above the ceiling; what is cut off goes to the others.

    Raises:
        ValueError: if the layers can't hold so many.
    """
    if total > ceiling * len(preference):
        raise ValueError(f"total must be at most {ceiling * len(preference)}, got {total}")
    exact: list[float] = [0.0] * len(preference)
    free, left = list(range(len(preference))), total
    while free:
        weight = sum(preference[layer] for layer in free)
        for layer in free:
            exact[layer] = left * preference[layer] / weight if weight > 0 else left / len(free)
        over = [layer for layer in free if exact[layer] > ceiling]
        if not over:
            break
        for layer in over:
            exact[layer] = ceiling
        free, left = [layer for layer in free if layer not in over], left - ceiling * len(over)
    return whole(exact, total)


def checked_table(given) -> tuple:
    """A table of parts as tuples.

    Raises:
        ValueError: for what is not a list of numbers >= 0, or of lists of one length of them, with one above 0.
    """
    why = f"table must be a list of numbers >= 0, or of equally long lists of them, not all of them 0, got {given!r}"
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(why)
    nested = [isinstance(one, Sequence) and not isinstance(one, str) for one in given]
    if any(nested) and not (all(nested) and len({len(one) for one in given}) == 1 and len(given[0])):
        raise ValueError(why)
    parts = [part for one in given for part in one] if all(nested) else list(given)
    if not all(is_real(part) and 0 <= part < math.inf for part in parts) or not any(parts):
        raise ValueError(why)
    return tuple(tuple(map(float, one)) if all(nested) else float(one) for one in given)


def by_table(table: tuple, length: int, budget: int, safe: int) -> list:
    """Entries of each layer, in the table's own form, together budget for each of its cells; see `proportional`."""
    if not isinstance(table[0], tuple):
        return [safe + one for one in proportional(table, len(table) * (budget - safe), length - safe)]
    parts = [part for one in table for part in one]
    shared = [safe + one for one in proportional(parts, len(parts) * (budget - safe), length - safe)]
    heads = len(table[0])
    return [shared[start : start + heads] for start in range(0, len(shared), heads)]


def alike(count: int, table: tuple | None, layers: int) -> list:
    """The same number in every layer, in the table's form."""
    heads = len(table[0]) if table is not None and isinstance(table[0], tuple) else 0
    return [[count] * heads if heads else count for _ in range(layers)]


def chunked(scores: Tensor, counts: Tensor, size: int) -> Tensor:
    """Each entry's score is the mean over its run of `size` places, of those that count.

    Args:
        scores: [B, G, n].   counts: bool, broadcastable to it.
    """
    n = scores.shape[-1]
    runs = -(-n // size)
    counts = counts.expand(scores.shape)
    parts = torch.stack((torch.where(counts, scores, 0.0), counts.to(scores.dtype)))
    sums = functional.pad(parts, (0, runs * size - n)).unflatten(-1, (runs, size)).sum(-1)
    mean = (sums[0] / sums[1].clamp_min(1)).repeat_interleave(size, -1)[..., :n]
    return torch.where(counts, mean, scores)


def whole(exact: Sequence, total: int) -> list[int]:
    """Whole numbers that add up to the total, by largest remainder; of equal ones the lower layer is served first."""
    found = [math.floor(one) for one in exact]
    order = sorted(range(len(exact)), key=lambda layer: (found[layer] - exact[layer], layer))
    for layer in order[: total - sum(found)]:
        found[layer] += 1
    return found
