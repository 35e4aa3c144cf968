"""A needle at every depth of a text of every length, and NeedleBench's many needles in one text."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.haystacks import LEAST_WORDS, in_essay, sentences, words
from kvpatch.evaluation.samples import Sample, Sources, Task

CITIES = (
    "San Francisco", "Lisbon", "Toronto", "Nairobi", "Helsinki", "Osaka", "Montevideo", "Edinburgh",
    "Cape Town", "Seville", "Wellington", "Krakow", "Quito", "Hanoi", "Marrakesh", "Ljubljana",
)  # fmt: skip
DEPTHS = tuple(range(0, 101, 10))
# From one sample to the next the depth moves on by so many steps of 11: the first few are spread over the whole text
# already, and each eleven are all depths once.
STRIDE = 4


@dataclass(frozen=True)
class Grid(Sized):
    """The needle in a haystack of Kamradt, with a drawn city and dish, so that nobody knows the answer by heart.

    `facts`: "depth" as asked for and "placed" as it is at the nearest sentence end, both 0 to 1; "answer".
    """

    name: str = "niah"

    family = "niah"
    new_tokens = 64

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        depth = DEPTHS[STRIDE * index % len(DEPTHS)] / 100
        city, dish = rng.choice(CITIES), f"{rng.choice(words('adjective'))} {rng.choice(words('noun'))} sandwich"
        answer = f"eat the {dish} and sit in the park on a sunny day."
        opening = f"The best thing to do in {city} is to"
        prose = sentences(sources)
        start = rng.randrange(len(prose))

        def draft(size: int) -> Draft:
            context, (placed,) = in_essay(prose, start, size, [f"{opening} {answer}"], [depth])
            question = (
                f"\n\nWhat is the best thing to do in {city}? Don't give information outside the document "
                "or repeat your findings."
            )
            facts = {"depth": depth, "placed": placed, "depths": [placed], "keys": [city], "answer": answer}
            return Draft(f"Read the document and answer the question.\n\n{context}", question, opening, (dish,), facts)

        return Plan(draft, LEAST_WORDS)

    def measures(self, prediction: str, sample: Sample) -> dict[str, float]:
        """ROUGE-L F (0 to 1) of the prediction against the whole answer."""
        return {"rouge_l": _rouge_l(prediction, sample.facts["answer"])}


@dataclass(frozen=True)
class MultiRetrieval(Sized):
    """NeedleBench's M-RT: five needles at fixed depths, all asked for at the end, in its wording and drawn words.

    `facts`: "depths" as asked for and "placed" as they are, 0 to 1, in the order of the references.
    """

    name: str = "needlebench_mrt"

    family = "needlebench"
    new_tokens = 192

    ASKED = (0.1, 0.3, 0.5, 0.7, 0.9)

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan:
        colours = rng.sample(words("adjective"), 2 * len(self.ASKED))
        islands = [f"{colour.title()} Island" for colour in colours[: len(self.ASKED)]]
        things = rng.sample(words("noun"), len(self.ASKED))
        items = [f"{a} {b}".title() for a, b in zip(colours[len(self.ASKED) :], things, strict=True)]
        needles = [f"Hidden on {island} is the legendary {item}." for island, item in zip(islands, items, strict=True)]
        order = rng.sample(range(len(islands)), len(islands))
        asked = " ".join(f"What legendary item is hidden on {islands[place]}?" for place in order)
        form = " ".join(f"The legendary item hidden on {islands[place]} is ______." for place in order)
        prose = sentences(sources)
        start = rng.randrange(len(prose))

        def draft(size: int) -> Draft:
            context, placed = in_essay(prose, start, size, needles, self.ASKED)
            document = (
                "You are an intelligent AI assistant skilled in answering user questions.\n"
                "Please keep your answers concise and clear. Do not talk about irrelevant topics or repeat your "
                f"answers.\nThe document given to you by the user is {context}"
            )
            question = f"\n\nNow, the questions are: {asked} Please answer in the format of '{form}'"
            facts = {"depths": list(self.ASKED), "placed": placed, "keys": islands}
            return Draft(document, question, "", tuple(items), facts)

        return Plan(draft, 2 * LEAST_WORDS)

    def measures(self, prediction: str, sample: Sample) -> dict[str, float]:
        """1 or 0 for the needle at each depth."""
        pairs = zip(sample.facts["depths"], sample.references, strict=True)
        return {f"depth_{round(100 * depth)}": float(one.lower() in prediction.lower()) for depth, one in pairs}


TASKS: tuple[Task, ...] = (Grid(), MultiRetrieval())


def _rouge_l(prediction: str, reference: str) -> float:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('ROUGE-L needs rouge-score: pip install "kvpatch[eval]"', name=error.name) from None
    return RougeScorer(["rougeL"]).score(reference, prediction)["rougeL"].fmeasure
