"""Pages of slots, for layers whose KV heads hold unlike numbers of entries: what one does not need another has.

Pure tensor code. P pages of a layer, SIZE slots each, one layout for all rows; G KV heads. Slot s of head g is place
s % SIZE of page table[g, s // SIZE]. Pages lie in the order in which they come to be needed, so that a step reads the
first ones only. After PagedAttention (arXiv 2309.06180), whose pages are of rows; here no allocator is asked while
decoding.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 32


def number(counts: Sequence[int], room: int) -> int:
    """Pages that heads with so many entries need for `room` more each."""
    return sum(-(-(count + room) // SIZE) for count in counts)


class Map(NamedTuple):
    """Which pages of one layer belong to which head.

    head, start: [P] int64, a page's head, and the slot of that head that it begins with; a page of nobody begins where
        no head comes.
    table: [G, P] int64; behind a head's last page its last one again.
    """

    head: Tensor
    start: Tensor
    table: Tensor


class Pages:
    """The pages of one layer: `map`, whose tensors stay where they are and are filled by `assign`."""

    def __init__(self, total: int, kv_heads: int, device: torch.device):
        self.total = total
        sizes = (total, total, (kv_heads, total))
        self.map = Map(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))
        self._due: list[int] = []

    def assign(self, counts: Sequence[int], room: int) -> None:
        """Give each head pages for its entries, of the fullest row, and `room` more. Mutates the tensors.

        Raises:
            ValueError: if there are too few.
        """
        if number(counts, room) > self.total:
            raise ValueError(f"room must leave at most {self.total} pages for heads of {list(counts)}, got {room}")
        wanted = [
            (start - count + 1, head, start)  # from which step on, counted from 1, it is needed
            for head, count in enumerate(counts)
            for start in range(0, count + room, SIZE)
        ]
        wanted.sort()
        self._due = [step for step, _, _ in wanted]
        table: list[list[int]] = [[] for _ in counts]
        for page, (_, head, _) in enumerate(wanted):
            table[head].append(page)
        spare = self.total - len(wanted)
        heads = [head for _, head, _ in wanted] + [0] * spare
        starts = [start for _, _, start in wanted] + [torch.iinfo(torch.int64).max // 2] * spare
        padded = [[*own, *itertools.repeat(own[-1] if own else 0, self.total - len(own))] for own in table]
        for tensor, values in zip(self.map, (heads, starts, padded), strict=True):
            tensor.copy_(torch.tensor(values, dtype=torch.int64))

    def read(self, step: int) -> int:
        """How many of the pages step `step` after the cut, counted from 1, has to read."""
        return max(1, bisect.bisect_right(self._due, step))

    @property
    def assigned(self) -> int:
        """Pages that belong to a head."""
        return len(self._due)


def gather(source: Tensor, order: Tensor, pages: Map) -> Tensor:
    """What each page is to hold.

    Args:
        source: [B, G, C, D].   order: [B, G, m] int64, the slots of each head in the order of their new places; m
            covers what is held, and what lies behind it is any slot.

    Returns:
        [B, P, SIZE, D], finite where the source is.
    """
    rows = torch.arange(source.shape[0], device=source.device)[:, None, None]
    place = pages.start[:, None] + torch.arange(SIZE, device=source.device)
    chosen = order[:, pages.head[:, None], place.clamp_max(order.shape[-1] - 1)]
    return source[rows, pages.head[None, :, None], chosen]


def scatter(source: Tensor, old: Pages, target: Tensor, new: Pages) -> None:
    """Bring what pages hold to the new ones of the same heads' slots. Mutates the target [B, P', SIZE, D]."""
    count = old.assigned
    to = new.map.table[old.map.head[:count], old.map.start[:count] // SIZE]
    target[:, to] = source[:, :count]
