"""Rare ways of using a patched model, each of which once went wrong."""

import copy
import types

import pytest
import torch
from factories import PAD, left_padded, llama, prompts

import kvpatch


def run(model, **more):
    return model.generate(
        **{
            **left_padded(prompts((20, 9))),
            "max_new_tokens": 12,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": PAD,
            **more,
        }
    )


def patch(model, policy="inertia", **more):
    return kvpatch.patch(model, policy, **({"budget": 8, "compile": False} | more))


@pytest.fixture
def model():
    return llama(layers=2)


def test_a_call_after_one_in_inference_mode_works(model):
    patch(model)
    with torch.inference_mode():
        expected = run(model)
    assert torch.equal(run(model), expected)


def test_a_refused_slot_cache_keeps_what_it_holds(model):
    patch(model)
    cache = kvpatch.SlotCache(model.config, "inertia", 8)
    run(model, cache=cache)
    held = cache.retained()
    with pytest.raises(ValueError, match="reset"):
        run(model, cache=cache)
    assert torch.equal(cache.retained(), held)


def test_a_part_of_a_patched_model_is_not_copied_silently(model):
    patch(model)
    for part in (model.model, model.model.layers[0], model.model.layers[0].self_attn):
        with pytest.raises(RuntimeError, match="unpatch"):
            copy.deepcopy(part)


def test_unpatch_gives_a_compiled_call_back(model):
    model._compiled_call = model._call_impl
    before = model.__dict__["_compiled_call"]
    patch(model)
    kvpatch.unpatch(model)
    assert model.__dict__.get("_compiled_call") is before


def test_patch_keeps_transformers_capture_hooks(model):
    model.model.layers[0].register_forward_hook(lambda *_: None)
    model.config.output_hidden_states = True
    patch(model)
    with torch.no_grad():
        assert len(model(torch.tensor([[5, 6]])).hidden_states) == 3


def test_stats_of_a_cache_given_away_stay(model):
    patch(model)
    out = run(model, return_dict_in_generate=True)
    steps = out.cache.stats.steps
    run(model, max_new_tokens=3)
    assert out.cache.stats.steps == steps == 11


def test_a_protected_entry_survives_scores_of_minus_infinity(model):
    kvpatch.register_scorer(
        "t-inf",
        lambda s: torch.where(s.positions % 2 == 0, 1.0, -torch.inf).to(s.weights.dtype),
        uses_attention=False,
        replace=True,
    )
    handle = patch(model, kvpatch.Policy(scorer="t-inf", aggregation="single", sinks=2))
    run(model)
    assert {0, 1} <= set(handle.retained()[0, 0, 0].tolist())


def test_a_failed_replace_keeps_the_earlier_patch(model):
    attention = model.model.layers[1].self_attn
    attention.forward = types.MethodType(
        lambda self, *a, **k: (1.5 * type(self).forward(self, *a, **k)[0], None), attention
    )
    first = patch(model, verify=False)
    with pytest.raises(kvpatch.VerificationError):
        patch(model, replace=True)
    assert model.__dict__.get("_kvpatch") is first


@pytest.mark.parametrize("fields", [{"rescue": "no"}, {"evicts": "no"}, {"name": 3}, {"seed": 2**70}])
def test_more_illegal_fields_are_refused(fields):
    with pytest.raises((TypeError, ValueError)):
        kvpatch.Policy(**fields)


def test_score_layers_may_be_an_array():
    import numpy

    assert kvpatch.Policy(score_layers=numpy.array([0, 1])).score_layers == (0, 1)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"custom_generate": print}, repr(print)),
        ({"use_mtp": True}, "use_mtp"),
        ({"assistant_early_exit": 1}, "assistant_early_exit"),
        ({"force_words_ids": [[3]]}, "force_words_ids"),
        ({"is_assistant": True}, "is_assistant"),
    ],
)
def test_refusals_name_argument_and_value(model, more, named):
    patch(model)
    with pytest.raises(ValueError, match=".") as caught:
        run(model, **more)
    assert named in str(caught.value)


def test_a_budget_beyond_int64_works(model):
    patch(model, budget=10**30)
    run(model)


@pytest.mark.parametrize("score", [lambda s: s.positions % 2 == 0, lambda s: s.weights.mean((1, 2)), lambda s: 1.0])
def test_a_scorer_of_another_type_or_shape_is_refused(score):
    with pytest.raises(ValueError, match="'t-wrong' must give"):
        kvpatch.register_scorer("t-wrong", score, uses_attention=True)


def test_h2o_offers_h2o_decode():
    with pytest.raises(ValueError, match="did you mean 'h2o-decode'"):
        kvpatch.policy.resolve("h2o")
