"""Prompts of one batch under several policies: the prompt is read once, each policy cuts a copy and answers."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvpatch.evaluation.forcing import Script, endless
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import Sample, Task


@dataclass
class Clock:
    """Seconds of a run: `read` of prompts, `saved` by not reading them again for every further policy, `decode`."""

    read: float = 0.0
    saved: float = 0.0
    decode: float = 0.0


@dataclass(frozen=True)
class Way:
    """One policy at one budget.

    name, text: as they were asked for.   policy, budget: as `kvpatch.patch` takes them.
    """

    name: str
    text: str
    policy: object
    budget: object


def left_padded(samples: list[Sample], pad: int, device) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, L] of the samples' prompts."""
    longest = max(len(one.prompt_ids) for one in samples)
    ids = torch.full((len(samples), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(samples):
        ids[row, longest - len(one.prompt_ids) :] = torch.tensor(one.prompt_ids)
        mask[row, longest - len(one.prompt_ids) :] = 1
    return ids.to(device), mask.to(device)


def pad_of(tokenizer) -> int:
    """The token that rows are padded with."""
    found = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return 0 if found is None else found


def answers(
    handle, tokenizer, task: Task, batch: list[Sample], ways: list[Way], clock: Clock
) -> Iterator[tuple[Way, list[Line]]]:
    """What each policy makes of one batch.

    Args:
        handle: of the patched model.
        batch: samples of the task, of one length and number of new tokens.
        clock: seconds are added to it.
    """
    ids, mask = left_padded(batch, pad_of(tokenizer), handle.model.device)
    started = time.perf_counter()
    source = handle.read(ids, mask)
    took = time.perf_counter() - started
    clock.read += took
    clock.saved += took * (len(ways) - 1)
    for way in ways:
        started = time.perf_counter()
        cache = source.fork(way.policy, way.budget)
        new = _continued(handle.model, tokenizer, batch, ids, mask, past_key_values=cache)
        cache.free()
        clock.decode += time.perf_counter() - started
        yield way, [line_of(task, one, way, tokenizer, row) for one, row in zip(batch, new, strict=True)]
    source.free()


def _continued(model, tokenizer, batch: list[Sample], ids: Tensor, mask: Tensor, **more) -> list[list[int]]:
    """The scored tokens of each row, up to and with its end."""
    eos = _ends(model)
    settings = {"attention_mask": mask, "do_sample": False, "pad_token_id": pad_of(tokenizer), **more}
    columns, new_tokens = ids.shape[1], max(one.new_tokens for one in batch)
    if not batch[0].then:
        made = model.generate(ids, max_new_tokens=new_tokens, **settings)[:, columns:]
        starts = [0] * len(batch)
    else:
        free, scripts = batch[0].free, [list(one.then) for one in batch]
        script = Script(columns, free, scripts, banned=min(eos, default=None))
        total = free + max(map(len, scripts)) + new_tokens
        with endless(model):
            made = model.generate(ids, max_new_tokens=total, logits_processor=LogitsProcessorList([script]), **settings)
        made, starts = made[:, columns:], [free + len(one) for one in scripts]
    found = []
    for one, row, start in zip(batch, made.tolist(), starts, strict=True):
        row = row[start : start + one.new_tokens]
        end = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
        found.append(row[:end])
    return found


def _ends(model) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}


def line_of(task: Task, sample: Sample, way: Way, tokenizer, tokens: list[int]) -> Line:
    """The record of one answer."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    held = way.budget.tokens(len(sample.prompt_ids)) if way.text != "full" else None
    more = task.measures(text, sample) if hasattr(task, "measures") else {}
    return Line(
        task=sample.task,
        length=sample.length,
        sample=sample.id,
        prompt_id=sample.prompt_id,
        policy=way.name,
        budget=way.text,
        held=held,
        prompt_tokens=len(sample.prompt_ids),
        references=sample.references,
        prediction=text,
        tokens=len(tokens),
        score=task.score(text, sample),
        measures=more,
        facts=sample.facts,
    )
