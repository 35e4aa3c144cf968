"""SlotCache: the transformers face of the slots, and the host's bookkeeping of one generation."""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpatch import attention, moving, scoring, selection, slots
from kvpatch.budget import UNSET
from kvpatch.policy import settle
from kvpatch.rows import HEADROOM, at_most, row_lengths, slots_read
from kvpatch.stats import Stats


class SlotCache(Cache):
    """A KV cache of fixed size with decode-time eviction, for a patched model.

    Between decode steps a row holds at most its budget of tokens. The prompt is held whole until the first decode step
    has scored it; then it is cut to the budget and its memory is given back layer by layer.

    Args:
        config: the model's config; only the number of layers is read.
        policy: name or `Policy`.
        budget: as `Budget`; may be left out for policy "full" only.
        max_new_tokens: an upper bound, for buffers that need not grow. Without it they grow by doubling up to the
            budget.
        backend: attention back end, as in `patch`.
        **fields: fields of the policy to replace.

    Raises:
        ValueError, TypeError: for a bad policy, budget or back end.
    """

    is_compileable = False  # transformers must not compile around our steps

    def __init__(self, config, policy="inertia-lazy", budget=UNSET, max_new_tokens=None, *, backend="auto", **fields):
        self.policy, self.budget = settle(policy, budget, fields)
        decode = attention.decode_function(attention.choose(backend)[0])
        text = config.get_text_config(decoder=True)
        super().__init__(layers=[SlotLayer(self, index) for index in range(text.num_hidden_layers)])
        self.max_new_tokens = max_new_tokens
        self.stats = Stats()
        self.scoring_layers = self.policy.scoring_layers(len(self.layers))
        scorer = scoring.scorer(self.policy.scorer)
        self.attends = {scores: slots.make_attend(self.policy, scorer, decode, scores) for scores in (False, True)}
        self._kept: slots.Buffers | None = None
        self.before_move = _nothing  # called before buffers are moved or given back: let go of them
        self._forget()

    def _forget(self) -> None:
        self.before_move()
        self.phase = "empty"  # then "prefill", "decode"
        self.columns = 0  # tokens consumed, pads included
        self.step = 0  # decode steps begun
        self.scores = False  # whether the current step scores
        self.prompt: list[int] = []  # prompt length per row, without pads
        self.limits: list[int | None] = []  # budget per row in tokens
        self.planned = 0  # slots that this generation needs, 0 while unknown
        self.expect_prompt = False  # a block of one token is still prompt
        self.mask: Tensor | None = None
        self.current: slots.Buffers | None = None
        self.ledger: slots.Ledger | None = None
        self._views: list[tuple] = []

    # ---- prefill -----------------------------------------------------------------------------------------------

    def plan(self, prompt: list[int], new_tokens: int | None) -> None:
        """Fix rows and capacity before the prompt arrives.

        Args:
            prompt: prompt length of each row, without pads.
            new_tokens: most tokens that can be fed after the prompt; None where it is not known.

        Raises:
            ValueError: if the policy's protected entries fill a row's budget.
        """
        self.prompt = prompt
        self.limits = [self.budget.tokens(length) if self.policy.evicts else None for length in prompt]
        for limit in self.limits:
            if limit is not None:
                self.policy.protected(limit)
        if new_tokens is not None:
            ahead = min(new_tokens, HEADROOM)
            self.planned = 1 + max(
                at_most(length + ahead, limit) for length, limit in zip(prompt, self.limits, strict=True)
            )

    def begin_forward(self, query: int, mask: Tensor | None) -> None:
        """Decide what a forward over `query` tokens is: a block of the prompt, or a decode step."""
        if self.phase == "decode" and query > 1:
            raise ValueError(
                f"a block of {query} tokens after the first decode step can't be added to a SlotCache yet; "
                "feed one token at a time, or reset() the cache and prefill the whole conversation"
            )
        if self.phase == "empty":
            self.phase = "prefill"
        elif self.phase == "prefill" and query == 1 and not self.expect_prompt:
            self.end_prefill()
        if self.phase == "prefill":
            if mask is not None and mask.ndim != 2:
                raise ValueError(f"attention_mask must be [batch, length] with a SlotCache, got {list(mask.shape)}")
            self.mask = mask
        else:
            self.begin_step()

    def end_forward(self, query: int) -> None:
        """Close what `begin_forward` opened; a decode step chooses its victims here."""
        if self.phase == "prefill":
            self.columns += query
        else:
            slots.finish(self.ledger, self.policy, len(self.scoring_layers) if self.scores else 0)
            self.end_step()

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a block of the prompt to one layer; k, v [B, G, q, D]. Returns all of the prompt's keys and values."""
        if self.phase != "prefill":
            raise RuntimeError("SlotCache.update is for the prompt of a patched model: call kvpatch.patch(model) first")
        end = self.columns + k.shape[2]
        if self.current is None:
            self._shape = slots.Shape.of(self.policy, len(self.layers), k)
            self.current = self._buffers(k.shape[0], max(end, self._columns_expected()) + 1)
        elif self.current.capacity <= end:
            self._grow(end + 1)
        self.current.add_layer(layer)
        self._note_bytes()
        keys, values = self.current.keys[layer], self.current.values[layer]
        keys[:, :, self.columns : end] = k
        values[:, :, self.columns : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def expect(self, columns: int) -> None:
        """The prompt will come to that many columns, pads included, in blocks of any length."""
        self.expect_prompt, self._columns = True, columns

    def _columns_expected(self) -> int:
        return self._columns if self.expect_prompt else 0

    def _buffers(self, batch: int, needed: int) -> slots.Buffers:
        """Buffers with room for `needed` slots now: the kept ones where the whole generation fits there."""
        whole = max(needed, self.planned)
        kept = self._kept
        if kept is not None and (kept.batch != batch or kept.shape != self._shape):
            kept = self._kept = None
        if kept is not None and kept.capacity >= whole:
            return kept
        if self.planned >= needed:  # nothing large will be cut: prefill straight into the slots
            self._kept = None
            self._kept = self._allocate(batch, whole)
            return self._kept
        return self._allocate(batch, needed)

    def _allocate(self, batch: int, needed: int) -> slots.Buffers:
        return slots.Buffers(self._shape, batch, slots.round_up(needed))

    def _note_bytes(self, *more: slots.Buffers) -> None:
        self.stats.note_bytes(self._live_bytes(*more))

    def _live_bytes(self, *more: slots.Buffers) -> int:
        live = {id(buffers): buffers.nbytes for buffers in (self._kept, self.current, *more) if buffers is not None}
        return sum(live.values())

    def end_prefill(self) -> None:
        """The prompt is complete: squeeze pads out and open the ledger."""
        batch = self.current.batch
        if not self.prompt:
            lengths = [self.columns] * batch if self.mask is None else row_lengths(self.mask)
            self.plan(lengths, self.max_new_tokens)
        self.mask, self.expect_prompt = None, False
        pads = [self.columns - length for length in self.prompt]
        if any(pads):
            moving.squeeze(self.current, self.columns, torch.tensor(pads, device=self._shape.device))
        self._open_ledger(batch)
        self.phase = "decode"
        self.stats.note_rows(self.prompt, self.limits)

    def _open_ledger(self, batch: int) -> None:
        device, current = self._shape.device, self.current
        prompt = torch.tensor(self.prompt, device=device)
        far = torch.iinfo(torch.int64).max // 4
        limits = [far if limit is None else min(limit, far) for limit in self.limits]
        protected = [(0, 0, 0) if limit is None else self.policy.protected(limit) for limit in self.limits]
        rows = [torch.tensor(column, device=device) for column in (limits, *zip(*protected, strict=True))]
        current.utility.zero_()
        current.pending.zero_()
        current.positions.copy_(torch.arange(current.capacity, device=device).expand_as(current.positions))
        lead = (self._shape.ranked_layers, batch, self._shape.ranked_heads)
        self._rows = selection.Rows(*rows, prompt)
        self._free = prompt[None, :, None].expand(lead).clone()
        self._length = self._free.clone()
        self._newest = prompt - 1
        self._active = torch.ones(batch, dtype=torch.bool, device=device)
        self._index = torch.arange(current.capacity, device=device)
        self._bind()

    # ---- decode steps ------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        """Make the views of the current buffers that steps use."""
        current, several = self.current, self.current.batch > 1
        layers, ranked = range(len(self.layers)), self._shape.ranked_layers
        target = current.pending if self._shape.uniform else current.utility
        if self._index.shape[0] < current.capacity:
            self._index = torch.arange(current.capacity, device=self._shape.device)
        self._views = []
        for layer in layers:
            own = layer if ranked > 1 else 0
            keys, values = current.keys[layer], current.values[layer]
            utility, positions = target[:, own], current.positions[own]
            free, length = self._free[own], self._length[own]
            for tensor, slot_dim, row_dim in (
                (keys, 2, 0),
                (values, 2, 0),
                (utility, 3, 1),
                (positions, 2, 0),
                (free, None, 0),
                (length, None, 0),
            ):
                slots.mark_dynamic(tensor, slot_dim, row_dim if several else None)
            self._views.append((keys, values, utility, positions, free, length))
        for tensor, row_dim in ((self._newest, 0), (self._active, 0), *((tensor, 0) for tensor in self._rows)):
            slots.mark_dynamic(tensor, None, row_dim if several else None)
        self.ledger = slots.Ledger(
            current.utility,
            current.pending,
            current.positions,
            self._free,
            self._length,
            self._newest,
            self._active,
            self._rows,
            self._index[:0],
        )
        for tensor, row_dim in zip(self.ledger[:5], (2, 2, 1, 1, 1), strict=True):
            slots.mark_dynamic(tensor, None, row_dim if several else None)
        for tensor in self.ledger[:3]:
            slots.mark_dynamic(tensor, tensor.ndim - 1, None)

    def begin_step(self) -> None:
        """Open a decode step: which kind it is, how many slots it reads, and the new token's slot."""
        self.step += 1
        self.scores = self.policy.scores_at(self.step) and self.budget.evicts
        n = max(slots_read(length, limit, self.step) for length, limit in zip(self.prompt, self.limits, strict=True))
        if n > self.current.capacity:
            self._grow(n)
        if n != self.ledger.index.shape[0]:
            index = self._index[:n]
            slots.mark_dynamic(index, 0, None)
            self.ledger = self.ledger._replace(index=index)
        slots.begin(self.ledger, self.policy)

    @property
    def step_views(self) -> object:
        """Stays one object as long as steps meet the same buffers."""
        return self._views

    def layer_slots(self, layer: int) -> slots.LayerSlots | None:
        """One layer's tensors for the current decode step; None while the prompt is read."""
        if self.phase != "decode":
            return None
        attend = self.attends[self.scores and layer in self.scoring_layers]
        return slots.LayerSlots(*self._views[layer], self.ledger.index, attend)

    def set_active(self, active: Tensor) -> None:
        """Freeze the rows where `active` [B] is False: what they hold stays as it is."""
        self._active.copy_(active)

    def end_step(self) -> None:
        """Close a decode step whose victims are chosen: count it, and after the first one cut to the budget."""
        self.columns += 1
        if self.step == 1:
            rows = zip(self.prompt, self.limits, strict=True)
            if max(length + 1 - at_most(length + 1, limit) for length, limit in rows) > 1:
                self._cut()
        self.stats.note_step(self.scores, self.step, self.prompt, self.limits)

    def _cut(self) -> None:
        """Cut every row to its budget, moving one layer at a time into the slots and freeing its prompt."""
        self._let_go()
        source, n = self.current, self.ledger.index.shape[0]
        held = max(at_most(length + 1, limit) for length, limit in zip(self.prompt, self.limits, strict=True))
        utility, positions = source.utility[0, ..., :n], source.positions[..., :n]
        # A row that ended before this step keeps what it had: the token fed for it is not one of its own.
        own = self._active[None, :, None, None] | (self.ledger.index != selection.per_row(self._rows.prompt))
        valid = (self.ledger.index < self._length[..., None]) & own
        shielded = selection.protected(positions, self._newest, self._rows) & valid
        keep = selection.first_cut(utility, valid, shielded, self._rows.budget, self.policy.rescue)
        target = source
        if source is not self._kept:
            needed = max(self.planned, held + 1)
            if self._kept is None or self._kept.capacity < needed:
                self._kept = None
                self._kept = self._allocate(source.batch, needed)
            target = self._kept
        moving.cut(source, target, selection.kept_order(keep, held), self._note_bytes)
        self._length.copy_(keep.sum(-1))
        self._free.copy_(self._length)
        self.current = target
        self._note_bytes()
        self._bind()

    def _let_go(self) -> None:
        """Hold no view of the buffers, so that a layer's memory is free as soon as it has moved."""
        self.before_move()
        self._views = []

    def _grow(self, needed: int) -> None:
        """Move to buffers of at least `needed` slots, doubling, one layer at a time."""
        self._let_go()
        old = self.current
        limits = [limit for limit in self.limits if limit is not None]
        most = max(limits) + 1 if limits and len(limits) == len(self.limits) else 2 * old.capacity
        new = self._allocate(old.batch, max(needed, min(2 * old.capacity, most)))
        moving.move(old, new, lambda: self._note_bytes(new))
        self._kept = new if self._kept is old or self.phase == "decode" else self._kept
        self.current = new
        if self.phase == "decode":
            self._bind()

    # ---- what is held ------------------------------------------------------------------------------------------

    def retained(self) -> Tensor:
        """Original positions held between steps: [layers, B, G, slots] int64, -1 for an empty slot."""
        if self.phase != "decode":
            if self.phase == "prefill" and self.current is not None and not self.expect_prompt:
                self.end_prefill()
            else:
                raise RuntimeError(
                    "nothing is held: no prompt has been read to its end since the cache was made or reset"
                )
        n = max(1, int(self._length.max()))
        index = torch.arange(n, device=self._length.device)
        held = (index < self._length[..., None]) & (index != self._free[..., None])
        positions = torch.where(held, self.current.positions[..., :n], -1)
        return positions.expand(len(self.layers), -1, self._shape.kv_heads, -1).clone()

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, kept buffers included."""
        return self._live_bytes()

    def reset(self) -> None:
        """Forget what is held; buffers that fit the next call are kept."""
        self._forget()

    def free(self) -> None:
        """Give all memory back."""
        self._forget()
        self._kept = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns consumed: tokens seen, pads included."""
        return self.columns


def _nothing() -> None:
    pass


class SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`, as transformers' `Cache` expects it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache: SlotCache, index: int):
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made when the prompt arrives."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.cache.store(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("beam search over a SlotCache is not supported yet")

    crop = batch_repeat_interleave = batch_select_indices = reorder_cache
