"""Having the model repeat its prompt, so that a method sees what that looks at (KVzip, arXiv 2505.23416).

What is fed for it is stored behind the prompt for as long as a forward takes, and then forgotten.
"""

import torch
from torch import Tensor

from kvpatch import turns

CHUNK = 2048  # columns that are repeated at once


def check(config) -> None:
    """Whether a model can repeat its prompt; before it is read.

    Raises:
        ValueError: for an attention implementation that takes no mask.
    """
    turns.refuse_fused(config, "a prompt that the model repeats")


def repeat(base, keyword: str, cache, input_ids: Tensor, mask: Tensor | None) -> None:
    """Feed the prompt that a cache has just read once more, chunk by chunk; its watch notes the attention.

    Args:
        base: the base model (patched).   keyword: name of the cache argument.
        cache: holds the prompt and has not decoded. Its watch is mutated, and the slots behind the prompt.
        input_ids: [B, L] int64.   mask: [B, L] or None.
    """
    device, columns = cache.shape.device, input_ids.shape[1]
    input_ids = input_ids.to(device)
    valid = torch.ones_like(input_ids) if mask is None else mask.to(device)
    lengths = valid.sum(-1, keepdim=True)
    kept = {name: getattr(cache, name) for name in ("columns", "stored", "mask", "fed", "logits")}
    cache.watch.peaks = [None] * len(cache.watch.peaks)  # of a reading that goes on, all is repeated
    cache.watch.repeating = columns
    try:
        for start in range(0, columns, CHUNK):
            own = valid[:, start : start + CHUNK]
            base(
                input_ids=input_ids[:, start : start + CHUNK],
                attention_mask=None if mask is None else torch.cat((valid, own), -1),
                position_ids=lengths + (own.cumsum(-1) - 1).clamp_min(0),
                use_cache=True,
                **{keyword: cache},
            )
            for name, value in kept.items():
                setattr(cache, name, value)
    finally:
        if cache.watch is not None:  # an error has reset the cache
            cache.watch.repeating = None
