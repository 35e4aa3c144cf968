"""Reading a prompt a block at a time and cutting it after each: no more than the budget and a block are ever held.

A block is read as a later turn of a conversation is: it attends to what was kept and to itself.
"""

import torch
from torch import Tensor

from kvpatch import turns
from kvpatch.prefill import read_prompt


def read(
    model,
    base,
    keyword: str,
    cache,
    input_ids: Tensor,
    mask: Tensor | None,
    new_tokens: int,
    block: int | None = None,
) -> Tensor:
    """Read a prompt, or a later turn's, from where the cache has come to.

    Pads are read with the first block, which is so much longer: no row is empty then.

    Args:
        model, base, keyword: as of `kvpatch.prefill.read_prompt`.
        cache: planned for the whole prompt; its policy's method has a block. Mutated.
        input_ids: [B, L] int64.   mask: [B, L] or None.
        new_tokens: most tokens that can be fed after the prompt.
        block: queries of one forward, as of `read_prompt`; what is cut in between follows from the policy.

    Returns:
        logits after the last column, [B, V].
    """
    first, columns, size = cache.columns, input_ids.shape[1], cache.policy.prefill.block
    if mask is None:
        mask = torch.ones_like(input_ids)
    pads = int((mask[:, first:] == 0).sum(-1).max())
    ends = [*range(first + pads + size, columns, size), columns]
    whole, start, logits = list(cache.prompt), first, None
    turns.refuse_fused(model.config)
    for end in ends:
        if start > first:
            cache.expect(end - start)
            turns.reopen(cache)
        cache.whole = whole
        cache.plan(mask[:, start:end].sum(-1).tolist(), new_tokens)
        part = mask[:, :end]
        positions = (part.cumsum(-1) - 1).clamp_min(0)
        padded = None if bool(part.all()) else part
        logits = read_prompt(model, base, keyword, cache, input_ids[:, :end], padded, positions, block)
        if end < columns:
            cache.end_prefill()
        start = end
    return logits
