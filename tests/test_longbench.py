"""LongBench and LongBench-v2 from small local files in their published layout."""

import hashlib
import json
import math

import pytest
from transformers import AutoTokenizer

from kvpatch import demo
from kvpatch.evaluation import longbench, longbench2
from kvpatch.evaluation.samples import CellError, Sources, by_name, framed

TASKS = by_name((*longbench.TASKS, *longbench2.TASKS))

# name: new tokens, whether a chat template is used, a gold answer, and the first 12 digits of the SHA-256 of the
# template in LongBench's dataset2prompt.json.
PUBLISHED = {
    "narrativeqa": (128, True, "a grey cat", "aada7ed24b06"),
    "qasper": (128, True, "unanswerable", "0fbdd123fe7f"),
    "multifieldqa_en": (64, True, "In 1987.", "20b4666a2de8"),
    "hotpotqa": (32, True, "Paris", "9ec4ae308865"),
    "2wikimqa": (32, True, "Paris", "9ec4ae308865"),
    "musique": (32, True, "Paris", "9ec4ae308865"),
    "gov_report": (512, True, "The report says little.", "91c25d585b18"),
    "qmsum": (512, True, "They agreed.", "dca23b678fe0"),
    "multi_news": (512, True, "Two trains were late.", "2af3f28c40b9"),
    "trec": (64, False, "City", "0eff8bebdba9"),
    "triviaqa": (32, False, "Paris", "00a802e6377e"),
    "samsum": (128, False, "Ann will be late.", "a68d88423490"),
    "passage_count": (32, True, "7", "986550b6c610"),
    "passage_retrieval_en": (32, True, "Paragraph 12", "39b96b7fa52b"),
    "lcc": (64, False, "        return self.total", "6a1f24cf0bb8"),
    "repobench-p": (64, False, "    total += 1", "ee9ec182ea5f"),
}
NAMES = list(PUBLISHED)
# Their prompts hold the context only.
UNASKED = ("gov_report", "multi_news", "passage_count", "lcc")
QUESTION = "Where {does} it end?"
FACTS = ("source", "difficulty", "length", "domain", "sub_domain", "cut")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo.path())


def story(words: int) -> str:
    return "BEGIN {brace} " + " ".join(f"word{number}" for number in range(words)) + " END"


def line(name: str, words: int = 30, **more) -> dict:
    """A line as published; `more` replaces fields."""
    classes = ["City", "Country", "Other number"] if name == "trec" else None
    given = {"input": QUESTION, "context": story(words), "answers": ["something else", PUBLISHED[name][2]]}
    if name == "passage_retrieval_en":
        given["answers"] = [PUBLISHED[name][2]]
    rest = {"length": words, "dataset": name, "language": "en", "all_classes": classes, "_id": f"id-{words}"}
    return given | rest | more


def item(words: int = 30, **more) -> dict:
    """An item of LongBench-v2 as published."""
    choices = {f"choice_{letter}": f"option {letter} " for letter in "ABCD"}
    given = {"_id": "id-0", "domain": "Code", "sub_domain": "Repository", "difficulty": "hard", "length": "medium"}
    return given | {"question": QUESTION, "answer": "C", "context": story(words)} | choices | more


def written(folder, name: str, *lines, place: str = "longbench/{}.jsonl") -> Sources:
    """A folder with one file of these lines; text is written as it is."""
    path = folder / place.format(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return Sources(data=folder)


def written2(folder, *items, place: str = "longbench-v2.json") -> Sources:
    return written(folder, "", json.dumps(items), place=place)


def made(tokenizer, name, sources, length=4000, count=9):
    return TASKS[name].samples(tokenizer, length, count, 0, sources)


def test_every_dataset_is_there_under_its_name():
    assert [task.name for task in longbench.TASKS] == NAMES
    assert set(longbench.EIGHT) < set(NAMES) and len(longbench.EIGHT) == 8
    assert all(task.family == "longbench" and not task.sized for task in longbench.TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_templates_and_new_tokens_are_the_published_ones(name):
    new_tokens, _, _, digest = PUBLISHED[name]
    assert hashlib.sha256(TASKS[name].prompt.encode()).hexdigest()[:12] == digest
    assert TASKS[name].new_tokens == new_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_is_the_published_prompt_with_context_and_question(tokenizer, tmp_path, name):
    new_tokens, chat, _, _ = PUBLISHED[name]
    sources = written(tmp_path, name, line(name), "", line(name, 40), line(name, 50))
    first, second = made(tokenizer, name, sources, count=2)
    text = tokenizer.decode(first.prompt_ids)
    assert story(30) in text and (QUESTION in text) == (name not in UNASKED)
    prompt = TASKS[name].prompt.replace("{context}", story(30)).replace("{input}", QUESTION)
    assert text == (framed(tokenizer, prompt, "", True) if chat else prompt)
    assert (first.task, first.length, first.new_tokens) == (name, 0, new_tokens)
    assert (first.facts["source"], first.facts["words"], first.facts["cut"]) == ("id-30", 30, 0)
    assert first.id != second.id and story(40) in tokenizer.decode(second.prompt_ids)
    assert made(tokenizer, name, sources, count=1) == [first] and len(made(tokenizer, name, sources)) == 3
    json.dumps(first.facts)


@pytest.mark.parametrize("name", NAMES)
def test_the_gold_answer_has_full_marks_and_silence_none(tokenizer, tmp_path, name):
    (sample,) = made(tokenizer, name, written(tmp_path, name, line(name)))
    gold = PUBLISHED[name][2]
    assert TASKS[name].score(gold, sample) == 1.0
    assert TASKS[name].score("", sample) == 0.0
    # Where models go on with more examples, and in code, what follows the first line is not scored.
    goes_on = TASKS[name].score(f"\n{gold}\nQuestion 3 City Country", sample)
    assert (goes_on == 1.0) == (name in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"))


@pytest.mark.parametrize("name", [*NAMES, "longbench-v2"])
def test_what_is_too_long_keeps_head_and_tail_and_the_bound(tokenizer, tmp_path, name):
    v2 = name == "longbench-v2"
    sources = written2(tmp_path, item(600)) if v2 else written(tmp_path, name, line(name, 600))
    (whole,) = made(tokenizer, name, sources, 9000)
    total = len(whole.prompt_ids) + whole.new_tokens
    assert (
        made(tokenizer, name, sources, total) == [whole] or made(tokenizer, name, sources, total)[0].facts["cut"] == 0
    )
    text = tokenizer.decode(whole.prompt_ids)
    for length in (total - 1, total - 777):
        (sample,) = made(tokenizer, name, sources, length)
        room = length - sample.new_tokens
        # All but a few tokens of the room are used.
        assert room - 4 <= len(sample.prompt_ids) <= room
        assert sample.facts["cut"] >= total - length
        shown = tokenizer.decode(sample.prompt_ids)
        assert shown[:300] == text[:300] and shown[-300:] == text[-300:] and story(600) not in shown
        half = len(sample.prompt_ids) // 2 - 40
        assert sample.prompt_ids[:half] == whole.prompt_ids[:half]
        assert sample.prompt_ids[-half:] == whole.prompt_ids[-half:]


def test_the_bound_holds_where_a_cut_splits_letters(tokenizer, tmp_path):
    sources = written(tmp_path, "hotpotqa", line("hotpotqa", context="🦜漢字ß" * 400))
    for length in range(300, 330):
        (sample,) = made(tokenizer, "hotpotqa", sources, length)
        assert length - 32 - 12 <= len(sample.prompt_ids) <= length - 32
        assert tokenizer.decode(sample.prompt_ids).count("Question: " + QUESTION + "\nAnswer:") == 1


def test_without_a_chat_template_the_prompt_is_plain(tokenizer, tmp_path):
    sources = Sources(data=written(tmp_path, "qasper", line("qasper")).data, template=False)
    (sample,) = made(tokenizer, "qasper", sources)
    assert tokenizer.decode(sample.prompt_ids).startswith("You are given a scientific article")


@pytest.mark.parametrize("name", ["gov_report", "longbench-v2"])
def test_a_length_without_room_for_the_instructions_is_refused(tokenizer, tmp_path, name):
    sources = written2(tmp_path, item()) if name == "longbench-v2" else written(tmp_path, name, line(name))
    for length in (100, TASKS[name].new_tokens + 20):
        with pytest.raises(CellError, match=f"{name}: instructions of .* tokens, but (0|20) are left"):
            made(tokenizer, name, sources, length)


def test_files_are_found_in_both_places_and_missing_ones_are_named(tokenizer, tmp_path):
    flat = tmp_path / "flat"
    assert len(made(tokenizer, "lcc", written(flat, "lcc", line("lcc"), place="{}.jsonl"))) == 1
    with pytest.raises(CellError) as error:
        made(tokenizer, "trec", Sources(data=flat))
    assert str(flat / "longbench" / "trec.jsonl") in str(error.value) and str(flat / "trec.jsonl") in str(error.value)
    with pytest.raises(CellError, match="longbench-v2.json or .*data.jsonl"):
        made(tokenizer, "longbench-v2", Sources(data=flat))
    with pytest.raises(CellError, match="no folder of datasets was given; it must hold longbench/trec.jsonl"):
        made(tokenizer, "trec", Sources())


@pytest.mark.parametrize(
    "name, broken, message",
    [
        ("hotpotqa", '{"input": ', "no JSON in UTF-8"),
        ("hotpotqa", "[1, 2]", r"must be a JSON object, not \[1, 2\]"),
        ("hotpotqa", '{"input": "a"}', "has no 'context'"),
        ("hotpotqa", line("hotpotqa", context=None), "'context' must be a text, not None"),
        ("hotpotqa", line("hotpotqa", answers=[]), r"'answers' must be a list of one or more texts, not \[\]"),
        ("hotpotqa", line("hotpotqa", answers="Paris"), "'answers' must be a list"),
        ("trec", line("trec", all_classes=None), "'all_classes' must be a list"),
        ("passage_retrieval_en", line("passage_retrieval_en", answers=["12"]), "'answers': '12' does not name"),
    ],
)
def test_a_malformed_line_is_named(tokenizer, tmp_path, name, broken, message):
    sources = written(tmp_path, name, line(name), "", broken, line(name))
    with pytest.raises(CellError, match=rf"{name}.jsonl, line 3: {message}"):
        made(tokenizer, name, sources)
    # Only the lines that are asked for are read.
    assert len(made(tokenizer, name, sources, count=1)) == 1


def test_text_in_another_encoding_is_met_at_its_line(tokenizer, tmp_path):
    sources = written(tmp_path, "lcc", line("lcc"))
    with (tmp_path / "longbench" / "lcc.jsonl").open("ab") as file:
        file.write('{"input": "ä"}\n'.encode("latin-1"))
    with pytest.raises(CellError, match="line 2: no JSON in UTF-8"):
        made(tokenizer, "lcc", sources)


@pytest.mark.parametrize("place", ["longbench-v2.json", "longbench2/data.json", "longbench-v2/data.jsonl"])
def test_version_2_reads_lists_and_lines(tokenizer, tmp_path, place):
    if place.endswith("l"):
        sources = written(tmp_path, "", item(), "", item(40, answer="A"), place=place)
    else:
        sources = written2(tmp_path, item(), item(40, answer="A"), place=place)
    first, second = made(tokenizer, "longbench-v2", sources)
    expected = (
        f"Please read the following text and answer the question below.\n\n<text>\n{story(30)}\n</text>\n\nWhat is the "
        f"correct answer to this question: {QUESTION}\nChoices:\n(A) option A\n(B) option B\n(C) option C\n(D) option "
        'D\n\nFormat your response as follows: "The correct answer is (insert answer here)".'
    )
    assert tokenizer.decode(first.prompt_ids) == framed(tokenizer, expected, "", True)
    assert tuple(first.facts.values()) == ("id-0", "hard", "medium", "Code", "Repository", 0)
    assert tuple(first.facts) == FACTS and first.new_tokens == 128
    task = TASKS["longbench-v2"]
    assert task.score("The correct answer is (C)", first) == 1.0 == task.score("The correct answer is A", second)
    assert task.score("The correct answer is (A)", first) == 0.0 == task.score("C", first)


@pytest.mark.parametrize(
    "broken, message",
    [
        ({"answer": "E"}, "'answer' must be one of A, B, C, D, not 'E'"),
        ({"difficulty": "odd"}, "'difficulty' must be one of easy, hard"),
        ({"length": 7}, "'length' must be a text, not 7"),
    ],
)
def test_a_malformed_item_of_version_2_is_named(tokenizer, tmp_path, broken, message):
    with pytest.raises(CellError, match=f"longbench-v2.json, item 2: {message}"):
        made(tokenizer, "longbench-v2", written2(tmp_path, item(), item(**broken)))
    lines = written(tmp_path, "", item(), item(**broken), place="longbench-v2.json")
    with pytest.raises(CellError, match=f"longbench-v2.json, line 2: {message}"):
        made(tokenizer, "longbench-v2", lines)
    with pytest.raises(CellError, match="longbench-v2.json: no JSON in UTF-8: .*line 1"):
        made(tokenizer, "longbench-v2", written(tmp_path, "", "[{]", place="longbench-v2.json"))


def test_breakdown_counts_hits_under_every_class():
    lines = [
        ({"difficulty": "easy", "length": "short"}, 1.0),
        ({"difficulty": "easy", "length": "long"}, 0.0),
        ({"difficulty": "hard", "length": "long"}, 1.0),
    ]
    found = longbench2.breakdown(lines)
    assert list(found) == ["overall", "easy", "hard", "short", "medium", "long"]
    assert list(found.values()) == [(2, 3), (1, 2), (1, 1), (1, 1), (0, 0), (1, 2)]
    assert longbench2.breakdown([])["overall"] == (0, 0) and math.isclose(longbench2.CHANCE, 1 / 4)
