"""The rows of one generation over their buffers: which slot is free, how many hold something, and views for each step.

Pure tensor code; shapes as in `kvpatch.slots`.
"""

from torch import Tensor

from kvpatch import slots
from kvpatch.selection import Rows, passed, per_row


class State:
    """Bookkeeping of a batch from the end of its prompt on.

    Args:
        buffers: hold `entries` tokens a row in their first slots; their books are opened.
        rows: per-row limits, copied; `rows.prompt` counts all tokens that the row has seen.
        entries: [B] int64, tokens held; those of an earlier turn may be gone.
        window: sliding window that every layer has, else None.

    Attributes:
        free, length: [Lc, B, Gc] int64.   newest: [B] int64.   active: [B] bool.   ledger: `slots.Ledger`.
        views: per layer the tensors of `slots.LayerSlots` before the index; another list whenever a buffer changes.
        indexes: per layer the slots, or pages, that the current step reads.
    """

    def __init__(self, buffers: slots.Buffers, rows: Rows, entries: Tensor, window: int | None):
        self.entries, self.window = entries, window
        books = buffers.books
        for own, given in zip(books.rows, rows, strict=True):
            own.copy_(given)
        books.free.copy_(entries[None, :, None].expand_as(books.free))
        books.length.copy_(books.free)
        books.newest.copy_(rows.prompt - 1)
        books.active.fill_(True)
        self._keep(books)
        self.bind(buffers)

    def _keep(self, books: slots.Books) -> None:
        self._books = books
        self.free, self.length, self.newest, self.active, self.rows = books

    def bind(self, buffers: slots.Buffers) -> None:
        """Make the views of these buffers that steps use, and go on in their books."""
        if buffers.books is not self._books:
            buffers.books.take(self._books)
            self._keep(buffers.books)
        shape, several = buffers.shape, buffers.batch > 1
        target = buffers.pending if shape.uniform else buffers.utility
        self._index = buffers.index
        self.views = []
        for layer in range(shape.layers):
            own = layer if shape.ranked_layers > 1 else 0
            slotted = (buffers.keys[layer], buffers.values[layer], target[:, own], buffers.positions[own])
            places = 2 if buffers.pages is None else 1
            for tensor, slots_at, rows_at in zip(slotted, (places, places, 3, 2), (0, 0, 1, 0), strict=True):
                slots.mark_dynamic(tensor, slots_at, rows_at if several else None)
            self.views.append((*slotted, self.free[own], self.length[own], self.newest, self.active))
            for tensor in self.views[-1][4:6]:
                slots.mark_dynamic(tensor, None, 0 if several else None)
        for tensor in (self.newest, self.active, *self.rows):
            slots.mark_dynamic(tensor, None, 0 if several else None)
        for tensor in (one for notes in buffers.notes for one in notes):
            slots.mark_dynamic(tensor, None, 0 if several else None)
        slots.mark_dynamic(buffers.turns, None, 1 if several else None)
        for tensor in (one for own in buffers.pages or () for one in own.map):
            slots.mark_dynamic(tensor, tensor.ndim - 1, None)
        self.ledger = slots.Ledger(
            buffers.utility,
            buffers.pending,
            buffers.positions,
            self.free,
            self.length,
            self.newest,
            self.active,
            self.rows,
            self._index[:0],
            self.window,
        )
        self.indexes = [self.ledger.index] * shape.layers
        for tensor, rows_at in zip(self.ledger[:5], (2, 2, 1, 1, 1), strict=True):
            slots.mark_dynamic(tensor, None, rows_at if several else None)
        for tensor in self.ledger[:3]:
            slots.mark_dynamic(tensor, tensor.ndim - 1, None)

    def unbind(self) -> None:
        """Hold no view of the buffers, so that a layer's memory is free as soon as it has moved."""
        self.views = []

    def read(self, n: int, pages: list[int] | None = None) -> None:
        """The next step reads the first n slots, of their keys and values so many pages of each layer if given."""
        if n != self.ledger.index.shape[0]:
            self.ledger = self.ledger._replace(index=self._first(n))
        if pages is not None:
            self.indexes = [self._first(one) for one in pages]
        elif self.indexes[0] is not self.ledger.index:
            self.indexes = [self.ledger.index] * len(self.indexes)

    def _first(self, n: int) -> Tensor:
        index = self._index[:n]
        slots.mark_dynamic(index, 0, None)
        return index

    def held(self, n: int) -> Tensor:
        """Which of the first n slots hold a token between steps: [Lc, B, Gc, n] bool."""
        index = self._index[:n]
        return (index < self.length[..., None]) & (index != self.free[..., None])

    def may_stay(self, positions: Tensor) -> Tensor:
        """Which of the slots that the first step has read may stay, [Lc, B, Gc, n] bool: own and not passed.

        A row that ended before this step keeps what it had: the token fed for it is not one of its own.
        """
        index = self.ledger.index
        own = self.active[None, :, None, None] | (index != per_row(self.entries))
        valid = (index < self.length[..., None]) & own
        return valid if self.window is None else valid & ~passed(positions, self.newest + 1, self.window)

    def shorten(self, length: Tensor) -> None:
        """The first `length` [Lc, B, Gc] slots hold tokens now, and the one behind is free."""
        self.length.copy_(length)
        self.free.copy_(length)

    def reorder(self, order: Tensor) -> None:
        """Row b becomes what row order[b] was; the buffers are the caller's to reorder."""
        for tensor, dim in ((self.free, 1), (self.length, 1), (self.newest, 0), (self.active, 0), (self.entries, 0)):
            tensor.copy_(tensor.index_select(dim, order))
        for tensor in self.rows:
            tensor.copy_(tensor.index_select(0, order))
