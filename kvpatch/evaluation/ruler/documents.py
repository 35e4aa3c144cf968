"""RULER's two question answering tasks: the documents that hold the answer among others, from local files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.samples import CellError, Sample, Sources

DOCUMENT = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}"
)
QUESTION = (
    "\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words."
    "\n\nQuestion: {question}"
)
OPENING = "Answer:"


class Question(NamedTuple):
    """A question, its answers, and the numbers of documents.

    own: documents that always go with it.   near: those taken before any others.   gold: those with the answer.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]
    gold: tuple[int, ...]


class Collection(NamedTuple):
    path: Path
    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class QA(Sized):
    """Question k of the file, in its order, with its own documents and as many others as the length has room for.

    A question whose own documents don't fit the length is left out; `facts["question"]` says which one a sample has.
    """

    name: str
    dataset: str

    family = "ruler"
    new_tokens = 32
    skips = True

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan | None:
        path, documents, questions = _collection(self.name, self.dataset, sources)
        if index >= len(questions):
            return None
        question = questions[index]
        # As in RULER: paragraphs of the same article come before any others.
        near = rng.sample(question.near, len(question.near))
        taken = {*question.own, *near}
        # A document is a token at least: no more of them can fit.
        drawn = rng.sample(range(len(documents)), min(len(documents), length + len(taken)))
        order = [*question.own, *near, *(number for number in drawn if number not in taken)]
        seed = rng.getrandbits(64)

        def draft(size: int) -> Draft:
            shown = order[:size]
            Random(seed).shuffle(shown)
            texts = [f"Document {place}:\n{documents[number]}" for place, number in enumerate(shown, 1)]
            ends = [0]
            for text in texts:
                ends.append(ends[-1] + len(text))
            depths = [ends[shown.index(number)] / ends[-1] for number in question.gold]
            facts = {"keys": [question.text], "depths": depths, "documents": size, "question": index}
            asked = QUESTION.format(question=question.text)
            return Draft(DOCUMENT.format(context="\n\n".join(texts)), asked, OPENING, question.answers, facts)

        return Plan(draft, len(question.own), len(order), f"all documents of {path}")

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if any of the answers is in the prediction, whatever the case of letters."""
        return float(any(one.lower() in prediction.lower() for one in sample.references))


def _collection(task: str, dataset: str, sources: Sources) -> Collection:
    names, layout, read = _DATASETS[dataset]
    if sources.data is None:
        raise CellError(f"{task} needs a data folder with {' or '.join(names)}; its layout: {layout}")
    paths = [Path(sources.data) / name for name in names]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise CellError(f"{task} finds neither {' nor '.join(map(str, paths))}; the layout of the file: {layout}")
    try:
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size, read)
    except (OSError, UnicodeDecodeError) as error:
        raise CellError(f"{path} can't be read: {error}") from error
    except json.JSONDecodeError as error:
        raise CellError(f"{path} is not JSON: {error}") from error


@lru_cache(maxsize=2)
def _read(path: Path, changed: int, size: int, read: Callable) -> Collection:
    documents, questions = read(_Node(json.loads(path.read_text(encoding="utf-8")), str(path)))
    if not questions:
        raise CellError(f"{path} has no question with an answer")
    return Collection(path, documents, questions)


class _Node:
    """A place in a JSON file that says where it is when it does not hold what it should."""

    def __init__(self, value, place: str):
        self.value, self.place = value, place

    def __getitem__(self, key: str | int) -> _Node:
        place = f"{self.place}[{key}]" if isinstance(key, int) else f"{self.place}: {key}"
        kind = list if isinstance(key, int) else dict
        try:
            return _Node(self.holds(kind)[key], place)
        except LookupError:
            raise CellError(f"{self.place} has no {key!r}") from None

    def holds(self, kind: type):
        if not isinstance(self.value, kind):
            raise CellError(f"{self.place} should be a {kind.__name__}, is a {type(self.value).__name__}")
        return self.value

    def each(self) -> list[_Node]:
        return [self[index] for index in range(len(self.holds(list)))]

    def text(self) -> str:
        if not self.holds(str).strip():
            raise CellError(f"{self.place} is empty")
        return self.value


def _squad(root: _Node) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    """SQuAD 2.0: the paragraphs, and the questions that have an answer."""
    articles = [article["paragraphs"].each() for article in root["data"].each()]
    documents = tuple(sorted({paragraph["context"].text() for article in articles for paragraph in article}))
    number = {document: place for place, document in enumerate(documents)}
    questions = []
    for article in articles:
        here = dict.fromkeys(number[paragraph["context"].value] for paragraph in article)
        for paragraph in article:
            own = number[paragraph["context"].value]
            near = tuple(other for other in here if other != own)
            for asked in paragraph["qas"].each():
                if asked.holds(dict).get("is_impossible"):
                    continue
                answers = tuple(dict.fromkeys(answer["text"].text() for answer in asked["answers"].each()))
                if not answers:
                    raise CellError(f"{asked.place}: answers is empty, but is_impossible is not true")
                questions.append(Question(asked["question"].text(), answers, (own,), near, (own,)))
    return documents, tuple(questions)


def _hotpotqa(root: _Node) -> tuple[tuple[str, ...], tuple[Question, ...]]:
    """HotpotQA with distractors: each question has ten documents, two of them with the answer."""
    numbers: dict[str, int] = {}
    questions = []
    for entry in root.each():
        own, gold = {}, []
        supporting = {fact[0].text() for fact in entry["supporting_facts"].each()}
        for document in entry["context"].each():
            title = document[0].text()
            text = f"{title}\n{''.join(sentence.holds(str) for sentence in document[1].each())}"
            own[numbers.setdefault(text, len(numbers))] = None
            if title in supporting:
                gold.append(numbers[text])
        if not own:
            raise CellError(f"{entry.place}: context is empty")
        found = tuple(dict.fromkeys(gold))
        questions.append(Question(entry["question"].text(), (entry["answer"].text(),), tuple(own), (), found))
    return tuple(numbers), tuple(questions)


# File names, where the layout is described, and what reads it.
_DATASETS = {
    "squad": (("squad.json", "dev-v2.0.json"), "https://rajpurkar.github.io/SQuAD-explorer/", _squad),
    "hotpotqa": (("hotpotqa.json", "hotpot_dev_distractor_v1.json"), "https://hotpotqa.github.io/", _hotpotqa),
}
