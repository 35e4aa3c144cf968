"""Moving what is held from one place to another: pads squeezed out, the first cut, growth. One layer at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpatch.slots import Buffers


def squeeze(buffers: Buffers, columns: int, pads: Tensor) -> None:
    """Shift every row left over its pads.

    Args:
        buffers: mutated; slots 0..columns-1 hold the prompt with its pads.
        pads: [B] int64.
    """
    # What comes behind a row's end is its last token again: never valid, but finite.
    order = (torch.arange(columns, device=pads.device) + pads[:, None]).clamp_max(columns - 1)
    order = order[:, None].expand(-1, buffers.shape.kv_heads, -1)
    for layer in range(buffers.shape.layers):
        for side in (buffers.keys, buffers.values):
            side[layer][:, :, :columns] = gathered(side[layer], order)


def cut(source: Buffers, target: Buffers, order: Tensor, note: Callable[[], None]) -> None:
    """Bring the entries that stay to the first slots of the target; the source gives its layers back on the way.

    Args:
        source, target: mutated; may be the same.
        order: [Lc, B, Gc, m] int64, slots that stay.
        note: called while both hold one layer, for the count of bytes.
    """
    shape, size = source.shape, order.shape[-1]
    every_head = order.expand(-1, -1, shape.kv_heads, -1)
    for layer in range(shape.layers):
        chosen = every_head[layer if shape.ranked_layers > 1 else 0]
        target.add_layer(layer)
        for old, new in ((source.keys, target.keys), (source.values, target.values)):
            new[layer][:, :, :size] = gathered(old[layer], chosen)
        note()
        if target is not source:
            source.drop_layer(layer)
    # Both are gathered before either is written: source and target may be one.
    utility, positions = source.utility[0].gather(-1, order), source.positions.gather(-1, order)
    target.utility[0, ..., :size] = utility
    target.positions[..., :size] = positions
    target.pending.zero_()


def move(source: Buffers, target: Buffers, note: Callable[[], None]) -> None:
    """Bring everything to larger buffers; layers that the source lacks are left out."""
    for layer in range(source.shape.layers):
        if source.keys[layer] is None:
            continue
        target.add_layer(layer)
        target.keys[layer][:, :, : source.capacity] = source.keys[layer]
        target.values[layer][:, :, : source.capacity] = source.values[layer]
        note()
        source.drop_layer(layer)
    target.utility[..., : source.capacity] = source.utility
    target.positions[..., : source.capacity] = source.positions


def gathered(source: Tensor, order: Tensor) -> Tensor:
    """source [B, G, C, D] at order [B, G, m] of its slots: [B, G, m, D]."""
    rows = torch.arange(source.shape[0], device=source.device)[:, None, None]
    heads = torch.arange(source.shape[1], device=source.device)[None, :, None]
    return source[rows, heads, order]
