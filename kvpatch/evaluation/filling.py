"""Prompts that fill a length: a task drafts its prompt at any size, and the size is searched for."""

from __future__ import annotations

import re
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count as counted
from random import Random

from kvpatch.evaluation.samples import CellError, Sample, Sources, framed, largest, rng_of, tokens_of


@dataclass(frozen=True)
class Draft:
    """One prompt as text, and what counts as its answer.

    Attributes:
        document: what is to be read: the task, its example and the haystack.
        question: what stands behind the document in the same turn, its line break included.
        opening: the beginning of the answer.
        references: texts that an answer is held against.
        facts: more that plots and scores need; JSON types only.
    """

    document: str
    question: str
    opening: str
    references: tuple[str, ...]
    facts: dict


@dataclass(frozen=True)
class Plan:
    """What was drawn for one sample, with the size of its haystack left open.

    Attributes:
        draft: the prompt whose haystack has so many units; the same size gives the same prompt.
        least: units without which the task is another one.
        most: units that there are; None where they have no end.
        source: what the units come from, for the message when there are too few.
    """

    draft: Callable[[int], Draft]
    least: int
    most: int | None = None
    source: str = ""


class _TooShort(CellError):
    """The prompt with the least haystack needs `need` tokens, new ones included."""

    def __init__(self, need: int):
        super().__init__(f"needs {need} tokens")
        self.need = need


class Sized(ABC):
    """A task whose prompts are made to a length; what a subclass adds is its name, its plan and its new tokens."""

    name: str
    family: str
    new_tokens: int
    sized = True
    # Whether a sample that doesn't fit is left out instead of refusing all: data have their own lengths.
    skips = False

    @abstractmethod
    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan | None:
        """What is drawn for sample `index`; None where the data end."""

    def text(self, tokenizer, draft: Draft, template: bool | str) -> str:
        """The whole prompt."""
        return framed(tokenizer, draft.document + draft.question, draft.opening, template)

    def reserved(self) -> int:
        """Tokens of the length that are not the prompt's."""
        return self.new_tokens

    def afterwards(self, tokenizer, draft: Draft, template: bool | str) -> dict:
        """The fields `free` and `then` of the sample, where the task has them."""
        return {}

    def score(self, prediction: str, sample: Sample) -> float:
        """Share of the references that the prediction contains, whatever the case of letters."""
        return contained(prediction, sample.references)

    def samples(self, tokenizer, length: int, count: int, seed: int, sources: Sources) -> list[Sample]:
        """As in `Task`: prompt and new tokens are never more than `length`, and at most one unit or 2 % less."""
        made: list[Sample] = []
        needs = []
        estimate = _Estimate(tokenizer)
        for index in counted():
            if len(made) == count or (plan := self._plan(index, length, seed, sources)) is None:
                break
            try:
                draft, ids = self._filled(plan, tokenizer, estimate, length, sources.template)
            except _TooShort as lack:
                needs.append(lack.need)
                if self.skips:
                    continue
                raise self._refusal(length, self._least(tokenizer, lack.need, count, seed, sources)) from None
            more = self.afterwards(tokenizer, draft, sources.template)
            name = f"{self.name}-{length}-{seed}-{index}"
            made.append(Sample(name, self.name, length, ids, draft.references, self.new_tokens, draft.facts, **more))
        if needs and not made:
            raise self._refusal(length, min(needs))
        return made

    def _plan(self, index: int, length: int, seed: int, sources: Sources) -> Plan | None:
        return self.plan(index, length, rng_of(self.name, length, seed, index), sources)

    def _least(self, tokenizer, length: int, count: int, seed: int, sources: Sources) -> int:
        """A length at which every one of the samples fits: each draws other words at every length."""
        while True:
            plans = [self._plan(index, length, seed, sources) for index in range(count)]
            need = max(self._tokens(plan, plan.least, tokenizer, sources.template) for plan in plans if plan)
            if need + self.reserved() <= length:
                return length
            length = need + self.reserved()

    def _refusal(self, length: int, need: int) -> CellError:
        return CellError(f"{self.name} does not fit {length} tokens: it needs at least {need} with this tokenizer")

    def _tokens(self, plan: Plan, size: int, tokenizer, template: bool | str) -> int:
        return len(tokens_of(tokenizer, self.text(tokenizer, plan.draft(size), template)))

    def _filled(
        self, plan: Plan, tokenizer, estimate: _Estimate, length: int, template: bool | str
    ) -> tuple[Draft, tuple[int, ...]]:
        """The draft with the largest haystack that the length has room for, and its tokens."""
        room = length - self.reserved()

        @cache
        def tokens(size: int) -> int:
            return self._tokens(plan, size, tokenizer, template)

        @cache
        def about(size: int) -> int:
            return estimate(plan.draft(size).document)

        if tokens(plan.least) > room:
            raise _TooShort(tokens(plan.least) + self.reserved())
        size = _size(plan, tokens, about, room)
        if size == plan.most and room - tokens(size) > length // 50:
            raise CellError(f"{self.name} at {length} tokens: {plan.source} fill only {tokens(size) + length - room}")
        draft = plan.draft(size)
        return draft, tuple(tokens_of(tokenizer, self.text(tokenizer, draft, template)))


def contained(prediction: str, references: tuple[str, ...]) -> float:
    """Share of the references that are in the prediction, whatever the case of letters."""
    found = prediction.lower()
    return sum(one.lower() in found for one in references) / len(references)


class _Estimate:
    """About how many tokens a text has: the sum over its words, each of which is tokenised once.

    A search asks for many sizes of one text; to tokenise each as a whole would take most of the time.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.known: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        total = 0
        for word, times in Counter(re.findall(r"\s*\S+", text)).items():
            if word not in self.known:
                self.known[word] = len(tokens_of(self.tokenizer, word))
            total += times * self.known[word]
        return total


def _size(plan: Plan, tokens: Callable[[int], int], estimate: Callable[[int], int], room: int) -> int:
    """The largest size that fits, or one whose tokens are at most 1 % below the room; `plan.least` must fit.

    The search goes by the estimate. What whole texts really have corrects it from round to round.
    """
    most = plan.most if plan.most is not None else sys.maxsize
    least = at = best = plan.least
    scale = 1.0

    def fits(size: int) -> bool:
        return tokens(at) + scale * (estimate(size) - estimate(at)) <= room

    for _ in range(6):
        high = max(best, least)
        while high < most and fits(high):
            high = min(2 * high, most)
        guess = largest(fits, least, high)
        if guess == at:
            break
        at = guess
        if estimate(at) != estimate(least):
            scale = max((tokens(at) - tokens(least)) / (estimate(at) - estimate(least)), 0.1)
        if tokens(at) <= room:
            best = max(best, at)
    while best < most and room - tokens(best) > room // 100 and tokens(best + 1) <= room:
        best += 1
    return best
