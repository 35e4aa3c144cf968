"""One hidden fact in an essay, told and asked for in other words than RULER's.

A policy that was tuned on one wording can be held against these: sentence, question and opening of the answer differ
from task to task, and where there is an opening it does not lead on into a copy of the sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.haystacks import LEAST_WORDS, in_essay, sentences, words
from kvpatch.evaluation.samples import Sources, Task

FIRST_NAMES = (
    "Amara", "Benedikt", "Carmen", "Dmitri", "Elif", "Fergus", "Greta", "Hiroshi", "Ingrid", "Joaquin",
    "Keiko", "Lorenzo", "Mariam", "Nikolai", "Oona", "Pavel", "Rosalind", "Soren", "Tamsin", "Yusuf",
)  # fmt: skip
LAST_NAMES = (
    "Abernathy", "Bergstrom", "Castellano", "Drummond", "Eriksen", "Fairbanks", "Gallagher", "Hathaway", "Ivanova",
    "Jorgensen", "Kowalski", "Lindqvist", "Montague", "Nakamura", "Okafor", "Pemberton", "Quintero", "Rosenthal",
)  # fmt: skip
TOWNS = (
    "Aberystwyth", "Bergamo", "Cuenca", "Debrecen", "Esbjerg", "Fremantle", "Galway", "Heilbronn", "Innsbruck",
    "Jyvaskyla", "Kaunas", "Ludlow", "Maribor", "Nelspruit", "Oamaru", "Plovdiv", "Queenstown", "Rotorua",
    "Saskatoon", "Tarragona", "Uppsala", "Viborg", "Whitehorse", "Yamagata", "Zaragoza",
)  # fmt: skip
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip


@dataclass(frozen=True)
class Wording(Sized):
    """A single needle; texts have the places {key} and {value}.

    Attributes:
        task: what stands before the document.
        sentence: the needle.
        question: asked behind the document.
        opening: beginning of the answer; empty where the model begins by itself.
        key, value: draw what is put in.
    """

    name: str
    task: str
    sentence: str
    question: str
    opening: str
    key: Callable[[Random], str]
    value: Callable[[Random], str]

    family = "wordings"
    new_tokens = 64

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        key, value, depth = self.key(rng), self.value(rng), rng.random()
        prose = sentences(sources)
        start = rng.randrange(len(prose))
        needle = self.sentence.format(key=key, value=value)

        def draft(size: int) -> Draft:
            context, depths = in_essay(prose, start, size, [needle], [depth])
            question, opening = self.question.format(key=key), self.opening.format(key=key)
            facts = {"keys": [key], "depths": depths}
            return Draft(f"{self.task}\n\n{context}", f"\n\n{question}", opening, (value,), facts)

        return Plan(draft, LEAST_WORDS)


def _thing(rng: Random) -> str:
    return f"{rng.choice(words('adjective'))} {rng.choice(words('noun'))}"


def _person(rng: Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _flight(rng: Random) -> str:
    return f"{rng.choice('ABDKLSTU')}{rng.choice('AFHQVX')} {rng.randint(1000, 9999)}"


WORDINGS: tuple[Task, ...] = (
    Wording(
        "needle_vault",
        "Here is a report. Read it to the end, then answer the question below it.",
        "Whoever wants to get into the {key} vault has to type {value} on the keypad beside its door.",
        "Which access code opens the {key} vault?",
        "The access code is",
        _thing,
        lambda rng: str(rng.randint(100_000, 999_999)),
    ),
    Wording(
        "needle_gate",
        "The following notes were taken at an airport.",
        "Passengers booked on flight {key} are kindly asked to proceed to gate {value}, where boarding has begun.",
        "My ticket says {key}. Where in the terminal do I have to go?",
        "Please go to gate",
        _flight,
        lambda rng: f"{rng.choice('ABCDEFGH')}{rng.randint(10, 99)}",
    ),
    Wording(
        "needle_birthplace",
        "Study the text, which mentions a person.",
        "It was in {value} that {key}, who later became a celebrated violinist, first saw the light of day.",
        "In which town was {key} born? Answer with the name of the town.",
        "",
        _person,
        lambda rng: rng.choice(TOWNS),
    ),
    Wording(
        "needle_gift",
        "Below you find an extract from a long manual.",
        "A {value} is what every guest of the {key} family should bring along, if they ask for advice.",
        "According to the extract, what makes a suitable present when the {key} family invites you?",
        "",
        lambda rng: rng.choice(LAST_NAMES),
        _thing,
    ),
    Wording(
        "needle_invoice",
        "Text:",
        "Our books show that on {value} the customer settled invoice {key} in full.",
        "Question: when was the money for invoice {key} received?\nGive day and month.",
        "Answer: it came in on",
        lambda rng: f"{rng.randint(1000, 9999)}-{rng.choice('KMNPRT')}",
        lambda rng: f"{rng.randint(1, 28)} {rng.choice(MONTHS)}",
    ),
)
