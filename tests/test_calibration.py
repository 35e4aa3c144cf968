"""Calibration: what heads are worth, and which policy is chosen."""

import math

import pytest
import torch
from factories import llama
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import best, selection
from kvpatch.calibration import choice, observing, prompts
from kvpatch.calibration.choice import Effort, Outcome
from kvpatch.policy import resolve
from kvpatch.ranking import Blend


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_the_worst_rank_is_how_many_must_be_kept(values, data):
    scores = torch.tensor(values, dtype=torch.float32)
    wanted = data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    found = observing.worst_rank(scores, tuple(wanted))
    lowest = min(values[place] for place in wanted)
    assert found == sum(value >= lowest for value in values)
    kept = scores.topk(found).indices.tolist()
    assert wanted <= set(kept)


def seen_by(copying: list[tuple[int, int]], prompts: int = 5) -> list[observing.Observed]:
    """Attention of 3 layers with 4 heads that is random but for the copying heads', which lies on the answer."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt in range(prompts):
        attention = torch.rand(3, 4, 40, generator=generator).softmax(-1)
        answer = tuple(range(10 + prompt, 14 + prompt))
        for layer, head in copying:
            attention[layer, head, list(answer)] = 0.2 + 0.01 * torch.rand(4, generator=generator)
        found.append(observing.Observed(attention, answer, True))
    return found


def test_copying_heads_come_first_and_their_mean_costs_the_answers_length():
    copying = [(2, 3), (0, 1), (1, 1)]
    seen = seen_by(copying)
    found = observing.by_cost(seen)
    assert set(found[:3]) == set(copying) and len(found) == len(set(found)) == 12
    assert observing.cost(observing.mean_of(copying), seen) == pytest.approx(2.0)  # log2 of four tokens
    assert observing.cost(observing.mean_of(found[-3:]), seen) > 3.0


def test_a_head_counts_as_the_fewer_entries_the_more_it_must_keep():
    """Also after the running utility has let those of earlier layers fade, and has taken a layer's mean."""
    alone, beside, late = (0, 2), (1, 0), (2, 3)
    seen = seen_by([(0, 1), (0, 2), (1, 0), (2, 3)])
    for one in seen:
        one.attention[0, 2, 20:24] = 0.9  # beside the answer it looks at four others: eight entries must be kept
        one.attention[2, 3, 20:32] = 0.9  # sixteen
    heads = [(0, 1), alone, beside, late]
    found = {(layer, head): weight for layer, head, weight in observing.weighted(heads, seen)}
    assert found[0, 1] == pytest.approx(2 / 0.8**2, rel=2e-3)
    assert found[alone] == pytest.approx(2 / 0.8**2 / 2, rel=2e-3)
    assert found[beside] == pytest.approx(1 / 0.8, rel=2e-3)
    assert found[late] == pytest.approx(1 / 4, rel=2e-3)
    # What is left of a head's attention in the running utility is its weight then.
    ranked = observing.running(observing.weighted(heads, seen))
    attention = torch.zeros(3, 4, 40)
    for place, (layer, head) in enumerate(heads):
        attention[layer, head, place] = 1.0
    share = ranked(attention)[:4]
    assert torch.allclose(share / share[0], torch.tensor([1.0, 0.5, 1.0, 0.25]), rtol=4e-3)


def test_the_focus_lies_between_prompts_with_a_fact_and_plain_texts():
    heads = [(2, 3), (0, 1, 0.5)]
    seen = [one.attention for one in seen_by([one[:2] for one in heads], prompts=9)]
    plain = [one.attention for one in seen_by([(1, 1)], prompts=11)]

    def by_hand(attention):
        mean = 0.8 * 0.2 * 0.5 * attention[0, 1] + 0.2 * attention[2, 3]  # InertiaKV's rule, layer after layer
        ordered = sorted(mean[1:].tolist(), reverse=True)
        return sum(ordered[:30]) / mean.sum().item()

    least, others = min(map(by_hand, seen)), sorted(map(by_hand, plain))
    assert others[-1] < least
    found = choice.focus_of(heads, seen, plain)
    beneath = others[9]  # of 11, the place 0.9 * 10 = 9
    assert found == math.floor(100 * (least + beneath) / 2) / 100 and beneath < found < least
    # Where plain texts have as much, no prompt with a fact is lost.
    assert choice.focus_of(heads, plain, seen) == math.floor(100 * others[0]) / 100
    nothing = [torch.eye(40)[:1].expand(3, 4, 40)]  # all on the first token
    assert choice.focus_of(heads, nothing, nothing) == 0.01


def test_where_an_answer_stands():
    assert observing.place_of([3, 4], [1, 3, 3, 4, 3, 4]) == 2
    assert observing.place_of([4, 5], [1, 3, 4]) is None


def outcome(kept, nats, share=0.5) -> Outcome:
    return Outcome(resolve("inertia", name="best", blend=Blend(share=share)), kept, nats)


def test_a_needle_in_a_hundred_is_worth_one_per_cent_of_divergence():
    fallback = Outcome(resolve("inertia", name="best"), (0.5, 0.1), (0.2, 0.4))
    kept, dear = outcome((0.9, 0.5), (0.2, 0.4)), outcome((0.92, 0.52), (0.21, 0.42))  # 2 per cent for 5 per cent
    assert choice.choose([fallback, kept, dear]) is kept
    cheap = outcome((0.92, 0.52), (0.202, 0.404))  # 2 per cent for 1 per cent
    assert choice.choose([fallback, kept, cheap]) is cheap
    ruinous = outcome((1.0, 1.0), (0.4, 0.8))
    assert choice.choose([fallback, ruinous]) is fallback


@given(st.integers(0, 10**6), st.integers(420, 700), st.integers(0, 4))
@example(21230, 501, 4)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_a_prompt_has_its_length_and_each_fact_once(demo_tokenizer, seed, length, others):
    hidden = prompts.document(length, demo_tokenizer, seed, others)
    assert len(hidden.prompt_ids) == length
    text = demo_tokenizer.decode(hidden.prompt_ids)
    fact = f"for {hidden.key} is: {hidden.answer}."
    assert text.count(fact) == 1 and text.count("The special magic") == others + 2  # facts, and the answer's opening
    assert text.endswith(hidden.prefix)
    place = text.index(fact) / len(text)
    assert abs(place - hidden.depth) < 0.35


def test_a_prompt_needs_room(demo_tokenizer):
    with pytest.raises(ValueError, match="length must be at least"):
        prompts.document(200, demo_tokenizer, 0)


@pytest.fixture(scope="module")
def demo_tokenizer():
    from transformers import AutoTokenizer

    from kvpatch import demo

    return AutoTokenizer.from_pretrained(demo.path())


def test_a_model_that_finds_nothing_is_refused_and_left_as_it_was(loaded):
    model = llama(layers=2, dtype=torch.float32, vocab_size=len(loaded[1]))
    before = set(model.__dict__)
    with pytest.raises(ValueError, match="answers 0 of 3 needle prompts of 512 tokens"):
        choice.calibrate(model, loaded[1], Effort(observed=3, length=512))
    assert set(model.__dict__) == before


def test_an_observed_prompt_is_what_the_model_does(loaded):
    model, tokenizer = loaded
    hidden = prompts.document(400, tokenizer, 20)
    found = observing.observe(model, tokenizer, hidden)
    said = observing.answer_ids(tokenizer, hidden)
    assert tokenizer.decode(said).strip() == hidden.answer
    assert [hidden.prompt_ids[place].item() for place in found.answer] == said[1:]
    ids = hidden.prompt_ids[None]
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(said), do_sample=False)
    assert found.solved == (made[0, 400:].tolist() == said)
    assert torch.allclose(found.attention.sum(-1), torch.ones(30, 9), atol=1e-4)
    assert found.attention.shape == (30, 9, 401)
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        said = model(ids).logits[0, -1].argmax()
        whole = torch.cat((ids, said[None, None]), -1)
        model.set_attn_implementation("eager")
        try:
            wanted = torch.stack([one[0, :, -1] for one in model(whole, output_attentions=True).attentions])
        finally:
            model.set_attn_implementation("sdpa")
    assert torch.allclose(observing.look(model, hidden.prompt_ids), wanted, atol=1e-4)


def test_the_focus_that_is_calibrated_is_the_one_that_decides(loaded, monkeypatch):
    model, tokenizer = loaded
    ids = prompts.document(400, tokenizer, 20).prompt_ids
    heads = [(20, 3, 1.5), (21, 5), (21, 8, 0.3), (22, 4)]
    seen, plain = [], selection.focus
    monkeypatch.setattr(selection, "focus", lambda *given: seen.append(plain(*given)) or seen[-1])
    policy = resolve("inertia", blend=Blend(score_heads=heads, focus=0.5))
    with kvpatch.patched(model, policy, budget=64, compile=False):
        batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        model.generate(**batch, max_new_tokens=3, do_sample=False)
    (found,) = seen
    monkeypatch.undo()
    expected = observing.foci(observing.running(heads), [observing.look(model, ids)])
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)


def test_the_demo_model_is_calibrated_whole_in_small(loaded, monkeypatch):
    model, tokenizer = loaded
    for name, value in {"COUNTS": (2, 4), "SHARES": (0.75,), "LEAST_SOLVED": 3}.items():
        monkeypatch.setattr(choice, name, value)
    stages = {}
    effort = Effort(observed=8, tried=2, texts=1, forced=8, length=448, batch=2)
    profile = choice.calibrate(
        model, tokenizer, effort, 123, lambda stage, done, total: stages.update({stage: (done, total)})
    )
    assert profile.model == best.identity(model) and profile.policy.name == "best"
    assert set(stages) == {"reading prompts", "reading prose", "trying policies"}
    assert stages["trying policies"][0] == stages["trying policies"][1]
    measured = profile.measured
    assert 3 <= measured["solved"] <= 8
    assert len(measured["tried"]) == 2
    assert all(0 <= kept <= 1 for one in measured["tried"] for kept in one["kept"])
    assert "generate" not in model.__dict__
