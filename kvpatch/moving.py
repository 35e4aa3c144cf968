"""Moving what is held from one place to another: pads squeezed out, the first cut, growth. One layer at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpatch import pages
from kvpatch.slots import Buffers


def squeeze(buffers: Buffers, valid: Tensor) -> None:
    """Bring every row's tokens to its first slots, in the order that they have.

    Args:
        buffers: mutated; keys and values only.
        valid: [B, columns] bool, which of the first slots hold a token.
    """
    columns, shape = valid.shape[1], buffers.shape
    order = (~valid).to(torch.int8).argsort(dim=-1, stable=True)
    # What comes behind a row's end is its last token again: never valid, but finite.
    last = valid.sum(-1, keepdim=True) - 1
    order = order.gather(-1, torch.minimum(torch.arange(columns, device=valid.device), last))
    order = order[:, None].expand(-1, shape.kv_heads, -1)
    for layer in range(shape.layers):
        for side in (buffers.keys, buffers.values):
            side[layer][:, :, :columns] = gathered(side[layer], order)


def enter(buffers: Buffers, before: Tensor, gone: Tensor, mean: list[bool]) -> None:
    """Give a prompt's tokens, which lie behind the first `before` slots of a row, their positions and utility.

    Args:
        buffers: mutated.
        before: [B] int64, tokens held already; they keep what they have.
        gone: [B] int64, tokens of earlier turns that are no longer held.
        mean: for each ranking, start at the mean utility of the tokens held already, else at zero.
    """
    index = torch.arange(buffers.capacity, device=before.device)
    earlier = index < before[None, :, None, None]
    buffers.pending.zero_()
    held = torch.where(earlier, buffers.utility, 0.0)
    start = held.sum(-1, keepdim=True) / before[None, None, :, None, None].clamp_min(1)
    start = start * torch.tensor(mean, device=before.device)[:, None, None, None, None]
    buffers.utility.copy_(torch.where(earlier, buffers.utility, start))
    buffers.positions.copy_(torch.where(earlier, buffers.positions, index + gone[None, :, None, None]))


def by_position(held: Tensor, positions: Tensor) -> Tensor:
    """Slots in order of what they hold, [Lc, B, Gc, n] int64: held positions ascending, then the others."""
    return torch.where(held, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def cut(source: Buffers, target: Buffers, order: Tensor, note: Callable[[], None]) -> None:
    """Bring the entries that stay to the first slots of the target; the source gives its layers back on the way.

    Args:
        source, target: mutated; may be the same. The source has no pages, the target may.
        order: [Lc, B, Gc, m] int64, slots that stay.
        note: called while both hold one layer, for the count of bytes.
    """
    shape, size = source.shape, order.shape[-1]
    every_head = order.expand(-1, -1, shape.kv_heads, -1)
    for layer in range(shape.layers):
        chosen = every_head[layer if shape.ranked_layers > 1 else 0]
        target.add_layer(layer)
        for old, new in ((source.keys, target.keys), (source.values, target.values)):
            if target.pages is None:
                new[layer][:, :, :size] = gathered(old[layer], chosen)
            else:
                new[layer].copy_(pages.gather(old[layer], chosen, target.pages[layer].map))
        note()
        if target is not source:
            _take_notes(source, target, layer)
            source.drop_layer(layer)
    # Both are gathered before either is written: source and target may be one.
    utility = source.utility.gather(-1, order.expand(shape.rankings, *order.shape))
    positions = source.positions.gather(-1, order)
    target.utility[..., :size] = utility
    target.positions[..., :size] = positions
    target.pending.zero_()


def move(source: Buffers, target: Buffers, note: Callable[[], None]) -> None:
    """Bring everything to larger buffers, in pages if the source's is; layers that the source lacks are left out."""
    for layer in range(source.shape.layers):
        if source.keys[layer] is None:
            continue
        target.add_layer(layer)
        for old, new in ((source.keys, target.keys), (source.values, target.values)):
            if source.pages is None:
                new[layer][:, :, : source.capacity] = old[layer]
            else:
                pages.scatter(old[layer], source.pages[layer], new[layer], target.pages[layer])
        note()
        _take_notes(source, target, layer)
        source.drop_layer(layer)
    target.utility[..., : source.capacity] = source.utility
    target.positions[..., : source.capacity] = source.positions


def _take_notes(source: Buffers, target: Buffers, layer: int) -> None:
    for old, new in zip(source.notes, target.notes, strict=True):
        if old:
            new[layer].copy_(old[layer])


def gathered(source: Tensor, order: Tensor) -> Tensor:
    """source [B, G, C, D] at order [B, G, m] of its slots: [B, G, m, D]."""
    rows = torch.arange(source.shape[0], device=source.device)[:, None, None]
    heads = torch.arange(source.shape[1], device=source.device)[None, :, None]
    return source[rows, heads, order]
