"""The grid, NeedleBench's needles, other wordings and late questions, read back from the text of the prompts."""

import re

import pytest
from sampling import made, text_of, tokenizer_of

from kvpatch.evaluation.grid import TASKS as GRIDS
from kvpatch.evaluation.later import TASKS as LATER
from kvpatch.evaluation.later import Later
from kvpatch.evaluation.ruler import TASKS
from kvpatch.evaluation.samples import CellError, Sources, by_name
from kvpatch.evaluation.wordings import WORDINGS

RULER = by_name(TASKS)


@pytest.mark.parametrize("task", GRIDS + WORDINGS, ids=lambda task: task.name)
def test_other_needles_are_there_once_and_their_answers_only_in_them(task):
    for sample in made(task, 2000, 6):
        text = text_of(sample)
        assert all(text.count(one) == 1 for one in sample.references)
        assert all(key in text[text.index(key) + 1 :] for key in sample.facts["keys"])  # told, and asked for


@pytest.mark.parametrize("count", [5, 11, 30])
def test_the_grid_spreads_over_the_depths(count):
    samples = made(GRIDS[0], 1500, count)
    asked = [sample.facts["depth"] for sample in samples]
    assert max(asked.count(depth / 10) for depth in range(11)) <= -(-count // 11)
    assert min(asked.count(depth / 10) for depth in range(11)) >= count // 11
    assert max(asked) - min(asked) >= 0.8
    for sample in samples:
        document = re.search(r"question\.\n\n(.*)\n\nWhat is the best", text_of(sample), re.DOTALL).group(1)
        sentence = f"The best thing to do in {sample.facts['keys'][0]} is to {sample.facts['answer']}"
        before, after = document.split(sentence)
        share = len(before.strip()) / (len(before.strip()) + len(after.strip()))
        assert share == pytest.approx(sample.facts["placed"], abs=0.01)
        # Sentences of the prose have up to 300 characters.
        assert abs(share - sample.facts["depth"]) <= 160 / len(before + after) + 0.01


def test_the_grid_measures_rouge():
    pytest.importorskip("rouge_score")
    (sample,) = made(GRIDS[0])
    answer = sample.facts["answer"]
    assert GRIDS[0].measures(answer, sample) == {"rouge_l": 1} and GRIDS[0].measures("", sample) == {"rouge_l": 0}
    # All words and as many others: recall 1, precision a half, F two thirds.
    padded = answer + " zzz" * len(re.findall(r"[a-z0-9]+", answer.lower()))
    assert GRIDS[0].measures(padded, sample)["rouge_l"] == pytest.approx(2 / 3)


def test_five_needles_lie_at_fixed_depths_and_are_asked_together():
    task = GRIDS[1]
    for sample in made(task, 2500, 3):
        text = text_of(sample)
        places = [text.index(one) for one in sample.references]
        assert places == sorted(places) and len(places) == 5
        assert sample.facts["depths"] == [0.1, 0.3, 0.5, 0.7, 0.9]
        assert sample.facts["placed"] == pytest.approx(sample.facts["depths"], abs=0.03)
        asked = re.findall(r"item is hidden on (.*?)\?", text)
        assert sorted(asked) == sorted(sample.facts["keys"]) and text.index(asked[0]) < text.rindex("the questions are")
        assert task.measures(sample.references[1], sample) == {
            "depth_10": 0, "depth_30": 1, "depth_50": 0, "depth_70": 0, "depth_90": 0
        }  # fmt: skip


@pytest.mark.parametrize("of", ["niah_single_2", "niah_multiquery", "vt", "cwe"])
@pytest.mark.parametrize("tokenizer", ["demo", "words"])
def test_a_question_asked_later_is_not_in_the_prompt(of, tokenizer):
    later = Later("late", RULER[of], free=64)
    (sample,) = made(later, tokenizer=tokenizer)
    text, then = text_of(sample, tokenizer), tokenizer_of(tokenizer).decode(sample.then)
    assert sample.free == 64 and "Summarize the text above" in text and 0.98 * 1536 <= len(sample.prompt_ids) <= 1536
    asked = {"vt": sample.facts.get("value"), "cwe": "Answer: The top 10"}.get(of, sample.facts["keys"][0])
    assert asked in then and (of == "cwe" or asked not in text.split("Summarize")[1])
    assert then.rstrip().endswith(("are", "is", "are:"))
    question = {"vt": "Find all variables that are", "cwe": "What are the 10 most"}.get(
        of, "mentioned in the provided text?"
    )
    assert question in then
    if tokenizer == "demo":
        # Together they are the conversation that the template makes of it.
        template = tokenizer_of("demo").apply_chat_template
        user = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        turns = [("user", user), ("assistant", "Well."), ("user", then.split("user\n")[1].split("<|im_end|>")[0])]
        chat = template([{"role": a, "content": b} for a, b in turns], tokenize=False, add_generation_prompt=True)
        assert (text + "Well." + then).startswith(chat)


def test_the_needle_is_asked_after_512_tokens():
    (sample,) = made(LATER[0])
    assert sample.free == 512 and sample.references[0] in text_of(sample)
    assert sample.references[0] not in tokenizer_of("words").decode(sample.then)


def test_wordings_differ_from_one_another_and_do_not_lead_into_a_copy():
    openings = [text_of(*made(task)).rsplit("\n", 1)[1] for task in WORDINGS]
    assert len(set(openings)) == len(WORDINGS) >= 4
    # Words as well as numbers are asked for, with an opening and without.
    answers = [made(task)[0].references[0] for task in WORDINGS]
    assert any(one.isdigit() for one in answers) and any(one.replace(" ", "").isalpha() for one in answers)
    for task in WORDINGS:
        assert "magic" not in task.sentence and (not task.opening or task.opening not in task.sentence)
    assert any(not task.opening for task in WORDINGS) and any(task.opening for task in WORDINGS)


def test_the_users_text_is_the_haystack(tmp_path):
    file = tmp_path / "own.txt"
    file.write_text('It rains.\n"Does it?" she said. Nobody knew!\n\nA heading without a stop\n\nIt went on.', "utf-8")
    for task in (RULER["niah_single_2"], GRIDS[0], WORDINGS[0]):
        text = text_of(*made(task, sources=Sources(haystack=file)))
        assert text.count("Nobody knew!") > 10 and "A heading without a stop It went on. It rains." in text
    (sample,) = made(GRIDS[0], sources=Sources(haystack=file))
    before = text_of(sample).split("The best thing to do")[0].strip()
    assert before.endswith(("question.", "rains.", '?"', "said.", "knew!", "stop", "on."))


@pytest.mark.parametrize("content", [None, b"", b" \n\n ", b"\xff\xfe\xfa"])
def test_a_haystack_that_is_no_text_is_refused_by_name(tmp_path, content):
    file = tmp_path / "broken.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(CellError, match="haystack .*broken.txt"):
        made(RULER["niah_single_2"], sources=Sources(haystack=file))
