"""Rare ways of using a patched model, each of which once went wrong."""

import copy
import functools
import types

import pytest
import torch
from factories import PAD, left_padded, llama, patch, prompts
from factories import run as run_longer

import kvpatch

run = functools.partial(run_longer, max_new_tokens=12)


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
    handle = patch(model)
    out = run(model, return_dict_in_generate=True)
    steps = out[handle.keyword].stats.steps
    run(model, max_new_tokens=3)
    assert out[handle.keyword].stats.steps == steps == 11


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


def test_a_replaced_scorer_is_met_by_a_new_cache(model):
    kvpatch.register_scorer("t-swap", lambda s: s.positions.to(s.weights.dtype), uses_attention=False, replace=True)
    policy = kvpatch.Policy(scorer="t-swap", aggregation="single")
    handle = patch(model, policy)
    run(model)
    newest = handle.retained()[0, 0, 0].max()
    kvpatch.register_scorer("t-swap", lambda s: -s.positions.to(s.weights.dtype), uses_attention=False, replace=True)
    cache = kvpatch.SlotCache(model.config, policy, 8)
    run(model, **{handle.keyword: cache})
    assert cache.retained()[0, 0, 0].max() < newest


def test_a_criterion_that_allows_more_than_the_default_length_is_followed(model):
    from transformers import MaxLengthCriteria

    expected = run(model, max_new_tokens=None, stopping_criteria=[MaxLengthCriteria(60)])
    patch(model, budget=1.0)
    assert torch.equal(run(model, max_new_tokens=None, stopping_criteria=[MaxLengthCriteria(60)]), expected)
    assert expected.shape[1] == 60


def test_arguments_that_are_none_are_as_if_left_out(model):
    handle = patch(model)
    assert torch.equal(run(model, custom_generate=None, **{handle.keyword: None}), run(model))


def test_stop_strings_of_the_models_own_config_are_followed_and_stay(model):
    from transformers import AutoTokenizer

    from kvpatch import demo

    tokenizer = AutoTokenizer.from_pretrained(demo.path())
    patch(model, budget=1.0)
    tokens = run(model)[0, 20:].tolist()
    at = next(place for place, token in enumerate(tokens) if token >= 17)  # tokens below are special
    model.generation_config.stop_strings = [tokenizer.decode(tokens[at])]
    first = tokens.index(tokens[at])
    batch = left_padded(prompts((20, 9)))
    got = model.generate(
        input_ids=batch["input_ids"][:1],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
        tokenizer=tokenizer,
    )
    assert got.shape[1] == 20 + first + 1
    assert model.generation_config.stop_strings == [tokenizer.decode(tokens[at])]


def test_two_patched_models_do_not_share_a_part(model):
    patch(model)
    other = llama(layers=2)
    other.model = model.model
    with pytest.raises(ValueError, match="shares .* with another patched"):
        patch(other)


def test_a_resized_vocabulary_is_met(model):
    patch(model, budget=1.0)
    run(model)
    model.resize_token_embeddings(140)
    got = run(model)
    kvpatch.unpatch(model)
    assert torch.equal(got, run(model))


def test_replaced_layers_are_refused(model):
    patch(model)
    model.model.layers[1] = llama(layers=2, seed=3).model.layers[1]
    with pytest.raises(RuntimeError, match="replaced after patching"):
        run(model)


def test_the_prompt_is_freed_layer_by_layer_during_the_cut(model, monkeypatch):
    import weakref

    from kvpatch import moving

    alive = []
    original = moving.cut

    def cut(source, target, order, note):
        first = weakref.ref(source.keys[0])

        def noting():
            alive.append(first() is not None)
            note()

        original(source, target, order, noting)

    monkeypatch.setattr(moving, "cut", cut)
    patch(model)
    run(model)
    assert alive == [True, False]


def test_a_row_that_ends_with_its_first_token_keeps_only_its_prompt(model):
    from factories import EOS, Forced

    handle = patch(model, budget=15)
    rows = left_padded(prompts((40, 9)))
    run(model, **rows, eos_token_id=EOS, logits_processor=[Forced([[5] * 20, [EOS]], 40)])
    held = handle.retained()[0, 1, 0]
    assert sorted(held[held >= 0].tolist()) == list(range(9))


def test_sampling_from_no_finite_score_is_an_error(model):
    class Nothing:
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf)

    patch(model)
    with pytest.raises(RuntimeError, match="nothing can be sampled"):
        run(model, do_sample=True, logits_processor=[Nothing()])


def test_a_replacing_patch_inside_the_block_is_undone_at_its_end(model):
    with kvpatch.patched(model, "inertia", budget=8, compile=False):
        patch(model, replace=True)
    assert "_kvpatch" not in model.__dict__ and "generate" not in model.__dict__


def test_signatures_stay(model):
    import inspect

    modules = (model, model.model, model.model.layers[0].self_attn)
    before = [inspect.signature(module.forward) for module in modules], inspect.signature(model.generate)
    patch(model)
    assert ([inspect.signature(module.forward) for module in modules], inspect.signature(model.generate)) == before


def test_a_budget_that_fills_its_buffers_exactly_also_serves_shorter_prompts():
    model = llama(layers=2, dtype=torch.float32)
    kvpatch.patch(model, "inertia", budget=63)
    long, short = (left_padded(prompts((length,))) for length in (200, 10))
    got = [run(model, **batch, max_new_tokens=30) for batch in (long, short)]
    kvpatch.patch(model, "inertia", budget=63, compile=False, replace=True)
    for batch, tokens in zip((long, short), got, strict=True):
        assert torch.equal(run(model, **batch, max_new_tokens=30), tokens)


def test_blocks_of_the_prompt_are_refused_in_the_host_loop(model):
    patch(model)
    with pytest.raises(ValueError, match="prefill_chunk_size=16"):
        run(model, prefill_chunk_size=16, output_hidden_states=True, return_dict_in_generate=True)
