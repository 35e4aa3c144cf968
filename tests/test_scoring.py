"""Each scorer equals its formula in plain Python; users' own scorers decide what is retained."""

import math

import pytest
import torch
from factories import PAD, left_padded, llama, prompts
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import aggregation, scoring

# A busy machine must not fail a test, and every run draws the same cases.
UNTIMED = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
DRAWS = settings(max_examples=50, **UNTIMED)
POOLS = ("mean", "max", "rms")


@st.composite
def scenes(draw, shared=None, head_pool=None):
    """A scene of float64 tensors, rows of different lengths, garbage outside them."""
    batch, groups, queries, n, width = (
        draw(st.integers(low, high)) for low, high in ((1, 3), (1, 3), (1, 4), (2, 12), (1, 6))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    heads = 1 if (draw(st.booleans()) if shared is None else shared) else groups
    lengths = torch.randint(2, n + 1, (batch, heads, 1), generator=generator)
    valid = torch.arange(n) < lengths
    positions = torch.rand(batch, heads, 3 * n, generator=generator).argsort(-1)[..., :n]
    logits = 3 * torch.randn(batch, groups, queries, n, generator=generator, dtype=torch.float64)
    weights = logits.masked_fill(~valid[:, :, None], -torch.inf).softmax(-1)
    keys, values = (torch.randn(batch, groups, n, width, generator=generator, dtype=torch.float64) for _ in range(2))
    garbage = ~valid.expand(batch, groups, n)[..., None]
    keys, values = torch.where(garbage, 1e30, keys), torch.where(garbage, -1e30, values)
    return scoring.Scene(
        weights,
        keys,
        values,
        positions,
        valid,
        head_pool or draw(st.sampled_from(POOLS)),
        draw(st.integers(-5, 5)),
    )


def pooled(numbers: list[float], head_pool: str) -> float:
    if head_pool == "mean":
        return sum(numbers) / len(numbers)
    return max(numbers) if head_pool == "max" else math.sqrt(sum(x * x for x in numbers) / len(numbers))


def norm(vector: list[float]) -> float:
    return math.sqrt(sum(x * x for x in vector))


def check(scene: scoring.Scene, name: str, naive) -> None:
    """Compare with naive(row, KV head, held slots, slot) at every held slot."""
    batch, groups, _, n = scene.weights.shape
    got = scoring.scorer(name).score(scene).expand(batch, groups, n)
    for b in range(batch):
        for g in range(groups):
            row = scene.valid[b, g if scene.valid.shape[1] > 1 else 0].tolist()
            held = [i for i in range(n) if row[i]]
            for i in held:
                assert got[b, g, i].item() == pytest.approx(naive(b, g, held, i), rel=1e-9, abs=1e-12)


@DRAWS
@given(scenes())
def test_attention_is_the_groups_pooled_weight(scene):
    weights = scene.weights.tolist()
    check(scene, "attention", lambda b, g, held, i: pooled([head[i] for head in weights[b][g]], scene.head_pool))


@DRAWS
@given(scenes())
def test_vnorm_weighs_attention_by_the_values_norm_over_the_held_mean(scene):
    weights, values = scene.weights.tolist(), scene.values.tolist()

    def naive(b, g, held, i):
        mean = sum(norm(values[b][g][j]) for j in held) / len(held)
        return pooled([head[i] * norm(values[b][g][i]) / mean for head in weights[b][g]], scene.head_pool)

    check(scene, "vnorm", naive)


@DRAWS
@given(scenes())
def test_value_mass_weighs_attention_by_the_values_absolute_sum(scene):
    weights, values = scene.weights.tolist(), scene.values.tolist()

    def naive(b, g, held, i):
        size = sum(abs(x) for x in values[b][g][i])
        return pooled([head[i] * size for head in weights[b][g]], scene.head_pool)

    check(scene, "value-mass", naive)


@DRAWS
@given(scenes())
def test_output_change_is_how_far_the_output_moves_without_an_entry(scene):
    weights, values = scene.weights.tolist(), scene.values.double()

    def naive(b, g, held, i):
        moved = []
        for head in weights[b][g]:
            whole = sum(head[j] * values[b, g, j] for j in held)
            left = sum(head[j] for j in held if j != i)
            rest = sum((head[j] / left * values[b, g, j] for j in held if j != i and left), torch.zeros_like(whole))
            moved.append(float((rest - whole).norm()))
        return pooled(moved, scene.head_pool)

    check(scene, "output-change", naive)


def test_a_lone_slot_has_entropy_zero_and_no_nan():
    one = torch.ones(1, 1, 2, 1)
    alone = scoring.Scene(
        one, one[:, :, 0, None], one[:, :, 0, None], torch.zeros(1, 1, 1), torch.ones(1, 1, 1, dtype=bool), "mean", 0
    )
    assert scoring.scorer("entropy").score(alone).tolist() == [[[0.0]]]


@DRAWS
@given(scenes(shared=True))
def test_entropy_scales_attention_by_the_layers_normalised_entropy(scene):
    weights = scene.weights.tolist()

    def naive(b, g, held, i):
        heads = [head for group in weights[b] for head in group]
        mean = [sum(head[j] for head in heads) / len(heads) for j in held]
        entropy = -sum(x * math.log(x) for x in mean if x > 0) / math.log(len(held))
        return entropy * pooled([head[i] for head in weights[b][g]], scene.head_pool)

    check(scene, "entropy", naive)


@DRAWS
@given(scenes())
def test_keydiff_is_minus_the_cosine_to_the_mean_direction(scene):
    keys = scene.keys.tolist()
    # In one dimension as many keys may point up as down; then there is no mean direction to compare with.
    units = torch.where(scene.valid[..., None], torch.nn.functional.normalize(scene.keys, dim=-1), 0.0)
    assume((units.sum(2).norm(dim=-1) > 1e-6).all())

    def naive(b, g, held, i):
        unit = {j: [x / norm(keys[b][g][j]) for x in keys[b][g][j]] for j in held}
        mean = [sum(unit[j][d] for j in held) / len(held) for d in range(len(unit[i]))]
        return -sum(x * y for x, y in zip(unit[i], mean, strict=True)) / norm(mean)

    check(scene, "keydiff", naive)


@DRAWS
@given(scenes())
def test_knorm_is_minus_the_keys_norm(scene):
    check(scene, "knorm", lambda b, g, held, i: -norm(scene.keys[b, g, i].tolist()))


@DRAWS
@given(scenes())
def test_recency_is_the_original_position(scene):
    positions = scene.positions.expand(*scene.keys.shape[:3]).tolist()
    check(scene, "recency", lambda b, g, held, i: positions[b][g][i])


def random_scores(positions, seed):
    zeros = torch.zeros(1, 1, 1, len(positions), dtype=torch.float64)
    empty = torch.zeros(1, 1, len(positions), 1)
    valid = torch.ones(1, 1, len(positions), dtype=torch.bool)
    scene = scoring.Scene(zeros, empty, empty, torch.tensor(positions)[None, None], valid, "mean", seed)
    return scoring.scorer("random").score(scene).flatten().tolist()


@DRAWS
@given(st.permutations(range(20)), st.integers(-(2**31), 2**31))
def test_random_depends_on_seed_and_position_alone(order, seed):
    ordered = random_scores(list(range(20)), seed)
    assert random_scores(order, seed) == [ordered[position] for position in order]
    assert random_scores([order[0]], seed) == [ordered[order[0]]]
    assert random_scores(list(range(20)), seed + 1) != ordered


@pytest.mark.parametrize("seed", [0, 1, -7, 12345])
def test_random_is_spread_over_zero_to_one_without_repeats(seed):
    count, bins = 20000, 20
    scores = random_scores(list(range(count)), seed)
    assert 0.0 <= min(scores) and max(scores) < 1.0
    assert len(set(scores)) > count - 30  # of 2**32 values, a draw with repeats expects one in 20 such lists
    filled = [0] * bins
    for score in scores:
        filled[int(score * bins)] += 1
    # Six standard deviations of a binomial draw.
    share = count / bins
    assert all(abs(n - share) < 6 * math.sqrt(share * (1 - 1 / bins)) for n in filled)
    mean = sum(scores) / count
    neighbours = sum((x - mean) * (y - mean) for x, y in zip(scores, scores[1:], strict=False)) / count * 12
    assert abs(neighbours) < 6 / math.sqrt(count)


@DRAWS
@given(scenes())
def test_a_row_scores_as_it_would_alone(scene):
    for name in scoring.list_scorers():
        if name == "entropy" and scene.valid.shape[1] > 1:  # refused: it needs one set for all heads
            continue
        groups = scene.weights.shape[1]
        together = scoring.scorer(name).score(scene)
        for b in range(len(scene.weights)):
            alone = scene._replace(**{field: getattr(scene, field)[b : b + 1] for field in scene._fields[:5]})
            held = scene.valid[b].expand(groups, -1)
            shape = (groups, held.shape[1])
            torch.testing.assert_close(
                scoring.scorer(name).score(alone)[0].expand(shape)[held], together[b].expand(shape)[held]
            )


@DRAWS
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.sampled_from(POOLS), st.integers(0, 2))
def test_pool_is_mean_max_or_root_mean_square(numbers, head_pool, dim):
    shape = [1, 1, 1]
    shape[dim] = len(numbers)
    got = scoring.pool(torch.tensor(numbers, dtype=torch.float64).view(shape), head_pool, dim)
    assert got.shape == (1, 1, 1)
    assert got.item() == pytest.approx(pooled(numbers, head_pool), abs=1e-12)


@DRAWS
@given(
    st.lists(st.floats(-5, 5), min_size=1, max_size=8),
    st.sampled_from(["single", "cumulative", "ema", "peak"]),
    st.floats(0, 0.99),
)
def test_aggregation_is_the_newest_the_sum_or_the_moving_average(scores, rule, alpha):
    utility, expected = torch.zeros(1, dtype=torch.float64), 0.0
    for score in scores:
        utility = aggregation.aggregate(utility, torch.tensor([score], dtype=torch.float64), rule, alpha)
        expected = {
            "single": score,
            "cumulative": expected + score,
            "peak": max(alpha * expected, score),
            "ema": alpha * expected + (1 - alpha) * score,
        }[rule]
    assert utility.item() == pytest.approx(expected, abs=1e-9)


def test_aggregation_leaves_its_arguments_alone():
    for rule in ("single", "cumulative", "ema", "peak"):
        utility, score = torch.ones(2, 3), torch.arange(3.0)
        got = aggregation.aggregate(utility, score.expand(2, 3), rule, 0.5)
        assert got.shape == (2, 3)
        assert torch.equal(utility, torch.ones(2, 3)) and torch.equal(score, torch.arange(3.0))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(scoring, "_SCORERS", dict(scoring._SCORERS))


def even(scene):
    """Even positions before odd ones, and among equals the later."""
    positions = scene.positions.to(scene.weights.dtype)
    return (scene.positions % 2 == 0) * 1000.0 + positions


@pytest.fixture(scope="module")
def model():
    return llama(query_groups=3)


def held_after(model, policy, budget, length, new):
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        model.generate(
            **left_padded(prompts((length,))),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=PAD,
        )
        return handle.retained()


@pytest.mark.parametrize("coupling", ["sequential", "uniform", "per_layer", "per_head"])
def test_a_users_scorer_decides_what_is_retained(registry, model, coupling):
    kvpatch.register_scorer("even", even, uses_attention=False)
    assert "even" in kvpatch.list_scorers()
    policy = kvpatch.Policy(scorer="even", aggregation="single", coupling=coupling)
    budget, length, new = 6, 21, 10
    retained = held_after(model, policy, budget, length, new)
    expected = [p for p in range(length + new - 1) if p % 2 == 0][-budget:]
    for head in retained.flatten(0, 2).tolist():
        assert sorted(p for p in head if p >= 0) == expected
    # The attention scorer, in the same place, holds something else.
    other = held_after(model, kvpatch.Policy(aggregation="single", coupling=coupling), budget, length, new)
    assert sorted(p for p in other[0, 0, 0].tolist() if p >= 0) != expected


def test_a_users_scorer_may_read_attention_and_be_pooled(registry, model):
    kvpatch.register_scorer("mine", lambda scene: scene.weights.amax(2), uses_attention=True)
    mine = held_after(model, kvpatch.Policy(scorer="mine", head_pool="max"), 6, 21, 10)
    theirs = held_after(model, kvpatch.Policy(scorer="attention", head_pool="max"), 6, 21, 10)
    assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values)


def test_a_scorer_may_give_one_score_for_all_heads(registry, model):
    kvpatch.register_scorer("wide", even, uses_attention=False)
    kvpatch.register_scorer("narrow", lambda scene: even(scene)[:, :1], uses_attention=False)
    policy = kvpatch.Policy(scorer="wide", aggregation="single", coupling="per_head")
    wide = held_after(model, policy, 6, 21, 10)
    assert torch.equal(held_after(model, policy.replace(scorer="narrow"), 6, 21, 10), wide)


def test_a_name_is_registered_once_unless_replaced(registry, model):
    kvpatch.register_scorer("even", lambda scene: -even(scene), uses_attention=False)
    with pytest.raises(ValueError, match="'even'.*replace=True"):
        kvpatch.register_scorer("even", even, uses_attention=False)
    with pytest.raises(ValueError, match="'attention'"):
        kvpatch.register_scorer("attention", even, uses_attention=False)
    policy = kvpatch.Policy(scorer="even", aggregation="single")
    first = held_after(model, policy, 6, 21, 10)
    kvpatch.register_scorer("even", even, uses_attention=False, replace=True)
    second = held_after(model, policy, 6, 21, 10)
    assert all(p % 2 == 0 for p in second.flatten().tolist() if p >= 0)
    assert any(p % 2 for p in first.flatten().tolist() if p >= 0)


@pytest.mark.parametrize("name", ["", None, 3, even], ids=["empty", "none", "number", "function"])
def test_a_scorers_name_must_be_text(registry, name):
    with pytest.raises(TypeError, match="name"):
        kvpatch.register_scorer(name, even, uses_attention=False)


@pytest.mark.parametrize("score", [None, "attention", 3])
def test_a_scorer_must_be_a_function(registry, score):
    with pytest.raises(TypeError, match="score"):
        kvpatch.register_scorer("mine", score, uses_attention=False)
    assert "mine" not in kvpatch.list_scorers()


def test_whether_a_scorer_reads_attention_must_be_said(registry):
    with pytest.raises(TypeError, match="uses_attention"):
        kvpatch.register_scorer("mine", even)


@pytest.mark.parametrize("name", ["atention", None, ["attention"]], ids=repr)
def test_an_unknown_scorer_is_refused_with_the_names_there_are(name):
    with pytest.raises(ValueError) as caught:
        scoring.scorer(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in scoring.list_scorers())


def test_listed_scorers_are_sorted_and_all_known():
    names = kvpatch.list_scorers()
    assert names == sorted(set(names))
    assert {
        "attention",
        "vnorm",
        "value-mass",
        "output-change",
        "entropy",
        "keydiff",
        "knorm",
        "recency",
        "random",
    } <= set(names)
    assert all(scoring.scorer(name).name == name for name in names)
