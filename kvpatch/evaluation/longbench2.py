"""LongBench-v2: four-choice questions about long texts, read from a local file.

The file is one of `PLACES` below the data folder: a JSON list, or one object a line, as published (_id, domain,
sub_domain, difficulty, length, question, choice_A to choice_D, answer, context). Zero-shot prompt, middle truncation
and the reading of answers are the published ones (github.com/THUDM/LongBench, MIT); decoding is greedy here.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvpatch.evaluation import metrics
from kvpatch.evaluation.longbench import located, records, require, shortened
from kvpatch.evaluation.samples import CellError, Sample, Sources

CHANCE = 0.25
"""Accuracy of a guess; an interval of `intervals.proportion_interval` that holds it shows nothing."""

PLACES = tuple(
    f"{stem}.{ending}"
    for stem in ("longbench-v2", "longbench-v2/data", "longbench2/data", "longbench2")
    for ending in ("json", "jsonl")
)

_PROMPT = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n(B) {choice_B}\n"
    '(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
)
_FILLED = ("context", "question", "choice_A", "choice_B", "choice_C", "choice_D")
_KEPT = ("difficulty", "length", "domain", "sub_domain")
_KNOWN = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long"), "answer": ("A", "B", "C", "D")}


@dataclass(frozen=True)
class LongBenchV2:
    """The one task; fields of `Task`."""

    name: str = "longbench-v2"
    family: str = "longbench-v2"
    new_tokens: int = 128
    sized: bool = False

    def samples(self, tokenizer, length: int, count: int, seed: int, sources: Sources) -> list[Sample]:
        """The file's first `count` items, each cut in its middle where it exceeds `length`.

        `seed` changes nothing: the data decide. Facts: source (the item's _id), difficulty, length (its class: short,
        medium, long), domain, sub_domain, and cut (tokens that the prompt lost).

        Raises:
            CellError: if the file is missing, one of these items is malformed, or the instructions alone exceed
                `length` less the new tokens.
        """
        bare = _PROMPT.format(**dict.fromkeys(_FILLED, ""))
        made = []
        for index, (where, item) in enumerate(islice(_items(located(sources.data, PLACES)), count)):
            require(where, item, (*_FILLED, *_KEPT, "answer"))
            for key, known in _KNOWN.items():
                if item[key] not in known:
                    raise CellError(f"{where}: {key!r} must be one of {', '.join(known)}, not {item[key]!r:.80}")
            prompt = _PROMPT.format(**{key: item[key].strip() for key in _FILLED})
            room = length - self.new_tokens
            ids, cut = shortened(tokenizer, prompt, bare, room, sources.template, self.name)
            facts = {"source": item.get("_id"), **{key: item[key] for key in _KEPT}, "cut": cut}
            name = f"{self.name}/{length}/{index}"
            made.append(Sample(name, self.name, 0, ids, (item["answer"],), self.new_tokens, facts))
        return made

    def score(self, prediction: str, sample: Sample) -> float:
        """1 for the right letter, 0 for another one or an answer without one."""
        return float(metrics.choice(prediction) in sample.references)


def breakdown(lines: Iterable[tuple[dict, float]]) -> dict[str, tuple[int, int]]:
    """Hits and n under overall, easy, hard, short, medium and long.

    Args:
        lines: a sample's facts and its score, for every sample.
    """
    found = {name: [0, 0] for name in ("overall", *_KNOWN["difficulty"], *_KNOWN["length"])}
    for facts, score in lines:
        for name in ("overall", facts["difficulty"], facts["length"]):
            found[name][0] += score == 1
            found[name][1] += 1
    return {name: (hits, n) for name, (hits, n) in found.items()}


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """Where each item stands and what it holds, from a JSON list or from JSON lines."""
    with path.open("rb") as file:
        listed = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not listed:
        yield from records(path)
        return
    try:
        items = json.loads(path.read_bytes())
    except ValueError as error:
        raise CellError(f"{path}: no JSON in UTF-8: {error}") from error
    for number, item in enumerate(items, 1):
        yield f"{path}, item {number}", item


TASKS = (LongBenchV2(),)
