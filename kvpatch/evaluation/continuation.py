"""Fidelity without labels: how far a policy's predictions are from the full cache's, on the full cache's own text.

The full cache reads prose and continues it greedily; every policy is fed that continuation token by token, and then
also writes freely. Place j is the prediction of the j-th token. Places 0 and 1 are equal by construction: eviction
begins after the first step, so they are left out of the means.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LogitsProcessor

from kvpatch import needle
from kvpatch.evaluation import haystacks
from kvpatch.evaluation.fidelity import attention_lost, between, distinct
from kvpatch.evaluation.reading import Clock, Reading, Way
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import CellError, Sample, Sources, rng_of

FIRST = 2  # places that are equal by construction
FEWEST = 3  # tokens of a continuation, with two steps of which the second can be held against the first
LEAST = 64


def samples(tokenizer, length: int, count: int, seed: int, sources: Sources, forced: int) -> list[Sample]:
    """Prose prompts; see `prose_samples`."""
    return prose_samples("fidelity", tokenizer, length, count, seed, sources, forced)


def prose_samples(
    task: str, tokenizer, length: int, count: int, seed: int, sources: Sources, forced: int
) -> list[Sample]:
    """Prose prompts of exactly `length` - `forced` tokens, the same for every task.

    Raises:
        CellError: if the continuation leaves no room for a prompt, or has no two steps.
    """
    prompt = length - forced
    if prompt < LEAST or forced < FEWEST:
        raise CellError(f"{task} at length {length} needs {FEWEST} <= forced <= {length - LEAST}, got {forced}")
    sentences = haystacks.sentences(sources)
    found = []
    for index in range(count):
        start = rng_of("fidelity", length, seed, index).random()
        ids = needle.passage(tokenizer, start, prompt, sentences)[0][:prompt]
        found.append(Sample(f"{task}/{length}/{seed}/{index}", task, length, tuple(ids), (), forced))
    return found


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
            divergence, same = between(self.expected[place], got)
            self.divergence.append(divergence.cpu())
            self.same.append(same.cpu())
        scores.fill_(-torch.inf)
        return scores.scatter_(1, self.tokens[:, place : place + 1].to(scores.device), 0.0)


class Keeping(LogitsProcessor):
    """Keeps every step's log-probabilities, and bans one token."""

    def __init__(self, banned: int | None):
        self.banned, self.kept = banned, []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.kept.append(scores.float().log_softmax(-1))
        if self.banned is not None:
            scores[:, self.banned] = -torch.inf
        return scores


def lines(
    handle, tokenizer, batch: list[Sample], ways: list[Way], forced: int, clock: Clock, folder: Path | None = None
) -> Iterator[tuple[Way, list[Line]]]:
    """Each way's distance from the full cache over one batch, of which the prompts are read once.

    Args:
        folder: of the run; nothing beside the lines is kept.
    """
    banned = tokenizer.eos_token_id
    found, sets = [], {}
    with Reading.of(handle, tokenizer, batch, ways) as reading:
        clock.note_reading(reading.seconds, 2 * len(ways) + 1)
        columns, full = reading.ids.shape[1], Keeping(banned)
        tokens = reading.generate("full", None, forced, full)
        for number, way in enumerate(ways):
            held: list[Tensor] = []

            def look(cache, held=held, way=way) -> None:
                if cache.phase == "decode" and cache.step > len(held):
                    held.append(distinct(cache, way.policy))

            feeding = Feeding(columns, tokens, full.kept)
            with clock.decoding():
                after = look if way.budget is not None else None
                reading.generate(way.policy, way.budget, forced, feeding, after=after)
                free = reading.free(way.policy, way.budget, forced, banned)
            found.append((torch.stack(feeding.divergence, 1), torch.stack(feeding.same, 1), free))
            if way.budget is not None:
                sets[number] = held
    # One look at the full cache's attention serves all ways.
    lost = attention_lost(handle.model, torch.cat((reading.ids, tokens), 1), columns, sets)
    nothing = torch.zeros(len(batch), forced, handle.model.config.num_hidden_layers)
    for number, (way, (divergence, same, free)) in enumerate(zip(ways, found, strict=True)):
        parts = (divergence, same, lost.get(number, nothing), free, tokens)
        yield way, [_line(one, way, *(part[row] for part in parts)) for row, one in enumerate(batch)]


def _line(sample: Sample, way: Way, divergence, same, lost, free, tokens) -> Line:
    differs = (free != tokens).nonzero()
    kl = divergence[FIRST:]
    return way.line(
        sample,
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
