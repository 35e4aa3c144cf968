"""Pages of slots, for layers whose KV heads hold unlike numbers of entries: what one does not need another has.

Pure tensor code. P pages of a layer, SIZE slots each, one layout for all rows; G KV heads. Slot s of head g is place
s % SIZE of page table[g, s // SIZE]. Pages lie in the order in which they come to be needed, so that a step reads the
first ones only. After PagedAttention (arXiv 2309.06180), whose pages are of rows; here no allocator is asked while
decoding.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 32


def pages_of(counts: Sequence[int], room: int) -> list[int]:
    """Pages that heads with so many entries need for `room` more each."""
    return [-(-(count + room) // SIZE) for count in counts]


class Map(NamedTuple):
    """Which pages of one layer belong to which head.

    head, start: [P] int64, a page's head, and the slot of that head that it begins with; a page of nobody begins where
        no head comes.
    table: [G, M] int64, M pages of the fullest head or more; behind a head's last page its last one again.
    """

    head: Tensor
    start: Tensor
    table: Tensor


class Pages:
    """The pages of one layer: `map`, whose tensors stay where they are and are filled by `assign`.

    Args:
        counts, room: what there must be pages for, as of `assign`.
    """

    def __init__(self, counts: Sequence[int], room: int, device: torch.device):
        needed = pages_of(counts, room)
        # Two at least: compiled code takes a size of one for a constant.
        self.total, self.width = max(2, sum(needed)), max(2, *needed)
        sizes = (self.total, self.total, (len(counts), self.width))
        self.map = Map(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))
        self.assign(counts, room)

    def fits(self, counts: Sequence[int], room: int) -> bool:
        """Whether heads with so many entries find pages for `room` more each."""
        needed = pages_of(counts, room)
        return sum(needed) <= self.total and max(needed) <= self.width

    def assign(self, counts: Sequence[int], room: int) -> None:
        """Give each head pages for its entries, of the fullest row, and `room` more. Mutates the tensors.

        Raises:
            ValueError: if there are too few.
        """
        if not self.fits(counts, room):
            raise ValueError(f"room must leave at most {self.total} pages for heads of {list(counts)}, got {room}")
        needed = pages_of(counts, room)
        heads = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(needed))
        ends = torch.tensor(needed).cumsum(0)
        starts = (torch.arange(sum(needed)) - (ends - torch.tensor(needed))[heads]) * SIZE
        due = starts - torch.tensor(list(counts))[heads] + 1  # from which step on, counted from 1, it is needed
        order = due.argsort(stable=True)
        self._due = due[order].tolist()
        spare = self.total - sum(needed)
        nobody = torch.full((spare,), torch.iinfo(torch.int64).max // 2)
        places = torch.minimum(torch.arange(self.width), torch.tensor(needed)[:, None] - 1)
        table = order.argsort()[(ends - torch.tensor(needed))[:, None] + places]
        head = torch.cat((heads[order], torch.zeros(spare, dtype=torch.int64)))
        for tensor, values in zip(self.map, (head, torch.cat((starts[order], nobody)), table), strict=True):
            tensor.copy_(values)

    def read(self, step: int) -> int:
        """How many of the pages step `step` after the cut, counted from 1, has to read."""
        return max(2, bisect.bisect_right(self._due, step))

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
