"""Patching changes one instance and gives everything back; what can't be honoured is refused by name."""

import copy
import functools
import io
import json
import pickle
import subprocess
import sys
import types

import pytest
import torch
from factories import BUDGET, assert_restored, left_padded, llama, patch, prompts, snapshot
from factories import run as run_longer
from transformers import (
    DynamicCache,
)

import kvpatch
from kvpatch import patches, verification

run = functools.partial(run_longer, max_new_tokens=12)


def outcome(model) -> list:
    """A call's tokens and logits, unpatched."""
    got = run(model, return_dict_in_generate=True, output_logits=True)
    return [got.sequences, *got.logits]


def same(first: list, second: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- there and back ----------------------------------------------------------------------------------------


def test_unpatch_gives_back_every_attribute_of_every_module(model):
    expected, before = outcome(model), snapshot(model)
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    patch(model)
    assert list(snapshot(model)) != list(before)
    run(model)
    kvpatch.unpatch(model)
    assert_restored(before, model)
    assert model.config.to_dict() == config and model.generation_config.to_dict() == generation
    assert same(outcome(model), expected)


def test_the_with_block_gives_back_after_an_exception(model):
    before = snapshot(model)
    with (
        pytest.raises(KeyError, match="planted"),
        kvpatch.patched(model, "inertia", budget=BUDGET, compile=False),
    ):
        run(model)
        raise KeyError("planted")
    assert_restored(before, model)


def test_the_with_block_yields_the_handle_and_gives_back(model):
    before = snapshot(model)
    with kvpatch.patched(model, "inertia", budget=BUDGET, compile=False) as handle:
        run(model)
        assert isinstance(handle, kvpatch.Patch) and handle.stats.held == BUDGET and handle.model is model
    assert_restored(before, model)


def test_unpatching_twice_or_a_model_that_is_not_patched_does_nothing(model):
    before = snapshot(model)
    kvpatch.unpatch(model)
    assert_restored(before, model)
    patch(model)
    kvpatch.unpatch(model)
    kvpatch.unpatch(model)
    assert_restored(before, model)


def test_a_patch_taken_back_inside_its_with_block_is_no_error(model):
    before = snapshot(model)
    with kvpatch.patched(model, "inertia", budget=BUDGET, compile=False):
        kvpatch.unpatch(model)
        newer = patch(model, "tova")
        newer.undo()
    assert_restored(before, model)


def test_forwards_and_generate_that_users_wrote_into_the_instance_come_back(model):
    calls = []

    def forward(self, *args, **kwargs):
        calls.append("forward")
        return type(self).forward(self, *args, **kwargs)

    def generate(self, *args, **kwargs):
        calls.append("generate")
        return type(self).generate(self, *args, **kwargs)

    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(forward, attention)
    model.generate = types.MethodType(generate, model)
    before = snapshot(model)
    patch(model)
    run(model)
    assert set(calls) == {"forward", "generate"}  # still part of what runs
    kvpatch.unpatch(model)
    assert_restored(before, model)
    assert model.__dict__["generate"] is before["", "generate"]


def test_another_instance_is_not_touched(model):
    other = llama(layers=2, seed=1)
    before, classes = snapshot(other), {kind: dict(vars(kind)) for kind in map(type, model.modules())}
    patch(model)
    assert_restored(before, other)
    assert all(dict(vars(kind)) == attributes for kind, attributes in classes.items())


def scaled(self, *args, **kwargs):
    """An attention that has been altered: its output is larger by half."""
    output, weights = type(self).forward(self, *args, **kwargs)
    return 1.5 * output, weights


def altered(model) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(scaled, attention)


def test_a_model_with_another_attention_is_refused_and_left_as_it_was(model):
    altered(model)
    expected, before = outcome(model), snapshot(model)
    with pytest.raises(kvpatch.VerificationError, match="LlamaForCausalLM") as caught:
        patch(model)
    assert isinstance(caught.value, kvpatch.KVPatchError)
    assert_restored(before, model)
    assert same(outcome(model), expected)
    patch(model, verify=False)  # told not to look
    kvpatch.unpatch(model)
    assert_restored(before, model)


def test_an_error_during_verification_leaves_the_model_as_it_was(model, monkeypatch):
    from kvpatch import patching

    before = snapshot(model)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(patching, "compare", fails)
    with pytest.raises(KeyboardInterrupt):
        patch(model)
    assert_restored(before, model)


def test_a_second_patch_needs_replace(model):
    before = snapshot(model)
    first = patch(model)
    patched_once = snapshot(model)
    with pytest.raises(ValueError, match="replace=True") as caught:
        patch(model, "tova")
    assert "unpatch" in str(caught.value) and "inertia" in str(caught.value)
    assert_restored(patched_once, model)
    second = patch(model, "tova", replace=True)
    assert second is not first and second.policy.name == "tova"
    run(model)
    assert second.stats.steps > 0 and first.stats.steps == 0
    kvpatch.unpatch(model)
    assert_restored(before, model)


def test_replace_with_bad_arguments_keeps_the_earlier_patch(model):
    first = patch(model)
    before = snapshot(model)
    for bad in (
        {"policy": "tovva"},
        {"budget": 0},
        {"score_layers": [9]},
        {"sinks": BUDGET},
        {"backend": "fused"},
    ):
        with pytest.raises((ValueError, TypeError)):
            patch(model, replace=True, **bad)
        assert_restored(before, model)
    run(model)
    assert first.stats.held == BUDGET


def test_replace_on_a_model_that_is_not_patched_is_a_patch(model):
    patch(model, replace=True)
    assert kvpatch.explain(model).policy == "inertia"


# ---- what is saved, copied, hooked and drawn ---------------------------------------------------------------


def files(folder) -> dict:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_state_dict_and_saved_files_are_those_of_the_unpatched_model(model, tmp_path):
    state = model.state_dict()
    model.save_pretrained(tmp_path / "before")
    patch(model)
    run(model)
    patched_state = model.state_dict()
    assert list(patched_state) == list(state)
    assert all(patched_state[key].data_ptr() == state[key].data_ptr() for key in state)
    assert all(torch.equal(patched_state[key], state[key]) for key in state)
    model.save_pretrained(tmp_path / "patched")
    saved = files(tmp_path / "before")
    assert {"config.json", "model.safetensors"} <= set(saved)
    assert files(tmp_path / "patched") == saved


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_copying_a_patched_model_raises_with_the_way_out(model, duplicate, used):
    patch(model)
    if used:
        run(model)
    expected = run(model)
    with pytest.raises(RuntimeError, match=r"unpatch\(model\)"):
        duplicate(model)
    assert torch.equal(run(model), expected)
    kvpatch.unpatch(model)
    duplicate(model)


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("with_kwargs", [False, True], ids=["plain", "with kwargs"])
def test_hooks_do_not_see_the_probe_and_fire_as_before(model, kind, with_kwargs):
    fired = []
    modules = {"whole": model, "base": model.model, "attention": model.model.layers[0].self_attn}
    modules |= {"norm": model.model.norm, "mlp": model.model.layers[1].mlp}
    for name, module in modules.items():
        getattr(module, kind)(lambda *_, name=name: fired.append(name), with_kwargs=with_kwargs)
    ids = left_padded(prompts((9,)))
    with torch.no_grad():
        model(**ids)
    expected, before = list(fired), snapshot(model)
    fired.clear()
    patch(model)
    assert fired == []
    with torch.no_grad():
        model(**ids)
    assert fired == expected  # a forward without a SlotCache
    fired.clear()
    run(model, ids, max_new_tokens=3)
    # The prompt, and two decode steps through the modules that a step calls as a whole.
    assert [fired.count(name) for name in ("attention", "mlp", "norm")] == [3, 3, 3]
    fired.clear()
    kvpatch.unpatch(model)
    assert_restored(before, model)
    with torch.no_grad():
        model(**ids)
    assert fired == expected


def test_hooks_survive_a_failed_verification(model):
    fired = []
    model.model.norm.register_forward_hook(lambda *_: fired.append("norm"))
    altered(model)
    before = snapshot(model)
    with pytest.raises(kvpatch.VerificationError):
        patch(model)
    assert_restored(before, model)
    assert fired == []


def test_patching_draws_no_random_number(model):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    patch(model)
    assert torch.equal(torch.get_rng_state(), before)
    kvpatch.unpatch(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_patching_leaves_gradients_and_modes_alone(model):
    model.model.norm.weight.requires_grad_(False)
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert torch.is_grad_enabled()
    patch(model)
    assert torch.is_grad_enabled() and not model.training
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wanted
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- a patched model as a plain one ------------------------------------------------------------------------


def test_a_forward_without_a_slot_cache_is_bit_identical(restored):
    batch = left_padded(prompts((20, 9)))

    @torch.no_grad()
    def forwards():
        plain = restored(**batch, use_cache=False).logits
        cached = restored(**batch, past_key_values=DynamicCache(config=restored.config)).logits
        return plain, cached

    expected = forwards()
    patch(restored)
    assert all(torch.equal(a, b) for a, b in zip(forwards(), expected, strict=True))


def test_gradients_flow_through_a_patched_model_as_before(model):
    batch = left_padded(prompts((9,)))

    def gradient():
        model.zero_grad()
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradient()
    patch(model)
    assert same(gradient(), expected)


# ---- reports -----------------------------------------------------------------------------------------------


def test_explaining_a_model_that_is_not_patched_raises(model):
    for thing in (model, object(), None):
        with pytest.raises(ValueError, match=r"kvpatch\.patch"):
            kvpatch.explain(thing)
    patch(model)
    kvpatch.unpatch(model)
    with pytest.raises(ValueError, match=r"kvpatch\.patch"):
        kvpatch.explain(model)


@pytest.mark.parametrize(
    ("policy", "budget"),
    [("inertia", BUDGET), ("tova", 0.3), ("inertia-lazy", "full"), ("full", None)],
    ids=["tokens", "share", "no eviction", "full"],
)
def test_an_explanation_names_backend_policy_and_bytes(restored, policy, budget):
    handle = patch(restored, policy, budget=budget)
    explanation = kvpatch.explain(restored)
    config = restored.config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 8  # float64
    text, plain = str(explanation), explanation.to_dict()
    for part in (
        type(restored).__name__,
        policy,
        handle.backend,
        handle.backend_reason,
        f"{per_token:,} bytes",
    ):
        assert part in text
    assert json.loads(json.dumps(plain)) == plain
    assert plain["backend"] == handle.backend and plain["policy"] == policy and plain["bytes_per_token"] == per_token
    assert len(plain["layers"]) == config.num_hidden_layers
    evicts = budget not in ("full", None)
    assert (plain["bytes_per_row"] is not None) == evicts
    assert all(("never scores" in line) != evicts for line in plain["layers"])


def test_the_bytes_promised_are_those_that_the_slots_take(restored):
    handle = patch(restored)
    promised = kvpatch.explain(restored).to_dict()["bytes_per_row"]
    run(restored, max_new_tokens=100)
    current = handle._last().current
    assert 2 * promised == sum(tensor.nbytes for tensor in (*current.keys, *current.values))
    patch(restored, budget=0.3, replace=True)
    plain = kvpatch.explain(restored).to_dict()
    assert "1,000" in plain["bytes_per_row_of"]
    assert (300 + 1) * plain["bytes_per_token"] <= plain["bytes_per_row"] < (300 + 65) * plain["bytes_per_token"]


def test_layers_that_never_score_are_told_apart(restored):
    patch(restored, score_layers=[1])
    first, second = kvpatch.explain(restored).layers
    assert "never scores" in first and "never" not in second
    assert first in str(kvpatch.explain(restored)) and second in str(kvpatch.explain(restored))


def test_stats_are_plain_numbers_before_and_after_a_call(restored):
    handle = patch(restored)
    fresh = handle.stats.to_dict()
    assert json.loads(json.dumps(fresh)) == fresh and fresh["steps"] == 0
    assert str(handle.stats)
    run(restored)
    plain = handle.stats.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    prompt, new = [20, 9], 12
    assert plain["steps"] == new - 1 and plain["prompt"] == prompt and plain["budget"] == [BUDGET] * 2
    assert plain["held"] == BUDGET
    assert plain["evicted"] == sum(length + new - 1 - BUDGET for length in prompt)
    assert plain["refreshes"] == new - 1 and plain["compiles"] == 0
    assert 0 < plain["step_seconds_p20"] <= plain["step_seconds_p50"] <= plain["step_seconds_p80"]
    assert plain["peak_cache_bytes"] >= plain["cache_bytes"] > 0
    assert str(BUDGET) in str(handle.stats)


def test_freeing_gives_the_memory_back_and_the_next_call_works(restored):
    handle = patch(restored)
    expected = run(restored)
    cache = handle._last()
    assert handle.stats.cache_bytes == cache.nbytes > 0
    handle.free()
    assert cache.nbytes == 0 and handle.stats.cache_bytes == 0
    with pytest.raises(RuntimeError, match="generate"):
        handle.retained()
    handle.free()
    assert torch.equal(run(restored), expected)
    assert (handle.retained() >= 0).sum(-1).max() == BUDGET


def test_retained_before_any_call_raises(restored):
    handle = patch(restored)
    with pytest.raises(RuntimeError, match="generate"):
        handle.retained()


def test_retained_has_one_set_for_each_layer_row_and_head(restored):
    handle = patch(restored, "tova")
    run(restored)
    retained = handle.retained()
    assert retained.shape[:3] == (restored.config.num_hidden_layers, 2, restored.config.num_key_value_heads)
    for row, length in ((0, 20), (1, 9)):
        for head in retained[:, row].flatten(0, 1).tolist():
            held = [position for position in head if position >= 0]
            assert len(held) == len(set(held)) == BUDGET
            assert max(held) < length + 11


def test_the_handles_text_names_model_policy_budget_and_backend(restored):
    handle = patch(restored)
    assert all(part in repr(handle) for part in ("LlamaForCausalLM", "inertia", str(BUDGET), handle.backend))


# ---- importing ---------------------------------------------------------------------------------------------

STATE = """
import json, logging, random, signal, sys, threading, warnings
import numpy, torch, transformers, torch._dynamo, torch._inductor.config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.generation import GenerationMixin

CLASSES = (
    GenerationMixin, torch.nn.Module,
    modeling_llama.LlamaAttention, modeling_llama.LlamaModel, modeling_llama.LlamaForCausalLM,
)
LOGGERS = [logging.getLogger(name) for name in (None, "transformers", "torch", "kvpatch")]

def settings(config):
    return {name: repr(getattr(config, name)) for name in sorted(config._config)}

def state():
    return {
        "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "random": [random.getstate(), torch.get_rng_state().tolist(), repr(numpy.random.get_state())],
        "attention": sorted(ALL_ATTENTION_FUNCTIONS.keys()),
        "functions": [id(ALL_ATTENTION_FUNCTIONS[name]) for name in sorted(ALL_ATTENTION_FUNCTIONS.keys())],
        "dynamo": settings(torch._dynamo.config), "inductor": settings(torch._inductor.config),
        "classes": [{name: id(value) for name, value in sorted(vars(kind).items())} for kind in CLASSES],
        "print": repr(torch._tensor_str.PRINT_OPTS),
        "warnings": len(warnings.filters), "hook": id(sys.excepthook),
        "logging": [(log.level, len(log.handlers)) for log in LOGGERS],
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "alive": threading.active_count(), "environment": sorted(__import__("os").environ.items()),
    }

before = state()
import kvpatch, kvpatch.patches, kvpatch.profiles
after = state()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def test_importing_changes_nothing():
    done = subprocess.run([sys.executable, "-c", STATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_in_half_precision_twice_the_models_own_rounding_is_allowed_and_never_more_than_three_tenths():
    model, expected = llama(layers=1, dtype=torch.bfloat16), torch.ones(3, 7)
    keyword = patches.cache_keyword(model.model.layers[0].self_attn)
    own = verification.rounding(model, keyword, 1.25 * verification.probe(model, keyword, None))
    assert abs(own - 0.2) < 0.02  # a fifth of what it is compared with, and what bfloat16 rounds

    def passes(error: float, own: float) -> bool:
        try:
            verification.compare(expected, expected * (1 + error), model, own)
        except kvpatch.VerificationError:
            return False
        return True

    assert passes(0.029, 0.0) and not passes(0.031, 0.0)
    assert passes(0.099, 0.05) and not passes(0.101, 0.05)
    assert passes(0.29, 1.0) and not passes(0.31, 1.0)


def test_a_model_whose_logits_depend_on_how_its_tokens_are_read_is_allowed_as_much(monkeypatch):
    model = llama(layers=1, dtype=torch.bfloat16)
    keyword = patches.cache_keyword(model.model.layers[0].self_attn)
    expected = verification.probe(model, keyword, None)
    near = verification.rounding(model, keyword, expected)
    forward = model.forward

    def apart(*args, **given):  # as if a product of one row were rounded otherwise than one of eight
        output = forward(*args, **given)
        if given["input_ids"].shape[1] == 1 and given["input_ids"].item() < 8:
            apart.lost += 0.25
        output.logits = output.logits * (1 + apart.lost * (given["input_ids"].shape[1] == 1))
        return output

    apart.lost = 0.0
    monkeypatch.setitem(model.__dict__, "forward", apart)
    assert verification.rounding(model, keyword, expected) > near + 0.2


def test_in_single_precision_nothing_is_allowed_for_rounding():
    model = llama(layers=1, dtype=torch.float32)
    assert verification.rounding(model, "cache", torch.zeros(3, 7)) == 0.0
