"""Reading the prompt: the model's own forward, in blocks, into a SlotCache."""

import torch
from torch import Tensor

# A padded prompt needs a [rows, 1, queries, keys] mask and so does every block but the first; eager attention
# materialises the weights themselves.
MASKED_BLOCK = 1024
PLAIN_BLOCK = 8192


def block_length(columns: int, padded: bool, config) -> int:
    """Queries a block, so that no tensor of length x length is ever made."""
    rope = getattr(config, "rope_parameters", None) or {}
    # These rotate by the longest position met so far: the first blocks would be rotated otherwise than the rest.
    if columns <= MASKED_BLOCK or rope.get("rope_type") in ("dynamic", "longrope"):
        return columns
    implementation = config._attn_implementation
    return MASKED_BLOCK if padded or implementation == "eager" or columns > PLAIN_BLOCK else columns


def read_prompt(
    model,
    base,
    keyword: str,
    cache,
    input_ids: Tensor,
    mask: Tensor | None,
    position_ids: Tensor | None,
    block: int | None = None,
) -> Tensor:
    """Read the prompt into the cache, from where the cache has come to.

    Args:
        model, base: the causal LM and its base model (patched).
        keyword: name of the cache argument.
        cache: a SlotCache that is empty, or was told of a later turn; mutated.
        input_ids: [B, L] int64.   mask: [B, L] or None.   position_ids: [B, L] or None.
        block: queries a block, if the caller wants a certain number.

    Returns:
        logits after the last column, [B, V].
    """
    first, columns = cache.columns, input_ids.shape[1]
    input_ids, mask, position_ids = (
        None if tensor is None else tensor.to(model.device) for tensor in (input_ids, mask, position_ids)
    )
    size = block or block_length(columns - first, mask is not None or first > 0, model.config)
    cache.expect(columns - first)
    for start in range(first, columns, size):
        end = min(start + size, columns)
        inputs = {
            "input_ids": input_ids[:, start:end],
            "attention_mask": None if mask is None else mask[:, :end],
            "position_ids": torch.arange(start, end, device=input_ids.device)[None]
            if position_ids is None
            else position_ids[:, start:end],
            keyword: cache,
            "use_cache": True,
        }
        if end < columns:
            base(**inputs)
    logits = model(**inputs, logits_to_keep=1).logits[:, -1]
    cache.end_prefill()
    return logits
