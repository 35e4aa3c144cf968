"""RULER's variable tracking: a chain of assignments in noise, all of whose variables are asked for."""

from __future__ import annotations

import string
from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.haystacks import NOISE, hidden, noise
from kvpatch.evaluation.samples import Sources

DOCUMENT = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{example}"
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
)
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
# The space at the end is RULER's.
OPENING = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
    "the value {value}, they are: "
)
HOPS = 4
# RULER's example fills 500 tokens in steps of five lines of noise: ten lines with all usual tokenizers.
EXAMPLE_LINES = 10


@dataclass(frozen=True)
class Tracking(Sized):
    """One chain of four hops, five variables, behind a solved example with shorter names and less noise."""

    name: str

    family = "ruler"
    new_tokens = 30

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        chosen: set[str] = set()
        shown, shown_value = _variables(rng, 3, chosen), _value(rng, chosen)
        variables, value = _variables(rng, 5, chosen), _value(rng, chosen)
        shown_seed, seed = rng.getrandbits(64), rng.getrandbits(64)
        text, _ = _context(noise(EXAMPLE_LINES * len(NOISE)), shown, shown_value, shown_seed)
        question, opening = _asked(shown_value)
        example = f"{text}{question} {opening} {' '.join(shown)}\n\n\n\n"

        def draft(size: int) -> Draft:
            context, depths = _context(noise(size), variables, value, seed)
            question, opening = _asked(value)
            facts = {"keys": variables, "value": value, "depths": depths}
            document = DOCUMENT.format(example=example, context=context)
            return Draft(document, question, opening, tuple(variables), facts)

        # With no more lines than assignments RULER would break up the lines.
        return Plan(draft, (HOPS + 2) * len(NOISE))


def _variables(rng: Random, letters: int, chosen: set[str]) -> list[str]:
    """Five names that are not chosen yet."""
    names: list[str] = []
    while len(names) < HOPS + 1:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in chosen:
            chosen.add(name)
            names.append(name)
    return names


def _value(rng: Random, chosen: set[str]) -> str:
    while (value := str(rng.randint(10000, 99998))) in chosen:
        pass
    chosen.add(value)
    return value


def _asked(value: str) -> tuple[str, str]:
    return QUESTION.format(value=value), OPENING.format(count=HOPS + 1, value=value)


def _context(lines: list[str], names: list[str], value: str, seed: int) -> tuple[str, list[float]]:
    """Noise with the chain in it, in order, and the depth of each assignment."""
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in zip(names, names[1:], strict=False)]
    spots = sorted(Random(seed).sample(range(len(lines)), len(chain)))
    return hidden([f"{line}\n" for line in lines], chain, spots, " ")
