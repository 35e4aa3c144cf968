"""Budgets and policies: what they mean, what they refuse, and what the refusal says."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpatch import Blend, Budget, Policy, list_policies
from kvpatch.policy import resolve

# A busy machine must not fail a test, and every run draws the same cases.
UNTIMED = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}

# ---- Budget ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 7, 100_000, np.int64(7), np.int32(7), np.uint8(7)], ids=repr)
@pytest.mark.parametrize("length", [1, 7, 5000])
def test_an_int_is_tokens_whatever_the_prompt(value, length):
    budget = Budget(value)
    assert budget.tokens(length) == int(value) and budget.evicts
    assert type(budget.value) is int


@pytest.mark.parametrize("value", [1.0, None, "full", np.float64(1.0)], ids=repr)
def test_one_point_zero_none_and_full_mean_no_eviction(value):
    budget = Budget(value)
    assert budget.tokens(100) is None and not budget.evicts and str(budget) == "full"
    assert budget == Budget("full")


def test_one_token_and_the_whole_prompt_are_different_budgets():
    assert Budget(1).tokens(100) == 1
    assert Budget(1.0).tokens(100) is None


@pytest.mark.parametrize(
    "value",
    [0, -1, 0.0, -0.5, 1.5, 2.0, float("nan"), float("inf"), -float("inf"), np.int64(0), np.float64(1.5)],
    ids=repr,
)
def test_a_number_outside_the_kinds_is_refused_by_value(value):
    with pytest.raises(ValueError, match="budget") as caught:
        Budget(value)
    number = value.item() if isinstance(value, np.generic) else value
    assert str(number) in str(caught.value)
    assert "float in (0, 1)" in str(caught.value) and "int >= 1" in str(caught.value)


@pytest.mark.parametrize(
    "value", [True, False, "half", "", "FULL", "0.2", [8], (0.2,), {}, 1j, np.bool_(True)], ids=repr
)
def test_a_budget_of_another_type_is_refused_by_value(value):
    with pytest.raises(TypeError, match="budget") as caught:
        Budget(value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("share", "exact"),
    [
        (0.1, (1, 10)),
        (0.2, (1, 5)),
        (0.05, (1, 20)),
        (0.3, (3, 10)),
        (0.7, (7, 10)),
        (0.9, (9, 10)),
        (1 - 0.9, (1, 10)),
    ],
)
def test_a_share_is_never_one_short(share, exact):
    exact, budget = Fraction(*exact), Budget(share, min_budget=1)
    wrong = [n for n in range(1, 10_000) if budget.tokens(n) != max(math.floor(exact * n), 1)]
    assert wrong == []


@settings(max_examples=200, **UNTIMED)
@given(
    st.fractions(Fraction(1, 1000), Fraction(999, 1000), max_denominator=1000),
    st.integers(1, 100_000),
    st.integers(1, 200),
)
def test_a_share_is_the_floor_of_the_rational_it_stands_for(share, length, least):
    assert Budget(float(share), min_budget=least).tokens(length) == max(math.floor(share * length), least)


def test_a_share_never_falls_below_the_least_budget():
    assert Budget(0.1).tokens(100) == Budget(0.1).min_budget
    assert Budget(0.1, min_budget=3).tokens(100) == 10
    assert Budget(0.1, min_budget=np.int64(30)).tokens(100) == 30
    assert Budget(5, min_budget=30).tokens(100) == 5  # tokens are taken at their word


@pytest.mark.parametrize("least", [0, -1, 1.0, 0.5, True, None, "1", float("nan")], ids=repr)
def test_the_least_budget_is_a_positive_int(least):
    with pytest.raises(ValueError, match="min_budget") as caught:
        Budget(0.5, min_budget=least)
    assert repr(least) in str(caught.value)


def test_budgets_are_values():
    assert Budget(0.5) == Budget(np.float64(0.5)) and hash(Budget(8)) == hash(Budget(np.int64(8)))
    assert Budget.of(Budget(0.5, min_budget=2)) == Budget(0.5, min_budget=2)
    assert Budget.of(8) == Budget(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Budget(8).value = 9


# ---- Policy ------------------------------------------------------------------------------------------------

ILLEGAL = {
    "scorer": ["atention", None, 3, "", ["attention"]],
    "head_pool": ["median", None, 1, "Mean"],
    "aggregation": ["sum", None, ""],
    "coupling": ["layer", None, "per-head"],
    "new_token": ["max", None, 0.0, True],
    "alpha": [1.0, 1, -0.1, 2, float("nan"), float("inf"), "0.8", None, True],
    "refresh": [0, -4, 1.5, 4.0, "twice", None, True],
    "sinks": [-1, 1.0, 1.5, -0.5, "4", None, True, float("nan")],
    "recent": [-1, 1.0, 1.5, -0.5, "4", None, True, float("nan")],
    "reserve": [-1, 1.0, 1.5, -0.5, "4", None, True, float("nan")],
    "seed": [0.5, "1", None, True],
    "score_layers": ["some", None, 3, [], (), [-1], [0, 1.5], [True], {0, 1}, range(0)],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in ILLEGAL.items() for value in values], ids=repr
)
def test_an_illegal_value_is_refused_by_field_and_value(field, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        Policy(**{field: value})
    assert field in str(caught.value)
    assert repr(value) in str(caught.value)


ILLEGAL_IN_A_BLEND = {
    "share": [0.0, 1.0, 1, -0.1, "all", None, True, float("nan")],
    "least": [-0.1, 1.0, "0", None, True, float("nan")],
    "closing": [0, -1, 2.0, "1", None, True],
    "focus": [0.0, 1.0, 1, -0.5, "0.5", True, float("nan")],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in ILLEGAL_IN_A_BLEND.items() for value in values], ids=repr
)
def test_an_illegal_value_of_a_second_ranking_is_refused_by_field_and_value(field, value):
    with pytest.raises(ValueError) as caught:
        Blend(**{field: value})
    assert field in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize("field", ["least", "focus"])
@pytest.mark.parametrize("scorer", ["keydiff", "knorm", "random"])
def test_a_part_of_the_whole_needs_attention(field, scorer):
    with pytest.raises(ValueError, match=f"{field}=0.25 with scorer='{scorer}'"):
        Blend(scorer=scorer, **{field: 0.25})
    Blend(scorer="vnorm", **{field: 0.25})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"scorer": "keydiff", "head_pool": "max"}, ("scorer='keydiff'", "head_pool='max'")),
        ({"scorer": "knorm", "head_pool": "rms"}, ("scorer='knorm'", "head_pool='rms'")),
        ({"scorer": "recency", "head_pool": "max"}, ("scorer='recency'", "head_pool='max'")),
        ({"scorer": "random", "head_pool": "rms"}, ("scorer='random'", "head_pool='rms'")),
        ({"scorer": "entropy", "coupling": "per_head"}, ('scorer="entropy"', 'coupling="per_head"')),
        ({"scorer": "recency", "refresh": 2}, ('scorer="recency"', "refresh=2")),
        ({"scorer": "recency", "refresh": "once"}, ('scorer="recency"', "refresh='once'")),
        ({"score_layers": [0, 2], "coupling": "per_layer"}, ("score_layers=(0, 2)", "coupling='per_layer'")),
        ({"score_layers": range(2), "coupling": "per_head"}, ("score_layers=(0, 1)", "coupling='per_head'")),
        ({"blend": Blend(focus=0.5), "coupling": "per_head"}, ("focus=0.5", "coupling='per_head'")),
        ({"blend": Blend(focus=0.5), "coupling": "per_layer"}, ("focus=0.5", "coupling='per_layer'")),
    ],
    ids=repr,
)
def test_a_senseless_combination_is_refused_by_both_fields(fields, named):
    with pytest.raises(ValueError) as caught:
        Policy(**fields)
    for part in named:
        assert part in str(caught.value)
    for field in fields:  # each field alone, or with the other's default, is fine
        Policy(**{field: fields[field]})


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": 0},
        {"alpha": 0.999},
        {"refresh": 1},
        {"refresh": np.int64(3)},
        {"sinks": 0.99},
        {"recent": 0.0},
        {"seed": -3},
        {"score_layers": range(1, 5, 2)},
        {"score_layers": [3, 1, 1]},
    ],
    ids=repr,
)
def test_legal_values_at_the_edges_are_taken(fields):
    policy = Policy(**fields)
    assert policy == Policy().replace(**fields)
    assert hash(policy) == hash(Policy(**fields))


def test_scored_layers_are_a_set_in_order():
    assert Policy(score_layers=[3, 1, 1]).rankings[0].scoring_layers(4) == (1, 3)
    assert Policy(score_layers=range(0, 6, 2)).rankings[0].scoring_layers(6) == (0, 2, 4)
    assert Policy().rankings[0].scoring_layers(3) == (0, 1, 2)


def test_layers_that_the_model_lacks_are_named():
    with pytest.raises(ValueError, match=r"score_layers.*\[4, 9\]"):
        Policy(score_layers=[1, 4, 9]).rankings[0].scoring_layers(4)


@pytest.mark.parametrize(("refresh", "expected"), [(1, range(1, 13)), (4, [1, 5, 9]), (5, [1, 6, 11]), ("once", [1])])
def test_scoring_steps_start_at_the_first(refresh, expected):
    policy = Policy(refresh=refresh)
    assert [step for step in range(1, 13) if policy.scores_at(step)] == list(expected)


def test_a_policy_that_evicts_nothing_never_scores():
    assert not any(resolve("full").scores_at(step) for step in range(1, 20))


# ---- protected counts --------------------------------------------------------------------------------------


@settings(max_examples=200, **UNTIMED)
@given(
    st.integers(1, 2000),
    st.lists(st.one_of(st.integers(0, 60), st.integers(0, 99)), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_protected_counts_are_counts_or_shares_of_the_budget(budget, numbers, shares):
    fields = ("sinks", "recent", "reserve")
    values = [number / 100 if share else number for number, share in zip(numbers, shares, strict=True)]
    exact = [math.floor(Fraction(n, 100) * budget) if share else n for n, share in zip(numbers, shares, strict=True)]
    policy = Policy(**dict(zip(fields, values, strict=True)))
    if 0 < sum(exact) >= budget:
        with pytest.raises(ValueError) as caught:
            policy.protected(budget)
        for part in ("sinks + recent + reserve", " + ".join(map(str, exact)), str(budget)):
            assert part in str(caught.value)
    else:
        assert policy.protected(budget) == tuple(exact)


def test_a_budget_of_one_token_needs_no_protection():
    assert Policy().protected(1) == (0, 0, 0)
    assert resolve("h2o-decode").protected(1) == (0, 0, 0)  # half of one token is none


# ---- names -------------------------------------------------------------------------------------------------


def test_listed_policies_are_sorted_and_resolve_to_their_own_name():
    names = list_policies()
    assert names == sorted(set(names)) and {"best", "full", "inertia", "inertia-lazy"} <= set(names)
    with pytest.raises(ValueError, match="made for a model"):
        resolve("best")
    names.remove("best")
    for name in names:
        policy = resolve(name)
        assert isinstance(policy, Policy) and policy.name == name
        assert resolve(policy) is policy
    assert [name for name in names if not resolve(name).evicts] == ["full"]


def test_presets_differ_in_a_field_beside_their_name():
    names = [name for name in list_policies() if name != "best"]
    plain = {dataclasses.replace(resolve(name), name="x") for name in names}
    assert len(plain) == len(names)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("inertai", "inertia"),
        ("inertia_lazy", "inertia-lazy"),
        ("tov", "tova"),
        ("h2o-decod", "h2o-decode"),
        ("StreamingLLM", "streaming-llm"),
        ("score_free", "score-free"),
    ],
)
def test_an_unknown_policy_is_refused_with_the_nearest_name(typed, meant):
    with pytest.raises(ValueError, match="unknown policy") as caught:
        resolve(typed)
    message = str(caught.value)
    assert repr(typed) in message and "did you mean" in message
    assert repr(meant) in message.split("; known")[0]
    assert all(name in message for name in list_policies())


def test_a_name_like_no_other_is_refused_with_all_names_and_no_guess():
    with pytest.raises(ValueError) as caught:
        resolve("qqqq")
    assert "did you mean" not in str(caught.value) and "inertia" in str(caught.value)


@pytest.mark.parametrize("policy", [None, 3, Policy, {"scorer": "attention"}], ids=repr)
def test_something_that_is_no_policy_is_refused(policy):
    with pytest.raises(TypeError, match="policy") as caught:
        resolve(policy)
    assert repr(policy) in str(caught.value)


def test_fields_replace_those_of_a_preset():
    policy = resolve("inertia-lazy", alpha=0.5, sinks=4)
    assert (policy.alpha, policy.sinks, policy.refresh) == (0.5, 4, resolve("inertia-lazy").refresh)
    assert resolve("inertia-lazy").alpha != 0.5  # the preset itself is as it was


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("alpah", "alpha"), ("sink", "sinks"), ("headpool", "head_pool"), ("refersh", "refresh")],
)
def test_an_unknown_field_is_refused_with_the_nearest_field(typed, meant):
    for call in (lambda: resolve("inertia", **{typed: 1}), lambda: Policy().replace(**{typed: 1})):
        with pytest.raises(TypeError) as caught:
            call()
        assert repr(typed) in str(caught.value) and f"did you mean {meant!r}" in str(caught.value)


def test_a_replaced_field_is_checked_like_a_given_one():
    with pytest.raises(ValueError, match="refresh=4"):
        resolve("streaming-llm", refresh=4)


def test_policies_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().alpha = 0.1
    assert len({Policy(), Policy(alpha=0.8), Policy(alpha=0.7)}) == 2


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ([], ("score_heads", "non-empty")),
        ([(1,)], ("pairs of indices >= 0", "(1,)")),
        ([(1, 2, 3, 4)], ("pairs of indices >= 0", "(1, 2, 3, 4)")),
        ([(1, -2)], ("pairs of indices >= 0", "(1, -2)")),
        ([(1, 2, 0.0)], ("weights above 0", "(1, 2, 0.0)")),
        ([(1, 2, float("inf"))], ("weights above 0", "inf")),
        ([(1, 2, 0.5), (1, 2)], ("the head (1, 2) one weight", "0.5 and 1.0")),
    ],
)
def test_heads_that_can_not_be_ranked_by_are_refused(heads, words):
    with pytest.raises(ValueError) as error:
        Policy(score_heads=heads)
    assert all(word in str(error.value) for word in words)


def test_heads_are_sorted_and_a_weight_of_one_is_none():
    assert Policy(score_heads=[[2, 1, 1.0], [0, 3, 2], [2, 1]]).score_heads == ((0, 3, 2.0), (2, 1))
