"""LongBench's English and code datasets, read from local files.

A dataset lies in `<data>/longbench/<name>.jsonl` or `<data>/<name>.jsonl`, one JSON object a line, as published:
input, context, answers, length, dataset, language, all_classes, _id. Prompts, numbers of new tokens, truncation and
scores are LongBench's (github.com/THUDM/LongBench, MIT), with three differences: a prompt and its answer together never
exceed the length asked for; samsum's answer does not end at the first line end, but only its first line is scored; and
what `metrics` says of ROUGE-L.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvpatch.evaluation import metrics
from kvpatch.evaluation.samples import CellError, Sample, Sources, framed, tokens_of

_STORY = (  # "asconcisely" is in the published prompt.
    "You are given a story, which can be either a novel or a movie script, and a question. Answer the question "
    "asconcisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}"
    "\n\nNow, answer the question based on the story asconcisely as you can, using a single phrase if possible. Do not "
    "provide any explanation.\n\nQuestion: {input}\n\nAnswer:"
)
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
    'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
    '"no", or "unanswerable". Do not provide any explanation.\n\n'
)
_QASPER = (
    f"You are given a scientific article and a question. Answer the question {_ARTICLE}Article: {{context}}\n\n "
    f"Answer the question based on the above article {_ARTICLE}Question: {{input}}\n\nAnswer:"
)
_MULTIFIELD = (
    "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the above "
    "text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
_REPORT = (
    "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}\n\n"
    "Now, write a one-page summary of the report.\n\nSummary:"
)
_MEETING = (
    "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one or "
    "more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript in one "
    "or more sentences.\n\nQuery: {input}\nAnswer:"
)
_NEWS = (
    "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write a "
    "one-page summary of all the news.\n\nSummary:"
)
_TREC = "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
_TRIVIA = (
    "Answer the question based on the given passage. Only give me the answer and do not output any other words. The "
    "following are some examples.\n\n{context}\n\n{input}"
)
_DIALOGUE = (
    "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
)
_COUNT = (
    "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
    "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other words, "
    "how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of unique "
    "paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, 3, and so "
    "on.\n\nThe final answer is: "
)
_RETRIEVAL = (
    "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract is "
    "from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph that "
    'the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: '
)
_CODE = "Please complete the code given below. \n{context}Next line of code:\n"
_REPOSITORY = "Please complete the code given below. \n{context}{input}Next line of code:\n"


@dataclass(frozen=True)
class LongBench:
    """One dataset; fields of `Task`, and

    metric: of a prediction and one reference (for `metrics.classification` the classes too); the best one counts.
    prompt: with {context} and {input}.
    chat: whether the prompt goes into a chat template.
    first_line: whether only the answer's first line is scored.
    """

    name: str
    new_tokens: int
    metric: Callable[..., float]
    prompt: str
    chat: bool = True
    first_line: bool = False
    family: str = "longbench"
    sized: bool = False

    def samples(self, tokenizer, length: int, count: int, seed: int, sources: Sources) -> list[Sample]:
        """The file's first `count` lines, each cut in its middle where it exceeds `length`.

        `seed` changes nothing: the data decide. Facts: source (the line's _id), words (its length as published), cut
        (tokens that the prompt lost) and, for trec, classes.

        Raises:
            CellError: if the file is missing, one of these lines is malformed, or the instructions alone exceed
                `length` less the new tokens.
        """
        template = sources.template if self.chat else False
        bare = self.prompt.format(context="", input="")
        places = (f"longbench/{self.name}.jsonl", f"{self.name}.jsonl")
        made = []
        for index, (where, line) in enumerate(islice(records(located(sources.data, places)), count)):
            self._check(where, line)
            prompt = self.prompt.format(context=line["context"], input=line["input"])
            ids, cut = shortened(tokenizer, prompt, bare, length - self.new_tokens, template, self.name)
            facts = {"source": line.get("_id"), "words": line.get("length"), "cut": cut}
            if self.metric is metrics.classification:
                facts["classes"] = line["all_classes"]
            name = f"{self.name}/{length}/{index}"
            made.append(Sample(name, self.name, 0, ids, tuple(line["answers"]), self.new_tokens, facts))
        return made

    def score(self, prediction: str, sample: Sample) -> float:
        """0 to 1 for the reference that fits best."""
        if self.first_line:
            prediction = metrics.first_line(prediction)
        classes = [sample.facts["classes"]] if self.metric is metrics.classification else []
        return metrics.best(self.metric, prediction, sample.references, *classes)

    def _check(self, where: str, line) -> None:
        require(where, line, ("input", "context"))
        for key in ("answers", "all_classes") if self.metric is metrics.classification else ("answers",):
            texts = line.get(key)
            if not (isinstance(texts, list) and texts and all(isinstance(one, str) for one in texts)):
                raise CellError(f"{where}: {key!r} must be a list of one or more texts, not {texts!r:.80}")
        if self.metric is metrics.retrieval:
            try:
                [metrics.paragraph(answer) for answer in line["answers"]]
            except ValueError as error:
                raise CellError(f"{where}: 'answers': {error}") from error


def located(data: Path | None, places: Sequence[str]) -> Path:
    """The first of the places below the folder that is a file; CellError with all of them where none is."""
    if data is None:
        raise CellError(f"no folder of datasets was given; it must hold {' or '.join(places)}")
    paths = [Path(data) / place for place in places]
    for path in paths:
        if path.is_file():
            return path
    raise CellError(f"no such file: {' or '.join(map(str, paths))}")


def records(path: Path) -> Iterator[tuple[str, object]]:
    """Where each line stands ("FILE, line 3") and what it holds; empty lines are passed over.

    Raises:
        CellError: at a line that is no JSON.
    """
    # Bytes: JSON may hold line separators of Unicode as they are, and text in another encoding is met at its line.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    yield where, json.loads(line)
                except ValueError as error:
                    raise CellError(f"{where}: no JSON in UTF-8: {error}") from error


def require(where: str, line, texts: Iterable[str]) -> None:
    """CellError unless the line is a JSON object with a text under each of these names."""
    if not isinstance(line, dict):
        raise CellError(f"{where}: must be a JSON object, not {line!r:.80}")
    for key in texts:
        if key not in line:
            raise CellError(f"{where}: has no {key!r}")
        if not isinstance(line[key], str):
            raise CellError(f"{where}: {key!r} must be a text, not {line[key]!r:.80}")


def shortened(
    tokenizer, prompt: str, bare: str, room: int, template: bool | str, task: str
) -> tuple[tuple[int, ...], int]:
    """Ids of the framed prompt, at most `room`, and how many tokens it lost.

    The first and the last half of what fits are kept, as published: before the chat template is put around them, and
    joined as text.

    Args:
        bare: the prompt without what the data fill in; must fit.

    Raises:
        CellError: if it does not.
    """
    least = len(tokens_of(tokenizer, framed(tokenizer, bare, "", template)))
    if least > room:
        raise CellError(f"{task}: instructions of {least} tokens, but {max(room, 0)} are left beside the new tokens")
    ids = tokens_of(tokenizer, framed(tokenizer, prompt, "", template))
    if len(ids) <= room:
        return tuple(ids), 0
    whole = tokens_of(tokenizer, prompt)
    half = len(whole) // 2
    # Text that is tokenised again can take a few tokens more than it had: cut by what is too much until it fits.
    while len(ids) > room:
        half = max(0, half - (len(ids) - room + 1) // 2)
        ends = (whole[:half], whole[len(whole) - half :])
        text = "".join(
            tokenizer.decode(end, skip_special_tokens=True, clean_up_tokenization_spaces=False) for end in ends
        )
        ids = tokens_of(tokenizer, framed(tokenizer, text, "", template))
    return tuple(ids), len(whole) - 2 * half


TASKS = (
    LongBench("narrativeqa", 128, metrics.token_f1, _STORY),
    LongBench("qasper", 128, metrics.token_f1, _QASPER),
    LongBench("multifieldqa_en", 64, metrics.token_f1, _MULTIFIELD),
    LongBench("hotpotqa", 32, metrics.token_f1, _PASSAGES),
    LongBench("2wikimqa", 32, metrics.token_f1, _PASSAGES),
    LongBench("musique", 32, metrics.token_f1, _PASSAGES),
    LongBench("gov_report", 512, metrics.rouge_l, _REPORT),
    LongBench("qmsum", 512, metrics.rouge_l, _MEETING),
    LongBench("multi_news", 512, metrics.rouge_l, _NEWS),
    LongBench("trec", 64, metrics.classification, _TREC, chat=False, first_line=True),
    LongBench("triviaqa", 32, metrics.token_f1, _TRIVIA, chat=False, first_line=True),
    LongBench("samsum", 128, metrics.rouge_l, _DIALOGUE, chat=False, first_line=True),
    LongBench("passage_count", 32, metrics.count, _COUNT),
    LongBench("passage_retrieval_en", 32, metrics.retrieval, _RETRIEVAL),
    LongBench("lcc", 64, metrics.code_similarity, _CODE, chat=False),
    LongBench("repobench-p", 64, metrics.code_similarity, _REPOSITORY, chat=False),
)

# The datasets of InertiaKV's table.
EIGHT = (
    "hotpotqa",
    "2wikimqa",
    "qasper",
    "musique",
    "gov_report",
    "multi_news",
    "qmsum",
    "passage_retrieval_en",
)
