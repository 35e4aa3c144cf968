"""The fidelity and needle tools against what they are defined as."""

import pytest
import torch
from factories import llama, prompts, tiny

import kvpatch
from kvpatch import needle
from kvpatch.evaluation import fidelity, found, found_later
from kvpatch.evaluation.needles import asked_later


def test_without_eviction_nothing_is_lost():
    model, texts = llama(), torch.tensor(prompts((60, 60)))
    got = fidelity(model, texts, 40, {"full": ("full", None), "all": ("inertia", 1.0), "wide": ("tova", 500)})
    for one in got.values():
        assert one.divergence.shape == one.same.shape == one.lost_mass.shape == (2, 20)
        assert one.divergence.abs().max() < 1e-6
        assert one.same.all()
        assert one.lost_mass.abs().max() < 1e-6
    assert "_kvpatch" not in model.__dict__ and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("policy", ["inertia-lazy", "tova", "h2o-decode"])
def test_divergence_and_lost_mass_are_their_definitions(policy):
    model, texts, prompt = llama(query_groups=3), torch.tensor(prompts((50, 50))), 30
    got = fidelity(model, texts, prompt, {policy: (policy, 12)})[policy]
    assert (got.divergence[:, :2].abs() < 1e-6).all() and (got.lost_mass[:, :2] == 0).all()
    assert (got.divergence[:, 5:] > 0).any() and (got.lost_mass[:, 2:] > 0).all()

    # Fed by hand, one token at a time, from what the handle says it holds.
    with kvpatch.patched(model, policy, budget=12, compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, policy, 12)
        with torch.no_grad():
            logits = [model(texts[:, :prompt], **{handle.keyword: cache}).logits[:, -1]]
            sets = []
            for column in range(prompt, 49):
                logits.append(model(texts[:, column : column + 1], **{handle.keyword: cache}).logits[:, -1])
                sets.append(cache.retained())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(texts, output_attentions=True)
    expected = whole.logits[:, prompt - 1 : -1].float().log_softmax(-1)
    by_hand = torch.stack(logits, 1).float().log_softmax(-1)
    torch.testing.assert_close(got.divergence, (expected.exp() * (expected - by_hand)).sum(-1), rtol=1e-3, atol=1e-5)
    assert torch.equal(got.same, expected.argmax(-1) == by_hand.argmax(-1))
    for row in range(2):
        for place in (2, 7, 19):
            query, lost = prompt + place - 1, []
            for layer, weights in enumerate(whole.attentions):
                for head in range(weights.shape[1]):
                    held = {*sets[place - 2][layer, row, head // 3].tolist(), query}
                    lost += [sum(weights[row, head, query, i].item() for i in range(query) if i not in held)]
            assert got.lost_mass[row, place].item() == pytest.approx(sum(lost) / len(lost), rel=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
def test_lost_mass_of_layers_with_a_window_is_that_within_it(kind):
    model = tiny(kind, **({"sliding_window": 16} if kind == "mistral" else {}))
    texts = torch.tensor(prompts((60, 60)))
    got = fidelity(model, texts, 40, {"full": ("full", None), "small": ("inertia", 8)})
    assert got["full"].lost_mass.abs().max() < 1e-6 < got["small"].lost_mass.max() <= 1


def test_nothing_to_feed_is_refused():
    with pytest.raises(ValueError, match="prompt must leave two tokens"):
        fidelity(llama(), torch.tensor(prompts((20,))), 19, {})


@pytest.mark.parametrize("kind", needle.KINDS)
def test_needles_of_both_kinds_are_found_at_once(loaded, kind):
    model, tokenizer = loaded
    needles = [needle.document(320, tokenizer, seed, kind=kind) for seed in range(4)]
    assert sum(found(model, tokenizer, needles)) >= 3
    for one in needles:
        text = tokenizer.decode(one.prompt_ids)
        assert f"magic {kind} for {one.key} is: {one.answer}." in text and text.endswith(one.prefix)
    # What is found is the answer, not something that any text holds.
    others = [needle.document(320, tokenizer, seed + 50, kind=kind) for seed in range(4)]
    swapped = [
        needle.Needle(a.prompt_ids, a.question, b.answer, a.key, a.depth, a.prefix)
        for a, b in zip(needles, others, strict=True)
    ]
    assert not any(found(model, tokenizer, swapped))


def test_needles_are_found_after_some_tokens(loaded):
    model, tokenizer = loaded
    asked = [asked_later(320, tokenizer, seed) for seed in range(2)]
    assert all(len(one.prompt_ids) == 320 for one in asked)
    assert any(found_later(model, tokenizer, asked, free=24))
    with kvpatch.patched(model, "streaming-llm", budget=30, compile=False):
        assert not any(found_later(model, tokenizer, asked, free=24))


def test_an_unknown_kind_is_refused(loaded):
    with pytest.raises(ValueError, match="kind must be one of number, word"):
        needle.document(320, loaded[1], 0, kind="uuid")
