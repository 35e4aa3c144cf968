"""The end of a step on the device alone: from logits to the next tokens, without the host looking at anything.

What it may hold is closed: logits processors that are tensor operations of fixed shapes, and the two stopping criteria
that need no Python. Everything else is the host's (`kvpatch.loops.by_token`).
"""

from collections.abc import Hashable

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria

# Processors of transformers that read nothing but tensors of the step. A subclass may do anything: types are exact.
_PROCESSORS = (
    "EpsilonLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
    "MinPLogitsWarper",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
)
# Reads the tokens so far, whose number grows; which ones they are is enough, and that has a fixed shape.
_PENALTY = "RepetitionPenaltyLogitsProcessor"


def why_host(processors, criteria, config) -> str | None:
    """Why the host has to look at every token; None where the device can do without it."""
    known = {getattr(logits_process, name) for name in (*_PROCESSORS, _PENALTY) if hasattr(logits_process, name)}
    for processor in processors:
        if type(processor) not in known:
            return f"{type(processor).__name__} may ask the host"
    penalties = [one for one in processors if type(one).__name__ == _PENALTY]
    if len(penalties) > 1 or any(isinstance(one.prompt_ignore_length, int) for one in penalties):
        return f"{_PENALTY} leaves out a part of the prompt"
    for criterion in criteria:
        if type(criterion) not in (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria):
            return f"{type(criterion).__name__} is decided in Python"
        if getattr(criterion, "max_length", config.max_length) != config.max_length:
            return f"{type(criterion).__name__} ends before max_length"
    for name in ("output_scores", "output_logits"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            return f"{name} keeps every step's"
    return None


class Desk:
    """Where steps read and write: tensors that keep their places from one generation to the next.

    tokens: [B] int64, to be fed next.   unfinished: [B] bool.   emitted: [longest run, B] int64, of the last run.
    logits: [B, V] of the last single step, float32 or wider.   seen: [B, V + 1] bool, tokens that a row has had; the
    last column is nobody's.
    """

    def __init__(self, batch: int, longest: int, vocabulary: int, dtype: torch.dtype, device):
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=device)
        self.emitted = torch.zeros(longest, batch, dtype=torch.int64, device=device)
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        self.seen = torch.zeros(batch, vocabulary + 1, dtype=torch.bool, device=device)
        accumulated = torch.promote_types(dtype, torch.float32)
        self.logits = torch.zeros(batch, vocabulary, dtype=accumulated, device=device)

    def mutable(self) -> tuple[Tensor, ...]:
        """What steps write for the steps after them."""
        return self.tokens, self.emitted, self.unfinished, self.seen


class Ending:
    """From logits to tokens by one call's settings.

    Args:
        processors: transformers' list, for which `why_host` was None.
        config: the effective generation config.   eos: ids that end a row, or None.   pad: [] int64 or None.

    Attributes:
        key: equal for endings that would capture the same graph.
    """

    def __init__(self, processors, config, eos: Tensor | None, pad: Tensor | None):
        self.processors, self.samples = processors, config.do_sample
        self.eos, self.pad = eos, pad
        self.penalty = next((one for one in processors if type(one).__name__ == _PENALTY), None)
        self.key = self._key()  # once: reading a tensor waits for the device

    def _key(self) -> Hashable:
        settings = tuple(
            (_PENALTY, one.penalty) if one is self.penalty else (type(one).__name__, tuple(_plain(vars(one))))
            for one in self.processors
        )
        eos, pad = (None if one is None else tuple(one.reshape(-1).tolist()) for one in (self.eos, self.pad))
        return settings, self.samples, eos, pad

    def lay_out(self, ids: Tensor, desk: Desk) -> None:
        """A generation begins after ids [B, L]. Mutates the desk."""
        desk.unfinished.fill_(True)
        if self.penalty is None:
            return
        kept, nobody = ids, desk.seen.shape[1] - 1
        if self.penalty.prompt_ignore_length is not None:  # [B], the pads
            columns = torch.arange(ids.shape[1], device=ids.device)
            kept = torch.where(columns < self.penalty.prompt_ignore_length.to(ids.device)[:, None], nobody, ids)
        desk.seen.zero_()
        desk.seen.scatter_(1, kept.to(desk.seen.device).clamp_max(nobody), True)

    def take(self, logits: Tensor, desk: Desk, place: int, active: Tensor | None) -> None:
        """Choose a token per row; mutates the desk, and `active` [B] bool, the rows that go on.

        Args:
            logits: [B, V]; may be written into.
            place: row of `desk.emitted` that takes the tokens.
        """
        chosen_by = logits.to(torch.float32)
        for processor in self.processors:
            if processor is self.penalty:
                chosen_by = _penalised(chosen_by, desk.seen[:, :-1], processor.penalty)
            else:
                chosen_by = processor(desk.tokens[:, None], chosen_by)
        tokens = draw(chosen_by) if self.samples else chosen_by.argmax(-1)
        if self.eos is not None:
            tokens = torch.where(desk.unfinished, tokens, self.pad)
            desk.unfinished.logical_and_((tokens[:, None] != self.eos).all(-1))
            if active is not None:
                active.copy_(desk.unfinished)
        desk.tokens.copy_(tokens)
        desk.emitted[place].copy_(tokens)
        if self.penalty is not None:
            # A pad may be no token of the head's.
            desk.seen.scatter_(1, tokens[:, None].clamp_max(desk.seen.shape[1] - 1), True)


def _penalised(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _plain(settings: dict):
    for name, value in sorted(settings.items()):
        yield name, tuple(value.reshape(-1).tolist()) if isinstance(value, Tensor) else value


def draw(scores: Tensor) -> Tensor:
    """One token a row from softmax(scores [B, V]): [B] int64, torch.multinomial's own draw, without its look back.

    Raises:
        RuntimeError: on a CPU, where looking costs nothing, for a row without a finite probability.
    """
    shares = torch.softmax(scores, dim=-1)
    if shares.device.type == "cpu" and not shares.sum(-1).isfinite().all():
        raise RuntimeError("a row's scores hold NaN or inf, or the processors left no token: nothing can be sampled")
    return (shares / torch.empty_like(shares).exponential_(1)).argmax(-1)
