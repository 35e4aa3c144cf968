"""RULER's question answering from small files written by hand."""

import copy
import json
import re

import pytest
from sampling import made, text_of

from kvpatch.evaluation.later import Later
from kvpatch.evaluation.ruler import TASKS
from kvpatch.evaluation.samples import CellError, Sources, by_name

RULER = by_name(TASKS)


def paragraph(name, asked=1):
    filler = " ".join(f"{name}{place} stands here." for place in range(12))
    questions = [
        {
            "question": f"What is said of {name} ({number})?",
            "id": f"{name}-{number}",
            "is_impossible": False,
            "answers": [{"text": f"{name}{number}"}, {"text": f"{name}{number}"}, {"text": f"the {name}{number}"}],
        }
        for number in range(asked)
    ]
    impossible = {"question": f"Who hid {name}?", "id": f"{name}-x", "is_impossible": True, "answers": []}
    return {"context": filler, "qas": [impossible, *questions]}


SQUAD = {
    "version": "v2.0",
    "data": [
        {"title": "Birds", "paragraphs": [paragraph("heron", 2), paragraph("finch")]},
        {"title": "Trees", "paragraphs": [paragraph(f"oak{letter}") for letter in "abcdefghijklmnopqrst"]},
    ],
}
HOTPOT = [
    {
        "_id": f"q{number}",
        "question": f"Which is larger, {number}?",
        "answer": f"gold{number}",
        "supporting_facts": [[f"T{number}-1", 0], [f"T{number}-3", 1]],
        "context": [[f"T{number}-{place}", ["One sentence. ", f"Two of {number}, {place}."]] for place in range(5)],
    }
    for number in range(30)
]
FILES = {"qa_1": ("squad.json", SQUAD), "qa_2": ("hotpotqa.json", HOTPOT)}


@pytest.fixture
def folder(tmp_path):
    for name, data in FILES.values():
        (tmp_path / name).write_text(json.dumps(data), "utf-8")
    return tmp_path


def documents(text):
    body = text.split("The following are given documents.\n\n")[1].split("\n\nAnswer the question")[0]
    found = re.split(r"(?:^|\n\n)Document (\d+):\n", body)[1:]
    assert [int(number) for number in found[::2]] == list(range(1, len(found) // 2 + 1))
    return found[1::2]


@pytest.mark.parametrize("length", [400, 700, 900])
def test_paragraphs_of_squad_lie_among_others(folder, length):
    samples = made(RULER["qa_1"], length, 3, sources=Sources(data=folder))
    assert [sample.facts["keys"] for sample in samples] == [
        ["What is said of heron (0)?"], ["What is said of heron (1)?"], ["What is said of finch (0)?"]
    ]  # fmt: skip
    assert samples[1].references == ("heron1", "the heron1")
    paragraphs = [one["context"] for article in SQUAD["data"] for one in article["paragraphs"]]
    for sample in samples:
        text = text_of(sample)
        found = documents(text)
        assert len(set(found)) == len(found) and set(found) <= set(paragraphs)
        # Both paragraphs of the article are there before any of another one.
        assert {paragraphs[0], paragraphs[1]} <= set(found) or len(found) == 1
        gold = paragraphs[0] if "heron" in sample.references[0] else paragraphs[1]
        assert sample.facts["depths"] == [pytest.approx(found.index(gold) / len(found), abs=0.05)]
        assert text.startswith("Answer the question based on the given documents. Only give me the answer and do not")
        assert text.endswith(f"output any other words.\n\nQuestion: {sample.facts['keys'][0]} Answer:")
        # A paragraph is about 60 words, 60 spaces and stops.
        assert length - 100 <= len(sample.prompt_ids) + 32 <= length


def test_the_document_with_the_answer_is_anywhere(folder):
    own = [made(RULER["qa_1"], 900, seed=seed, sources=Sources(data=folder))[0] for seed in range(12)]
    assert min(one.facts["depths"][0] for one in own) < 0.4 and max(one.facts["depths"][0] for one in own) > 0.6


def test_any_answer_is_right(folder):
    task = RULER["qa_1"]
    (sample,) = made(task, 700, sources=Sources(data=folder))
    assert task.score("It is HERON0.", sample) == 1 and task.score("finch0", sample) == task.score("", sample) == 0


def test_the_ten_documents_of_a_hotpotqa_question_stay_together(folder):
    samples = made(RULER["qa_2"], 600, 4, sources=Sources(data=folder))
    for number, sample in enumerate(samples):
        found = documents(text_of(sample))
        own = {f"T{number}-{place}\nOne sentence. Two of {number}, {place}." for place in range(5)}
        assert own < set(found) and len(set(found)) == len(found) and sample.references == (f"gold{number}",)
        gold = [next(at for at, one in enumerate(found) if one.startswith(f"T{number}-{place}\n")) for place in (1, 3)]
        assert sample.facts["depths"] == pytest.approx([at / len(found) for at in gold], abs=0.03)


@pytest.mark.parametrize("name", FILES)
def test_samples_follow_from_their_arguments(folder, name):
    def ids(**more):
        return [one.prompt_ids for one in made(RULER[name], 700, sources=Sources(data=folder), **more)]

    assert ids(count=3) == ids(count=3) and ids(count=2) == ids(count=3)[:2]
    assert ids(count=1, seed=43) != ids(count=1)


def test_samples_end_with_the_questions(folder):
    assert len(made(RULER["qa_1"], 700, 100, sources=Sources(data=folder))) == 23
    (late,) = made(Later("late", RULER["qa_1"]), 700, sources=Sources(data=folder))
    assert "What is said of heron (0)?" not in text_of(late) and late.then


def test_a_question_that_does_not_fit_is_left_out_and_none_is_a_refusal(folder):
    data = copy.deepcopy(SQUAD)
    data["data"][0]["paragraphs"][0]["context"] *= 20
    (folder / "squad.json").write_text(json.dumps(data), "utf-8")
    (sample,) = made(RULER["qa_1"], 700, sources=Sources(data=folder))
    assert sample.facts["question"] == 2 and sample.references == ("finch0", "the finch0")
    with pytest.raises(CellError, match="qa_1 does not fit 120 tokens: it needs at least"):
        made(RULER["qa_1"], 120, sources=Sources(data=folder))


def test_too_few_documents_are_refused(folder):
    with pytest.raises(CellError, match=r"qa_1 at 9000 tokens: all documents of .*squad.json fill only \d+"):
        made(RULER["qa_1"], 9000, sources=Sources(data=folder))


def test_the_published_names_are_read_too(folder):
    before = {name: made(RULER[name], 700, sources=Sources(data=folder)) for name in FILES}
    (folder / "squad.json").rename(folder / "dev-v2.0.json")
    (folder / "hotpotqa.json").rename(folder / "hotpot_dev_distractor_v1.json")
    assert {name: made(RULER[name], 700, sources=Sources(data=folder)) for name in FILES} == before


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_named(tmp_path, name):
    path = re.escape(str(tmp_path / FILES[name][0]))
    with pytest.raises(CellError, match=rf"{name} finds neither {path} nor .*https://"):
        made(RULER[name], sources=Sources(data=tmp_path))
    with pytest.raises(CellError, match=rf"{name} needs a data folder with {FILES[name][0]}.*https://"):
        made(RULER[name])


def spoiled(change):
    data = {name: copy.deepcopy(one) for name, (_, one) in FILES.items()}
    change(data)
    return data


@pytest.mark.parametrize(
    "name, change, place",
    [
        ("qa_1", lambda d: d["qa_1"].pop("data"), "squad.json has no 'data'"),
        ("qa_1", lambda d: d["qa_1"]["data"].clear(), "squad.json has no question"),
        (
            "qa_1",
            lambda d: d["qa_1"]["data"][1]["paragraphs"][2].pop("context"),
            r"data\[1\]: paragraphs\[2\] has no 'c",
        ),
        (
            "qa_1",
            lambda d: d["qa_1"]["data"][0]["paragraphs"][0]["qas"][1].pop("answers"),
            r"qas\[1\] has no 'answers'",
        ),
        ("qa_1", lambda d: d["qa_1"]["data"][0]["paragraphs"][0]["qas"][1]["answers"].clear(), r"qas\[1\]: answers is"),
        (
            "qa_1",
            lambda d: d["qa_1"]["data"][0]["paragraphs"][0]["qas"][1]["answers"][0].update(text=""),
            r"answers\[0\]: text is empty",
        ),
        ("qa_1", lambda d: d["qa_1"].update(data={}), "squad.json: data should be a list, is a dict"),
        ("qa_2", lambda d: d["qa_2"][3].pop("answer"), r"hotpotqa.json\[3\] has no 'answer'"),
        ("qa_2", lambda d: d["qa_2"][3]["context"].clear(), r"hotpotqa.json\[3\]: context is empty"),
        ("qa_2", lambda d: d["qa_2"][3]["context"][1].pop(), r"hotpotqa.json\[3\]: context\[1\] has no 1"),
        ("qa_2", lambda d: d["qa_2"][3]["context"][1].__setitem__(1, "text"), r"context\[1\]\[1\] should be a list"),
    ],
)
def test_malformed_files_are_refused_with_the_place(tmp_path, name, change, place):
    data = spoiled(change)
    (tmp_path / FILES[name][0]).write_text(json.dumps(data[name]), "utf-8")
    with pytest.raises(CellError, match=place):
        made(RULER[name], sources=Sources(data=tmp_path))


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"{}"])
def test_files_that_are_no_data_are_named(tmp_path, content):
    for name, (file, _) in FILES.items():
        (tmp_path / file).write_bytes(content)
        with pytest.raises(CellError, match=file):
            made(RULER[name], sources=Sources(data=tmp_path))
