"""SlotCache: the transformers face of the slots, and the host's bookkeeping of one generation."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpatch import attention, backends, compact, cutting, moving, scoring, selection, slots, turns
from kvpatch.budget import UNSET
from kvpatch.cachelayer import LayerWatch, SlotLayer, heads_of, site_of, windows_of
from kvpatch.compression import rule as compression
from kvpatch.compression import watch as watching
from kvpatch.compression.prompt import Exit
from kvpatch.policy import settle
from kvpatch.rows import HEADROOM, at_most, full_at, held_after, row_lengths, slots_read
from kvpatch.state import State
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
        attention.check_name(backend)
        self.policy.check_backend(backend)
        self.asked, self.backend, self.site = backend, None, None
        text = config.get_text_config(decoder=True)
        super().__init__(layers=[SlotLayer(self, index) for index in range(text.num_hidden_layers)])
        self.max_new_tokens = max_new_tokens
        self.stats = Stats()
        rankings = self.policy.rankings
        layers = [ranking.scoring_layers(len(self.layers)) for ranking in rankings]
        self.scoring_layers = tuple(map(len, layers))  # for each ranking, how many
        self._rankings, self._heads = rankings, [None] * len(self.layers)
        self._scored = [tuple(n for n, some in enumerate(layers) if index in some) for index in range(len(self.layers))]
        self.windows = windows_of(text)
        self.window = self.windows[0] if len(set(self.windows)) == 1 else None  # that of every layer
        self.policy.check_model(self.windows, heads_of(text)[1], self.budget.evicts)
        # Whether positions are those in the cache; without eviction they are the text's too.
        fixed = not compact.why_not(self.windows, getattr(text, "rope_parameters", None))
        self.compact = self.policy.compact and self.policy.sinks > 0 and self.budget.evicts and fixed
        self._scorers = tuple(scoring.scorer(ranking.scorer) for ranking in rankings)
        self.config = text
        self.attends: dict[tuple, Callable] = {}  # (rankings that a layer scores for, its window) -> its attention
        self.kept: slots.Buffers | None = None
        self.needs = self.policy.prefill.needs if self.compresses else watching.Needs()
        self.noted = self.needs  # what is noted while the prompt is read; other policies' needs too where they share it
        self.rotary = None  # the model's, where a method asks for it
        self.stepper = None  # runs decode steps in place of the base model's forward, in transformers' own loop
        self.before_move = _nothing  # called before buffers are moved or given back: let go of them
        self.before_drop = _nothing  # called before buffers that steps ran over are given back for good
        self._forget()

    def _forget(self) -> None:
        self.before_move()
        self.phase = "empty"  # then "prefill", "decode"
        self.columns = 0  # tokens consumed, pads included
        self.stored = 0  # slots that the prompt fills so far, with what was held before it
        self.step = 0  # decode steps begun since the last prompt
        self.scores = False  # whether the current step scores
        self.seen: list[int] = []  # tokens of each row, and how many of them are held,
        self.before: list[int] = []  # when its current prompt began: empty for the first one
        self.whole: list[int] = []  # tokens of each row's whole prompt while it is read a block at a time
        self.prompt: list[int] = []  # tokens of each row when its prompt ends, without pads
        self.entries: list[int] = []  # tokens held then
        self.budgets: list[int | None] = []  # budget per row in tokens
        self.limits: list[int | None] = []  # most tokens held per row: the budget, or what a window leaves
        self.leaving: list[int | None] = []  # how many leave at once when a row is full, None: one at a time
        self.noted_from: Tensor | None = None  # [B], position of the first query that is kept
        self.scale, self.outputs = 1.0, []  # of the prompt's watch, for cuts to come
        self.counts: list[list[int]] | None = None  # as `entries`, of each layer and head, where they differ
        self.fed: Tensor | None = None  # tokens consumed [B, columns], where they are known
        self.planned = 0  # slots that this generation needs, 0 while unknown
        self.expect_prompt = False  # a block of one token is still prompt
        self.mask: Tensor | None = None
        self.ahead = 0  # tokens that may come after the prompt and that room is made for
        self.watch: watching.Watch | None = None  # of the prompt that is read
        self.logits: Tensor | None = None  # [B, V] after a prompt that was read ahead of the generation
        self.current: slots.Buffers | None = None
        self.state: State | None = None

    def choose_backend(self, site: attention.Site) -> None:
        """Choose the back end for what it must serve there; while nothing is held.

        Raises:
            BackendError: if the one that was asked for can't run there.
        """
        if site == self.site:
            return
        name, _ = attention.choose(self.asked, site)
        self.site, self.backend = site, backends.backend(name, site)
        self.attends = {
            (scored, window): self.backend.attend(self.policy, self._scorers, scored, window)
            for scored in dict.fromkeys([(), *self._scored])
            for window in dict.fromkeys(self.windows)
        }
        if self.recuts and self.needs.window:
            self.attends = {kind: slots.noting(attend) for kind, attend in self.attends.items()}
        if self.compact:
            self.attends = {kind: compact.compacting(attend) for kind, attend in self.attends.items()}
        self.paged = self.backend.paged
        self._heads = [self._head_weights(layer) for layer in range(len(self.layers))]

    def _shape(self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> slots.Shape:
        more = {"sinks": self.policy.sinks} if self.compact else {}
        if self.recuts and self.needs.window:
            more |= {"window": self.needs.window, "heads": heads_of(self.config)[0], "bounds": self.needs.bounds}
        return slots.Shape.at(self.policy, len(self.layers), kv_heads, head_dim, dtype, device, **more)

    def _head_weights(self, layer: int) -> Tensor | None:
        """[Q, G, R] for `slots.LayerSlots`, weights among it."""
        heads, groups, _ = heads_of(self.config)
        chosen = [
            ranking.head_weights(layer, heads) if number in self._scored[layer] else None
            for number, ranking in enumerate(self._rankings)
        ]
        if not any(chosen):
            return None
        dtype = torch.promote_types(self.site.dtype, torch.float32)
        every = [one or [1.0] * heads for one in chosen]
        return torch.tensor(every, dtype=dtype, device=self.site.device).view(len(every), groups, heads // groups)

    # ---- prefill -----------------------------------------------------------------------------------------------

    def plan(self, lengths: list[int], new_tokens: int | None) -> None:
        """Fix rows and capacity before a prompt arrives.

        Args:
            lengths: length of each row's prompt, without pads and without what was read before.
            new_tokens: most tokens that can be fed after the prompt; None where it is not known.

        Raises:
            ValueError: if the policy's protected entries fill a row's budget.
        """
        nothing = [0] * len(lengths)
        self.prompt = [sum(pair) for pair in zip(self.seen or nothing, lengths, strict=True)]
        self.entries = [sum(pair) for pair in zip(self.before or nothing, lengths, strict=True)]
        whole = self.whole or self.prompt
        self.budgets = [self.budget.tokens(length) if self.policy.evicts else None for length in whole]
        for length, budget in zip(whole, self.budgets, strict=True):
            if budget is not None:
                self.policy.check_budget(budget, length)
        # Of a window that every layer has, its last position is not met again when the step is done.
        held = self.budgets if self.policy.bounded else [None] * len(lengths)
        self.leaving = [None if budget is None else self.policy.leaving(budget) for budget in self.budgets]
        self.limits = [at_most(self.window - 1, budget) if self.window else budget for budget in held]
        if new_tokens is not None:
            self.ahead = min(new_tokens, HEADROOM)
            left = self.entries
            if self.compresses:
                left = [at_most(*pair) for pair in zip(left, self.budgets, strict=True)]
            # How much a cut leaves in the fullest head is known beforehand only if all are cut alike.
            self.planned = 0 if self.compresses and not self.policy.prefill.even else self.room(left)

    @property
    def compresses(self) -> bool:
        """Whether the prompt is cut before anything is decoded."""
        return self.policy.prefill is not None and self.budget.evicts

    @property
    def recuts(self) -> bool:
        """Whether the method cuts again while decoding."""
        return self.compresses and self.policy.interval is not None

    @property
    def rows(self) -> list[tuple]:
        """Of each row what `held_after` asks for."""
        return list(zip(self.entries, self.limits, self.leaving, strict=True))

    def uncut(self) -> int:
        """Decode steps from now on up to the one that fills a row and so cuts it; a great number where none does."""
        if not self.recuts:
            return sys.maxsize
        return min(row[1] - held_after(self.step, *row) for row in self.rows)

    def room(self, entries: list[int]) -> int:
        """Slots that the fullest of rows with so many entries needs from now on."""
        rows = zip(entries, self.limits, strict=True)
        return 1 + max(at_most(length + self.ahead, limit) for length, limit in rows)

    def begin_forward(self, query: int, mask: Tensor | None) -> None:
        """Decide what a forward over `query` tokens is: a block of a prompt, or a decode step."""
        if self.phase == "decode" and (query > 1 or self.expect_prompt):
            turns.check(self, self.columns + query, mask)
            turns.reopen(self)
        if self.phase == "empty":
            self.phase = "prefill"
        elif query == 1 and not self.expect_prompt:
            self.end_prompt()
        if self.phase == "prefill":
            if mask is not None and mask.ndim != 2:
                raise ValueError(f"attention_mask must be [batch, length] with a SlotCache, got {list(mask.shape)}")
            self.mask = mask
            if self.watch is None and self.noted.anything:
                self.watch = watching.Watch(self.noted, len(self.layers))
        else:
            self.begin_step()

    def end_forward(self, query: int) -> None:
        """Close what `begin_forward` opened; a decode step chooses its victims here."""
        if self.phase == "prefill":
            self.columns += query
            self.stored += query
        else:
            self.backend.finish(self.state.ledger, self.policy, self.scoring_layers if self.scores else ())
            self.end_step()

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a block of the prompt to one layer; k, v [B, G, q, D]. Returns all keys and values that it meets."""
        if self.phase != "prefill":
            raise RuntimeError("SlotCache.update is for the prompt of a patched model: call kvpatch.patch(model) first")
        end = self.stored + k.shape[2]
        if self.current is None:
            self.choose_backend(site_of(self.config, k.device, k.dtype, k.shape[3]))
            self.shape = self._shape(k.shape[1], k.shape[3], k.dtype, k.device)
            self.current = self._buffers(k.shape[0], max(end, self.columns_expected()) + 1)
        elif self.current.capacity <= end:
            self._grow(end + 1)
        self.current.add_layer(layer)
        self.note_bytes()
        keys, values = self.current.keys[layer], self.current.values[layer]
        keys[:, :, self.stored : end] = k
        values[:, :, self.stored : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def watch_for(self, rules: Sequence[compression.Prefill]) -> None:
        """Note what these methods need too; before a prompt is read."""
        for rule in rules:
            self.noted = self.noted | rule.needs

    def layer_watch(self, layer: int) -> LayerWatch | None:
        """What wants to see a layer's queries of the prompt; None while decoding, or where nothing does."""
        if self.phase != "prefill" or self.watch is None:
            return None
        return LayerWatch(self, layer)

    def note_queries(self, layer: int, block: int, queries: Tensor, raw: Tensor | None, scale: float) -> None:
        """A layer's queries of the block, of so many columns, that it has just stored; see `Watch.note`."""
        end = self.stored + block
        valid = turns.valid(self, end - max(self.before, default=0))
        keys, reach = self.current.keys[layer][:, :, :end], self.windows[layer]
        self.watch.note(layer, queries, raw, keys, valid, scale, reach)

    @property
    def wants_exit(self) -> bool:
        """Whether this forward's last states are asked for."""
        return self.phase == "prefill" and self.watch is not None and self.noted.exit

    def note_exit(self, block: int, states: Tensor, way: tuple) -> None:
        """What the last layer gave [B, q, E] at the block's columns, and where it goes, as `Exit`."""
        valid = turns.valid(self, self.stored + block - max(self.before, default=0))
        states = states[:, -(block if self.before else self.watch.columns(block)) :]
        self.watch.note_exit(Exit(states, *way), valid)

    def take_prompt(self, source: "SlotCache") -> None:
        """Copy what another cache has read, before anything is cut; while nothing is held."""
        shape = self.shape = self._shape(*source.current.shape[1:5])
        self.current = slots.Buffers(shape, source.current.batch, source.current.capacity)
        for layer in range(shape.layers):
            self.current.keys[layer] = source.current.keys[layer].clone()
            self.current.values[layer] = source.current.values[layer].clone()
        self.phase, self.columns, self.stored = source.phase, source.columns, source.stored
        self.fed, self.mask, self.logits = source.fed, source.mask, source.logits
        self.rotary, self.noted = source.rotary, source.noted
        self.watch = None if source.watch is None else source.watch.copy()
        self.note_bytes()

    def read_lengths(self, columns: int) -> list[int]:
        """Tokens of each row once a prompt that was begun ahead has come to that many columns."""
        batch = self.current.batch
        pads = [0] * batch if self.mask is None else [self.columns - length for length in row_lengths(self.mask)]
        return [columns - pad for pad in pads]

    def fork(self, policy=None, budget=UNSET, **fields) -> "SlotCache":
        """A cache that goes on from the same prompt under another policy: one reading serves several generations.

        Pass it to `generate` with the same input_ids and attention_mask. What this cache holds is copied, so it can be
        forked again.

        Args:
            policy: name or `Policy`; this cache's own by default.
            budget: as `Budget`; this cache's own by default.
            **fields: fields of the policy to replace.

        Raises:
            RuntimeError: if this cache has not read a prompt through `Patch.read`, or has decoded since.
            ValueError, TypeError: for a bad policy or budget.
        """
        from kvpatch import sharing  # which makes caches

        return sharing.fork(self, policy, budget, fields)

    def note_fed(self, tokens: Tensor | None) -> None:
        """Tokens [B, q] were fed, or None where only their embeddings are known."""
        if tokens is None or (self.fed is None and self.columns > tokens.shape[1]):
            self.fed = None
        else:
            self.fed = tokens if self.fed is None else torch.cat((self.fed, tokens), -1)

    def expect(self, columns: int) -> None:
        """A prompt will come to that many columns, pads included, in blocks of any length."""
        self.expect_prompt, self._columns = True, columns

    def columns_expected(self) -> int:
        return self._columns if self.expect_prompt else 0

    def _buffers(self, batch: int, needed: int) -> slots.Buffers:
        """Buffers with room for `needed` slots now: the kept ones where the whole generation fits there."""
        whole = max(needed, self.planned)
        kept = self.kept
        if kept is not None and (kept.batch != batch or kept.shape != self.shape):
            self.drop_kept()
        elif kept is not None and kept.pages is None and kept.capacity >= whole:
            return kept
        if self.planned >= needed:  # nothing large will be cut: prefill straight into the slots
            self.drop_kept()
            self.kept = self.allocate(batch, whole)
            return self.kept
        return self.allocate(batch, needed)

    def drop_kept(self) -> None:
        """Give the kept buffers back."""
        if self.kept is not None:
            self.before_drop()
            self.kept = None

    def reserve(self, batch: int) -> None:
        """Allocate what the generation, which is planned, will decode in, before its prompt is there."""
        site, heads = self.site, heads_of(self.config)[1]
        self.shape = self._shape(heads, site.width, site.dtype, site.device)
        kept = self._buffers(batch, self.planned)
        for layer in range(self.shape.layers):
            kept.add_layer(layer)
        self.note_bytes()

    @property
    def decoded_in(self) -> slots.Buffers | None:
        """The buffers that decode steps run over: those held, or before a prompt the reserved ones."""
        return self.kept if self.phase == "empty" else self.current

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps inside leave no trace: every row is done, over the buffers held or, before a prompt, the reserved ones.

        Raises:
            RuntimeError: while a prompt is read, or when there are no buffers.
        """
        empty = self.phase == "empty"
        if self.phase == "prefill" or self.decoded_in is None:
            raise RuntimeError(f"steps can't be rehearsed in phase {self.phase!r}")
        scores, active = self.scores, None
        try:
            if empty:
                nothing = torch.ones(self.kept.batch, dtype=torch.int64, device=self.kept.shape.device)
                self.current = self.kept
                self.state = State(
                    self.current, selection.Rows(*[nothing] * len(selection.Rows._fields)), nothing, self.window
                )
                self.phase = "decode"
            active = self.state.active.clone()
            self.state.active.fill_(False)
            self.read_all()
            yield
        finally:
            if active is not None:
                self.state.active.copy_(active)
            self.scores = scores
            if empty:
                self.phase, self.current, self.state = "empty", None, None

    def allocate(self, batch: int, needed: int) -> slots.Buffers:
        """Buffers with room for so many slots of every row, layer and head."""
        return slots.Buffers(self.shape, batch, slots.round_up(needed))

    def bring_to(self, needed: int) -> slots.Buffers:
        """The buffers to decode in, for so many slots of the fullest: the kept ones where they fit.

        Where layers or heads hold unlike numbers of entries they are in pages, for those and what may come, unless the
        model has a sliding window.
        """
        kept, room = self.kept, self.ahead + 1
        # A window is told by places, which positions and keys must share.
        if self.counts is None or any(self.windows):
            if kept is None or kept.pages is not None or kept.capacity < needed:
                self.drop_kept()
                self.kept = self.allocate(self.current.batch, needed)
        elif kept is not None and kept.fits(self.counts, room):
            kept.assign(self.counts, room)
        else:
            self.drop_kept()
            most = slots.round_up(needed)
            self.kept = slots.Buffers(self.shape, self.current.batch, most, self.counts, room)
        return self.kept

    def note_bytes(self, *more: slots.Buffers) -> None:
        self.stats.note_bytes(self._live_bytes(*more))

    def _live_bytes(self, *more: slots.Buffers) -> int:
        live = {id(buffers): buffers.nbytes for buffers in (self.kept, self.current, *more) if buffers is not None}
        return sum(live.values())

    def end_prompt(self) -> None:
        """A token to decode comes: whatever was read so far was the prompt."""
        if self.phase == "prefill":
            self.end_prefill()

    def end_prefill(self) -> None:
        """The prompt is complete: squeeze pads out and open the books."""
        self.logits = None
        batch, device = self.current.batch, self.shape.device
        block = self.stored - max(self.before, default=0)
        if not self.entries:
            lengths = [block] * batch if self.mask is None else row_lengths(self.mask[:, -block:], bool(self.before))
            self.plan(lengths, self.max_new_tokens)
        valid = turns.valid(self, block)
        self.mask, self.expect_prompt = None, False
        before = torch.tensor(self.before or [0] * batch, device=device)
        entries, prompt = torch.tensor(self.entries, device=device), torch.tensor(self.prompt, device=device)
        if any(length != self.stored for length in self.entries):
            moving.squeeze(self.current, valid)
        means = [ranking.new_token == "mean" for ranking in self.policy.rankings]
        moving.enter(self.current, before, prompt - entries, means)
        far = torch.iinfo(torch.int64).max // 4
        limits = [far if limit is None else min(limit, far) for limit in self.limits]
        protected = [(0, 0, 0) if budget is None else self.policy.protected(budget) for budget in self.budgets]
        rows = (torch.tensor(column, device=device) for column in (limits, *zip(*protected, strict=True)))
        blended = [0 if budget is None else self.policy.blended(budget) for budget in self.budgets]
        rows = selection.Rows(*rows, prompt, torch.tensor(blended, device=device))
        self.state = State(self.current, rows, entries, self.window)
        self.phase = "decode"
        read = sum(self.entries)
        if self.compact:
            compact.keep(self.current, before)
        if self.compresses:
            cutting.by_method(self, valid)
        self.watch = None
        self.stats.note_rows(self.prompt, self.entries, self.limits, read - sum(self.entries))

    # ---- decode steps ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a decode step: which kind it is, how many slots it reads, and the new token's slot."""
        self.step += 1
        self.scores = self.scores_at(self.step)
        n = self.make_room(self.step)
        own = self.current.pages
        self.state.read(n, None if own is None else [one.read(self.step) for one in own])
        self.admit()

    def admit(self) -> None:
        """What a step's begin does on the device: the new token's slot and position, and where the sinks stand now."""
        self.backend.begin(self.state.ledger, self.policy)
        if self.compact:
            gone = self.state.newest + 1 - self.state.length[0, :, 0]
            self.current.turns.copy_(compact.factors(self.rotary.inv_freq, gone))

    def read_all(self) -> None:
        """Steps read up to the capacity: kernels stop at each row's length, and one captured run serves all lengths."""
        own = self.current.pages
        self.state.read(self.current.capacity, None if own is None else [one.total for one in own])

    def scores_at(self, step: int) -> bool:
        """Whether decode step `step` scores."""
        return self.policy.scores_at(step) and self.budget.evicts

    def make_room(self, step: int) -> int:
        """Have the slots that decode step `step` reads of the longest row; how many."""
        n = max(slots_read(length, limit, step, leaving) for length, limit, leaving in self.rows)
        if n > self.current.capacity or (self.current.pages is not None and step > self.current.room):
            self._grow(n)
        return n

    def count(self, kinds: Sequence[bool]) -> None:
        """Steps of these kinds were taken on the device."""
        for scores in kinds:
            self.step += 1
            self.columns += 1
            self.stats.note_step(scores, self.step, self.rows)
        self._cut_again()

    def uncount(self, steps: int) -> None:
        """The last steps were taken for rows that had all ended: they do not count."""
        for _ in range(steps):
            self.stats.unnote_step(self.scores_at(self.step))
            self.step -= 1
            self.columns -= 1
        if steps:
            self.stats.note_rows_at(self.step, self.rows)

    @property
    def step_views(self) -> object:
        """Stays one object as long as steps meet the same buffers."""
        return self.state.views

    def layer_slots(self, layer: int) -> slots.LayerSlots | None:
        """One layer's tensors for the current decode step; None while the prompt is read."""
        if self.phase != "decode":
            return None
        current, pages = self.current, None
        attend = self.attends[self._scored[layer] if self.scores else (), self.windows[layer]]
        if current.pages is not None:
            attend, pages = self.paged, current.pages[layer].map
        heads = self._heads[layer] if self.scores else None
        queries = current.queries[layer] if current.queries else None
        bounds = current.bounds[layer] if current.bounds else None
        turned = (current.anchors[layer], current.turns) if self.compact else (None, None)
        return slots.LayerSlots(
            *self.state.views[layer], self.state.indexes[layer], heads, attend, queries, *turned, bounds, pages
        )

    def set_active(self, active: Tensor) -> None:
        """Freeze the rows where `active` [B] is False: what they hold stays as it is."""
        self.state.active.copy_(active)

    def end_step(self) -> None:
        """Close a decode step whose victims are chosen: count it, and after the first one cut to the budget."""
        self.columns += 1
        if self.step == 1:
            found = cutting.in_focus(self)
            rows = zip(self.entries, self.limits, strict=True)
            if max(length + 1 - at_most(length + 1, limit) for length, limit in rows) > 1:
                cutting.first_step(self, found)
            if found is not None:
                self.state.rows.blended.mul_(found)
        self.stats.note_step(self.scores, self.step, self.rows)
        self._cut_again()

    def _cut_again(self) -> None:
        """Where a row is full, let the method cut it."""
        if self.recuts:
            full = [full_at(self.step, *row) for row in self.rows]
            if any(full):
                cutting.again(self, full)

    def let_go(self) -> None:
        """Hold no view of the buffers, so that a layer's memory is free as soon as it has moved."""
        self.before_move()
        if self.state is not None:
            self.state.unbind()

    def _grow(self, needed: int) -> None:
        """Move to buffers of at least `needed` slots, doubling, one layer at a time."""
        self.let_go()
        if self.phase == "decode":
            self.before_drop()
        old = self.current
        limits = [limit for limit in self.limits if limit is not None]
        most = max(limits) + 1 if limits and len(limits) == len(self.limits) else 2 * old.capacity
        wanted = slots.round_up(max(needed, old.capacity, min(2 * old.capacity, most)))
        more: tuple = ()
        if old.pages is not None:  # as many more as are held on average, so that all of it doubles
            held = [count for heads in self.counts for count in heads]
            room = 2 * self.step + sum(held) // len(held)
            wanted, more = max(old.capacity, slots.round_up(max(held) + room)), (self.counts, room)
        new = slots.Buffers(self.shape, old.batch, wanted, *more)
        moving.move(old, new, lambda: self.note_bytes(new))
        if self.phase == "decode":
            self.kept = new  # while a prompt is read, larger buffers are cut from, and the kept ones cut into
        self.current = new
        if self.phase == "decode":
            self.state.bind(new)

    # ---- what is held ------------------------------------------------------------------------------------------

    def retained(self) -> Tensor:
        """Original positions held between steps: [layers, B, G, slots] int64, -1 for an empty slot."""
        if self.phase != "decode":
            if self.phase == "prefill" and self.current is not None and not self.expect_prompt:
                self._end_prompt_or_reset()
            else:
                raise RuntimeError(
                    "nothing is held: no prompt has been read to its end since the cache was made or reset"
                )
        n = max(1, int(self.state.length.max()))
        positions = torch.where(self.state.held(n), self.current.positions[..., :n], -1)
        return positions.expand(len(self.layers), -1, self.shape.kv_heads, -1).clone()

    def _end_prompt_or_reset(self) -> None:
        try:
            with torch.no_grad():
                self.end_prompt()
        except BaseException:
            self.reset()
            raise

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b goes on from what row beam_idx[b] holds, as beam search asks for; all tensors keep their places.

        Args:
            beam_idx: [B] int64.
        """
        order = beam_idx.tolist()
        if order == list(range(len(order))):
            return
        for tensor, dim in self.current.by_row():
            tensor.copy_(tensor.index_select(dim, beam_idx))
        if self.state is not None:
            self.state.reorder(beam_idx)
        if self.watch is not None:
            self.watch.reorder(beam_idx)
        for name in ("mask", "fed", "noted_from"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.index_select(0, beam_idx.to(tensor.device)))
        for name in ("seen", "before", "prompt", "entries", "budgets", "limits", "leaving"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in order] if values else values)

    def held_after(self, step: int) -> float:
        """Tokens held after decode step `step`: the mean over rows, and over layers and heads as the fullest row has
        them.

        Raises:
            RuntimeError: while nothing is held.
        """
        if self.phase != "decode":
            raise RuntimeError("nothing is held: no prompt has been read to its end since the cache was made or reset")
        if self.counts is not None:  # nothing that was generated has gone since
            counts = [count for heads in self.counts for count in heads]
            return sum(counts) / len(counts) + step
        return sum(held_after(step, *row) for row in self.rows) / len(self.rows)

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values that are held between steps; `nbytes` less these are free slots and notes."""
        if self.phase != "decode":
            raise RuntimeError("nothing is held: no prompt has been read to its end since the cache was made or reset")
        held = self.state.held(self.current.capacity).sum(-1)
        cells = held.expand(len(self.layers), -1, self.shape.kv_heads).sum().item()
        return 2 * cells * self.shape.head_dim * self.shape.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes allocated now, kept buffers included."""
        return self._live_bytes()

    def reset(self) -> None:
        """Forget what is held; buffers that fit the next call are kept."""
        self._forget()
        self.note_bytes()

    def free_hooks(self) -> None:
        """Let go of whatever ran steps over this cache, which is its owner's from now on."""
        self.before_move()
        self.before_drop()
        self.before_move = self.before_drop = _nothing

    def free(self) -> None:
        """Give all memory back."""
        self._forget()
        self.before_drop()
        self.drop_kept()
        self.note_bytes()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns consumed: tokens seen, pads included."""
        return self.columns


def _nothing() -> None:
    pass
