"""What the host knows of a batch's rows: lengths, and how many slots a step needs of them."""

import torch
from torch import Tensor

# New tokens that room is made for ahead; more are made room for by doubling, since most generations end early.
HEADROOM = 4096


def row_lengths(mask: Tensor, holes: bool = False) -> list[int]:
    """Tokens of each row of a left-padded mask [B, L] of zeros and ones.

    Args:
        holes: whether zeros may stand before any token, as between two turns of a padded batch.

    Raises:
        ValueError: for right padding, holes, an empty row or other values, naming the row.
    """
    if mask.ndim != 2:
        raise ValueError(f"attention_mask must be [batch, length], got shape {list(mask.shape)}")
    ones = mask.bool()
    if not torch.equal(ones.to(mask.dtype), mask):
        raise ValueError("attention_mask must hold zeros and ones only")
    lengths = ones.sum(-1).tolist()
    expected = torch.arange(mask.shape[1], device=mask.device) >= (mask.shape[1] - ones.sum(-1, keepdim=True))
    for row, (length, fine) in enumerate(zip(lengths, (ones == expected).all(-1).tolist(), strict=True)):
        if length == 0:
            raise ValueError(f"attention_mask row {row} is empty: every row needs at least one token")
        if not fine and (not holes or not ones[row, -1]):
            kind = "is padded on the right" if not ones[row, -1] else "has a hole"
            raise ValueError(
                f"attention_mask row {row} {kind}; rows must be left-padded (tokenizer.padding_side = 'left'). If no "
                "attention_mask was passed, transformers made this one from the pad token's places: pass one"
            )
    return lengths


def at_most(value: int, limit: int | None) -> int:
    """The value, or the row's limit if it has one and that is less."""
    return value if limit is None else min(value, limit)


def held_after(step: int, length: int, limit: int | None, interval: int | None = None) -> int:
    """Tokens of one row after decode step `step` (0: before the first).

    Args:
        length: tokens that it held before the first step.   limit: the most that it may hold, None: any number.
        interval: how many leave at once, as soon as it holds so many; None: one in, one out.
    """
    seen = length + step
    if limit is None or interval is None or seen < limit:
        return at_most(seen, limit)
    return limit - interval + (seen - limit) % interval


def full_at(step: int, length: int, limit: int, interval: int) -> bool:
    """Whether decode step `step` fills a row, so that `interval` tokens leave at its end; as of `held_after`."""
    return length + step >= limit and (length + step - limit) % interval == 0


def slots_read(length: int, limit: int | None, step: int, interval: int | None = None) -> int:
    """Slots of one row that step `step` reads: everything at step 1, then what is held and the new token."""
    return length + 1 if step == 1 else held_after(step - 1, length, limit, interval) + 1
