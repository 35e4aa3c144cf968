"""Decode attention written as its formula, in float64: the oracle of the other back ends."""

import torch
from torch import Tensor


def decode(q: Tensor, keys: Tensor, values: Tensor, valid: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v over the valid slots; arguments and results as `kvpatch.attention.packed.decode`."""
    batch, heads, _, width = q.shape
    groups = heads // keys.shape[1]
    keys = keys.double().repeat_interleave(groups, dim=1)
    values = values.double().repeat_interleave(groups, dim=1)
    valid = valid.expand(batch, keys.shape[1] // groups, -1).repeat_interleave(groups, dim=1)
    logits = torch.einsum("bhd,bhnd->bhn", q[:, :, 0].double(), keys) * scale
    weights = torch.softmax(logits.masked_fill(~valid, -torch.inf), dim=-1)
    output = torch.einsum("bhn,bhnd->bhd", weights, values).to(q.dtype).view(batch, 1, heads, width)
    accumulated = torch.promote_types(q.dtype, torch.float32)
    return output, weights.to(accumulated).view(batch, heads // groups, groups, -1)


def decode_pages(q: Tensor, keys: Tensor, values: Tensor, pages, length: Tensor, index: Tensor, scale: float) -> Tensor:
    """The same over slots in pages, brought together; arguments as `kvpatch.attention.packed.decode_pages`."""
    batch, _, size, width = keys.shape
    groups = pages.table.shape[0]
    whole = [side[:, pages.table].reshape(batch, groups, -1, width) for side in (keys, values)]
    valid = torch.arange(whole[0].shape[2], device=q.device) < length[..., None]
    return decode(q, *whole, valid, scale)[0]
