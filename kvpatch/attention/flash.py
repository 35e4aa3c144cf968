"""FlashAttention's own decode kernels: the output and the log-sum-exp, over slots as they lie.

Three packages offer them, and the newest that is installed and knows the card is used:

    4  flash_attn.cute.flash_attn_varlen_func          distribution flash-attn-4; compute capability 9 and 10
    3  flash_attn_interface.flash_attn_with_kvcache    built from the project's hopper/ folder; capability 9
    2  flash_attn.flash_attn_with_kvcache              distribution flash-attn, 2.6 or newer; capability 8 and up

All take a [B, L, G, D] view of our [B, G, C, D] buffers without a copy, int32 lengths per row, and give the natural
log-sum-exp as [B, H, 1] float32. The new token is written by us before: their append can't overwrite a victim. Lengths
are at least 1 here: what an empty row's log-sum-exp is differs between the three.

Bytes per held slot and row: 2 D G e, keys and values once (e the element size); pooled scores read the keys again.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable

import torch
from torch import Tensor

_EXTRAS = "pip install 'kvpatch[flash]' (flash-attn 2), 'kvpatch[flash4]' (flash-attn-4), or build flash-attn 3"


def version(capability: tuple[int, int] | None) -> int | None:
    """Which FlashAttention is installed and runs on a card of that compute capability; any card for None."""
    major = None if capability is None else capability[0]
    if _installed("flash-attn-4") and _has("flash_attn.cute") and major in (None, 9, 10):
        return 4
    if _has("flash_attn_interface") and major in (None, 9):
        return 3
    if _installed("flash-attn", (2, 6)) and major in (None, 8, 9, 10, 12):
        return 2
    return None


def _installed(distribution: str, least: tuple[int, ...] = ()) -> bool:
    # Not an import: flash-attn-4 makes `import flash_attn` succeed without flash-attn 2 and the other way round.
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in re.findall(r"\d+", found)[:2]) >= least


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def why_not(site) -> str:
    """Why FlashAttention can't serve a `kvpatch.attention.Site`; an empty text if it can."""
    if site.device.type != "cuda":
        return "it needs a CUDA GPU"
    if site.dtype not in (torch.float16, torch.bfloat16):
        return f"the model is in {site.dtype}, FlashAttention takes float16 and bfloat16"
    if site.width % 8 or site.width > 256:
        return f"the head size is {site.width}, FlashAttention takes multiples of 8 up to 256"
    if site.windowed:
        return "a layer has a sliding window, which one length a row can't express"
    capability = torch.cuda.get_device_capability(site.device)
    which = version(capability)
    if which is None:
        return f"no FlashAttention for this card is installed: {_EXTRAS}"
    if which == 4 and capability[0] == 10 and site.width > 128:
        return f"the head size is {site.width}, flash-attn-4 takes up to 128 on this card"
    return ""


@functools.cache
def _function(which: int) -> Callable:
    """(q [B, 1, H, D], k, v [B, L, G, D], lengths [B] int32, scale) -> (out [B, 1, H, D], lse [B, H, 1])."""
    if which == 4:
        varlen = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

        def four(q, k, v, lengths, scale):
            # By keywords only: the places of its arguments moved between releases.
            return varlen(q=q, k=k, v=v, seqused_k=lengths, softmax_scale=scale, return_lse=True)

        return four
    module = importlib.import_module("flash_attn_interface" if which == 3 else "flash_attn")
    with_kvcache = module.flash_attn_with_kvcache

    def two_or_three(q, k, v, lengths, scale):
        out, lse, *_ = with_kvcache(
            q, k_cache=k, v_cache=v, cache_seqlens=lengths, softmax_scale=scale, return_softmax_lse=True
        )
        return out, lse

    return two_or_three


@torch.library.custom_op("kvpatch::flash_decode", mutates_args=())
def decode(q: Tensor, keys: Tensor, values: Tensor, length: Tensor, scale: float, which: int) -> tuple[Tensor, Tensor]:
    """FlashAttention over slots.

    Args:
        q: [B, H, 1, D] float16 or bfloat16.   keys, values: [B, G, C, D] contiguous, of q's dtype.
        length: [B] int64, 1 <= length <= C.   scale: of the logits.   which: the package, as `version`.

    Returns:
        output [B, 1, H, D], and the natural log-sum-exp [B, H, 1] float32.
    """
    turned = (tensor.transpose(1, 2) for tensor in (q, keys, values))
    out, lse = _function(which)(*turned, length.to(torch.int32), scale)
    return out.contiguous(), lse.contiguous()


@decode.register_fake
def _(q, keys, values, length, scale, which):
    batch, heads, _, width = q.shape
    return q.new_empty(batch, 1, heads, width), q.new_empty(batch, heads, 1, dtype=torch.float32)
