"""The decode loops of `generate`: greedy search or sampling over a SlotCache. They follow transformers' `_sample`.

`by_run` leaves everything to the device and looks at its tokens one run late; `by_token` lets the host's processors,
criteria and streamers see every token. Both take the steps that `kvpatch.schedule` says.
"""

import contextlib
import time
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from kvpatch import bounded, repeating, turns
from kvpatch.ending import Desk, Ending, draw, why_host
from kvpatch.prefill import read_prompt
from kvpatch.rows import row_lengths
from kvpatch.schedule import Schedule


class Call(NamedTuple):
    """What transformers prepared for one call of generate."""

    ids: Tensor
    processors: list
    criteria: list
    config: object
    streamer: object

    @property
    def eos(self) -> Tensor | None:
        """Ids that end a row."""
        found = [one.eos_token_id for one in self.criteria if hasattr(one, "eos_token_id")]
        return torch.cat([one.reshape(-1) for one in found]).to(self.ids.device) if found else None

    @property
    def pad(self) -> Tensor | None:
        pad = self.config._pad_token_tensor
        return None if pad is None else pad.to(self.ids.device)


def decode(handle, cache, input_ids, processors, criteria, config, model_kwargs, streamer):
    """Read the prompt and decode; what `generate` returns."""
    device = cache.site.device
    # The streams that are meant without a name are the model's.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        call = Call(input_ids, processors, criteria, config, streamer)
        return _decode(handle, cache, call, model_kwargs)


def _decode(handle, cache, call: "Call", model_kwargs):
    input_ids, processors, criteria, config, _ = call
    runner = handle.runner_for(cache)
    decoder = handle.decoder_for(cache) if runner is None else runner.decoder
    ending = None
    if runner is not None and why_host(processors, criteria, config) is None:
        eos, pad = (None if one is None else one.to(cache.site.device) for one in (call.eos, call.pad))
        ending = Ending(processors, config, eos, pad)
    schedule = Schedule.of(cache.policy, cache.budget.evicts, grouped=ending is not None)

    model, stats = handle.model, cache.stats
    batch, columns = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    positions = model_kwargs.get("position_ids")
    first = cache.columns if cache.phase == "decode" else 0  # column where this call's own prompt begins
    lengths = [columns - first] * batch if mask is None else row_lengths(mask[:, first:], holes=first > 0)
    check_positions(positions, [length + cache.step for length in cache.prompt] if first else [0] * batch, mask, first)
    if first:
        cache.expect(columns - first)
        turns.reopen(cache)
    elif cache.logits is not None and cache.columns and lengths != cache.read_lengths(columns):
        raise ValueError(
            f"attention_mask marks {lengths} tokens a row, but the SlotCache has read rows of "
            f"{cache.read_lengths(cache.columns)} tokens: pass the mask that they were read with"
        )
    elif all(length == columns for length in lengths):
        mask = None  # it says nothing, and a masked prompt is read in smaller blocks by a slower kernel
    cache.plan(lengths, config.max_length - columns - 1)
    desk = None
    if runner is not None:
        desk = runner.desk(cache.site, batch, max(len(run.kinds) for run in schedule.runs()))
        if cache.phase == "empty" and cache.planned and config.max_length - columns > 2:
            # Before the prompt takes its memory, and while there is nothing to lose.
            cache.reserve(batch)
            runner.ready(cache, schedule.runs(), ending, desk)
    started = time.perf_counter()
    logits = cache.logits if columns == cache.columns else None
    if cache.compresses and cache.policy.prefill.block is not None:
        new, chunk = config.max_length - columns - 1, config.prefill_chunk_size
        logits = bounded.read(model, handle.parts.base, handle.keyword, cache, input_ids, mask, new, chunk)
    elif logits is None:
        if cache.needs.repeat:
            repeating.check(model.config)
        logits = read_prompt(
            model, handle.parts.base, handle.keyword, cache, input_ids, mask, positions, config.prefill_chunk_size
        )
        if cache.needs.repeat:
            repeating.repeat(handle.parts.base, handle.keyword, cache, input_ids, mask)
    cache.end_prefill()
    stats.prefill_seconds = time.perf_counter() - started

    scores = raw = None
    if ending is not None:
        ids = by_run(call, cache, decoder, runner, schedule, ending, desk, logits)
    else:
        ids, scores, raw = by_token(call, cache, decoder, runner, schedule, desk, logits)
    cache.fed = ids[:, : cache.columns]
    if not config.return_dict_in_generate:
        return ids
    return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=raw, **{handle.keyword: cache})


def by_token(call: Call, cache, decoder, runner, schedule: Schedule, desk: Desk | None, logits: Tensor):
    """The host sees every token. Returns ids [B, L + T], and scores and logits of every step where asked for."""
    ids, config, eos, pad = call.ids, call.config, call.eos, call.pad
    batch = ids.shape[0]
    unfinished = torch.ones(batch, dtype=torch.bool, device=ids.device)
    keeps = config.return_dict_in_generate
    scores = () if keeps and config.output_scores else None
    raw_logits = () if keeps and config.output_logits else None
    while True:
        # Processors may write into what they are given, and float64 logits become float32 here as in transformers.
        raw = logits.to(ids.device, torch.float32, copy=True)
        chosen_by = call.processors(ids, raw.clone() if raw_logits is not None else raw)
        if scores is not None:
            scores += (chosen_by,)
        if raw_logits is not None:
            raw_logits += (raw,)
        tokens = draw(chosen_by) if config.do_sample else chosen_by.argmax(-1)
        if eos is not None:
            tokens = torch.where(unfinished, tokens, pad)
        ids = torch.cat((ids, tokens[:, None]), -1)
        unfinished = unfinished & ~call.criteria(ids, scores)
        if call.streamer is not None:
            call.streamer.put(tokens.cpu())
        if not unfinished.any():
            break
        if batch > 1 and eos is not None:  # without EOS a finished row is not padded: it goes on until all are done
            cache.set_active(unfinished)
        if runner is None or cache.step == 0:
            logits = decoder.step(cache, tokens.to(cache.site.device))
        else:
            logits = _single(cache, runner, schedule, desk, tokens)
    if call.streamer is not None:
        call.streamer.end()
    return ids, scores, raw_logits


def _single(cache, runner, schedule: Schedule, desk: Desk, tokens: Tensor) -> Tensor:
    """One step as a run of its own: logits [B, V], overwritten by the next."""
    started = time.perf_counter()
    run = schedule.run_at(cache.step + 1, 1)
    cache.make_room(cache.step + 1)
    desk.tokens.copy_(tokens)
    runner.replay(cache, run, None, desk)
    cache.count(run.kinds)
    cache.stats.step_seconds.append(time.perf_counter() - started)
    return desk.logits


def by_run(
    call: Call, cache, decoder, runner, schedule: Schedule, ending: Ending, desk: Desk, logits: Tensor
) -> Tensor:
    """The device goes on by itself; the host reads each run's tokens while the next one runs. Returns [B, L + T].

    Sampled tokens are those of single steps; the random numbers of a run that goes on behind the last row's end are
    drawn all the same, so that the caller's generator ends up further on.
    """
    left = call.config.max_length - call.ids.shape[1]  # tokens that may still be chosen
    reader = _Reader(desk, call)
    ending.lay_out(call.ids, desk)
    ending.take(logits, desk, 0, None)
    reader.send(1)
    left -= 1
    goes_on = bool(left) and reader.receive()
    if goes_on:
        # Step 1 reads the whole prompt: no run that is captured does.
        if ending.eos is not None:
            cache.set_active(desk.unfinished)
        ending.take(decoder.step(cache, desk.tokens), desk, 0, cache.state.active)
        reader.send(1)
        left -= 1
    clock = time.perf_counter()
    while left and goes_on:
        run = schedule.run_at(cache.step + 1, min(left, cache.uncut()))
        cache.make_room(cache.step + len(run.kinds))
        runner.replay(cache, run, ending, desk)
        before = reader.waiting
        reader.send(len(run.kinds))
        cache.count(run.kinds)
        left -= len(run.kinds)
        goes_on = reader.receive(before)
        now = time.perf_counter()
        cache.stats.step_seconds.extend([(now - clock) / len(run.kinds)] * len(run.kinds))
        clock = now
    reader.receive()
    _trim(cache, reader)
    if call.streamer is not None:
        call.streamer.end()
    return torch.cat((call.ids, torch.stack(reader.tokens, -1).to(call.ids)), -1)


def _trim(cache, reader: "_Reader") -> None:
    """Count no step after the one that all rows had ended with: rows that are done leave no trace in it."""
    cache.uncount(cache.step - (len(reader.tokens) - 1))  # the last token was not fed
    # Who ended with the last token may go on in a later turn; who ended before it was fed pads.
    if reader.ends is not None:
        last = torch.tensor([end is None or end == len(reader.tokens) for end in reader.ends])
        cache.set_active(last.to(cache.site.device))


class _Reader:
    """Takes tokens from the desk to the host without making the device wait.

    Attributes:
        tokens: each [B] int64 on the CPU, up to the one with which every row had ended.
        ends: for each row how many tokens it has, None while it goes on; None where no token ends a row.
        waiting: blocks sent and not yet received.
    """

    def __init__(self, desk: Desk, call: Call):
        self.desk, self.call = desk, call
        self.tokens: list[Tensor] = []
        self._eos = None if call.eos is None else set(call.eos.tolist())
        self.ends = None if self._eos is None else [None] * call.ids.shape[0]
        self.done = False
        self._cuda = desk.emitted.device.type == "cuda"
        # Two of them: one is read while the other is written.
        self._pinned = [torch.empty(desk.emitted.shape, dtype=torch.int64, pin_memory=True) for _ in "ab" if self._cuda]
        self._sent: list[tuple] = []
        self._count = 0

    @property
    def waiting(self) -> int:
        return len(self._sent)

    def send(self, count: int) -> None:
        """Have the first `count` rows of `desk.emitted` copied as soon as the device has come here."""
        if not self._cuda:
            self._sent.append((self.desk.emitted[:count].clone(), None))
            return
        place = self._pinned[self._count % 2][:count]
        self._count += 1
        place.copy_(self.desk.emitted[:count], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((place, event))

    def receive(self, blocks: int | None = None) -> bool:
        """Read blocks that were sent, all of them by default; whether any row goes on."""
        for _ in range(self.waiting if blocks is None else blocks):
            block, event = self._sent.pop(0)
            if event is not None:
                event.synchronize()
            for tokens in block.clone():
                if not self.done:
                    self._note(tokens)
        return not self.done

    def _note(self, tokens: Tensor) -> None:
        self.tokens.append(tokens)
        if self.call.streamer is not None:
            self.call.streamer.put(tokens)
        if self._eos is None:
            return
        for row, token in enumerate(tokens.tolist()):
            if self.ends[row] is None and token in self._eos:
                self.ends[row] = len(self.tokens)
        self.done = None not in self.ends


def check_positions(positions: Tensor | None, seen: list[int], mask: Tensor | None, first: int) -> None:
    """A row's positions count its own tokens: anything else can't be continued by the step.

    Args:
        positions: [B or 1, L] of the whole conversation, or None.
        seen: tokens of each row before its prompt.
        mask: [B, L] or None.
        first: column where the prompt begins.

    Raises:
        ValueError: naming the row.
    """
    for row, before in enumerate(seen if positions is not None else ()):
        given = positions[min(row, positions.shape[0] - 1), first:]
        given = (given if mask is None else given[mask[row, first:].bool()]).tolist()
        if given != list(range(before, before + len(given))):
            raise ValueError(
                f"position_ids row {row} must count that row's tokens from {before} to {before + len(given) - 1}, as "
                "the attention_mask does; leave position_ids out"
            )
