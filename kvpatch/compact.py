"""Positions inside the cache in place of those in the text (StreamingLLM, arXiv 2309.17453).

Attention depends on how far apart query and key are rotated. Where only the oldest tokens behind the sinks are evicted,
what is held behind the sinks keeps its distances; only the sinks come nearer, by as many places as tokens have gone. So
their keys alone are turned anew at each step, from what they were: no rounding adds up.

Pure tensor code; shapes as in `kvpatch.slots`, S sinks.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from kvpatch.patches import half_turned
from kvpatch.slots import Buffers, LayerSlots


def why_not(windows, rope: dict | None) -> str:
    """Why a model's positions must stay those of the text; "" where they need not.

    Args:
        windows: each layer's sliding window, None for one without.   rope: parameters of its rotary embedding.
    """
    if any(windows):
        return "layers have a sliding window, which counts positions of the text"
    rope = rope or {}
    if rope.get("llama_4_scaling_beta"):
        return "its queries are scaled by their positions in the text"
    kind = rope.get("rope_type", "default")
    return f"its rotary frequencies ({kind}) follow the length" if kind in ("dynamic", "longrope") else ""


def keep(buffers: Buffers, before: Tensor) -> None:
    """Remember the sinks' keys that a prompt has brought into the first slots. Mutates the anchors.

    Args:
        before: [B] int64, tokens that each row held already.
    """
    places = torch.arange(buffers.shape.sinks, device=before.device)
    new = (places >= before[:, None])[:, None, :, None]
    for anchors, keys in zip(buffers.anchors, buffers.keys, strict=True):
        anchors.copy_(torch.where(new, keys[:, :, : len(places)], anchors))


def turn(buffers: Buffers, frequencies: Tensor, gone: Tensor) -> None:
    """Turn the sinks' keys of all layers that many places [B] ahead. Mutates keys and turns."""
    buffers.turns.copy_(factors(frequencies, gone))
    for anchors, keys in zip(buffers.anchors, buffers.keys, strict=True):
        keys[:, :, : anchors.shape[2]] = turned(anchors, buffers.turns)


def factors(frequencies: Tensor, places: Tensor) -> Tensor:
    """cos and sin by which keys are turned that many places [B] ahead: [2, B, D], in the frequencies' dtype or wider.

    Args:
        frequencies: [D / 2], of the half-split layout.
    """
    wide = frequencies.to(torch.promote_types(frequencies.dtype, torch.float32))
    angles = places[:, None] * wide
    angles = torch.cat((angles, angles), -1)
    return torch.stack((angles.cos(), angles.sin()))


def turned(keys: Tensor, by: Tensor) -> Tensor:
    """Keys [B, G, S, D] turned by factors [2, B, D]."""
    cos, sin = by[:, :, None, None].to(torch.promote_types(keys.dtype, torch.float32))
    wide = keys.to(cos.dtype)
    return (wide * cos + half_turned(wide) * sin).to(keys.dtype)


@functools.cache
def compacting(attend: Callable) -> Callable:
    """The same attention, before which the sinks' keys are turned to where they stand in the cache."""

    def attend_compactly(slots: LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        count = slots.anchors.shape[2]
        # A row so short that its new token is one of the sinks.
        new = slots.free[..., None] == torch.arange(count, device=k.device)
        slots.anchors.copy_(torch.where(new[..., None], k, slots.anchors))
        # index_put, as in `slots.write`: of a slice that is assigned inductor makes two copies of the whole buffer.
        batch, heads = slots.keys.shape[:2]
        rows, every = torch.arange(batch, device=k.device), torch.arange(heads, device=k.device)
        first = torch.arange(count, device=k.device)
        slots.keys[rows[:, None, None], every[None, :, None], first] = turned(slots.anchors, slots.turns)
        return attend(slots, q, k, v, scale)

    return attend_compactly
