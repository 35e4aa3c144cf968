"""RULER's two counting tasks: the words that come most often in a numbered list and in a coded text."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.haystacks import words
from kvpatch.evaluation.samples import Sources

COMMON_DOCUMENT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}"
)
COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
COMMON_OPENING = "Answer: The top 10 words that appear most often in the list are:"
COMMON = 10
# Tokens from which on the words come more often.
LONG = 4096

CODED_DOCUMENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}"
)
CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
CODED_OPENING = "Answer: According to the coded text above, the three most frequently appeared words are:"
CODED_NOISE = "..."
LETTERS = 6
ALPHA = 2.0
ZETA = math.pi**2 / 6  # the zeta function at ALPHA
# Fewer words leave two of the ranks 2 to 5 equally frequent: floor(n / (16 ZETA)) > floor(n / (25 ZETA)) from here on.
LEAST_CODED = math.ceil(32 * ZETA)


@dataclass(frozen=True)
class CommonWords(Sized):
    """Ten words that come 30 times (6 below 4,096 tokens) among others that come 3 times (once)."""

    name: str

    family = "ruler"
    new_tokens = 120

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        often, seldom = (30, 3) if length >= LONG else (6, 1)
        # The example has 40 different words, below 4,096 tokens 20 that make a list of 40.
        shown_count, shown_often, shown_seldom = (40, 10, 3) if length >= LONG else (20, 3, 1)
        known = sorted({*words("noun"), *words("adjective"), *words("verb")})
        rng.shuffle(known)
        shown, known = known[:shown_count], known[shown_count:]
        common, others = known[:COMMON], known[COMMON:]
        seed = rng.getrandbits(64)
        listed = _numbered(shown[:COMMON] * shown_often + shown[COMMON:] * shown_seldom, rng.getrandbits(64))
        # No space behind the opening: RULER's.
        example = (
            f"{COMMON_DOCUMENT.format(context=listed)}{COMMON_QUESTION} {COMMON_OPENING}{_numbered(shown[:COMMON])}\n"
        )

        def draft(size: int) -> Draft:
            listed = _numbered(common * often + others[:size] * seldom, seed)
            facts = {"keys": common, "others": size, "repeats": [often, seldom]}
            document = example + COMMON_DOCUMENT.format(context=listed)
            return Draft(document, COMMON_QUESTION, COMMON_OPENING, tuple(common), facts)

        return Plan(draft, 1, len(others), "the words of wonderwords")


@dataclass(frozen=True)
class FrequentWords(Sized):
    """Words of six random letters whose frequencies fall with the square of the rank; the first one is only dots."""

    name: str

    family = "ruler"
    new_tokens = 50

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < max(length // 50, 5):  # the ranks asked for, and one below them
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked = [CODED_NOISE, *list(vocabulary)[1:]]
        seed = rng.getrandbits(64)

        def draft(size: int) -> Draft:
            counts = [int(size * rank**-ALPHA / ZETA) for rank in range(1, len(ranked) + 1)]
            text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
            Random(seed).shuffle(text)
            facts = {"keys": ranked[1:4], "counts": counts[1:5]}
            document = CODED_DOCUMENT.format(context=" ".join(text))
            return Draft(document, CODED_QUESTION, CODED_OPENING, tuple(ranked[1:4]), facts)

        return Plan(draft, LEAST_CODED)


def _numbered(words: list[str], seed: int | None = None) -> str:
    """The words behind their numbers, shuffled if there is a seed."""
    if seed is not None:
        words = list(words)
        Random(seed).shuffle(words)
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
