"""Decode attention over slots: one query a row, output and attention weights or pooled scores."""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch.attention import flash, packed, reference
from kvpatch.errors import BackendError
from kvpatch.scoring import pool

# What needs only the slots and gives weights: (q, keys, values, valid, scale) -> (output, weights).
PLAIN = {"packed": packed.decode, "reference": reference.decode}
PAGED = {"packed": packed.decode_pages, "reference": reference.decode_pages}
NAMES = (*PLAIN, "triton", "flash")


class Site(NamedTuple):
    """What a back end must serve.

    device, dtype: of queries, keys and values.   queries: query heads a KV head.   width: head size.
    windowed: whether a layer meets a sliding window only.
    """

    device: torch.device
    dtype: torch.dtype
    queries: int
    width: int
    windowed: bool = False


def check_name(backend: str) -> None:
    """ValueError for a name that no back end has."""
    if backend != "auto" and backend not in NAMES:
        raise ValueError(f"backend must be one of auto, {', '.join(NAMES)}, got {backend!r}")


def choose(backend: str, site: Site) -> tuple[str, str]:
    """(name, why) of the back end that runs there.

    Raises:
        BackendError: if a named one can't run there, with the reason.
        ValueError: for an unknown name.
    """
    check_name(backend)
    if backend != "auto":
        reason = why_not(backend, site)
        if reason:
            raise BackendError(f"backend={backend!r} can't run: {reason}; use 'auto' or 'packed'")
        return backend, "asked for"
    if site.device.type == "cpu":
        return "packed", "the fused path on a CPU"
    reason = why_not("triton", site)
    if not reason:
        return "triton", f"the fused kernels run on {site.device.type} in {str(site.dtype).removeprefix('torch.')}"
    return "packed", f"the fused kernels can't run ({reason})"


def why_not(backend: str, site: Site) -> str:
    """Why a back end can't run there; an empty text if it can."""
    if backend in PLAIN:
        return ""
    reason = flash.why_not(site) if backend == "flash" else ""
    if reason:
        return reason
    # FlashAttention too: a scoring step's pooled scores are a kernel of ours.
    if not _has_triton():
        return "the package triton is not installed" if site.device.type == "cuda" else "it needs a CUDA GPU"
    from kvpatch.attention import triton

    return triton.why_not(site.device, site.dtype, site.queries, site.width)


def available(site: Site | None = None) -> dict[str, str]:
    """Every back end's name, and why it can't run there (this machine's GPU, or its CPU); an empty text if it can."""
    if site is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        site = Site(torch.device(device), torch.bfloat16, 4, 128)
    return {name: why_not(name, site) for name in NAMES}


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    scores: bool = True,
    head_pool: str = "mean",
    per_head: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """One query a row over a KV cache, with the attention that each entry gets. Changes nothing.

    Works on plain tensors, and under torch.compile with fullgraph.

    Args:
        q: [B, H, D] or [B, H, 1, D], last stride 1.
        k, v: [B, G, C, D] contiguous, G divides H; same dtype and device as q.
        lengths: [B] integers; entries 0..lengths-1 of a row are valid, 1 <= lengths <= C. What lies behind is not read
            on a GPU; elsewhere it must be finite.
        scale: of the logits; D ** -0.5 if None.
        scores: whether the second result is made.
        head_pool: how query heads' attention weights become one: "mean", "max" or "rms".
        per_head: pool over each KV head's own queries only.
        backend: as in `patch`; "flash" is not offered here.

    Returns:
        out: q's shape and dtype: softmax(q k^T scale) v over the valid entries.
        pooled: [B, C] float32 or wider, with per_head [B, G, C]; 0 behind a row's length. None without scores.

    Raises:
        ValueError: for shapes or a pool that don't fit, naming the argument.
        BackendError: if a named back end can't run there.
    """
    rows, heads, groups, width = _checked(q, k, v, lengths, head_pool)
    name = _of_plain_tensors(backend, q, heads // groups)
    scale = width**-0.5 if scale is None else scale
    one, capacity = q.reshape(rows, heads, 1, width), k.shape[2]
    own = groups if per_head else 1
    if name == "triton":
        from kvpatch.attention import triton

        length = lengths.to(torch.int64)[:, None].expand(rows, own).contiguous()
        out, _, pooled = triton.decode(one, k, v, length, capacity, scale, "attention" if scores else "", head_pool)
    else:
        valid = (torch.arange(capacity, device=q.device) < lengths[:, None])[:, None]
        out, weights = PLAIN[name](one, k, v, valid, scale)
        pooled = pool(weights, head_pool, 2).squeeze(2)
        pooled = pooled if per_head else pool(pooled, head_pool, 1)
    out = out.reshape(q.shape)
    if not scores:
        return out, None
    return out, pooled if per_head else pooled[:, 0]


def window_scores(
    q: Tensor,
    k: Tensor,
    lengths: Tensor,
    *,
    lse: Tensor | None = None,
    scale: float | None = None,
    head_pool: str = "mean",
    per_head: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Attention that a prompt's last queries pay to each of its tokens, as SnapKV and its kin rank by. Changes nothing.

    No tensor of prompt x prompt is made; on a GPU none of window x prompt either.

    Args:
        q: [B, H, W, D], last stride 1: the queries at each row's last W places, after RoPE.
        k: [B, G, n, D], last stride 1, after RoPE; G divides H.
        lengths: [B] integers: row b's tokens are k[b, :, :lengths[b]], and W <= lengths <= n.
        lse: [B, H, W] float32 natural log-sum-exps of those queries' logits over their own past, where an attention
            kernel left them; else they are computed, which reads the keys once more.
        scale: of the logits; D ** -0.5 if None.
        head_pool: how query heads' weights become one: "mean", or with W = 1 also "max" or "rms".
        per_head: a score per KV head, pooled over its own queries; else one over all heads.
        backend: as in `patch`, without "flash".

    Returns:
        [B, G, n] float32 or wider, without per_head [B, n]: the mean over the window; 0 behind a row's length.

    Raises:
        ValueError: for shapes or a pool that don't fit, naming the argument.
        BackendError: if a named back end can't run there.
    """
    if q.ndim != 4:
        raise ValueError(f"q must be [rows, heads, window, head size], got {list(q.shape)}")
    rows, heads, window, width = q.shape
    _check_keys("k", k, q)
    _check_lengths(lengths, rows)
    if head_pool not in ("mean", "max", "rms") or (head_pool != "mean" and window > 1):
        raise ValueError(f'head_pool must be "mean", or "max" or "rms" with one query, got {head_pool!r}')
    if lse is not None and lse.shape != (rows, heads, window):
        raise ValueError(f"lse must be {[rows, heads, window]}, got {list(lse.shape)}")
    name = _of_plain_tensors(backend, q, heads // k.shape[1])
    scale = width**-0.5 if scale is None else scale
    if name == "triton":
        from kvpatch.attention import triton

        scores = triton.window_scores(q, k, lengths.to(torch.int64), lse, scale, per_head, head_pool)
    else:
        accumulated = torch.float64 if name == "reference" else torch.promote_types(q.dtype, torch.float32)
        scores = packed.window_scores(q, k, lengths, lse, scale, head_pool, accumulated)
        if not per_head:
            scores = pool(scores, head_pool, 1)
    return scores if per_head else scores[:, 0]


def _checked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, head_pool: str) -> tuple[int, int, int, int]:
    if q.ndim not in (3, 4) or (q.ndim == 4 and q.shape[2] != 1):
        raise ValueError(f"q must be [rows, heads, head size] or [rows, heads, 1, head size], got {list(q.shape)}")
    rows, heads, width = q.shape[0], q.shape[1], q.shape[-1]
    for name, tensor in (("k", k), ("v", v)):
        _check_keys(name, tensor, q)
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(f"{name} must be {q.dtype} on {q.device} as q is, got {tensor.dtype} on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for {list(tensor.shape)}")
    if k.shape != v.shape:
        raise ValueError(f"v must have k's shape {list(k.shape)}, got {list(v.shape)}")
    _check_lengths(lengths, rows)
    if head_pool not in ("mean", "max", "rms"):
        raise ValueError(f"head_pool must be one of mean, max, rms, got {head_pool!r}")
    return rows, heads, k.shape[1], width


def _check_keys(name: str, tensor: Tensor, q: Tensor) -> None:
    rows, heads, width = q.shape[0], q.shape[1], q.shape[-1]
    if tensor.ndim != 4 or tensor.shape[0] != rows or tensor.shape[3] != width or heads % max(1, tensor.shape[1]):
        raise ValueError(
            f"{name} must be [{rows}, KV heads that divide {heads}, slots, {width}] to fit q, got {list(tensor.shape)}"
        )


def _check_lengths(lengths: Tensor, rows: int) -> None:
    if lengths.shape != (rows,) or lengths.is_floating_point():
        raise ValueError(f"lengths must be [{rows}] integers, got {lengths.dtype} {list(lengths.shape)}")


def _of_plain_tensors(backend: str, q: Tensor, queries: int) -> str:
    """The back end for tensors that are no slots of a cache."""
    name, _ = choose(backend, Site(q.device, q.dtype, queries, q.shape[-1]))
    if name == "flash":
        raise BackendError("backend='flash' can't run: plain tensors are for 'triton', 'packed' and 'reference'")
    return name


__all__ = ["decode", "window_scores"]
