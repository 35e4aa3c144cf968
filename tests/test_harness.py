"""lm-evaluation-harness over a patched model: lm_eval's own plain model is what it is compared with."""

import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from factories import VOCABULARY, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvpatch

BUDGET = 12
STOP = "w40"
NEW = 24
WORDS = ["<pad>", "<eos>", *(f"w{index:02}" for index in range(2, VOCABULARY))]
GENERATION = {"max_gen_toks": NEW, "do_sample": False, "until": [STOP]}
EAGER = {"compile": False, "batch_size": 3}


@pytest.fixture(scope="module")
def harness():
    reason = 'lm_eval is not installed: pip install "kvpatch[lm-eval]"'
    pytest.importorskip("lm_eval", reason=reason)
    return importlib.import_module("kvpatch.evaluation.harness")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Folder of a tiny random Llama with a tokenizer of one word a token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    )
    llama(layers=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def documents():
    """Prompts of unlike lengths; every other one's answer is what the model itself continues with."""
    generator = torch.Generator().manual_seed(3)
    model, rows = llama(layers=2), []
    for index, length in enumerate((30, 61, 44, 18, 52, 37, 25)):
        ids = torch.randint(2, VOCABULARY, (1, length), generator=generator)
        mask = torch.ones_like(ids)
        more = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[0, length:]
        said = " ".join(WORDS[token] for token in more if token > 1).split(STOP)[0]
        answer = said if index % 2 == 0 else "w02"
        prompt = " ".join(WORDS[token] for token in ids[0])
        rows.append({"prompt": prompt, "answer": answer, "choices": ["w05", "w06 w07", "w08"], "gold": index % 3})
    return rows


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, documents):
    """Folder with a generating and a choosing task over the documents."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": " ",
    }
    says = {
        "task": "tiny_says",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": GENERATION,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chooses = {
        "task": "tiny_chooses",
        "output_type": "multiple_choice",
        "doc_to_target": "gold",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (says, chooses):
        (folder / f"{task['task']}.yaml").write_text(json.dumps(shared | task))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def evaluated(harness, checkpoint, tasks):
    """What lm_eval gives for a model's name or object: metrics, configuration, and every document's response."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    def run(model, task: str, **model_args):
        result = lm_eval.simple_evaluate(
            model=model,
            model_args={"pretrained": checkpoint, **model_args},
            tasks=[task],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
        )
        return result["results"][task], result["config"], [one["resps"] for one in result["samples"][task]]

    return run


@pytest.fixture(scope="module")
def plain(evaluated):
    return {task: evaluated("hf", task, batch_size=3, device="cpu") for task in ("tiny_says", "tiny_chooses")}


def test_a_full_budget_gives_the_plain_models_answers(evaluated, plain):
    metrics, config, responses = evaluated("kvpatch", "tiny_says", policy="full", **EAGER)
    expected_metrics, _, expected = plain["tiny_says"]
    assert responses == expected and metrics == expected_metrics
    assert metrics["exact_match,none"] == pytest.approx(4 / 7)  # every other document's answer is the model's own
    assert config["kvpatch"]["evicted"] == 0 and config["kvpatch"]["calls"] == 3


def test_stop_strings_end_an_answer(plain):
    lengths = [len(response[0][0].split()) for response in plain["tiny_says"][2]]
    assert min(lengths) < NEW <= max(lengths), "the documents must tell whether a stop string is heeded"


def test_an_evicting_policy_evicts_and_says_so(harness, evaluated, plain, checkpoint):
    model = harness.KVPatchLM(checkpoint, "inertia", budget=str(BUDGET), sinks=2, **EAGER)
    _, config, responses = evaluated(model, "tiny_says")
    stats = model.handle.stats
    assert stats.evicted > 0 and stats.held == BUDGET and set(stats.budget) == {BUDGET}
    assert model.totals["calls"] == 3 and model.totals["evicted"] > stats.evicted
    assert responses != plain["tiny_says"][2]
    written = json.loads(json.dumps(config["kvpatch"]))
    assert written["policy"]["name"] == "inertia" and written["policy"]["sinks"] == 2
    assert written["budget"] == f"{BUDGET} tokens" and written["evicted"] == model.totals["evicted"]


def test_answers_are_those_of_the_patched_generate(harness, evaluated, checkpoint, documents):
    *_, responses = evaluated("kvpatch", "tiny_says", policy="tova", budget=BUDGET, compile=False)
    model = llama(layers=2)
    kvpatch.patch(model, "tova", budget=BUDGET, compile=False)
    for row, response in zip(documents, responses, strict=True):
        ids = torch.tensor([[WORDS.index(word) for word in row["prompt"].split()]])
        more = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        said = " ".join(WORDS[token] for token in more[0, ids.shape[1] :] if token > 1)
        assert response == [[said.split(STOP)[0]]]


def test_log_likelihoods_are_the_plain_models_and_a_warning_says_it_once(evaluated, plain):
    with pytest.warns(UserWarning, match="no effect on their results") as caught:
        metrics, config, responses = evaluated("kvpatch", "tiny_chooses", policy="inertia", budget=BUDGET, **EAGER)
    assert len([one for one in caught if "log-likelihood" in str(one.message)]) == 1
    expected_metrics, _, expected = plain["tiny_chooses"]
    assert responses == expected and metrics == expected_metrics
    assert config["kvpatch"]["calls"] == 0


def test_without_eviction_log_likelihoods_warn_of_nothing(harness, checkpoint, recwarn):
    model = harness.KVPatchLM(checkpoint, "full", **EAGER)
    model._loglikelihood_tokens([(("w02", "w03"), [2], [3])], disable_tqdm=True)
    assert not [one for one in recwarn if "log-likelihood" in str(one.message)]


@pytest.mark.parametrize(
    ("given", "value", "least"),
    [
        ({"budget": "10%"}, 0.1, 64),
        ({"budget": "0.1", "min_budget": 5}, 0.1, 5),
        ({"budget": 0.1}, 0.1, 64),
        ({"budget": "128"}, 128, 64),
        ({"budget": 128}, 128, 64),
        ({"budget": "full"}, None, 64),
        ({"policy": "full"}, None, 64),
    ],
)
def test_budgets_are_read_as_the_other_commands_read_them(harness, checkpoint, given, value, least):
    handle = harness.KVPatchLM(checkpoint, **EAGER, **given).handle
    assert handle.budget == kvpatch.Budget(value, least)


def test_the_policys_fields_and_patchs_settings_are_passed_on(harness, checkpoint):
    given = {"alpha": 0.5, "refresh": "once", "recent": 0.25, "backend": "packed", "verify": False}
    handle = harness.KVPatchLM(checkpoint, "inertia", budget=BUDGET, **EAGER, **given).handle
    assert handle.policy == kvpatch.Policy("inertia", alpha=0.5, refresh="once", recent=0.25)
    assert (handle.backend, handle.compile) == ("packed", False)


def test_a_loaded_model_is_taken_too(harness, checkpoint):
    model = llama(layers=2)
    given = {"tokenizer": PreTrainedTokenizerFast.from_pretrained(checkpoint), **EAGER}
    assert harness.KVPatchLM(model, "inertia", budget=BUDGET, **given).handle.model is model
    with pytest.raises(ValueError, match="model is patched already: pass replace=True"):
        harness.KVPatchLM(model, "inertia", budget=BUDGET, **given)
    assert harness.KVPatchLM(model, "full", replace=True, **given).handle.policy.name == "full"
    with pytest.raises(TypeError, match="unexpected argument 'bugdet'.*kvpatch takes policy, budget, min_budget"):
        harness.KVPatchLM(model, "full", replace=True, bugdet=3, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "budget must be given for policy 'inertia-lazy'"),
        ({"policy": "inertai", "budget": 8}, "unknown policy 'inertai'.*did you mean 'inertia'"),
        ({"budget": "ten"}, 'budget must be tokens ("1024"), a share of the prompt ("10%") or "full", got \'ten\''),
        ({"budget": 0}, "budget must be an int >= 1 (tokens)"),
        ({"budget": 0.1, "min_budget": "few"}, "min_budget must be an int >= 1, got 'few'"),
        ({"min_budget": 4}, "min_budget=4 without budget"),
        ({"policy": "full", "budget": 8}, "policy 'full', which evicts nothing: leave budget out"),
        ({"budget": 8, "alpha": 2}, "alpha must be a number in [0, 1), got 2"),
        ({"budget": 8, "backend": "causal"}, "backend must be one of auto, packed"),
        ({"budget": 8, "mixed_precision_dtype": "bfloat16"}, "mixed_precision_dtype='bfloat16': .*give dtype"),
        ({"budget": 8, "compile": "no"}, "compile must be True or False, got 'no'"),
    ],
)
def test_a_bad_argument_is_named_before_a_model_is_loaded(harness, given, message):
    pattern = ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises(ValueError, match=pattern):
        harness.KVPatchLM("/no/such/folder", **given)


def test_an_unknown_argument_is_named_with_the_known_ones(harness, checkpoint):
    with pytest.raises(TypeError, match="'bugdet'.*kvpatch takes policy, budget, min_budget"):
        harness.KVPatchLM(checkpoint, budget=8, bugdet=3, **EAGER)


def test_a_generation_setting_that_cannot_be_honoured_is_named(harness, checkpoint):
    from lm_eval.api.instance import Instance

    model = harness.KVPatchLM(checkpoint, "inertia", budget=BUDGET, **EAGER)
    arguments = ("w02 w03", GENERATION | {"prompt_lookup_num_tokens": 2})
    request = Instance("generate_until", {}, arguments, 0)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=2 is not supported by a patched model"):
        model.generate_until([request], disable_tqdm=True)


def test_the_demo_model_is_known_by_name(harness, checkpoint, monkeypatch):
    monkeypatch.setattr(kvpatch.demo, "path", lambda: checkpoint)
    assert harness.KVPatchLM("demo", "full", **EAGER).pretrained == checkpoint


def test_the_command_evaluates_and_writes_the_models_name(harness, checkpoint, tasks, tmp_path):
    command = [
        *(sys.executable, "-m", "kvpatch.evaluation.harness", "--model", "kvpatch"),
        *("--model_args", f"pretrained={checkpoint},policy=inertia,budget=25%,min_budget=4,compile=False"),
        *("--tasks", str(tasks / "tiny_says.yaml"), "--batch_size", "4", "--limit", "4"),
        *("--output_path", str(tmp_path / "out")),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "tiny_says" in done.stdout
    (file,) = (tmp_path / "out").rglob("results_*.json")
    written = json.loads(file.read_text())
    assert written["model_source"] == written["config"]["model"] == "kvpatch"
    assert written["model_name"] == checkpoint
    assert written["config"]["kvpatch"]["budget"] == "0.25 of the prompt"
    assert written["config"]["kvpatch"]["evicted"] > 0


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch):
    for name in ("lm_eval", "lm_eval.api.registry", "lm_eval.models.huggingface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvpatch.evaluation.harness", raising=False)
    with pytest.raises(ModuleNotFoundError, match=re.escape('pip install "kvpatch[lm-eval]"')):
        importlib.import_module("kvpatch.evaluation.harness")
