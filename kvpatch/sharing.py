"""One reading of a prompt for several generations: a cache that has read it is copied, each copy goes its own way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpatch import repeating
from kvpatch.budget import UNSET
from kvpatch.cache import SlotCache
from kvpatch.policy import resolve
from kvpatch.prefill import read_prompt
from kvpatch.rows import row_lengths


def read(handle, input_ids: Tensor, attention_mask: Tensor | None = None, policies: Sequence = ()) -> SlotCache:
    """Read a prompt with a patched model; see `Patch.read`."""
    if input_ids.ndim != 2 or input_ids.is_floating_point():
        raise ValueError(f"input_ids must be [batch, length] integers, got {input_ids.dtype} {list(input_ids.shape)}")
    mask, positions = None, None
    if attention_mask is not None:
        lengths = row_lengths(attention_mask)
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must be {list(input_ids.shape)} as input_ids is, got {list(attention_mask.shape)}"
            )
        if min(lengths) < input_ids.shape[1]:
            mask, positions = attention_mask, (attention_mask.cumsum(-1) - 1).clamp_min(0)
    rules = [one.prefill for one in map(resolve, policies) if one.prefill is not None]
    cache = SlotCache(handle.model.config, handle.policy, handle.budget, backend=handle.asked)
    cache.watch_for(rules)
    with handle.in_use(), torch.inference_mode(False), torch.no_grad():
        handle.check_parts()
        if cache.noted.repeat:
            repeating.check(handle.model.config)
        cache.choose_backend(handle.site)
        logits = read_prompt(handle.model, handle.parts.base, handle.keyword, cache, input_ids, mask, positions)
        if cache.noted.repeat:
            repeating.repeat(handle.parts.base, handle.keyword, cache, input_ids, mask)
    cache.logits = logits
    return cache


def fork(source: SlotCache, policy, budget, fields: dict) -> SlotCache:
    """A cache under another policy with a copy of what the source has read; see `SlotCache.fork`."""
    if source.logits is None:
        raise RuntimeError("only a cache that has read a prompt and decoded nothing can be forked: see Patch.read")
    if policy is None:
        policy = source.policy
        budget = source.budget if budget is UNSET else budget
    cache = SlotCache(source.config, policy, budget, backend=source.asked, **fields)
    if cache.compresses and cache.policy.prefill.block is not None:
        raise RuntimeError(
            f"policy {cache.policy.name!r} reads its prompt in blocks of {cache.policy.prefill.block} and cuts it in "
            "between, so it can't go on from one that was read whole: generate without a fork"
        )
    # Bounds follow from the window's queries when the prompt is cut.
    if (source.noted | cache.needs)._replace(bounds=False) != source.noted._replace(bounds=False):
        raise RuntimeError(
            f"policy {cache.policy.name!r} cuts the prompt by {cache.policy.prefill.name!r}, for which the prompt's "
            "queries were not noted: give the policy to Patch.read(..., policies=[...])"
        )
    cache.choose_backend(source.site)
    cache.take_prompt(source)
    return cache
