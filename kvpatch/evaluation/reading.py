"""Prompts of one batch, read once: every policy goes on from a copy."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpatch.cache import SlotCache
from kvpatch.evaluation.forcing import Script, endless, generate
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import Sample
from kvpatch.policy import resolve


@dataclass
class Clock:
    """Seconds of a run: `read` of prompts, `saved` by not reading them again for every further policy, `decode`."""

    read: float = 0.0
    saved: float = 0.0
    decode: float = 0.0

    def note_reading(self, seconds: float, generations: int) -> None:
        """Prompts were read once for so many generations."""
        self.read += seconds
        self.saved += seconds * (generations - 1)

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """Count what happens inside as decoding."""
        started = time.perf_counter()
        yield
        self.decode += time.perf_counter() - started


@dataclass(frozen=True)
class Way:
    """One policy at one budget.

    name, text: as they were asked for.   policy, budget: as `kvpatch.patch` takes them.
    """

    name: str
    text: str
    policy: object
    budget: object

    def line(self, sample: Sample, **given) -> Line:
        """The record of what this way made of a sample."""
        held = None if self.budget is None else self.budget.tokens(len(sample.prompt_ids))
        return Line(
            task=sample.task,
            length=sample.length,
            sample=sample.id,
            prompt_id=sample.prompt_id,
            policy=self.name,
            budget=self.text,
            held=held,
            prompt_tokens=len(sample.prompt_ids),
            **given,
        )


class Reading:
    """Prompts that a patched model has read.

    Args:
        handle: of the patched model.
        ids: [B, L] int64.   mask: [B, L], left-padded; None: no pads.
        policies: that will go on from it, as of `Patch.read`.

    Attributes:
        seconds: that reading took.
    """

    def __init__(self, handle, tokenizer, ids: Tensor, mask: Tensor | None = None, policies: Sequence = ()):
        self.model, self.pad = handle.model, pad_of(tokenizer)
        self.ids, self.mask = ids, torch.ones_like(ids) if mask is None else mask
        started = time.perf_counter()
        self._cache = handle.read(self.ids, self.mask, policies)
        self.seconds = time.perf_counter() - started

    @classmethod
    def of(cls, handle, tokenizer, samples: list[Sample], ways: Sequence[Way] = ()) -> "Reading":
        """Of the samples' prompts, for those ways."""
        ids, mask = left_padded(samples, pad_of(tokenizer), handle.model.device)
        return cls(handle, tokenizer, ids, mask, [way.policy for way in ways])

    def generate(
        self,
        policy,
        budget,
        tokens: int,
        script=None,
        *,
        ends: bool = False,
        after: Callable[[object], None] | None = None,
        **more,
    ) -> Tensor:
        """What a policy goes on to say greedily, [B, T] int64.

        Args:
            policy, budget: as of `SlotCache.fork`.
            tokens: most new tokens.
            script: a logits processor.
            ends: whether a row may end early.
            after: called with the cache after the prompt and after every token.
        """
        cache = self._begun(policy, budget)
        look = None if after is None else lambda: after(cache)
        more |= {"past_key_values": cache, "pad_token_id": self.pad}
        with contextlib.nullcontext() if ends else endless(self.model):
            made = generate(self.model, self.ids, tokens, script=script, after=look, mask=self.mask, **more)
        cache.free()
        return made[:, self.ids.shape[1] :]

    def _begun(self, policy, budget) -> SlotCache:
        """A fork, or an empty cache for a policy that reads the prompt in its own way."""
        chosen = resolve(policy)
        if chosen.prefill is None or chosen.prefill.block is None:
            return self._cache.fork(policy, budget)
        return SlotCache(self.model.config, chosen, budget, backend=self._cache.asked)

    def continuation(self, tokens: int, banned: int | None) -> Tensor:
        """The full cache's own, [B, tokens] int64, in which one token never comes."""
        return self.free("full", None, tokens, banned)

    def free(self, policy, budget, tokens: int, banned: int | None) -> Tensor:
        """A policy's own text of that length, [B, tokens] int64, in which one token never comes."""
        nothing = Script(self.ids.shape[1], tokens, [[]] * len(self.ids), banned)
        return self.generate(policy, budget, tokens, nothing)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_) -> None:
        self._cache.free()


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
