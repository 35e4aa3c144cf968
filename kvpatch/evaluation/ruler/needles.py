"""RULER's eight needle tasks: values hidden under keys in noise, in essays or among other needles."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.haystacks import LEAST_WORDS, NOISE, drawn, essay, hidden, noise, sentences
from kvpatch.evaluation.samples import Sources

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DOCUMENT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}"
)
QUESTION = "\nWhat are all the special magic {kind} for {key} mentioned in the provided text?"
OPENING = "The special magic {kind} for {key} mentioned in the provided text are"

# 40 depths in percent, evenly over 0..100.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


@dataclass(frozen=True)
class Needles(Sized):
    """Some keys with some values each, of which some keys are asked for.

    Attributes:
        haystack: "noise" (one line repeated), "essay" (prose) or "needles" (other keys with other values).
        keys, values, asked: how many keys, values a key, and keys asked for.
        key_kind, value_kind: "words", "numbers" or "uuids".
    """

    name: str
    haystack: str
    keys: int = 1
    values: int = 1
    asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"

    family = "ruler"
    new_tokens = 128

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        used: set[str] = set()
        keys = [drawn(self.key_kind, rng, used) for _ in range(self.keys)]
        pairs = [(key, drawn(self.value_kind, rng, used)) for key in keys for _ in range(self.values)]
        asked = rng.sample(keys, self.asked)
        rng.shuffle(pairs)
        depths = sorted(rng.sample(DEPTHS, len(pairs)))
        needles = [self._needle(key, value) for key, value in pairs]
        references = tuple(value for wanted in asked for key, value in pairs if key == wanted)
        places = [pairs.index((key, value)) for wanted in asked for key, value in pairs if key == wanted]
        lines_seed, others_seed = rng.getrandbits(64), rng.getrandbits(64)
        prose = sentences(sources) if self.haystack == "essay" else ()
        start = rng.randrange(len(prose)) if prose else 0
        others = _Others(self, used, Random(others_seed))

        def draft(size: int) -> Draft:
            if self.haystack == "essay":
                pieces = essay(prose, start, size)
                spots = [int(len(pieces) * depth / 100) for depth in depths]
            else:
                pieces = noise(size) if self.haystack == "noise" else others.first(size)
                spots = sorted(Random(lines_seed).sample(range(len(pieces)), len(pairs)))
            context, shares = hidden(pieces, needles, spots, " " if self.haystack == "essay" else "\n")
            facts = {"keys": asked, "depths": [shares[place] for place in places]}
            return Draft(*self._wording(asked, context, len(references)), references, facts)

        least = {"essay": LEAST_WORDS, "noise": len(NOISE) * len(pairs), "needles": len(pairs)}
        return Plan(draft, least[self.haystack])

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _wording(self, asked: list[str], context: str, answers: int) -> tuple[str, str, str]:
        """Document, question and opening; in the singular where there is one answer."""
        kind, texts = self.value_kind, [DOCUMENT, QUESTION, OPENING]
        if answers == 1:
            kind = kind.removesuffix("s")
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
                texts = [text.replace(plural, singular) for text in texts]
        key = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        document, question, opening = (text.format(kind=kind, key=key, context=context) for text in texts)
        return document, question, opening


class _Others:
    """Needles that nobody asks for, drawn one after another, so that a longer haystack begins with a shorter one."""

    def __init__(self, task: Needles, used: set[str], rng: Random):
        self.task, self.used, self.rng = task, used, rng
        self.lines: list[str] = []

    def first(self, count: int) -> list[str]:
        while len(self.lines) < count:
            key = drawn(self.task.key_kind, self.rng, self.used)
            self.lines.append(self.task._needle(key, drawn(self.task.value_kind, self.rng, self.used)))
        return self.lines[:count]
