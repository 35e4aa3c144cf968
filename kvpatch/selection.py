"""Which entries stay: protection, the next victim, and the first large cut.

Shapes: Lc is the number of layers with a ranking of their own (1 where all share one), Gc the same for KV heads, B
rows, n slots. Everything is one tensor operation over all layers, rows and heads.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

RESCUE_BLOCK = 16
TIE = 1e-6
FOCUS = 30


class Rows(NamedTuple):
    """Per-row limits, each [B] int64: budget (tokens held between steps), protected counts, prompt length, and how many
    entries a second ranking keeps."""

    budget: Tensor
    sinks: Tensor
    recent: Tensor
    reserve: Tensor
    prompt: Tensor
    blended: Tensor


def per_row(values: Tensor) -> Tensor:
    """[B] as [1, B, 1, 1], to meet [Lc, B, Gc, n]."""
    return values[None, :, None, None]


def protected(positions: Tensor, newest: Tensor, rows: Rows) -> Tensor:
    """Entries that are never evicted.

    Args:
        positions: [Lc, B, Gc, n] int64.
        newest: [B] int64, position of the newest token.
    """
    sinks = positions < per_row(rows.sinks)
    recent = positions > per_row(newest - rows.recent)
    return sinks | recent | reserved(positions, per_row(rows.prompt), per_row(rows.reserve))


def passed(positions: Tensor, newest: Tensor, window: int) -> Tensor:
    """Whether the token at `newest` [B] no longer meets positions [Lc, B, Gc, n] through a sliding window."""
    return positions <= per_row(newest - window)


def reserved(positions: Tensor, prompt: Tensor, count: Tensor) -> Tensor:
    """Whether a position is floor(j * prompt / count) for some j in 0..count-1, in integers only."""
    first = (positions * count + prompt - 1) // prompt
    return (first * prompt < (positions + 1) * count) & (positions < prompt)


def victims(utility: Tensor, positions: Tensor, eligible: Tensor) -> Tensor:
    """Slot of the lowest utility, ties by lowest position, among the eligible: [Lc, B, Gc] int64.

    Utilities within a relative `TIE` of the lowest are equal to it. New tokens start at the mean of the others, so
    after enough steps without scores the held utilities lie so close that rounding alone would order them; by this
    rule the oldest goes, as it would in exact arithmetic.

    Where nothing is eligible the result is slot 0; the policy's limits rule that out.
    """
    held = torch.where(eligible, utility, torch.inf)
    least = held.amin(-1, keepdim=True)
    lowest = (held <= least + TIE * least.abs()) | (held == least)  # the sum is NaN where the least is -inf
    last = torch.iinfo(positions.dtype).max
    return torch.where(lowest & eligible, positions, last).argmin(-1)


def best(utility: Tensor, positions: Tensor, held: Tensor, count: Tensor, least: float = 0.0) -> Tensor:
    """The entries of highest utility, [Lc, B, Gc, n] bool, `count` [B] a row (or all that are held).

    With `least`, those of them only that have that part of the whole utility.

    Utilities within a relative `TIE` of the lowest of them are equal to it; of equals the newest are taken.

    Args:
        utility, positions: [Lc, B, Gc, n].   held: bool of that shape; no other entry counts.
    """
    count = per_row(count)
    ranked = torch.where(held, utility, -torch.inf)
    # Of fewer entries than count the last one is -inf, and every entry lies above it.
    place = (count - 1).clamp(0, utility.shape[-1] - 1).expand(*utility.shape[:-1], 1)
    last = ranked.sort(-1, descending=True).values.gather(-1, place)
    slack = TIE * last.abs()
    above = held & (ranked > last + slack)
    tied = held & ~above & (ranked >= last - slack)
    newest = torch.where(tied, positions, -1).sort(-1, descending=True).values
    missing = count - above.sum(-1, keepdim=True)
    oldest = newest.gather(-1, (missing - 1).clamp(0, utility.shape[-1] - 1))
    chosen = (above | (tied & (positions >= oldest) & (missing > 0))) & (count > 0)
    if not least:
        return chosen
    whole = torch.where(held, utility, 0.0).sum(-1, keepdim=True)
    return chosen & (utility >= least * (1 - TIE) * whole)


def focus(utility: Tensor, positions: Tensor, held: Tensor) -> Tensor:
    """Part of the utility that the `FOCUS` best entries have: [Lc, B, Gc, 1], 0 where all utility is 0.

    The first token is not one of them, since what attention has no use for goes there.

    Args:
        utility, positions: [Lc, B, Gc, n].   held: bool of that shape; no other entry counts.
    """
    counted = torch.where(held, utility, 0.0)
    others = torch.where(positions > 0, counted, 0.0)
    highest = others.topk(min(FOCUS, others.shape[-1]), dim=-1).values.sum(-1, keepdim=True)
    return highest / counted.sum(-1, keepdim=True).clamp_min(torch.finfo(utility.dtype).tiny)


def closed(utility: Tensor, valid: Tensor, width: int) -> Tensor:
    """Utilities with narrow gaps filled: the least, over all runs of `width` entries around one, of a run's highest.

    Args:
        utility, valid: [Lc, B, Gc, n], in order of position; beside a row's valid entries there is nothing.
    """
    if width == 1:
        return utility
    lowest = torch.where(valid, utility, -torch.inf).flatten(0, -2)[:, None]
    highest = functional.max_pool1d(functional.pad(lowest, (width - 1, width - 1), value=-torch.inf), width, 1)
    return torch.where(valid, -functional.max_pool1d(-highest, width, 1).view_as(utility), utility)


def first_cut(
    utility: Tensor, valid: Tensor, shielded: Tensor, positions: Tensor, budget: Tensor, rescue: bool
) -> Tensor:
    """Entries that stay when a row's whole prompt is cut to its budget.

    Args:
        utility: [Lc, B, Gc, n], in order of position.
        valid, shielded: bool of that shape; shielded entries (`protected`) go last.
        positions: int64 of that shape.
        budget: [B] int64.
        rescue: keep the best of every 16 positions of a row that loses more than one entry, before filling by rank.

    Returns:
        [Lc, B, Gc, n] bool, min(held, budget) entries a row.
    """
    held = valid.sum(-1, keepdim=True)
    kept = torch.minimum(held, per_row(budget))
    tier = valid.to(torch.int8) + 2 * (shielded & valid)
    if rescue:
        tier = tier + (block_best(utility, valid, positions) & (held - kept > 1)).to(torch.int8)
    return highest(utility, tier, kept)


def highest(utility: Tensor, tier: Tensor, count: Tensor) -> Tensor:
    """The entries of highest tier, then utility, then slot: bool [..., n].

    Args:
        utility, tier: [..., n].   count: [..., 1] int64, how many.
    """
    # Stable sorts from the minor key to the major one: slot, utility, tier.
    order = utility.argsort(dim=-1, stable=True)
    order = order.gather(-1, tier.gather(-1, order).argsort(dim=-1, stable=True))
    slots = utility.shape[-1]
    rank = torch.arange(slots, device=utility.device).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter(-1, order, rank >= slots - count)


def block_best(utility: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
    """The valid entry of highest utility (then highest position) of every 16 positions, as a bool mask.

    Args:
        utility, valid, positions: [Lc, B, Gc, n], in order of position.
    """
    block = torch.where(valid, positions // RESCUE_BLOCK, torch.iinfo(positions.dtype).max)
    # Stable sorts from the minor key to the major one: position, utility, block. The last of each block is its best.
    order = utility.argsort(dim=-1, stable=True)
    order = order.gather(-1, block.gather(-1, order).argsort(dim=-1, stable=True))
    block = block.gather(-1, order)
    last = torch.ones_like(valid)
    last[..., :-1] = block[..., 1:] != block[..., :-1]
    return torch.zeros_like(valid).scatter(-1, order, last) & valid


def kept_order(keep: Tensor, size: int) -> Tensor:
    """Slots to keep, in order of position, filled up with others: [Lc, B, Gc, size] int64."""
    return (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :size]
