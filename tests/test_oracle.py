"""The oracle against facts that do not come from it: hand arithmetic and the model's own forward pass."""

import inspect
import math

import pytest
import torch
from oracle import Axes, Row, random_score, tokens_kept
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

PROMPT = [3, 17, 5, 29, 11, 2, 23, 7, 19, 13, 31, 1]
TOKENS = [4, 9, 30, 8, 15, 22]


class Norm64(torch.nn.Module):
    """LlamaRMSNorm without its detour through float32, which rounds at 6e-8 whatever the model's dtype is."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def tiny_model(layers=2, attention="sdpa", bias=True, exact_norms=True):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, attention_bias=bias, initializer_range=0.4,
        attn_implementation=attention, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    if exact_norms:
        model.model.norm = Norm64(model.model.norm)
        for layer in model.model.layers:
            layer.input_layernorm = Norm64(layer.input_layernorm)
            layer.post_attention_layernorm = Norm64(layer.post_attention_layernorm)
    return model


class Scripted(Row):
    """A row whose layer scores are given: script[step - 1][layer] = function of the position."""

    script: list

    def head_scores(self, l, attention):
        score = self.script[self.step_number - 1][l]
        return [{i: float(score(i)) for i in self.keys[l][g]} for g in range(self.kv_heads)]


def scripted(script, axes, budget, prompt, layers=1):
    row = Scripted(tiny_model(layers), axes, budget, min_budget=1)
    row.script = script
    row.prefill(prompt)
    return row


def held(row):
    return row.retained[0][0]


# sdpa keeps float64 throughout, so with float64 norms only the summation order differs; transformers' own
# RMSNorm may round a last-bit difference to the neighbouring float32 (6e-8), and a few layers amplify that.
@pytest.mark.parametrize(("exact_norms", "tolerance"), [(True, 1e-11), (False, 1e-5)])
@torch.no_grad()
def test_without_eviction_the_logits_are_the_models_own(exact_norms, tolerance):
    model = tiny_model(exact_norms=exact_norms)
    row = Row(model, Axes(), None)
    ours = [row.prefill(PROMPT)] + [row.step(token) for token in TOKENS]
    theirs = model(torch.tensor([PROMPT + TOKENS]), use_cache=False).logits[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(ours), theirs, rtol=tolerance, atol=tolerance)
    assert row.retained == [[list(range(len(PROMPT) + len(TOKENS)))] * 2] * 2


@torch.no_grad()
def test_dropped_entries_are_invisible_from_the_next_step_on():
    model = tiny_model()
    row = Row(model, Axes(), 5)
    ours, total = [row.prefill(PROMPT)], len(PROMPT) + len(TOKENS)
    visible = torch.ones(total, total).tril().bool()
    for t, token in enumerate(TOKENS, start=1):
        newest = len(PROMPT) + t - 1
        visible[newest] = False
        visible[newest, held(row) + [newest]] = True
        ours.append(row.step(token))
        assert len(held(row)) == 5
    mask = torch.zeros(total, total, dtype=torch.float64).masked_fill(~visible, -math.inf)[None, None]
    theirs = model(torch.tensor([PROMPT + TOKENS]), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(torch.stack(ours), theirs[0, len(PROMPT) - 1 :], rtol=1e-11, atol=1e-11)


def test_the_ema_runs_over_both_layers_within_a_step_by_hand():
    script = [[lambda i: [0.5, 0.3, 0.2][i], lambda i: [0.1, 0.1, 0.8][i]],
              [lambda i: [0.1, 0.2, 0.3, 0.4][i], lambda i: 0.25]]  # fmt: skip
    row = scripted(script, Axes(alpha=0.5), None, PROMPT[:2], layers=2)
    row.step(4)  # m = 0.5 * (0.5 * s1) + 0.5 * s2
    assert row.utility(1, 1) == pytest.approx({0: 0.175, 1: 0.125, 2: 0.45})
    row.step(9)  # the new token enters at 0.75 / 3 = 0.25
    assert row.utility(0, 0) == pytest.approx({0: 0.19375, 1: 0.20625, 2: 0.3125, 3: 0.2875})


@torch.no_grad()
def test_the_paper_rule_reads_the_models_own_attention():
    model = tiny_model(attention="eager")  # eager rounds its softmax to float32
    row = Row(model, Axes(), None)
    row.prefill(PROMPT)
    row.step(TOKENS[0])
    maps = model(torch.tensor([PROMPT + TOKENS[:1]]), use_cache=False, output_attentions=True).attentions
    first, second = (a[0, :, -1].mean(0) for a in maps)
    expected = 0.8 * 0.2 * first + 0.2 * second
    assert row.utility(0, 1) == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-6)


@pytest.mark.parametrize("scorer", ["attention", "vnorm", "entropy", "keydiff", "knorm"])
@torch.no_grad()
def test_head_scores_follow_from_the_models_own_cache_and_attention(scorer):
    model = tiny_model(attention="eager")
    row = Row(model, Axes(scorer=scorer, coupling="per_head", aggregation="single"), None)
    row.prefill(PROMPT)
    row.step(TOKENS[0])
    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    inputs = torch.tensor([PROMPT + TOKENS[:1]])
    maps = model(inputs, output_attentions=True, **{name: cache}).attentions
    for l in range(2):
        k, v, a = cache.layers[l].keys[0], cache.layers[l].values[0], maps[l][0, :, -1]
        p = a.mean(0)
        grouped = a.view(2, 2, -1).mean(1)
        centre = (k / k.norm(dim=-1, keepdim=True)).mean(1, keepdim=True)
        expected = {
            "attention": grouped,
            "vnorm": grouped * v.norm(dim=-1) / v.norm(dim=-1).mean(-1, keepdim=True),
            "entropy": grouped * -(p * p.log()).sum() / math.log(len(p)),
            "keydiff": -torch.cosine_similarity(k, centre, dim=-1),
            "knorm": -k.norm(dim=-1),
        }[scorer]
        for g in range(2):
            assert row.utility(l, g) == pytest.approx(dict(enumerate(expected[g].tolist())), abs=1e-5)


def test_layers_outside_score_layers_do_not_count_and_uniform_averages_before_one_update():
    script = [[lambda i: 1.0, lambda i: 3.0, lambda i: 100.0]]
    row = scripted(script, Axes(coupling="uniform", score_layers=(0, 1), alpha=0.75), None, PROMPT, layers=3)
    row.step(4)
    assert set(row.utility(0, 0).values()) == {0.5}
    row = scripted(script, Axes(score_layers=(0, 1), alpha=0.75), None, PROMPT, layers=3)
    row.step(4)
    assert set(row.utility(0, 0).values()) == {0.75 * 0.25 + 0.25 * 3.0}


def test_between_scoring_steps_utilities_stay_and_the_new_token_gets_their_mean():
    script = [[lambda i: i + 1.0]] * 4
    row = scripted(script, Axes(refresh=3, aggregation="cumulative"), None, PROMPT[:2])
    for token in TOKENS[:3]:
        row.step(token)
    assert row.utility(0, 0) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 2.0, 4: 2.0}
    row.step(5)
    assert row.utility(0, 0) == {0: 2.0, 1: 4.0, 2: 6.0, 3: 6.0, 4: 7.0, 5: 8.0}


def test_tokens_kept_depends_on_the_type_of_the_budget():
    assert tokens_kept(0.1, 1000, min_budget=1) == 100
    assert tokens_kept(0.1, 70, min_budget=1) == 7
    assert tokens_kept(1 - 0.9, 70, min_budget=1) == 7  # 6.999999999999998 before the guard
    assert tokens_kept(0.1, 79, min_budget=1) == 7
    assert tokens_kept(0.1, 70) == 64
    assert tokens_kept(5, 1000) == 5
    assert tokens_kept(1, 1000) == 1
    assert [tokens_kept(x, 1000) for x in (None, "full", 1.0)] == [None] * 3


def test_recency_with_sinks_keeps_the_first_and_the_last_entries():
    # not with the EMA: a new token enters at the mean, so that its utility lags behind its older neighbours'
    row = Row(tiny_model(), Axes(scorer="recency", aggregation="single", sinks=2), 6)
    row.prefill(PROMPT)
    for t, token in enumerate(TOKENS):
        row.step(token)
        newest = len(PROMPT) + t
        assert row.retained == [[[0, 1, newest - 3, newest - 2, newest - 1, newest]] * 2] * 2


def test_equal_utilities_go_by_the_lowest_position():
    model = tiny_model()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.q_proj.weight)
        torch.nn.init.zeros_(layer.self_attn.q_proj.bias)
    row = Row(model, Axes(), 4)
    row.prefill(PROMPT)
    row.step(TOKENS[0])
    assert held(row) == [9, 10, 11, 12]


def test_reserve_and_recent_entries_outlive_a_score_against_them():
    axes = Axes(aggregation="single", reserve=3, recent=0.25)
    row = scripted([[lambda i: 0.0 if i % 4 == 0 or i >= 11 else 1.0 + i]], axes, 8, PROMPT)
    row.step(4)  # 12 entries of prompt, reserve at 0, 4, 8; recent: floor(0.25 * 8) = 2
    assert held(row) == [0, 4, 7, 8, 9, 10, 11, 12]


def test_rescue_keeps_the_best_of_every_block_at_step_1_only():
    prompt = [i % 31 for i in range(40)]
    script = [[lambda i: 100.0 if i >= 32 else float(i % 16 == 3)], [lambda i: float(i)]]
    row = scripted(script, Axes(aggregation="single", rescue=True), 6, prompt)
    row.step(4)
    assert held(row) == [3, 19, 37, 38, 39, 40]
    row.step(5)
    assert held(row) == [19, 37, 38, 39, 40, 41]
    row = scripted(script, Axes(aggregation="single", rescue=True), 2, prompt)
    row.step(4)  # three rescued entries, two places
    assert held(row) == [19, 40]


def test_a_budget_above_the_prompt_is_filled_before_anything_goes():
    row = Row(tiny_model(), Axes(), len(PROMPT) + 2)
    row.prefill(PROMPT)
    sizes = []
    for token in TOKENS:
        row.step(token)
        sizes.append(len(held(row)))
    assert sizes == [13, 14, 14, 14, 14, 14]


def test_a_near_tie_is_adopted_and_a_clear_error_is_not():
    script = [[lambda i: [1.0, 1.0 + 1e-9, 2.0, 3.0][i]]]
    own, near, far = [1, 2, 3], [0, 2, 3], [0, 1, 3]
    for observed, adopted in ((own, 0), (near, 1)):
        row = scripted(script, Axes(aggregation="single"), 3, PROMPT[:3])
        row.step(4, observed=[[observed] * 2])
        assert (held(row), row.adopted) == (observed, adopted)
    row = scripted(script, Axes(aggregation="single"), 3, PROMPT[:3])
    message = r"step 1, layer 0, kv head 0: wrongly kept \[0\], wrongly dropped \[2\]"
    with pytest.raises(AssertionError, match=message):
        row.step(4, observed=[[far] * 2])


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        ([[1, 2, 3], [0, 2, 3]], "same ranking"),
        ([[2, 3]] * 2, "holds 2 entries, expected 3"),
        ([[1, 2, 9]] * 2, "not in the cache"),
        ([[1, 2, 2]] * 2, "held twice"),
        ([[0, 1, 2]] * 2, "protected"),
    ],
)
def test_an_observed_set_that_no_near_tie_explains_is_refused(observed, message):
    row = scripted([[lambda i: 1.0]], Axes(recent=1), 3, PROMPT[:3])
    with pytest.raises(AssertionError, match=message):
        row.step(4, observed=[observed])


def test_random_scores_lie_in_the_unit_interval_and_depend_on_seed_and_position():
    scores = [random_score(seed, position) for seed in range(3) for position in range(200)]
    assert all(0.0 <= x < 1.0 for x in scores)
    assert len(set(scores)) == len(scores)
    assert abs(sum(scores) / len(scores) - 0.5) < 0.05


def test_illegal_combinations_are_refused():
    for wrong in (
        {"scorer": "knorm", "head_pool": "max"},
        {"score_layers": (0,), "coupling": "per_layer"},
        {"score_layers": (0,), "coupling": "per_head"},
    ):
        with pytest.raises(ValueError):
            Axes(**wrong)
    with pytest.raises(ValueError):
        Row(tiny_model(), Axes(sinks=2, recent=2, reserve=1), 5).prefill(PROMPT)
