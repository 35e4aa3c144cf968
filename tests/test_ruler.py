"""RULER's tasks, and what every task of a given length holds, read back from the text of the prompts."""

import json
import re
import string
import sys
from math import isqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import made, text_of, tokenizer_of, used

from kvpatch import needle
from kvpatch.evaluation.grid import TASKS as GRIDS
from kvpatch.evaluation.haystacks import drawn
from kvpatch.evaluation.later import TASKS as LATER
from kvpatch.evaluation.ruler import TASKS
from kvpatch.evaluation.samples import CellError, Sources, by_name
from kvpatch.evaluation.wordings import WORDINGS

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
MADE = [task for task in TASKS if not task.name.startswith("qa")]
ALL = [*MADE, *GRIDS, *WORDINGS, *LATER]
RULER = by_name(TASKS)
NEEDLES = [task for task in TASKS if task.name.startswith("niah")]


def context(text):
    """What is between a needle prompt's two instructions."""
    return re.search(r"quiz you about the \w+ afterwards\.\n(.*)\nWhat ", text, re.DOTALL).group(1)


def fact(task, key, value):
    kind = "uuid" if "-" in value else "number"
    return f"One of the special magic {kind}s for {key} is: {value}."


def test_the_tasks_are_the_table_in_its_order():
    rows = [(task.name, task.new_tokens) for task in TASKS]
    niah = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
    assert rows == [(f"niah_{name}", 128) for name in niah] + [
        ("vt", 30), ("cwe", 120), ("fwe", 50), ("qa_1", 32), ("qa_2", 32)
    ]  # fmt: skip
    names = [task.name for task in (*ALL, *TASKS[-2:])]
    assert len(set(names)) == len(names) and all(task.sized for task in ALL)


@given(st.sampled_from(ALL), st.integers(1100, 2600), st.integers(0, 10_000), st.sampled_from(["demo", "words"]))
@settings(max_examples=60, deadline=None)
def test_a_prompt_fills_its_length(task, length, seed, tokenizer):
    (sample,) = made(task, length, 1, seed, tokenizer)
    # Needles among needles are the one haystack whose unit can be more than 2 %; the next may have a longer key.
    lines = context(text_of(sample, tokenizer)).split("\n") if getattr(task, "haystack", "") == "needles" else [""]
    unit = max(len(tokenizer_of(tokenizer)(line, add_special_tokens=False).input_ids) for line in lines) + 12
    assert length - max(0.02 * length, unit) <= used(task, sample) <= length
    assert sample.length == length and sample.task == task.name and sample.new_tokens == task.new_tokens
    json.dumps(sample.facts)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_samples_follow_from_their_arguments_alone(task):
    first = made(task, count=3)
    assert made(task, count=3) == first and made(task, count=2) == first[:2] and made(task, count=0) == []
    others = [*first, *made(task, seed=43), *made(task, length=1600)]
    assert len({one.prompt_id for one in others}) == len({one.id for one in others}) == 5


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_only_the_references_score(task):
    mine, other = made(task, count=2)
    gold = " ".join(mine.references)
    assert task.score(gold, mine) == task.score(f"They are: {gold.upper()}!", mine) == 1
    assert task.score("", mine) == 0 and task.score(" ".join(other.references), mine) < 1
    parts = mine.references
    assert task.score(parts[0], mine) == pytest.approx(1 / len(parts))


@pytest.mark.parametrize("tokenizer", ["demo", "words"])
@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_what_does_not_fit_is_refused_with_a_length_that_does(task, tokenizer):
    with pytest.raises(CellError, match=rf"{task.name} does not fit 100 tokens") as refusal:
        made(task, 100, 3, 42, tokenizer)
    least = int(re.search(r"at least (\d+)", str(refusal.value)).group(1))
    samples = made(task, least, 3, 42, tokenizer)
    assert len(samples) == 3 and max(used(task, one) for one in samples) <= least
    with pytest.raises(CellError):
        made(task, 7 * least // 10, 3, 42, tokenizer)


@given(st.sampled_from(NEEDLES), st.integers(900, 2000), st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_needles_are_there_once_at_the_depths_told(task, length, seed):
    (sample,) = made(task, length, 1, seed)
    text = text_of(sample)
    body = context(text)
    pairs = re.findall(r"special magic (?:number|uuid)s for (.+?) is: (\S+)\.", body)
    assert len({value for _, value in pairs}) == len(pairs)
    keys, values = {"niah_multikey_1": (4, 1), "niah_multivalue": (1, 4), "niah_multiquery": (4, 1)}.get(
        task.name, (1, 1)
    )
    asked = sample.facts["keys"]
    assert len(asked) == (4 if task.name == "niah_multiquery" else 1) and len(sample.references) == len(asked) * values
    hidden = [pair for pair in pairs if task.haystack != "needles" or pair[0] in asked]
    assert len(hidden) == keys * values and len({key for key, _ in hidden}) == keys
    expected = [fact(task, key, value) for key in asked for value in sample.references if (key, value) in pairs]
    assert len(expected) == len(sample.references)
    question = text[text.rindex("\nWhat ") :]
    assert all(text.count(one) == 1 for one in expected) and all(key in question for key in asked)

    pattern = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if "uuid" in question else r"\d{7}"
    assert all(re.fullmatch(pattern, value) for value in sample.references)
    # Depths by hand: characters that are neither needles nor white space.
    plain = body
    for pair in hidden:
        plain = plain.replace(fact(task, *pair), "")
    total = len("".join(plain.split()))
    for one, depth in zip(expected, sample.facts["depths"], strict=True):
        before = body[: body.index(one)]
        for pair in hidden:
            before = before.replace(fact(task, *pair), "")
        assert len("".join(before.split())) / total == pytest.approx(depth, abs=0.02)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1", "niah_multiquery"])
def test_essays_hold_needles_at_sentence_ends_of_the_forty_depths(task, seed):
    (sample,) = made(RULER[task], 4000, seed=seed)
    pieces = re.split(r"One of the special magic numbers for .+? is: \d{7}\.", context(text_of(sample)))
    plain = " ".join(" ".join(pieces).split())
    prose = needle.sentences()
    start = next(place for place, one in enumerate(prose) if plain.startswith(one))
    ends = [0]  # characters up to each sentence's end, with the space behind it
    while ends[-1] < len(plain):
        ends.append(ends[-1] + len(prose[(start + len(ends) - 1) % len(prose)]) + 1)
    ends[-1] = len(plain) + 1  # the last one may break off
    before = [" ".join(" ".join(pieces[:place]).split()) for place in range(1, len(pieces))]
    found = [ends.index(len(one) + 1 if one else 0) for one in before]
    total = len(ends) - 1
    assert len(found) in (1, 4) and set(found) <= {int(total * round(100 * step / 39) / 100) for step in range(40)}


def test_haystacks_are_noise_lines_or_needles():
    body = context(text_of(*made(RULER["niah_single_1"])))
    lines = [line for line in body.split("\n") if "special magic" not in line]
    assert len(body.split("\n")) == len(lines) + 1 and set(lines[:-1]) == {NOISE} and NOISE.startswith(lines[-1])
    for name in ("niah_multikey_2", "niah_multikey_3"):
        assert all(
            line.startswith("One of the special magic") for line in context(text_of(*made(RULER[name]))).split("\n")
        )


@given(st.integers(0, 10_000), st.integers(1100, 2000))
@settings(max_examples=15, deadline=None)
def test_a_chain_is_tracked_in_order_behind_an_example(seed, length):
    (sample,) = made(RULER["vt"], length, 1, seed)
    example, text = text_of(sample).split("Memorize and track")[1:]
    names = list(sample.references)
    value = re.search(r"assigned the value (\d{5}) in", text).group(1)
    assert 10000 <= int(value) <= 99998 and len(set(names)) == 5
    assert all(len(name) == 5 and set(name) <= set(string.ascii_uppercase) for name in names)
    body = text.split("\n\n", 1)[1].split("\nQuestion")[0]
    chain = re.findall(r"VAR \w+ = (?:VAR )?\w+", body)
    assert chain == [f"VAR {names[0]} = {value}"] + [
        f"VAR {b} = VAR {a}" for a, b in zip(names, names[1:], strict=False)
    ]
    rest = re.sub(r"VAR \w+ = (VAR )?\w+", "", body).split()
    assert rest == (NOISE.split() * (len(rest) // 19 + 1))[: len(rest)]
    assert sample.facts["depths"] == sorted(sample.facts["depths"])
    shown = re.findall(r"VAR (\w+) = ", example)
    assert len(shown) == 5 and example.split("they are:")[1].split() == shown
    assert not set(names) & set(example.split())


@pytest.mark.parametrize("length, often, seldom, shown", [(1400, 6, 1, (3, 1, 20)), (6000, 30, 3, (10, 3, 40))])
def test_common_words_come_more_often_than_the_others(length, often, seldom, shown):
    (sample,) = made(RULER["cwe"], length)
    example, text = text_of(sample).split("Below is a numbered list")[1:]
    # Entries end where the next number stands, as some nouns are two words.
    for part, times, rare, different in (
        (example.split("\nQuestion")[0], *shown),
        (text.split("\nQuestion")[0], often, seldom, None),
    ):
        listed = re.findall(r"(\d+)\. (.*?)(?= \d+\. |$)", part.split("most often.\n")[1])
        assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
        counts = {}
        for _, word in listed:
            counts[word] = counts.get(word, 0) + 1
        common = {word for word, count in counts.items() if count == times}
        assert len(common) == 10 and {counts[word] for word in counts.keys() - common} == {rare}
        assert different is None or len(counts) == different
    assert common == set(sample.references)
    told = re.findall(r"\d+\. ", example.split("list are:")[1])
    assert len(told) == 10


@given(st.integers(0, 10_000), st.integers(400, 4000))
@settings(max_examples=20, deadline=None)
def test_coded_words_asked_for_are_the_ranks_behind_the_noise(seed, length):
    (sample,) = made(RULER["fwe"], length, 1, seed)
    body = text_of(sample).split("coded words. ")[1].split("\nQuestion")[0].split()
    counts = {word: body.count(word) for word in set(body)}
    ranked = sorted(counts, key=counts.get, reverse=True)
    assert ranked[0] == "..." and set(ranked[1:4]) == set(sample.references)
    assert len(ranked) == 4 or counts[ranked[3]] > counts[ranked[4]]
    assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])
    # The frequency falls with the square of the rank, each rounded down.
    first = counts["..."]
    assert all(-1 < counts[word] - first / rank**2 <= 1 / rank**2 for rank, word in enumerate(ranked, 1))
    assert len(ranked) in {min(length // 50, isqrt(first)), min(length // 50, isqrt(first + 1))}


HIDDEN = (
    "{some} special magic number{s} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number{s} afterwards.\n<>\nWhat {are_all} the special magic number{s} for <> mentioned "
    "in the provided text? The special magic number{s} for <> mentioned in the provided text {are}"
)
TRACKED = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n<>\nQuestion: Find all "
    "variables that are assigned the value <> in the text above. Answer: According to the chain(s) of variable "
    "assignment in the text above, 5 variables are assigned the value <>, they are: "
)
LISTED = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n<>\nQuestion: What are the 10 most common words in the above list? Answer: The top 10 words "
    "that appear most often in the list are:"
)
PUBLISHED = {
    "niah_single_1": HIDDEN.format(some="A", s="", are="is", are_all="is"),
    "niah_single_3": HIDDEN.format(some="A", s="", are="is", are_all="is").replace("number", "uuid"),
    "niah_multivalue": HIDDEN.format(some="Some", s="s", are="are", are_all="are all"),
    "niah_multiquery": HIDDEN.format(some="Some", s="s", are="are", are_all="are all").replace("<> m", "<>, and <> m"),
    "vt": TRACKED + "<>\n\n" + TRACKED,
    "cwe": LISTED + "<>\n" + LISTED,
    "fwe": "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. <>\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
    "three most frequently appeared words in the above coded text? Answer: According to the coded text above, the "
    "three most frequently appeared words are:",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_wording_is_the_published_one(name):
    text = text_of(*made(RULER[name]))
    assert re.fullmatch(re.escape(PUBLISHED[name]).replace("<>", ".+"), text, re.DOTALL)


def test_a_value_that_came_before_is_not_taken_again():
    class Repeating:
        values = iter([1_111_111, 1_111_111, 2_222_222])

        def randint(self, low, high):
            return next(self.values)

    rng, used_before = Repeating(), set()
    assert [drawn("numbers", rng, used_before) for _ in range(2)] == ["1111111", "2222222"]


def test_the_opening_is_the_assistants():
    for task in (*MADE, *WORDINGS, *GRIDS):
        text = text_of(*made(task, tokenizer="demo"), tokenizer="demo")
        assistant = text.split("<|im_start|>assistant\n")
        assert len(assistant) == 2 and assistant[0].endswith("<|im_end|>\n")
        assert task.family != "ruler" or assistant[1].startswith(("The special magic", "Answer:"))
    (plain,) = made(RULER["niah_single_2"], tokenizer="demo", sources=Sources(template=False))
    text = text_of(plain, "demo")
    assert "<|im_start|>" not in text and re.search(r"provided text\? The special magic number for .+ mentioned", text)


def test_missing_words_name_the_extra(monkeypatch):
    from kvpatch.evaluation import haystacks

    haystacks.words.cache_clear()
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "kvpatch\[eval\]"'):
        made(RULER["niah_single_1"])


def test_a_list_that_runs_out_is_refused():
    with pytest.raises(CellError, match="cwe at 400000 tokens: the words of wonderwords fill only"):
        made(RULER["cwe"], 400_000)
