"""Strict stand-ins for the decode entry points of FlashAttention 2, 3 and 4, for tests without a GPU.

A factory returns {module name: module}, to be put into `sys.modules` before the code under test imports them. The
entry points have the signatures of flash-attn 2.8.3, of its `hopper` folder and of flash-attn-4 4.0.0b36. They check
what the kernels need, also what those leave unchecked, and compute in float64. What has no part in plain decoding must
be left at its default, else NotImplementedError is raised. The tensors may lie on the CPU.
"""

import inspect
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Modules = dict[str, ModuleType]


def _module(name: str, *, package: bool = False, **attributes: Any) -> ModuleType:
    """An importable module; a package has no further submodules than those that lie in `sys.modules`."""
    module = ModuleType(name)
    # importlib.util.find_spec raises if a loaded module has no spec.
    module.__spec__ = ModuleSpec(name, loader=None, is_package=package)
    if package:
        module.__path__ = []
    vars(module).update(attributes)
    return module


def _leave_at_default(entry: Callable[..., Any], given: dict[str, Any], supported: str) -> None:
    """Raise NotImplementedError for an argument of `entry`, not named in `supported`, that is not at its default."""
    for name, parameter in inspect.signature(entry).parameters.items():
        value, default = given[name], parameter.default
        if name not in supported.split() and value is not default and (isinstance(value, Tensor) or value != default):
            got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name} must stay at its default {default!r} in the stand-in, got {got}")


def _check(
    tensors: dict[str, Tensor], lengths_name: str, lengths: Tensor, scale: float | None, splits: int, finite: bool
) -> None:
    """Raise TypeError or ValueError unless q [B, 1, H, D], keys and values [B, L, G, D] and lengths [B] fit."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"{name} must be a float16 or bfloat16 tensor, got {getattr(x, 'dtype', type(x))}")
        if x.dim() != 4 or x.stride(-1) != 1:
            raise ValueError(f"{name} must have 4 dimensions, the last of stride 1, got {x.shape}, {x.stride()}")
        # The kernels read 16 bytes at a time; versions 2 and 3 do not check that they may.
        if x.data_ptr() % 16 or any(s % 8 for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1):
            raise ValueError(f"{name} must lie aligned to 16 bytes in each dimension, got strides {x.stride()}")
    (_, q), (k_name, k), (v_name, v) = tensors.items()
    (b, one, h, d), (_, length, g, _) = q.shape, k.shape
    if b < 1 or one != 1:
        raise ValueError(f"q must have shape [B, 1, H, D], got {tuple(q.shape)}")
    if d < 8 or d % 8 or d > 256:
        raise ValueError(f"q must have a head size divisible by 8 and at most 256, got {d}")
    for name, x in ((k_name, k), (v_name, v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{name} must be {q.dtype} on {q.device} as q is, got {x.dtype} on {x.device}")
        if x.shape != (b, length, g, d):
            raise ValueError(f"{name} must have shape {(b, length, g, d)}, got {tuple(x.shape)}")
    if g < 1 or h % g:
        raise ValueError(f"{k_name} must have a number of heads that divides the {h} of q, got {g}")
    if not isinstance(lengths, Tensor) or lengths.dtype != torch.int32:
        raise TypeError(f"{lengths_name} must be an int32 tensor, got {getattr(lengths, 'dtype', type(lengths))}")
    if lengths.shape != (b,) or lengths.device != q.device or not lengths.is_contiguous():
        got = f"{tuple(lengths.shape)}, strides {lengths.stride()}, on {lengths.device}"
        raise ValueError(f"{lengths_name} must have shape {(b,)}, contiguous, on {q.device}, got {got}")
    # Above L the kernels read out of bounds. At 0 they disagree: the lse is +inf in version 2, -inf in 3 and 4.
    if not all(1 <= n <= length for n in lengths.tolist()):
        raise ValueError(f"{lengths_name} must lie in 1..{length}, got {lengths.tolist()}")
    # Versions 3 and 4 load whole tiles of values and give the unused ones the weight 0, but 0 * NaN is NaN.
    if finite and not v.isfinite().all():
        raise ValueError(f"{v_name} must be finite also past {lengths_name}")
    if scale is not None and not isinstance(scale, float):
        raise TypeError(f"softmax_scale must be a float or None, got {scale!r}")
    if not isinstance(splits, int) or not 0 <= splits <= 128:
        raise ValueError(f"num_splits must be an int in 0..128, got {splits!r}")


@torch.no_grad()
def _attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Out [B, 1, H, D] in q's dtype, and the natural log-sum-exp of the scaled scores, float32 [B, H, 1]."""
    (b, _, h, d), g = q.shape, k.shape[2]
    out, lse = q.new_empty(b, 1, h, d), q.new_empty(b, h, 1, dtype=torch.float32)
    for row, n in enumerate(lengths.tolist()):
        for head in range(h):
            keys, values = (x[row, :n, head // (h // g)].double() for x in (k, v))
            scores = keys @ q[row, 0, head].double() * (d**-0.5 if scale is None else scale)
            lse[row, head, 0] = scores.logsumexp(0)
            out[row, 0, head] = scores.softmax(0) @ values
    return out, lse


# The arguments stand in the packages' order, several to a line.
# fmt: off
def flash_attn_2() -> Modules:
    """`flash_attn.flash_attn_with_kvcache` of flash-attn 2: out, or (out, lse) with return_softmax_lse."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        supported = "q k_cache v_cache cache_seqlens softmax_scale num_splits return_softmax_lse"
        _leave_at_default(flash_attn_with_kvcache, locals(), supported)
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        _check(tensors, "cache_seqlens", cache_seqlens, softmax_scale, num_splits, finite=False)
        out, lse = _attend(q, k_cache, v_cache, cache_seqlens, softmax_scale)
        return (out, lse) if return_softmax_lse else out

    names = {"__version__": "2.8.3.post2", "flash_attn_with_kvcache": flash_attn_with_kvcache}
    return {"flash_attn": _module("flash_attn", package=True, **names)}


def flash_attn_3() -> Modules:
    """`flash_attn_interface.flash_attn_with_kvcache` of flash-attn 3, a module without a version.

    Returns out, or with return_softmax_lse not two but four: (out, lse, out_accum, lse_accum), the last two of no use.
    """

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
        rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:
        supported = "q k_cache v_cache cache_seqlens softmax_scale num_splits pack_gqa return_softmax_lse"
        _leave_at_default(flash_attn_with_kvcache, locals(), supported)
        tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
        _check(tensors, "cache_seqlens", cache_seqlens, softmax_scale, num_splits, finite=True)
        out, lse = _attend(q, k_cache, v_cache, cache_seqlens, softmax_scale)
        return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out

    return {"flash_attn_interface": _module("flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)}


def flash_attn_4() -> Modules:
    """`flash_attn.cute.flash_attn_varlen_func` of flash-attn-4, which always returns (out, lse or None).

    The package leaves `flash_attn` without an __init__, and looks its version up under a name that is not its own.
    """

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None,
        softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None), learnable_sink: Tensor | None = None,
        softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
        score_mod: Callable | None = None, score_mod_bwd: Callable | None = None, mask_mod: Callable | None = None,
        block_sparse_tensors=None, aux_tensors: list | None = None, aux_scalars: tuple | None = None,
        return_lse: bool = False, scheduler_metadata=None, seqlen_k_per_split: int | None = None,
        disable_scheduler_metadata: bool = False, gather_bwd_recompute_p: bool = False,
        gather_bwd_token_chunk: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        supported = "q k v seqused_k softmax_scale num_splits pack_gqa return_lse"
        _leave_at_default(flash_attn_varlen_func, locals(), supported)
        _check({"q": q, "k": k, "v": v}, "seqused_k", seqused_k, softmax_scale, num_splits, finite=True)
        out, lse = _attend(q, k, v, seqused_k, softmax_scale)
        return out, lse if return_lse else None

    names = {"__version__": "0.0.0", "flash_attn_varlen_func": flash_attn_varlen_func}
    cute = _module("flash_attn.cute", package=True, **names)
    return {"flash_attn": _module("flash_attn", package=True, cute=cute), "flash_attn.cute": cute}
# fmt: on
