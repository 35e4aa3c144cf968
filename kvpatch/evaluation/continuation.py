"""Fidelity without labels: how far a policy's predictions are from the full cache's, on the full cache's own text.

The full cache reads prose and continues it greedily; every policy is fed that continuation token by token, and then
also writes freely. Place j is the prediction of the j-th token. Places 0 and 1 are equal by construction: eviction
begins after the first step, so they are left out of the means.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from kvpatch.evaluation import haystacks
from kvpatch.evaluation.answers import Clock, Way, left_padded, pad_of
from kvpatch.evaluation.fidelity import attention_lost
from kvpatch.evaluation.forcing import Each, Script, endless
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import CellError, Sample, Sources, rng_of, tokens_of

FIRST = 2  # places that are equal by construction
LEAST = 64


def samples(tokenizer, length: int, count: int, seed: int, sources: Sources, forced: int) -> list[Sample]:
    """Prose prompts of exactly `length` - `forced` tokens.

    Raises:
        CellError: if the continuation leaves no room for a prompt.
    """
    prompt = length - forced
    if prompt < LEAST:
        raise CellError(f"fidelity at length {length} needs forced <= {length - LEAST}, got {forced}")
    found = []
    for index in range(count):
        start = rng_of("fidelity", length, seed, index).random()
        ids = prose(tokenizer, prompt, start, sources)
        found.append(Sample(f"fidelity/{length}/{seed}/{index}", "fidelity", length, ids, (), forced))
    return found


def prose(tokenizer, length: int, start: float, sources: Sources) -> tuple[int, ...]:
    """That many tokens of consecutive sentences, beginning at the share `start` of the haystack."""
    sentences = haystacks.sentences(sources)
    ids: list[int] = []
    at = int(start * len(sentences))
    while len(ids) < length:
        ids += tokens_of(tokenizer, " " + sentences[at % len(sentences)])
        at += 1
    return tuple(ids[:length])


class Feeding(LogitsProcessor):
    """Makes generate choose given tokens, and holds its logits against expected ones where there are any.

    Args:
        columns: of the prompt.
        tokens: [B, forced] int64.
        expected: for every place [B, V] log-probabilities of the full cache; None: keep these.

    Attributes:
        kept: for every place [B, V] log-probabilities, without `expected`.
        divergence, same: [B] each with it: KL(expected || these) in nats, and whether both put the same token first.
    """

    def __init__(self, columns: int, tokens: Tensor, expected: list[Tensor] | None = None):
        self.columns, self.tokens, self.expected = columns, tokens, expected
        self.kept: list[Tensor] = []
        self.divergence: list[Tensor] = []
        self.same: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.columns
        got = scores.float().log_softmax(-1)
        if self.expected is None:
            self.kept.append(got)
        else:
            full = self.expected[place]
            self.divergence.append((full.exp() * (full - got)).sum(-1).cpu())
            self.same.append((full.argmax(-1) == got.argmax(-1)).cpu())
        scores.fill_(-torch.inf)
        return scores.scatter_(1, self.tokens[:, place : place + 1].to(scores.device), 0.0)


class Keeping(LogitsProcessor):
    """Keeps every step's log-probabilities, and lets no token end a text."""

    def __init__(self, banned: list[int]):
        self.banned, self.kept = banned, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept.append(scores.float().log_softmax(-1))
        scores[:, self.banned] = -torch.inf
        return scores


def lines(
    handle, tokenizer, batch: list[Sample], ways: list[Way], forced: int, clock: Clock, folder: Path | None = None
) -> Iterator[tuple[Way, list[Line]]]:
    """Each way's distance from the full cache over one batch, of which the prompts are read once.

    Args:
        folder: of the run; nothing beside the lines is kept.
    """
    model = handle.model
    ids, mask = left_padded(batch, pad_of(tokenizer), model.device)
    started = time.perf_counter()
    source = handle.read(ids, mask)
    clock.read += time.perf_counter() - started
    clock.saved += (time.perf_counter() - started) * 2 * len(ways)
    banned = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def generate(way: Way | None, processor, after: Callable | None = None) -> Tensor:
        cache = source.fork("full") if way is None else source.fork(way.policy, way.budget)
        look = None if after is None else Each(lambda: after(cache))
        with endless(model):
            made = model.generate(
                ids,
                attention_mask=mask,
                past_key_values=cache,
                max_new_tokens=forced,
                do_sample=False,
                pad_token_id=pad_of(tokenizer),
                logits_processor=LogitsProcessorList([processor]),
                streamer=look,
            )
        cache.free()
        return made[:, ids.shape[1] :]

    full = Keeping(banned)
    tokens = generate(None, full)
    found, sets = [], {}
    for number, way in enumerate(ways):
        started = time.perf_counter()
        held: list[Tensor] = []

        def look(cache, held=held, way=way) -> None:
            if cache.phase == "decode" and cache.step > len(held):
                held.append(distinct(cache, way.policy))

        feeding = Feeding(ids.shape[1], tokens, full.kept)
        generate(way, feeding, look if way.budget is not None else None)
        free = generate(way, Script(ids.shape[1], forced, [[]] * len(batch), banned[0] if banned else None))
        found.append((torch.stack(feeding.divergence, 1), torch.stack(feeding.same, 1), free))
        if way.budget is not None:
            sets[number] = held
        clock.decode += time.perf_counter() - started
    source.free()
    # One look at the full cache's attention serves all ways.
    lost = attention_lost(model, torch.cat((ids, tokens), 1), ids.shape[1], sets)
    nothing = torch.zeros(len(batch), forced, model.config.num_hidden_layers)
    for number, (way, (divergence, same, free)) in enumerate(zip(ways, found, strict=True)):
        parts = (divergence, same, lost.get(number, nothing), free, tokens)
        yield way, [_line(one, way, *(part[row] for part in parts)) for row, one in enumerate(batch)]


def distinct(cache, policy) -> Tensor:
    """What is held after a step, for layers and heads that differ only: [Lc, B, Gc, slots] int32."""
    layers = None if policy.coupling in ("per_layer", "per_head") else 1
    heads = None if policy.coupling == "per_head" else 1
    return cache.retained()[:layers, :, :heads].to(torch.int32)


def _line(sample: Sample, way: Way, divergence, same, lost, free, tokens) -> Line:
    differs = (free != tokens).nonzero()
    kl = divergence[FIRST:]
    return Line(
        task=sample.task,
        length=sample.length,
        sample=sample.id,
        prompt_id=sample.prompt_id,
        policy=way.name,
        budget=way.text,
        held=way.budget.tokens(len(sample.prompt_ids)) if way.budget is not None else None,
        prompt_tokens=len(sample.prompt_ids),
        tokens=len(tokens),
        measures={
            "kl": kl.mean().item(),
            "kl_p95": kl.quantile(0.95).item(),
            "top1": same[FIRST:].float().mean().item(),
            "lost_mass": lost[FIRST:].mean().item(),
            "diverged": int(differs[0]) if len(differs) else len(tokens),
        },
        series={
            "kl": [round(value, 6) for value in divergence.tolist()],
            "lost_mass_by_layer": [round(value, 6) for value in lost[FIRST:].mean(0).tolist()],
        },
    )
