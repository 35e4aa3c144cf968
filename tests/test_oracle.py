"""The oracle against facts that do not come from it: hand arithmetic and the model's own forward pass."""

import inspect
import math

import pytest
import torch
from oracle import Axes, Blend, Row, random_score, tokens_kept
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
    """A row whose layer scores are given: script[step - 1][layer] = function of the position; so for the blend."""

    script: list
    second_script: list

    def head_scores(self, l, attention, rule):
        script = self.script if rule is self.axes else self.second_script
        score = script[self.step_number - 1][l]
        return [{i: float(score(i)) for i in self.keys[l][g]} for g in range(self.kv_heads)]


def scripted(script, axes, budget, prompt, layers=1, second=None):
    row = Scripted(tiny_model(layers), axes, budget, min_budget=1)
    row.script, row.second_script = script, second
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


# ---- a blend of two rankings


def latest(share, coupling="sequential", **fields):
    """Both rankings are the latest scores, so that a step's script is its utilities."""
    return Axes(aggregation="single", coupling=coupling, blend=Blend(share, aggregation="single"), **fields)


def one_step(first, second, axes, budget, observed=None, tolerance=1e-6):
    """The row after step 1, the scores of all positions given."""
    row = scripted([[first.__getitem__]], axes, budget, PROMPT[: len(first) - 1], second=[[second.__getitem__]])
    row.step(4, observed=None if observed is None else [[observed] * 2], tolerance=tolerance)
    return row


@pytest.mark.parametrize(("share", "expected"), [(0.3, [2, 3, 4]), (0.4, [0, 3, 4]), (0.7, [0, 1, 4])])
def test_the_top_of_the_second_ranking_survives_at_the_bottom_of_the_first(share, expected):
    row = one_step([1, 2, 3, 4, 5], [9, 8, 3, 2, 1], latest(share), 3)  # K = 0, 1, 2
    assert held(row) == expected
    assert row.utility(0, 0) == {i: i + 1.0 for i in expected}
    assert row.second_utility(0, 0) == {i: [9, 8, 3, 2, 1][i] for i in expected}


def test_the_top_is_taken_over_all_held_entries_those_protected_anyway_included():
    assert held(one_step([1, 2, 3, 4, 5], [9, 8, 3, 2, 1], latest(0.4, sinks=1), 3)) == [0, 3, 4]
    assert held(one_step([5, 4, 3, 2, 1], [1, 2, 3, 8, 9], latest(0.4, recent=1), 3)) == [0, 1, 4]
    assert held(one_step([5, 4, 3, 2, 1], [1, 9, 3, 8, 2], latest(0.4, recent=1), 3)) == [0, 1, 4]
    assert held(one_step([5, 4, 3, 2, 1], [1, 2, 3, 9, 8], latest(0.4, recent=1), 3)) == [0, 3, 4]


def test_the_protected_entries_may_fill_the_budget():
    row = one_step([9, 1, 1, 8, 9, 1], [0, 7, 8, 6, 5, 4], latest(0.5, sinks=1, recent=1), 4)
    assert held(row) == [0, 1, 2, 5]


def test_nothing_goes_until_more_than_the_budget_is_held():
    assert held(one_step([1, 2, 3, 4, 5], [9, 8, 3, 2, 1], latest(0.4), 5)) == [0, 1, 2, 3, 4]
    assert held(one_step([1, 2, 3, 4, 5], [9, 8, 3, 2, 1], latest(0.4), None)) == [0, 1, 2, 3, 4]


def test_a_share_that_comes_to_no_entry_is_as_no_blend():
    model = tiny_model()
    rows = [Row(model, Axes(blend=blend), 5) for blend in (None, Blend(0.19, scorer="knorm"))]
    for row in rows:
        row.prefill(PROMPT)
    assert rows[1].blended == 0
    for token in TOKENS:
        logits = [row.step(token) for row in rows]
        assert torch.equal(*logits)
        assert rows[0].retained == rows[1].retained
        assert rows[0].utility(0, 0) == rows[1].utility(0, 0)
    assert set(rows[1].second_utility(0, 0)) == set(held(rows[1]))


def test_the_share_is_of_the_budget_and_not_lost_to_rounding():
    for share, budget, expected in ((0.29, 100, 29), (1 - 0.9, 70, 7), (0.5, 5, 2), (0.99, 3, 2), (0.5, 0.5, 3)):
        row = Row(tiny_model(), Axes(blend=Blend(share)), budget, min_budget=1)
        row.prefill(PROMPT)
        assert row.blended == expected  # 28.999999999999996 and 6.999999999999998 before the guard


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ([1, 1, 1, 1, 1, 1], [0, 1, 4, 5]),  # 4 and 5 on top; of 0 .. 3 the first ranking keeps 0 and 1
        ([1 + 5e-7, 1, 1, 1, 1, 1], [0, 1, 4, 5]),  # within a relative 1e-6 of the second highest
        ([1, 1, 1, 1, 1, 1 - 5e-7], [0, 1, 4, 5]),
        ([-1, -1, -1, -1, -1, -1 - 5e-7], [0, 1, 4, 5]),
        ([1, 1, 1, 1, 1, 1 - 5e-6], [0, 1, 3, 4]),
        ([1, 1, 1, 1 + 5e-6, 1, 1], [0, 1, 3, 5]),  # 3 is clearly above: one place for the others
        ([0, 0, 0, 0, 0, -1e-9], [0, 1, 3, 4]),  # beside 0 nothing is within a share of it
    ],
)
def test_of_equals_at_the_edge_of_the_top_the_highest_positions_are_taken(second, expected):
    assert held(one_step([9, 8, 7, 6, 5, 4], second, latest(0.5), 4)) == expected


def test_of_equals_at_the_edge_the_highest_position_is_taken_where_one_goes_too():
    row = one_step([3, 1, 2, 0], [1 + 5e-7, 1 + 2e-7, 1, 0], latest(0.4), 3)
    assert held(row) == [0, 1, 2]
    row = one_step([2, 3, 1, 1.5], [1 + 5e-7, 1 + 2e-7, 1, 0], latest(0.4), 3)
    assert held(row) == [0, 1, 2]


def test_victims_of_equal_first_utility_go_by_the_lowest_position_that_is_not_on_top():
    assert held(one_step([1, 1, 1, 1, 1, 1], [9, 0, 8, 0, 0, 0], latest(0.5), 4)) == [0, 2, 4, 5]
    assert held(one_step([0, 1 + 1e-9, 1, 2], [9, 0, 0, 0], latest(0.4), 3)) == [0, 2, 3]


def test_each_ranking_starts_new_tokens_by_its_own_rule():
    script = [[lambda i: i + 1.0]] * 3
    means, zeros = {0: 1.0, 1: 2.0, 2: 3.0, 3: 2.0, 4: 2.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 0.0, 4: 0.0}
    for first, second, expected in (("mean", "zero", (means, zeros)), ("zero", "mean", (zeros, means))):
        blend = Blend(0.5, aggregation="cumulative", new_token=second)
        axes = Axes(refresh=3, aggregation="cumulative", new_token=first, blend=blend)
        row = scripted(script, axes, None, PROMPT[:2], second=script)
        for token in TOKENS[:3]:
            row.step(token)
        assert (row.utility(0, 0), row.second_utility(0, 0)) == expected
        row.turn(PROMPT[2:4])
        starts = {"mean": 2.0, "zero": 0.0}
        assert row.utility(0, 0) == expected[0] | {5: starts[first], 6: starts[first]}
        assert row.second_utility(0, 0) == expected[1] | {5: starts[second], 6: starts[second]}


def test_a_new_token_starts_at_the_mean_of_the_second_utilities_still_held():
    axes = Axes(aggregation="single", refresh="once", blend=Blend(0.4, aggregation="single"))
    row = scripted([[[1, 2, 3, 4].__getitem__]], axes, 3, PROMPT[:3], second=[[[9, 0, 4, 2].__getitem__]])
    row.step(4)
    assert row.second_utility(0, 0) == {0: 9.0, 2: 4.0, 3: 2.0}
    row.step(9)  # first: 1, 3, 4 and 8 / 3; second: 9, 4, 2 and 5
    assert row.utility(0, 0) == pytest.approx({0: 1.0, 2: 3.0, 3: 4.0})
    assert row.second_utility(0, 0) == {0: 9.0, 2: 4.0, 3: 2.0}


def test_both_rankings_over_three_steps_by_hand():
    """alpha = 1/2, B = 4, K = 2; new tokens start at the mean in the first ranking, at 0 in the second."""
    axes = Axes(alpha=0.5, blend=Blend(0.5, alpha=0.5, new_token="zero"))
    first = [{0: 4, 1: 2, 2: 6, 3: 8, 4: 10}, {1: 1, 2: 1, 3: 2, 4: 1, 5: 0.75}, {2: 0, 3: 1, 4: 5, 5: 0, 6: 1.5}]
    second = [{0: 2, 1: 8, 2: 6, 3: 4, 4: 10}, {1: 0, 2: 5, 3: 6, 4: 1, 5: 8}, {2: 0, 3: 0, 4: 1, 5: 2, 6: 10}]
    row = scripted([[s.__getitem__] for s in first], axes, 4, PROMPT[:4], second=[[s.__getitem__] for s in second])
    row.step(4)  # first 2 1 3 4 5, second 1 4 3 2 5: on top 1 and 4; of 0, 2 and 3 the lowest is 0
    assert row.utility(0, 0) == {1: 1.0, 2: 3.0, 3: 4.0, 4: 5.0}
    assert row.second_utility(0, 0) == {1: 4.0, 2: 3.0, 3: 2.0, 4: 5.0}
    row.step(9)  # 5 starts at 13 / 4 and 0: first 1 2 3 3 2, second 2 4 4 3 4: on top 3 and 5; 1 goes
    assert row.utility(0, 0) == {2: 2.0, 3: 3.0, 4: 3.0, 5: 2.0}
    assert row.second_utility(0, 0) == {2: 4.0, 3: 4.0, 4: 3.0, 5: 4.0}
    row.step(30)  # 6 starts at 10 / 4 and 0: first 1 2 4 1 2, second 2 2 2 3 5: on top 5 and 6; 2 goes
    assert row.utility(0, 0) == {3: 2.0, 4: 4.0, 5: 1.0, 6: 2.0}
    assert row.second_utility(0, 0) == {3: 2.0, 4: 2.0, 5: 3.0, 6: 5.0}
    assert row.retained == [[[3, 4, 5, 6]] * 2]


@pytest.mark.parametrize(("coupling", "first", "second"), [("sequential", 4.0, 2.5), ("uniform", 2.0, 1.5)])
def test_the_second_ranking_has_its_own_layers_and_aggregation(coupling, first, second):
    scores = [[lambda i: 1.0, lambda i: 3.0, lambda i: 100.0]], [[lambda i: 100.0, lambda i: 8.0, lambda i: 4.0]]
    blend = Blend(0.5, score_layers=(1, 2), alpha=0.75)
    axes = Axes(coupling=coupling, score_layers=(0, 1), aggregation="cumulative", blend=blend)
    row = scripted(scores[0], axes, None, PROMPT, layers=3, second=scores[1])
    row.step(4)  # first: 1 + 3, or their mean; second: 0.75 * (0.25 * 8) + 0.25 * 4, or 0.25 * 6
    assert set(row.utility(0, 0).values()) == {first}
    assert set(row.second_utility(0, 0).values()) == {second}


@pytest.mark.parametrize("coupling", ["sequential", "uniform", "per_layer", "per_head"])
def test_the_second_ranking_scores_as_a_first_with_the_same_fields(coupling):
    model = tiny_model()
    for fields in (
        {"scorer": "vnorm", "head_pool": "max", "alpha": 0.3},
        {"head_pool": "rms", "aggregation": "cumulative", "new_token": "zero"},
        {"scorer": "keydiff", "aggregation": "single"},
        {"scorer": "knorm"},
        {"scorer": "recency"},
        {"scorer": "random"},
        {"scorer": "entropy"},
    ):
        if coupling == "per_head" and fields.get("scorer") == "entropy":
            continue
        rows = [Row(model, axes, None) for axes in (
            Axes(coupling=coupling, refresh=2, seed=5, blend=Blend(0.5, **fields)),
            Axes(coupling=coupling, refresh=2, seed=5, **fields),
            Axes(coupling=coupling, refresh=2, seed=5),
        )]  # fmt: skip
        for row in rows:
            row.prefill(PROMPT)
            for token in TOKENS[:4]:
                row.step(token)
        for l in range(2):
            for g in range(2):
                assert rows[0].second_utility(l, g) == rows[1].utility(l, g)
                assert rows[0].utility(l, g) == rows[2].utility(l, g)


@pytest.mark.parametrize("coupling", ["per_layer", "per_head"])
def test_every_layer_protects_the_top_of_its_own_second_ranking(coupling):
    second = [[[9, 8, 3, 2, 1].__getitem__, [1, 2, 9, 3, 8].__getitem__]]
    row = scripted([[lambda i: i + 1.0] * 2], latest(0.4, coupling), 3, PROMPT[:4], layers=2, second=second)
    row.step(4)
    assert row.retained == [[[0, 3, 4]] * 2, [[2, 3, 4]] * 2]


def test_what_the_sliding_windows_have_passed_goes_even_from_the_top_and_takes_no_place_in_it():
    for budget, share, expected in ((4, 0.25, [3, 4, 5, 6]), (3, 0.4, [3, 5, 6])):
        second = [[lambda i: 10.0 - i]]
        row = scripted([[lambda i: i + 1.0]], latest(share), budget, PROMPT[:6], second=second)
        row.windows = [5]  # the next query, at 7, meets 3 .. 7
        row.step(4)
        assert held(row) == expected
        assert sorted(row.second_utility(0, 0)) == expected


def test_a_rescue_divides_what_the_top_leaves():
    prompt = [i % 31 for i in range(40)]
    script = [[lambda i: 100.0 if i >= 32 else float(i % 16 == 3)]]
    for share, budget, best, expected in (
        (0.2, 6, (10,), [3, 10, 19, 38, 39, 40]),
        (0.2, 6, (3,), [3, 19, 37, 38, 39, 40]),  # a block whose best is on top has had its rescue
        (0.5, 4, (10, 11), [10, 11, 19, 40]),  # three rescued entries, two places
        (0.5, 2, (10,), [10, 40]),
    ):
        second = [[lambda i, best=best: float(i in best)]]
        row = scripted(script, latest(share, rescue=True), budget, prompt, second=second)
        row.step(4)
        assert held(row) == expected


def test_a_later_turn_takes_its_share_of_the_grown_budget():
    script = [[lambda i: i + 1.0]]
    row = scripted(script, latest(0.5), 0.5, PROMPT[:8], second=[[lambda i: 100.0 - i]])
    row.step(4)  # B = 4, K = 2
    assert held(row) == [0, 1, 7, 8]
    row.turn(PROMPT[:7])  # 16 seen: B = 8, K = 4
    row.step(9)
    assert held(row) == [0, 1, 7, 8, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("first", "second", "own", "near"),
    [
        ([1, 2, 3, 4], [1, 1, 0, 0], [1, 2, 3], [0, 2, 3]),  # 0 in the place of 1 on top
        ([1, 2, 3, 4], [1, 1 + 5e-7, 0, 0], [1, 2, 3], [0, 2, 3]),
        ([1, 2, 3, 4], [1 + 5e-7, 1, 0, 0], [1, 2, 3], [0, 2, 3]),
        ([1, 1 + 1e-9, 2, 0], [0, 0, 0, 9], [1, 2, 3], [0, 2, 3]),  # victims near each other, 3 on top
        ([1, 5, 5 + 1e-9, 9], [1, 1, 0, 0], [1, 2, 3], [0, 1, 3]),  # both
        ([5, 4, 3, 2, 1], [1, 1, 1, 1, 0], [0, 1, 3], [0, 1, 2]),
    ],
)
def test_near_ties_in_either_ranking_are_adopted(first, second, own, near):
    for observed, adopted in ((own, 0), (near, 1)):
        row = one_step(first, second, latest(0.4), 3, observed)
        assert (held(row), row.adopted) == (observed, adopted)
        assert sorted(row.utility(0, 0)) == sorted(row.second_utility(0, 0)) == observed


def test_a_large_cut_adopts_any_choice_among_near_ties_of_the_top_and_no_other():
    first, second = [1, 2, 3, 4, 5, 6], [1, 1, 1, 0, 0, 0]
    for observed, adopted in (([1, 2, 5], 0), ([0, 1, 5], 1), ([0, 2, 5], 1)):
        row = one_step(first, second, latest(0.7), 3, observed)
        assert (held(row), row.adopted) == (observed, adopted)
    for observed in ([0, 1, 2], [1, 2, 4], [0, 1, 4], [0, 4, 5]):
        with pytest.raises(AssertionError, match="wrongly kept"):
            one_step(first, second, latest(0.7), 3, observed)


def test_the_tolerance_holds_for_the_second_ranking_too():
    first, second = [1, 2, 3, 4], [1, 1.001, 0, 0]
    message = r"wrongly kept \[0\], wrongly dropped \[1\]; in the blend's ranking, utility of 0 is 1.0, "
    with pytest.raises(AssertionError, match=message):
        one_step(first, second, latest(0.4), 3, [0, 2, 3])
    row = one_step(first, second, latest(0.4), 3, [0, 2, 3], tolerance=1e-2)
    assert row.adopted == 1


@pytest.mark.parametrize(
    ("observed", "message"),
    [
        ([1, 2, 3], "wrongly kept .1., wrongly dropped .0.; in the blend's ranking"),  # left the top
        ([0, 1, 3], "wrongly kept .1., wrongly dropped .2.; in the blend's ranking"),  # wrong by the first alone
        ([0, 1, 2], "protected"),
        ([0, 2, 3, 1], "holds 4 entries, expected 3"),
    ],
)
def test_a_choice_that_no_near_tie_of_two_rankings_explains_is_refused(observed, message):
    axes = latest(0.4, recent=1)
    with pytest.raises(AssertionError, match=message):
        one_step([1, 2, 3, 4], [9, 5, 0, 0], axes, 3, observed)


def test_near_ties_at_the_edge_of_the_top_are_adopted_in_a_rescue():
    prompt = [i % 31 for i in range(40)]
    script = [[lambda i: 100.0 if i >= 32 else float(i % 16 == 3)]]
    for observed, adopted in (
        ([3, 11, 19, 38, 39, 40], 0),
        ([3, 10, 19, 38, 39, 40], 1),
        ([3, 9, 19, 38, 39, 40], None),
    ):
        second = [[lambda i: float(i in (10, 11))]]
        row = scripted(script, latest(0.2, rescue=True), 6, prompt, second=second)
        if adopted is None:
            with pytest.raises(AssertionError, match="in the blend's ranking"):
                row.step(4, observed=[[observed] * 2])
        else:
            row.step(4, observed=[[observed] * 2])
            assert (held(row), row.adopted) == (observed, adopted)


def test_illegal_blends_are_refused():
    for wrong in (
        {"share": 0.0}, {"share": 1.0}, {"share": -0.1}, {"share": math.nan}, {"scorer": "magic"},
        {"head_pool": "min"}, {"aggregation": "sum"}, {"new_token": "max"}, {"scorer": "knorm", "head_pool": "max"},
    ):  # fmt: skip
        with pytest.raises(ValueError):
            Blend(**({"share": 0.5} | wrong))
    for coupling, fields in (
        ("per_layer", {"score_layers": (0,)}),
        ("per_head", {"score_layers": (0,)}),
        ("per_head", {"scorer": "entropy"}),
    ):
        with pytest.raises(ValueError):
            Axes(coupling=coupling, blend=Blend(0.5, **fields))
    with pytest.raises(ValueError):
        Row(tiny_model(), Axes(blend=Blend(0.5, score_layers=(2,))), 5)


def test_the_protected_of_all_kinds_must_not_exceed_the_budget():
    for share, fits in ((0.2, True), (0.4, False)):
        row = Row(tiny_model(), Axes(sinks=2, recent=1, reserve=1, blend=Blend(share)), 5)
        if fits:
            row.prefill(PROMPT)
        else:
            with pytest.raises(ValueError, match=r"2 \+ 2 \+ 1 \+ 1"):
                row.prefill(PROMPT)
    with pytest.raises(ValueError, match="must stay below"):
        Row(tiny_model(), Axes(sinks=2, recent=2, reserve=1, blend=Blend(0.1)), 5).prefill(PROMPT)
