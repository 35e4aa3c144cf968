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
