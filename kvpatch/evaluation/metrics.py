"""How an answer is held against a reference; every score is 0 (wrong) to 1 (right).

The rules are LongBench's and LongBench-v2's. Two differences are stated where they are: `rouge_l` and `classification`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")
_PARAGRAPH = re.compile(r"Paragraph (\d+)")
# Marks of a comment or a fence: such a line is no answer of a code task.
_NO_CODE = ("`", "#", "//")
_CHOICES = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


def best(metric: Callable[..., float], prediction: str, references: Sequence[str], *more) -> float:
    """The largest score over references; 0 without any."""
    return max((float(metric(prediction, reference, *more)) for reference in references), default=0.0)


def first_line(prediction: str) -> str:
    """What stands before the first line end, empty lines at the beginning left out."""
    return prediction.lstrip("\n").split("\n")[0]


def normalised(text: str) -> list[str]:
    """Lower-case words without ASCII punctuation and without the articles a, an, the."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def token_f1(prediction: str, reference: str) -> float:
    """F1 over the normalised words that both have, each as often as both have it; 0 if they share none."""
    said, wanted = normalised(prediction), normalised(reference)
    shared = (Counter(said) & Counter(wanted)).total()
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def rouge_l(prediction: str, reference: str) -> float:
    """F of the longest common subsequence of lower-case alphanumeric words, as `rouge-score` has it, unstemmed.

    LongBench takes the package `rouge`: case-sensitive words between blanks, each counted once, and the union of the
    common subsequences over sentences. That gives several points more on long texts, so that published figures can't
    be set beside these; differences between policies can.

    Raises:
        ModuleNotFoundError: without the extra `eval`.
    """
    return float(_rouge().score(reference, prediction)["rougeL"].fmeasure)


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / the number of class names that the prediction contains, if the reference is one of them, else 0.

    Names that are a part of the reference's own name don't count. LongBench drops them while it walks the list, and so
    overlooks the second of two neighbours.
    """
    named = [one for one in classes if one in prediction and (one == reference or one not in reference)]
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str) -> float:
    """Share of the prediction's whole numbers that are the reference, digit for digit; 0 without a number."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str) -> float:
    """`count` for the number in a reference "Paragraph 7".

    Raises:
        ValueError: if the reference has no such number.
    """
    return count(prediction, paragraph(reference))


def paragraph(reference: str) -> str:
    """The digits of "Paragraph 7"; ValueError where there are none."""
    match = _PARAGRAPH.search(reference)
    if match is None:
        raise ValueError(f"{reference!r} does not name a paragraph as 'Paragraph 7' does")
    return match.group(1)


def code_similarity(prediction: str, reference: str) -> float:
    """Likeness of the prediction's first line of code to the reference: 1 - insertions and deletions / both lengths.

    The first line without a backtick, `#` or `//` is taken; none at all counts as an empty line. Rounded to whole
    per cent as LongBench's fuzzywuzzy does, which `rapidfuzz` does not.

    Raises:
        ModuleNotFoundError: without the extra `eval`.
    """
    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")
    return round(_fuzz().ratio(code, reference)) / 100


def choice(prediction: str) -> str | None:
    """The letter A to D of "The correct answer is (B)", else of "The correct answer is B", else None.

    Asterisks are left out first: models like to print the letter bold.
    """
    text = prediction.replace("*", "")
    return next((match.group(1) for form in _CHOICES if (match := form.search(text))), None)


@lru_cache(maxsize=1)
def _rouge():
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('ROUGE-L needs rouge-score: pip install "kvpatch[eval]"', name=error.name) from error
    return RougeScorer(["rougeL"])


@lru_cache(maxsize=1)
def _fuzz():
    try:
        from rapidfuzz import fuzz
    except ModuleNotFoundError as error:
        message = 'the likeness of code needs rapidfuzz: pip install "kvpatch[eval]"'
        raise ModuleNotFoundError(message, name=error.name) from error
    return fuzz
