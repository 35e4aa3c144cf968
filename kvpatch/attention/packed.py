"""Decode attention with the query heads of a group packed as rows of one matrix product.

Bytes a step: every valid key and value once; K and V are never expanded to the query heads.
"""

import torch
from torch import Tensor


def decode(q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v over the valid slots.

    Args:
        q: [B, H, 1, D].
        keys, values: [B, G, n, D], G divides H; entries outside `valid` must be finite.
        valid: [B, 1 or G, n] bool; at least one slot a row.
        scale: factor of the logits.

    Returns:
        output [B, 1, H, D] in q's dtype, and weights [B, G, H / G, n] in max(float32, q's dtype), 0 outside `valid`.
    """
    batch, heads, _, width = q.shape
    groups = keys.shape[1]
    accumulated = torch.promote_types(q.dtype, torch.float32)
    packed = q.view(batch, groups, heads // groups, width)
    logits = torch.matmul(packed, keys.transpose(-1, -2)).to(accumulated) * scale
    weights = torch.softmax(logits.masked_fill(~valid.unsqueeze(2), -torch.inf), dim=-1)
    output = torch.matmul(weights.to(values.dtype), values)
    return output.view(batch, 1, heads, width), weights


def decode_pages(q: Tensor, keys: Tensor, values: Tensor, pages, length: Tensor, index: Tensor, scale: float) -> Tensor:
    """softmax(q k^T scale) v over the slots that each head holds, which lie in pages.

    Every page by itself, then those of a head together by their log-sum-exps, as flash decoding joins its splits.

    Args:
        q: [B, H, 1, D].
        keys, values: [B, P, S, D], finite.
        pages: `kvpatch.pages.Map`.
        length: [B, G] int64, or [B, 1], at least 1.
        index: [n] int64, 0..n-1: pages that are read.
        scale: factor of the logits.

    Returns:
        [B, 1, H, D] in q's dtype.
    """
    batch, heads, _, width = q.shape
    groups, size = pages.table.shape[0], keys.shape[2]
    accumulated = torch.promote_types(q.dtype, torch.float32)
    count, head, start = index.shape[0], pages.head[index], pages.start[index]
    packed = q.view(batch, groups, heads // groups, width)
    logits = torch.matmul(packed[:, head], keys[:, :count].transpose(-1, -2)).to(accumulated) * scale
    places = start[:, None] + torch.arange(size, device=q.device)
    held = places < length.expand(batch, groups)[:, head][..., None]
    logits = logits.masked_fill(~held.unsqueeze(2), -torch.inf)
    peak = logits.amax(-1)  # [B, P, R]; -inf where a page holds nothing
    own = head == torch.arange(groups, device=q.device)[:, None]  # [G, P]
    highest = peak[:, None].masked_fill(~own[..., None], -torch.inf).amax(2)  # [B, G, R]
    weights = torch.exp(logits - highest[:, head][..., None])
    parts = torch.matmul(weights.to(values.dtype), values[:, :count]).to(accumulated)
    own = own.to(accumulated)
    output = torch.matmul(own, parts.flatten(2)).view(batch, groups, heads // groups, width)
    total = torch.matmul(own, weights.sum(-1))
    return (output / total[..., None]).to(q.dtype).view(batch, 1, heads, width)


def window_scores(
    q: Tensor, keys: Tensor, lengths: Tensor, lse: Tensor | None, scale: float, head_pool: str, dtype: torch.dtype
) -> Tensor:
    """Mean over the last W queries of the attention that each token gets: [B, G, n] of q [B, H, W, D].

    One KV head at a time, so that no more than [B, R, W, n] is held. Arguments as `kvpatch.attention.window_scores`,
    which checks them; `dtype` is what is accumulated in.
    """
    batch, heads, window, _ = q.shape
    groups, n = keys.shape[1], keys.shape[2]
    queries = heads // groups
    place = torch.arange(n, device=q.device)
    own = lengths[:, None] - window + torch.arange(window, device=q.device)  # [B, W], where each query stands
    met = (place <= own[..., None])[:, None]
    scores = []
    for group in range(groups):
        mine = slice(group * queries, (group + 1) * queries)
        logits = torch.einsum("brwd,bnd->brwn", q[:, mine].to(dtype), keys[:, group].to(dtype)) * scale
        logits = logits.masked_fill(~met, -torch.inf)
        total = torch.logsumexp(logits, -1) if lse is None else lse[:, mine].to(dtype)
        weights = torch.exp(logits - total[..., None]).mean(2)
        pooled = {"mean": weights.mean, "max": weights.amax, "rms": lambda dim, w=weights: w.square().mean(dim).sqrt()}
        scores.append(pooled[head_pool](1))
    return torch.stack(scores, 1)
