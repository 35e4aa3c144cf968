"""Scores of answers against cases worked out by hand."""

import sys

import pytest

from kvpatch.evaluation import metrics


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        # cats, mat, red, one against red, mat: 2 shared, precision 2/4, recall 2/2.
        ("The cat's mat, a red one!", "red mat", 2 / 3),
        # paris, paris against paris: one is shared as the reference has one; precision 1/2, recall 1.
        ("Paris. Paris", "Paris", 2 / 3),
        # Punctuation goes before articles do: "a-b" becomes "ab", "an." becomes the article "an".
        ("a-b an.", "AB", 1.0),
        # Articles only: no words at all.
        ("the", "a", 0.0),
        ("", "Paris", 0.0),
        ("Rome", "Paris", 0.0),
    ],
)
def test_token_f1(prediction, reference, expected):
    assert metrics.token_f1(prediction, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        # "the cat on mat" is common: 4 of 6 words on both sides.
        ("The cat was on a mat.", "the cat sat on the mat", 2 / 3),
        # "b c" or "a c": 2 of 3 words of one, 2 of 4 of the other; 2 * 2/3 * 1/2 / (2/3 + 1/2).
        ("b a c", "a b d c", 4 / 7),
        # Stems are not taken: cat and cats differ.
        ("cats", "cat", 0.0),
        ("", "cat", 0.0),
        ("...", "cat", 0.0),
    ],
)
def test_rouge_l(prediction, reference, expected):
    assert metrics.rouge_l(prediction, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        ("Type: City", "City", 1.0),
        # Two classes are named, one of them right.
        ("City or Country", "City", 1 / 2),
        ("Country", "City", 0.0),
        # Upper and lower case differ.
        ("city", "City", 0.0),
        # "number" and "Other" are in the reference's own name and don't count, "City" does.
        ("Other number, City", "Other number", 1 / 2),
        # A class whose name the reference is a part of does count: Other number and number are both named.
        ("Other number", "number", 1 / 3),
        ("", "City", 0.0),
    ],
)
def test_classification(prediction, reference, expected):
    classes = ["number", "Other", "Other number", "City", "Country"]
    assert metrics.classification(prediction, reference, classes) == pytest.approx(expected)


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [("5", "5", 1.0), ("between 5 and 7", "5", 1 / 2), ("15", "5", 0.0), ("05", "5", 0.0), ("five", "5", 0.0)],
)
def test_count(prediction, reference, expected):
    assert metrics.count(prediction, reference) == expected


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        ("Paragraph 12", "Paragraph 12", 1.0),
        ("12", "Paragraph 12", 1.0),
        # 12 is one of three numbers.
        ("Paragraph 12, not 1 or 2", "Paragraph 12", 1 / 3),
        ("Paragraph 1", "Paragraph 12", 0.0),
        ("none", "Paragraph 12", 0.0),
    ],
)
def test_retrieval(prediction, reference, expected):
    assert metrics.retrieval(prediction, reference) == pytest.approx(expected)


def test_retrieval_refuses_a_reference_without_a_paragraph():
    with pytest.raises(ValueError, match="'twelve' does not name a paragraph"):
        metrics.retrieval("12", "twelve")


@pytest.mark.parametrize(
    "prediction, reference, expected",
    [
        ("return x", "return x", 1.0),
        # One letter deleted and one inserted, 8 letters in all: 1 - 2/8.
        ("abcd", "abxd", 0.75),
        # 1 - 2/6 = 0.6667, in whole per cent.
        ("abc", "abd", 0.67),
        # The first line that is neither fence nor comment.
        ("\n\n```python\n# says x\n// says y\nabcd\nabxd", "abxd", 0.75),
        # An empty line between is taken, as it has no mark of a comment: nothing of "abxd" is there.
        ("# says x\n\nabxd", "abxd", 0.0),
        ("# only this", "abxd", 0.0),
        ("", "abxd", 0.0),
    ],
)
def test_code_similarity(prediction, reference, expected):
    assert metrics.code_similarity(prediction, reference) == expected


@pytest.mark.parametrize(
    "prediction, expected",
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (B)**", "B"),
        ("The correct answer is C, because", "C"),
        # The form with parentheses wins, wherever it stands.
        ("The correct answer is A. No: The correct answer is (D)", "D"),
        ("The correct answer is (A) or (B). The correct answer is (C)", "A"),
        ("the correct answer is (B)", None),
        ("The correct answer is (E)", None),
        ("B", None),
        ("", None),
    ],
)
def test_choice(prediction, expected):
    assert metrics.choice(prediction) == expected


def test_the_best_reference_counts():
    assert metrics.best(metrics.token_f1, "red mat", ["blue", "mat", "red mat"]) == 1.0
    # red mat against mat: precision 1/2, recall 1.
    assert metrics.best(metrics.token_f1, "red mat", ["blue", "mat"]) == pytest.approx(2 / 3)
    assert metrics.best(metrics.token_f1, "red mat", []) == 0.0
    assert metrics.best(metrics.classification, "a", ["b", "a"], ["a", "b"]) == 1.0


def test_the_first_line_is_the_first_that_says_something():
    assert metrics.first_line("\n\nCity\nQuestion: next") == "City"
    assert metrics.first_line("City") == "City"
    # Only line ends are passed over, as published.
    assert metrics.first_line(" \nCity") == " "
    assert metrics.first_line("") == ""


@pytest.mark.parametrize(
    "module, loaded, score",
    [
        ("rouge_score.rouge_scorer", metrics._rouge, metrics.rouge_l),
        ("rapidfuzz", metrics._fuzz, metrics.code_similarity),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, module, loaded, score):
    loaded.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "kvpatch\[eval\]"'):
        score("a", "b")
