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
