"""Later turns of a conversation over one SlotCache: its prompt attends to what was kept and to itself.

While such a prompt is read, the tokens held lie in the first slots, and the prompt behind the longest row's.
"""

import torch
from torch import Tensor

from kvpatch import compact, moving, slots
from kvpatch.rows import row_lengths


def valid(cache, block: int) -> Tensor:
    """Which stored slots hold a token, of earlier turns or of the last `block` columns: [B, slots] bool."""
    device, most = cache.current.shape.device, max(cache.before, default=0)
    before = torch.tensor(cache.before or [0] * cache.current.batch, device=device)
    earlier = torch.arange(most, device=device) < before[:, None]
    own = torch.ones(cache.current.batch, block, dtype=torch.bool, device=device)
    if cache.mask is not None:
        own = cache.mask[:, -block:].to(device, torch.bool)
    return torch.cat((earlier, own), -1)


def check(cache, columns: int, mask: Tensor | None) -> None:
    """Whether a conversation of that many columns can go on from here; nothing is changed.

    Args:
        mask: [B, columns] of the whole conversation, or None.

    Raises:
        ValueError: if rows of this batch ended at different steps, the mask disagrees with what was read before or
            is padded on the right, or the conversation is longer than a sliding window.
    """
    rule = cache.policy.prefill
    if cache.needs.repeat:
        raise ValueError(
            f"prefill {rule.name!r} has the model repeat its prompt, so no later turn can follow; reset() the "
            "SlotCache and read the conversation whole"
        )
    if cache.compresses and not rule.even:
        raise ValueError(
            f"prefill {rule.name!r} leaves layers or heads of different lengths, so no later turn can follow; use one "
            "with allocation='uniform', or reset() the SlotCache and read the conversation whole"
        )
    if not bool(cache.state.active.all()):
        raise ValueError(
            "the rows of this SlotCache ended at different steps, so no later turn can follow; hold each "
            "conversation in a cache of its own"
        )
    shortest = min(filter(None, cache.windows), default=columns)
    if columns > shortest:
        raise ValueError(
            f"a conversation of {columns} tokens is longer than this model's sliding window of {shortest}: a later "
            "turn can't go on from a SlotCache there; reset() it and read the conversation whole"
        )
    read = [length + cache.step for length in cache.prompt]
    marked = [cache.columns] * len(read) if mask is None else mask[:, : cache.columns].sum(-1).tolist()
    if marked != read:
        raise ValueError(
            f"attention_mask marks {marked} tokens a row in the {cache.columns} columns that the SlotCache has "
            f"read, but {read} were read: pass the mask of the whole conversation, with the pads of its first turn"
        )
    if mask is not None:
        row_lengths(mask[:, cache.columns :], holes=True)


def refuse_fused(config, what: str = "a later turn over a SlotCache") -> None:
    """A later turn's prompt needs a mask of its own, and so does a prompt that the model repeats.

    Raises:
        ValueError: for an attention implementation that takes none.
    """
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r}: {what} needs a mask; load the model with "
            'attn_implementation="sdpa"'
        )


def reopen(cache) -> None:
    """A later turn's prompt comes: bring what is held to the first slots; the prompt is stored behind it."""
    cache.let_go()
    source = cache.current
    held = cache.state.held(int(cache.state.length.max()))
    cache.before = held.sum(-1)[0, :, 0].tolist()
    cache.seen = [length + cache.step for length in cache.prompt]
    most = max(cache.before)
    target, needed = source, most + cache.columns_expected() + 1
    if source.capacity < needed:
        # Between the blocks of a prompt that is read in some, these are the peak: not a slot too many.
        target = slots.Buffers(cache.shape, source.batch, needed if cache.whole else slots.round_up(needed))
    order = moving.by_position(held, source.positions[..., : held.shape[-1]])[..., :most]
    moving.cut(source, target, order, lambda: cache.note_bytes(target))
    if cache.compact:  # the prompt's first token comes in behind what is held
        gone = torch.tensor(cache.seen, device=held.device) - torch.tensor(cache.before, device=held.device)
        compact.turn(target, cache.rotary.inv_freq, gone)
    cache.current, cache.state, cache.phase, cache.step, cache.stored = target, None, "prefill", 0, most
    cache.watch, cache.whole = None, []
    cache.prompt, cache.entries, cache.budgets, cache.limits, cache.planned = [], [], [], [], 0


def inputs(cache, query: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """What a block of a later turn's prompt attends to, as a mask added to the logits, and its positions.

    Args:
        query: tokens of the block, which `begin_forward` was told of.
        dtype: of the mask.

    Returns:
        [B, 1, q, slots stored with the block's] and [B, q]; None for any other forward.
    """
    if not cache.before or cache.phase != "prefill":
        return None
    device, most, end = cache.current.shape.device, max(cache.before), cache.stored + query
    own = valid(cache, end - most)
    causal = torch.ones(query, end, dtype=torch.bool, device=device).tril(cache.stored)
    allowed = own[:, None, None] & causal
    positions = torch.tensor(cache.seen, device=device)[:, None] + (own[:, most:].cumsum(-1) - 1).clamp_min(0)
    zero = torch.zeros((), dtype=dtype, device=device)
    return torch.where(allowed, zero, torch.finfo(dtype).min), positions[:, -query:]
