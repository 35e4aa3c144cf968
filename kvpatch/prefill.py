"""Reading the prompt: the model's own forward, in blocks, into a SlotCache."""

import torch
from torch import Tensor

from kvpatch.cachelayer import heads_of

# A padded prompt needs a [rows, 1, queries, keys] mask and so does every block but the first; eager attention
# materialises the weights themselves.
MASKED_BLOCK = 1024
FLASH = ("flash_attention", "kernels-community")  # implementations of transformers that make no mask
PLAIN_BLOCK = 8192
# Tokens that a GPU reads in one block: the flash kernel of SDPA takes no mask, so none but a first block meets it. What
# limits it is the memory of the feed-forward layers' activations.
GPU_TOKENS = 131072


def block_length(rows: int, columns: int, padded: bool, config, device: str) -> int:
    """Queries a block, so that no tensor of length x length is ever made.

    Args:
        rows, columns: of the prompt.   padded: whether it needs a mask.   device: its type, "cuda" or another.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # These rotate by the longest position met so far: the first blocks would be rotated otherwise than the rest.
    if columns <= MASKED_BLOCK or rope.get("rope_type") in ("dynamic", "longrope"):
        return columns
    if config._attn_implementation.startswith(FLASH):
        return min(columns, PLAIN_BLOCK)
    whole = GPU_TOKENS // rows if device == "cuda" else PLAIN_BLOCK
    return MASKED_BLOCK if padded or config._attn_implementation == "eager" or columns > whole else columns


def prefill_kernel(model) -> str:
    """Which attention kernel reads a prompt, in words."""
    implementation, device = model.config._attn_implementation, model.device.type
    if implementation.startswith(FLASH):
        return f"{implementation}, padded or not"
    if implementation != "sdpa":
        return implementation
    if device != "cuda":
        return "sdpa: torch's own kernel"
    masked = f"memory-efficient with a mask in blocks of {MASKED_BLOCK:,} queries"
    if not _flash_kernel_runs(model):
        return f"sdpa: memory-efficient; padded, {masked}"
    return f"sdpa: flash up to {GPU_TOKENS:,} tokens a batch; longer or padded, {masked}"


def _flash_kernel_runs(model) -> bool:
    """Whether SDPA's flash kernel takes the model's heads on its GPU."""
    heads, _, width = heads_of(model.config)
    one = torch.empty(1, heads, 16, width, dtype=model.dtype, device=model.device)
    params = torch.backends.cuda.SDPAParams(one, one, one, None, 0.0, True, False)
    return torch.backends.cuda.can_use_flash_attention(params)


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
    padded = mask is not None or first > 0
    size = block or block_length(len(input_ids), columns - first, padded, model.config, model.device.type)
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
    return model(**inputs, logits_to_keep=1).logits[:, -1]
