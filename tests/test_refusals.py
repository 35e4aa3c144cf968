"""What can't be patched or honoured is refused by name, before any work, and nothing is half-patched."""

import copy
import functools

import pytest
import torch
from factories import BUDGET, assert_restored, left_padded, llama, patch, prompts, snapshot
from factories import run as run_longer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LogitsProcessorList,
    T5Config,
    T5ForConditionalGeneration,
)

import kvpatch

run = functools.partial(run_longer, max_new_tokens=12)


def tiny_t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def tiny_gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1))


def small_config():
    return LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def on_meta():
    with torch.device("meta"):
        return LlamaForCausalLM(small_config())


UNSUPPORTED = {
    "meta device": (on_meta, ("meta",)),
    "encoder-decoder": (tiny_t5, ("T5ForConditionalGeneration", "encoder-decoder", "llama")),
    "other model type": (tiny_gpt2, ("gpt2", "GPT2LMHeadModel", "llama")),
    "no lm_head": (lambda: LlamaModel(small_config()), ("LlamaModel", "lm_head", "AutoModelForCausalLM")),
    "no transformers model": (lambda: torch.nn.Linear(2, 2), ("Linear", "transformers")),
}


@pytest.mark.parametrize(("make", "named"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_model_that_cannot_be_patched_is_refused_and_untouched(make, named):
    model = make().eval()
    before = snapshot(model)
    with pytest.raises(kvpatch.UnsupportedModelError) as caught:
        patch(model)
    assert all(part in str(caught.value) for part in named)
    assert isinstance(caught.value, ValueError)
    assert_restored(before, model)


def test_a_model_in_training_mode_is_refused_with_the_way_out(model):
    model.train()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"training mode.*model\.eval\(\)"):
        patch(model)
    assert_restored(before, model)


BAD_ARGUMENTS = {
    "prefill": ({"prefill": "snapvk"}, ValueError, ("prefill", "'snapvk'", "did you mean", "'snapkv'")),
    "profile": ({"profile": "h200"}, ValueError, ("profile", "'h200'")),
    "unknown policy": (
        {"policy": "inertai"},
        ValueError,
        ("policy", "'inertai'", "did you mean", "'inertia'"),
    ),
    "policy of another type": ({"policy": 3}, TypeError, ("policy", "3")),
    "unknown field": ({"alhpa": 0.5}, TypeError, ("'alhpa'", "did you mean", "'alpha'")),
    "bad field": ({"alpha": 1.5}, ValueError, ("alpha", "1.5")),
    "bad budget": ({"budget": 1.5}, ValueError, ("budget", "1.5")),
    "budget of another type": ({"budget": "half"}, TypeError, ("budget", "'half'")),
    "sinks and recent fill the budget": (
        {"sinks": 5, "recent": BUDGET - 5},
        ValueError,
        ("sinks + recent", str(BUDGET)),
    ),
    "shares fill the budget": ({"sinks": 0.5, "recent": 0.5}, ValueError, ("sinks + recent", str(BUDGET))),
    "layers the model lacks": ({"score_layers": [0, 7]}, ValueError, ("score_layers", "[7]")),
    "a budget that full ignores": ({"policy": "full"}, ValueError, ("budget", "'full'")),
    "unknown backend": ({"backend": "fused"}, ValueError, ("backend", "'fused'", "packed")),
    "a backend that cannot run": ({"backend": "triton"}, kvpatch.BackendError, ("'triton'", "packed")),
}


@pytest.mark.parametrize(("arguments", "error", "named"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_a_bad_argument_is_refused_by_name_and_value_before_any_work(restored, arguments, error, named):
    before, forwards = snapshot(restored), []
    watch = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        with pytest.raises(error) as caught:
            patch(restored, **arguments)
    finally:
        watch.remove()
    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert forwards == []
    assert_restored(before, restored)


def test_a_policy_that_evicts_needs_a_budget(restored):
    before = snapshot(restored)
    with pytest.raises(ValueError, match="budget must be given.*'inertia'"):
        kvpatch.patch(restored, "inertia", compile=False)
    assert_restored(before, restored)
    kvpatch.patch(restored, "full", compile=False)


def test_protections_that_fill_a_share_are_refused_by_the_call(restored):
    patch(restored, budget=kvpatch.Budget(0.2, min_budget=1), sinks=2, recent=2)
    with pytest.raises(ValueError, match="sinks \\+ recent"):
        run(restored, left_padded(prompts((20,))))  # a fifth of 20 is 4
    run(restored, left_padded(prompts((25,))))


# ---- calls that are refused --------------------------------------------------------------------------------


def anything(*_, **__):
    return None


def shortened(lengths, columns: int):
    """A mask of ones that end after that many columns."""
    return torch.tensor([[1] * length + [0] * (columns - length) for length in lengths])


REFUSED = {
    "cache implementation": ({"cache_implementation": "static"}, ("cache_implementation='static'",)),
    "no cache": ({"use_cache": False}, ("use_cache=False",)),
    "own loop": ({"custom_generate": anything}, ("custom_generate", "unpatch")),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, ("output_attentions=True",)),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, ("prompt_lookup_num_tokens=3",)),
    "contrastive search": ({"penalty_alpha": 0.6, "top_k": 4}, ("penalty_alpha=0.6",)),
    "right padding": (
        {"attention_mask": shortened((20, 9), 20)},
        ("attention_mask", "row 1", "right", "left"),
    ),
    "hole": (
        {"attention_mask": torch.tensor([[0] + [1] * 19, [0] * 11 + [1] * 4 + [0] + [1] * 4])},
        ("attention_mask", "row 1", "hole"),
    ),
    "empty row": ({"attention_mask": shortened((20, 0), 20)}, ("attention_mask", "row 1", "empty")),
    "other values": ({"attention_mask": 2 * shortened((20, 20), 20)}, ("attention_mask", "zeros and ones")),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_a_call_that_cannot_be_honoured_is_refused_by_name_and_the_next_one_works(restored, arguments, named):
    restored.set_attn_implementation("eager" if "output_attentions" in arguments else "sdpa")
    handle = patch(restored)
    expected = run(restored)
    with pytest.raises(ValueError) as caught:
        run(restored, **arguments)
    assert all(part in str(caught.value) for part in named), str(caught.value)
    assert torch.equal(run(restored), expected)
    assert handle.stats.held == BUDGET


def test_an_assistant_is_refused_by_name_and_the_next_call_works(restored):
    patch(restored)
    one = left_padded(prompts((20,)))
    expected = run(restored, one)
    with pytest.raises(ValueError, match="assistant_model"):
        run(restored, one, assistant_model=llama(layers=1))
    assert torch.equal(run(restored, one), expected)


@pytest.mark.parametrize("where", ["generation_config=", "model.generation_config"])
def test_a_refused_setting_is_found_in_a_generation_config_too(model, where):
    patch(model)
    config = copy.deepcopy(model.generation_config)
    config.prompt_lookup_num_tokens = 3
    if where == "generation_config=":
        given = {"generation_config": config}
    else:
        model.generation_config, given = config, {}
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=3"):
        run(model, **given)
    assert config.prompt_lookup_num_tokens == 3


def test_training_mode_after_patch_is_refused_with_the_way_out(restored):
    patch(restored)
    expected = run(restored)
    restored.train()
    with pytest.raises(ValueError, match=r"training mode.*model\.eval\(\)"):
        run(restored)
    restored.eval()
    assert torch.equal(run(restored), expected)


def test_a_misspelt_argument_is_refused_by_transformers_and_the_next_call_works(restored):
    patch(restored)
    expected = run(restored)
    with pytest.raises(ValueError, match="max_new_tokenz"):
        run(restored, max_new_tokenz=3)
    assert torch.equal(run(restored), expected)


def test_a_refused_call_leaves_the_callers_objects_alone(restored):
    patch(restored)
    processors, batch = LogitsProcessorList(), left_padded(prompts((20, 9)))
    before = {name: tensor.clone() for name, tensor in batch.items()}
    with pytest.raises(ValueError, match="penalty_alpha"):
        run(restored, batch, penalty_alpha=0.6, top_k=4, logits_processor=processors)
    assert len(processors) == 0
    assert all(torch.equal(batch[name], before[name]) for name in before)
