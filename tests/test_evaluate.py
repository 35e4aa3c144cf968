"""Runs of an evaluation: what each sample gives, taking a run up again, and what can't be run."""

import contextlib
import dataclasses
import json
import os

import pytest
import torch
from factories import llama

import kvpatch
from kvpatch import demo
from kvpatch.evaluation import continuation, fidelity, plots, retention, runner, tasks
from kvpatch.evaluation.answers import answered, answers, ends_of
from kvpatch.evaluation.config import Config
from kvpatch.evaluation.forcing import endless
from kvpatch.evaluation.later import Later
from kvpatch.evaluation.reading import Clock, Way, left_padded
from kvpatch.evaluation.ruler import TASKS as RULER
from kvpatch.evaluation.runs import Run
from kvpatch.evaluation.samples import Sample, Sources

SHARE = kvpatch.Budget(0.1, min_budget=1)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo.path())


@pytest.fixture(scope="module")
def model(tokenizer):
    small = llama(query_groups=2, kv_heads=1, layers=2, dtype=torch.float32, vocab_size=len(tokenizer), eos_token_id=2)
    small.generation_config.pad_token_id = tokenizer.pad_token_id
    return small


@pytest.fixture
def handle(model):
    with kvpatch.patched(model, "full", compile=False) as found:
        yield found


def config(tmp_path, **given) -> Config:
    plain = {"tasks": ["niah_single_1", "needle_gate"], "policies": ["full", "inertia", "tova"], "lengths": [450]}
    plain |= {"budgets": ["10%", "24"], "samples": 3, "batch": 2, "compile": False, "out": str(tmp_path / "run")}
    return Config(**plain | given)


def executed(settings: Config, handle, tokenizer, stop_after: int | None = None) -> runner.Evaluation:
    """The evaluation after its run, which is interrupted before so many ways are done."""
    evaluation = runner.Evaluation(settings, handle, tokenizer)
    plan, done = evaluation.plan(), []

    def tick(job, way):
        done.append(way)
        if stop_after is not None and len([one for one in done if one is not None]) >= stop_after:
            raise KeyboardInterrupt

    try:
        evaluation.execute(plan, tick)
    except KeyboardInterrupt:
        return evaluation
    evaluation.finish(plan)
    return evaluation


def key(line) -> tuple:
    return line.key


# ---- answers -----------------------------------------------------------------------------------------------

QUICK = [
    task for task in tasks.tasks().values() if task.sized and task.family != "later" and not task.name.startswith("qa")
]
QUICK.append(Later("later", next(task for task in RULER if task.name == "niah_single_2"), free=9))


@pytest.mark.parametrize("task", QUICK, ids=lambda task: task.name)
def test_the_policy_full_says_what_the_unpatched_model_says(model, tokenizer, task):
    samples = task.samples(tokenizer, 1024, 2, 7, Sources())
    samples = [dataclasses.replace(one, new_tokens=8) for one in samples]
    with kvpatch.patched(model, "full", compile=False) as handle:
        ((_, lines),) = answers(handle, tokenizer, task, samples, [Way("full", "full", "full", None)], Clock())
    ids, mask = left_padded(samples, tokenizer.pad_token_id, "cpu")

    def plainly(tokens, script, ends):
        with contextlib.nullcontext() if ends else endless(model):
            more = {"attention_mask": mask, "do_sample": False, "logits_processor": [script] if script else []}
            return model.generate(ids, max_new_tokens=tokens, **more)[:, ids.shape[1] :]

    expected = answered(plainly, samples, ids.shape[1], ends_of(model))
    for line, tokens, sample in zip(lines, expected, samples, strict=True):
        assert line.prediction == tokenizer.decode(tokens, skip_special_tokens=True)
        assert line.score == task.score(line.prediction, sample) and line.tokens == len(tokens)
        assert (line.prompt_id, line.references) == (sample.prompt_id, sample.references)


def test_a_policy_answers_as_if_it_had_read_the_prompt_itself(model, tokenizer):
    task = next(task for task in RULER if task.name == "niah_multikey_1")
    samples = [dataclasses.replace(one, new_tokens=12) for one in task.samples(tokenizer, 500, 3, 7, Sources())]
    ways = [Way(name, "10%", name, SHARE) for name in ("inertia", "h2o-decode")]
    with kvpatch.patched(model, "full", compile=False) as handle:
        found = {way.name: lines for way, lines in answers(handle, tokenizer, task, samples, ways, Clock())}
    for name, lines in found.items():
        for line, sample in zip(lines, samples, strict=True):
            with kvpatch.patched(model, name, budget=SHARE, compile=False):
                ids = torch.tensor([sample.prompt_ids])
                more = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
                made = model.generate(ids, **more)[0, ids.shape[1] :]
            assert line.prediction == tokenizer.decode(made, skip_special_tokens=True)
            assert line.held == len(sample.prompt_ids) // 10


def test_what_is_fed_later_is_fed_and_the_answer_begins_behind_it(model, tokenizer):
    task = QUICK[-1]
    samples = [dataclasses.replace(one, new_tokens=5) for one in task.samples(tokenizer, 420, 2, 1, Sources())]
    seen = []
    original = model.forward
    with kvpatch.patched(model, "full", compile=False) as handle:
        embed = model.get_input_embeddings()
        hook = embed.register_forward_hook(lambda module, args, output: seen.append(args[0]))
        try:
            list(answers(handle, tokenizer, task, samples, [Way("full", "full", "full", None)], Clock()))
        finally:
            hook.remove()
    assert model.forward == original
    fed = torch.cat([ids for ids in seen if ids.shape[1] == 1], 1)
    for row, sample in zip(fed.tolist(), samples, strict=True):
        assert row[sample.free : sample.free + len(sample.then)] == list(sample.then)


def test_the_scored_tokens_lie_behind_what_is_fed_and_end_with_the_first_end():
    plain = Sample("a", "x", 0, (1, 2), ("r",), 4)
    asked = []

    def generate(tokens, script, ends):
        asked.append((tokens, script is not None, ends))
        return torch.arange(20, 20 + 2 * tokens).view(2, tokens)

    assert answered(generate, [plain, plain], 2, {21, 27}) == [[20, 21], [24, 25, 26, 27]]
    later = [dataclasses.replace(plain, free=3, then=then) for then in ((7, 8), (7, 8, 9))]
    assert answered(generate, later, 2, set()) == [[25, 26, 27, 28], [36, 37, 38, 39]]
    assert asked == [(4, False, True), (10, True, False)]


# ---- runs --------------------------------------------------------------------------------------------------


def test_every_sample_is_run_once_with_every_way_and_each_prompt_is_read_once(tmp_path, handle, tokenizer, monkeypatch):
    reads = []
    read = type(handle).read
    monkeypatch.setattr(type(handle), "read", lambda self, ids, *more: reads.append(len(ids)) or read(self, ids, *more))
    evaluation = executed(config(tmp_path), handle, tokenizer)
    lines = list(evaluation.run.lines())
    assert len(lines) == len({line.key for line in lines}) == 2 * 3 * (1 + 2 * 2)
    assert sum(reads) == 2 * 3
    assert {(line.policy, line.budget) for line in lines} == {
        ("full", "full"), ("inertia", "10%"), ("inertia", "24"), ("tova", "10%"), ("tova", "24"),
    }  # fmt: skip
    assert {line.held for line in lines if line.budget == "24"} == {24}
    assert all(line.held == line.prompt_tokens // 10 for line in lines if line.budget == "10%")
    assert evaluation.clock.saved == pytest.approx(4 * evaluation.clock.read)
    metrics = json.loads((evaluation.run.folder / "metrics.json").read_text())
    assert metrics["seconds"]["read"] == pytest.approx(evaluation.clock.read)
    environment = json.loads((evaluation.run.folder / "environment.json").read_text())
    assert environment["kvpatch"] == kvpatch.__version__ and set(environment["policies"]) == {"full", "inertia", "tova"}


def test_a_run_that_was_stopped_goes_on_to_the_same_metrics(tmp_path, handle, tokenizer):
    whole = executed(config(tmp_path, out=str(tmp_path / "whole")), handle, tokenizer)
    for stop in (1, 4, 11):
        settings = config(tmp_path, out=str(tmp_path / f"stopped-{stop}"))
        stopped = executed(settings, handle, tokenizer, stop_after=stop)
        written = len(list(stopped.run.lines()))
        assert 0 < written < 30
        with stopped.run.predictions.open("ab") as file:  # killed in the middle of a line
            file.write(b'{"task": "niah_sin')
        resumed = executed(settings, handle, tokenizer)
        assert sorted(resumed.run.lines(), key=key) == sorted(whole.run.lines(), key=key)
        one, other = (json.loads((run.run.folder / "metrics.json").read_text()) for run in (resumed, whole))
        assert {name: one[name] for name in one if name != "seconds"} == {
            name: other[name] for name in other if name != "seconds"
        }


def test_a_model_without_a_profile_is_said_to_run_the_policy_best_as_another_one(
    tmp_path, handle, tokenizer, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = config(tmp_path, policies=["full", "best"], tasks=["niah_single_1"], samples=1, budgets=["10%"])
    evaluation = executed(given, handle, tokenizer)
    (note,) = evaluation.notes
    assert "best" in note and "'inertia'" in note and "kvpatch calibrate" in note
    assert json.loads((evaluation.run.folder / "environment.json").read_text())["notes"] == [note]
    others = runner.Evaluation(config(tmp_path, out=str(tmp_path / "others")), handle, tokenizer)
    assert others.notes == []


def test_policies_that_cut_prompts_are_paced_and_run_beside_the_others(tmp_path, handle, tokenizer):
    given = config(tmp_path, policies=["snapkv", "full"], budgets=["10%", "40"], samples=2, tasks=["niah_single_1"])
    evaluation = runner.Evaluation(given, handle, tokenizer)
    plan = evaluation.plan()
    (refused,) = plan.refused  # a tenth of these prompts is less than the window
    assert "snapkv 10%" in refused["reason"] and "last 32" in refused["reason"]
    assert evaluation.pace(plan).step > 0
    lines = list(executed(given, handle, tokenizer).run.lines())
    assert {(line.policy, line.budget) for line in lines} == {("full", "full"), ("snapkv", "40")}
    both = config(
        tmp_path, policies=["full", "inertia", "snapkv"], tasks=["stability"], forced=16, out=str(tmp_path / "both")
    )
    evaluation = runner.Evaluation(both, handle, tokenizer)
    (note,) = evaluation.notes
    assert "stability" in note and "snapkv" in note
    assert {way.name for job in evaluation.plan().jobs for way in job.ways} == {"full", "inertia"}


def test_a_finished_run_has_nothing_left_and_can_be_widened(tmp_path, handle, tokenizer):
    executed(config(tmp_path), handle, tokenizer)
    again = runner.Evaluation(config(tmp_path), handle, tokenizer).plan()
    assert again.jobs == [] and again.found == 30
    wider = config(tmp_path, samples=4, policies=["full", "inertia", "tova", "streaming-llm"])
    plan = runner.Evaluation(wider, handle, tokenizer).plan()
    left = sum(len(job.samples) * len(job.ways) for job in plan.jobs)
    assert left == 2 * 4 * (1 + 3 * 2) - 30


def test_a_full_disk_loses_no_finished_sample(tmp_path, handle, tokenizer, monkeypatch):
    evaluation = runner.Evaluation(config(tmp_path), handle, tokenizer)
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        evaluation.execute(evaluation.plan())
    monkeypatch.undo()
    lines = list(Run(evaluation.run.folder).lines())
    assert len(lines) == 4 and evaluation.run.predictions.read_bytes().endswith(b"\n")  # two ways of two samples
    resumed = executed(config(tmp_path), handle, tokenizer)
    assert len(list(resumed.run.lines())) == 30


def test_a_line_that_is_no_prediction_is_named(tmp_path, handle, tokenizer):
    run = executed(config(tmp_path), handle, tokenizer).run
    content = run.predictions.read_text().splitlines(keepends=True)
    content[4] = '{"task": 3}\n'
    run.predictions.write_text("".join(content))
    with pytest.raises(ValueError, match=r"predictions\.jsonl, line 5"):
        runner.Evaluation(config(tmp_path), handle, tokenizer).plan()


@pytest.mark.parametrize("changed", [{"seed": 43}, {"min_budget": 5}, {"template": False}, {"forced": 100}])
def test_a_folder_keeps_to_one_configuration(tmp_path, handle, tokenizer, changed):
    executed(config(tmp_path), handle, tokenizer)
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=rf"{name}=.*{name}={value}"):
        runner.Evaluation(config(tmp_path, **changed), handle, tokenizer)


def test_what_does_not_fit_is_left_out_with_the_reason(tmp_path, handle, tokenizer):
    settings = config(tmp_path, tasks=["cwe", "qa_1", "hotpotqa", "niah_single_1"], data=str(tmp_path / "nowhere"))
    evaluation = executed(settings, handle, tokenizer)
    refused = {
        cell["task"]: cell["reason"]
        for cell in json.loads((evaluation.run.folder / "metrics.json").read_text())["refused"]
    }
    assert set(refused) == {"cwe", "qa_1", "hotpotqa"}
    assert "nowhere" in refused["qa_1"] and "hotpotqa" in refused["hotpotqa"] and "tokens" in refused["cwe"]
    assert {line.task for line in evaluation.run.lines()} == {"niah_single_1"}


# ---- fidelity ----------------------------------------------------------------------------------------------


def test_fidelity_is_the_distance_on_the_full_caches_own_text(model, tokenizer):
    samples = continuation.samples(tokenizer, 120, 2, 3, Sources(), 24)
    ways = [Way("full", "full", "full", None), Way("inertia", "10%", kvpatch.Policy(), SHARE)]
    with kvpatch.patched(model, "full", compile=False) as handle:
        full, small = (lines for _, lines in continuation.lines(handle, tokenizer, samples, ways, 24, Clock()))
    prompts = torch.tensor([one.prompt_ids for one in samples])
    eos = model.generation_config.eos_token_id
    more = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 24, "do_sample": False}
    texts = model.generate(prompts, suppress_tokens=[eos], eos_token_id=None, **more)
    expected = fidelity(model, texts, 96, {"inertia": (kvpatch.Policy(), SHARE)})["inertia"]
    for row, (line, whole) in enumerate(zip(small, full, strict=True)):
        assert max(map(abs, whole.series["kl"])) < 1e-5 and whole.measures["top1"] == 1.0
        assert whole.measures["diverged"] == 24 and whole.measures["lost_mass"] == 0.0
        assert torch.allclose(torch.tensor(line.series["kl"]), expected.divergence[row], atol=1e-5)
        assert line.measures["kl"] == pytest.approx(expected.divergence[row, 2:].mean().item(), abs=1e-5)
        assert line.measures["top1"] == pytest.approx(expected.same[row, 2:].float().mean().item())
        assert line.measures["lost_mass"] == pytest.approx(expected.lost_mass[row, 2:].mean().item(), abs=1e-5)
        assert line.held == 9 and line.score is None


def test_where_free_text_leaves_the_full_caches(model, tokenizer):
    samples = continuation.samples(tokenizer, 150, 2, 5, Sources(), 40)
    ways = [Way("inertia", "4", kvpatch.Policy(), kvpatch.Budget(4))]
    with kvpatch.patched(model, "full", compile=False) as handle:
        ((_, lines),) = continuation.lines(handle, tokenizer, samples, ways, 40, Clock())
    prompts = torch.tensor([one.prompt_ids for one in samples])
    more = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": 40, "do_sample": False}
    more |= {"suppress_tokens": [model.generation_config.eos_token_id], "eos_token_id": None}
    full = model.generate(prompts, **more)[:, 110:]
    with kvpatch.patched(model, "inertia", budget=4, compile=False):
        free = model.generate(prompts, **more)[:, 110:]
    for row, line in enumerate(lines):
        differs = (full[row] != free[row]).nonzero()
        assert line.measures["diverged"] == (int(differs[0]) if len(differs) else 40)


def test_a_prompt_must_be_left_by_what_is_forced(tokenizer):
    with pytest.raises(ValueError, match="forced <= 36"):
        continuation.samples(tokenizer, 100, 1, 0, Sources(), 64)


def test_a_run_of_stability_keeps_and_draws_what_was_held(tmp_path, handle, tokenizer):
    settings = config(tmp_path, tasks=["stability"], lengths=[120], forced=24, samples=2)
    run = executed(settings, handle, tokenizer).run
    lines = list(run.lines())
    assert len(lines) == 2 * (1 + 2 * 2) and all(line.score is None for line in lines)
    assert {"churn_raw", "churn_ema"} <= set(next(line for line in lines if line.policy == "tova").measures)
    held = retention.Retention.load(run.folder)
    assert set(held.held) == {("inertia", "10%"), ("inertia", "24"), ("tova", "10%"), ("tova", "24")}
    drawn = {path.name for path in plots.draw_all(run, run.read_json("metrics.json"), lines)}
    assert {"retention.png", "churn_stability_120.png"} <= drawn


# ---- configuration -----------------------------------------------------------------------------------------


def test_every_key_of_a_yaml_file_can_be_replaced(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "tasks: [niah]\nsamples: 5\nbudgets: [10%, 64]\npolicies:\n- full\n- name: mine\n  base: tova\n  recent: 4\n"
        "- name: two\n  blend: {share: 0.5, score_heads: [[1, 2]]}\n"
    )
    found = Config.load(path, samples=7)
    assert (found.tasks, found.samples, found.budgets, found.lengths) == (("niah",), 7, ("10%", "64"), (1024,))
    policies = dict(found.named_policies())
    assert policies["mine"] == kvpatch.policy.resolve("tova", name="mine", recent=4)
    assert policies["two"].blend == kvpatch.Blend(share=0.5, score_heads=((1, 2),))
    assert Config.of(found.to_dict()) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": ["niah"]}, "unknown key 'task'"),
        ({"samples": 0}, "samples must be a whole number"),
        ({"lengths": []}, "lengths must be a non-empty list"),
        ({"lengths": ["x"]}, "lengths must be a whole number"),
        ({"budgets": ["full"]}, "budgets must be those of policies that evict"),
        ({"budgets": ["12 %%"]}, "budget must be tokens"),
        ({"policies": ["inertai"]}, "did you mean 'inertia'"),
        ({"policies": ["tova", "tova"]}, "different names"),
        ({"policies": [{"base": "tova"}]}, 'mappings with a "name"'),
        ({"template": "yes"}, "template must be"),
    ],
)
def test_a_bad_key_is_named_with_what_is_allowed(given, message):
    with pytest.raises(ValueError, match=message):
        Config.of(given)


def test_an_unknown_task_is_named_with_all_that_there_are():
    with pytest.raises(ValueError, match="'niha'.*families: ruler.*fidelity"):
        tasks.chosen(("niha",))
    assert tasks.chosen(("ruler", "vt", "fidelity"))[-1] == "fidelity"
    assert len(tasks.chosen(("ruler", "vt"))) == 13
