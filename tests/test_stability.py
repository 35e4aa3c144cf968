"""How stable rankings are, against a recomputation in plain loops from the model's own attention, step by step."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from factories import EOS, PAD, llama, prompts, tiny
from sampling import tokenizer_of
from scipy import stats

import kvpatch
from kvpatch.evaluation import continuation, rankings, retention, stability
from kvpatch.evaluation.config import Config
from kvpatch.evaluation.fidelity import distinct
from kvpatch.evaluation.rankings import Look, Standing, rule_of
from kvpatch.evaluation.reading import Clock, Way
from kvpatch.evaluation.retention import Retention, draw_retention
from kvpatch.evaluation.samples import CellError, Sample, Sources
from kvpatch.evaluation.summary import cells

PROMPT, FORCED, BUDGET = 30, 14, 7
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
RECIPE = Path(kvpatch.__file__).parents[1] / "profiles" / "recipes" / "ablation.yaml"


def way(policy="inertia", budget=BUDGET, name=None, **fields) -> Way:
    policy = kvpatch.Policy(**fields) if fields else kvpatch.policy.resolve(policy)
    given = None if budget is None else kvpatch.Budget(budget)
    return Way(name or policy.name, "full" if budget is None else str(budget), policy, given)


def text_of(seed=0, length=PROMPT + FORCED) -> torch.Tensor:
    return torch.tensor(prompts((length,), seed)[0])


def measured(model, *ways: Way, text=None, queries=5):
    return stability.measured(model, text_of() if text is None else text, PROMPT, list(ways), queries)


# ---- the recomputation: one token at a time, everything in Python numbers


def steps_by_hand(model, text, prompt=PROMPT) -> list[list[list[list[float]]]]:
    """[step][layer][query head][position]: attention of each step, from one forward over the whole text."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(text[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    columns = range(prompt, len(text) - 1)
    return [[layer[0, :, query, : query + 1].tolist() for layer in whole] for query in columns]


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def utilities_by_hand(steps, coupling, aggregation, alpha, layers=None, forgets=False) -> list[list[float]]:
    """[step][position], of a ranking that all layers share."""
    m, found = [], []
    for attention in steps:
        scores = [[mean(column) for column in zip(*heads, strict=True)] for heads in attention]
        scores = [scores[layer] for layer in layers] if layers else scores
        n = len(scores[0])
        if not m or forgets:
            m = [0.0] * n
        else:
            m = [*m, mean(m)]
        for s in [[mean(column) for column in zip(*scores, strict=True)]] if coupling == "uniform" else scores:
            if aggregation == "single":
                m = s
            elif aggregation == "cumulative":
                m = [a + b for a, b in zip(m, s, strict=True)]
            else:
                m = [alpha * a + (1 - alpha) * b for a, b in zip(m, s, strict=True)]
        found.append(m)
    return found


def top_by_hand(m, count=BUDGET) -> set[int]:
    return set(sorted(range(len(m)), key=lambda i: (m[i], i))[-count:])


def churns_by_hand(utilities, count=BUDGET) -> list[float]:
    sets = [top_by_hand(m, count) for m in utilities]
    return [1 - len(a & b) / len(a | b) for a, b in zip(sets, sets[1:], strict=False)]


def calm_by_hand(utilities, count=BUDGET) -> float:
    sets = [top_by_hand(m, count) for m in utilities]
    return mean([float(len(b - a) <= 1) for a, b in zip(sets, sets[1:], strict=False)])


@pytest.mark.parametrize("coupling", ["sequential", "uniform"])
@pytest.mark.parametrize("aggregation, alpha", [("ema", 0.8), ("ema", 0.3), ("cumulative", 0.8)])
@pytest.mark.parametrize("layers", ["all", (0, 2)])
def test_churn_is_that_of_a_recomputation(coupling, aggregation, alpha, layers):
    model, text = llama(), text_of()
    one = way(coupling=coupling, aggregation=aggregation, alpha=alpha, score_layers=layers)
    ((measures, series),) = measured(model, one)
    steps, chosen = steps_by_hand(model, text), None if layers == "all" else layers
    expected = {
        "raw": utilities_by_hand(steps, coupling, "single", alpha, chosen),
        "step": utilities_by_hand(steps, coupling, aggregation, alpha, chosen, forgets=True),
        "ema": utilities_by_hand(steps, coupling, aggregation, alpha, chosen),
    }
    for name, utilities in expected.items():
        churns = churns_by_hand(utilities)
        assert len(churns) == FORCED - 2 and 0 < mean(churns) < 1
        assert series[f"churn_{name}"] == pytest.approx(churns, abs=1e-6)
        assert measures[f"churn_{name}"] == pytest.approx(mean(churns))
        assert measures[f"at_most_one_{name}"] == pytest.approx(calm_by_hand(utilities))


@pytest.mark.parametrize("coupling", ["per_layer", "per_head"])
def test_churn_of_rankings_of_their_own_is_the_mean_over_them(coupling):
    model, text = llama(query_groups=3), text_of()
    ((measures, _),) = measured(model, way(coupling=coupling))
    steps, churns = steps_by_hand(model, text), []
    for layer in range(3):
        for heads in [range(6)] if coupling == "per_layer" else [range(3), range(3, 6)]:
            own = [[[step[layer][head] for head in heads]] for step in steps]
            churns.append(mean(churns_by_hand(utilities_by_hand(own, "sequential", "ema", 0.8))))
    assert measures["churn_ema"] == pytest.approx(mean(churns))
    assert measures["churn_raw"] == measures["churn_step"]  # no depth is weighted


@pytest.mark.parametrize("coupling", ["sequential", "uniform", "per_layer", "per_head"])
def test_scorers_are_compared_with_attention_under_the_same_rule(coupling):
    """The utilities are the library's own, decoded under a budget at which nothing goes."""
    model, text = llama(query_groups=3), text_of()
    ((measures, _),) = measured(model, way(coupling=coupling))
    utilities = {}
    with kvpatch.patched(model, "full", compile=False) as handle:
        for name in ("attention", *stability.COMPARED):
            if name == "entropy" and coupling == "per_head":
                assert f"spearman_{name}" not in measures and f"jaccard_{name}" not in measures
                continue
            policy = kvpatch.Policy(scorer=name, coupling=coupling)
            cache = kvpatch.SlotCache(model.config, policy, 500)
            found = utilities[name] = []
            with torch.no_grad():
                model(text[None, :PROMPT], **{handle.keyword: cache})
                for column in range(PROMPT, len(text) - 1):
                    model(text[None, column : column + 1], **{handle.keyword: cache})
                    found.append(cache.current.utility[0, :, 0, :, : column + 1].flatten(0, 1).tolist())
    for name in utilities.keys() - {"attention"}:
        pairs = [
            (a, b)
            for ours, theirs in zip(utilities[name], utilities["attention"], strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        rho = mean([stats.spearmanr(a, b).statistic for a, b in pairs])
        sets = [(top_by_hand(a), top_by_hand(b)) for a, b in pairs]
        assert measures[f"spearman_{name}"] == pytest.approx(rho, abs=1e-6), name
        assert measures[f"jaccard_{name}"] == pytest.approx(mean([len(a & b) / len(a | b) for a, b in sets])), name


@pytest.mark.parametrize("kind", ["mistral", "ministral", "qwen3"])
def test_heads_pools_and_windows_are_the_librarys(kind):
    model = tiny(kind, **({"sliding_window": 16} if kind == "mistral" else {}))
    text = text_of()
    policies = [
        kvpatch.Policy(score_heads=[(0, 1), (2, 0), (2, 3)], head_pool="max"),
        kvpatch.Policy(scorer="vnorm", head_pool="rms", coupling="uniform", new_token="zero"),
        kvpatch.Policy(scorer="random", seed=3, aggregation="peak"),
    ]
    standings = [Standing(rule_of(one)) for one in policies]
    found = [[] for _ in policies]

    def watch(look: Look):
        for one, kept in zip(standings, found, strict=True):
            one.update(look)
            kept.append(one.utility[0, 0])

    rankings.observe(model, text, PROMPT, watch, 4)
    with kvpatch.patched(model, "full", compile=False) as handle:
        for policy, kept in zip(policies, found, strict=True):
            if kind == "mistral" and policy.new_token == "mean":
                continue  # the mean of what is held, which is less there than the full cache holds
            cache = kvpatch.SlotCache(model.config, policy, 500)
            with torch.no_grad():
                model(text[None, :PROMPT], **{handle.keyword: cache})
                for step, column in enumerate(range(PROMPT, len(text) - 1)):
                    model(text[None, column : column + 1], **{handle.keyword: cache})
                    # A window that all layers have lets go of what lies behind it.
                    held = cache.retained()[0, 0, 0]
                    utility = cache.current.utility[0, 0, 0, 0, : len(held)][held >= 0]
                    got = kept[step][held[held >= 0]].to(utility)
                    torch.testing.assert_close(got, utility, rtol=1e-5, atol=1e-7)


# ---- what must hold whatever the model says


def test_everything_lies_within_its_bounds():
    policies = [way(name) for name in kvpatch.list_policies() if name not in ("full", "best")]
    for measures, series in measured(llama(), *policies, way("full", None)):
        for name, value in measures.items():
            least = -1 if name.startswith("spearman") else 0
            assert least - 1e-12 <= value <= (math.inf if name == "variance_left" else 1 + 1e-12), name
        for values in series.values():
            assert len(values) == FORCED - 2 and all(0 <= value <= 1 for value in values)


def test_the_full_cache_tells_how_other_scorers_rank_one_step():
    model = llama()
    ((measures, series),) = measured(model, way("full", None))
    assert set(measures) == {f"spearman_{name}" for name in stability.COMPARED} and not series
    steps = steps_by_hand(model, text_of())
    expected = [stats.spearmanr(m, range(len(m))).statistic for m in utilities_by_hand(steps, "uniform", "single", 0)]
    assert measures["spearman_recency"] == pytest.approx(mean(expected), abs=1e-6)


def test_without_memory_the_utility_is_the_last_layers_score():
    names = ("raw", "step", "ema")
    bare, last = measured(llama(), way(alpha=0.0), way(score_layers=[2], aggregation="single", coupling="uniform"))
    for name in names:
        assert bare[1][f"churn_{name}"] == last[1]["churn_raw"]
    assert bare[0]["variance_left"] == pytest.approx(1) == bare[0]["variance_bound"]


def test_smoothing_over_time_lets_less_change():
    alphas = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95)
    text = text_of(length=PROMPT + 40)
    found = measured(llama(), *(way(coupling="uniform", alpha=alpha) for alpha in alphas), text=text)
    churns = [measures["churn_ema"] for measures, _ in found]
    assert churns[0] == found[0][0]["churn_raw"] and churns[-1] < churns[0] / 2
    assert len({measures["churn_raw"] for measures, _ in found}) == 1


@pytest.mark.parametrize("queries", [1, 3, 100])
def test_blocks_of_any_size_give_the_same(queries):
    ways = [way("inertia"), way("tova"), way("h2o-decode"), way("full", None)]
    for one, other in zip(measured(llama(), *ways), measured(llama(), *ways, queries=queries), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5)
        assert one[1] == other[1]


def test_what_a_policy_protects_and_when_it_scores_does_not_count():
    lazy = way(refresh=4, sinks=2, recent=2, blend=kvpatch.Blend(scorer="keydiff"))
    assert len({repr(one) for one in measured(llama(), way("inertia"), lazy)}) == 1


def test_the_model_is_as_before():
    model = llama()
    measured(model, way())
    assert model.config._attn_implementation == "sdpa"


def look_of(scores) -> Look:
    """One layer and head whose attention is given."""
    weights = torch.tensor([scores], dtype=torch.float64)
    nothing = torch.ones(1, 1, len(scores), 1)
    return Look([weights], [nothing], [nothing], [None])


def churn_of(rows, count=2, **fields):
    standing = Standing(rule_of(kvpatch.Policy(**fields)))
    churn = rankings.Churn(standing, count)
    for row in rows:
        standing.update(look_of(row))
        churn.look()
    return churn


def test_equal_scores_change_nothing():
    rows = [[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3, 0.0], [0.1, 0.4, 0.2, 0.3, 0.0, 0.0]]
    for aggregation in ("single", "ema", "cumulative", "peak"):
        found = churn_of(rows, aggregation=aggregation)
        assert found.churn == [0.0, 0.0] and found.calm == [1.0, 1.0]


def test_churn_by_hand():
    # {1, 3}, {1, 2}: one of three is shared. Then {0, 4}: none of four.
    found = churn_of([[0.1, 0.4, 0.2, 0.3], [0, 0.4, 0.3, 0.2, 0.1], [0.3, 0, 0, 0, 0.7, 0]], aggregation="single")
    assert found.churn == pytest.approx([2 / 3, 1.0]) and found.calm == [1.0, 0.0]


def test_of_equals_the_newest_are_best():
    standing = Standing(rule_of(kvpatch.Policy(aggregation="single")))
    standing.update(look_of([0.2, 0.3, 0.2, 0.2, 0.1]))
    assert standing.top(3)[0, 0].nonzero().flatten().tolist() == [1, 2, 3]


def test_a_budget_above_what_is_there_holds_everything():
    assert churn_of([[0.5, 0.5], [0.3, 0.3, 0.4]], count=9).churn == pytest.approx([1 / 3])


def test_rank_correlation_by_hand_and_with_ties():
    for a, b, expected in (
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.4, 0.3], 1 - 6 * 2 / (4 * 15)),
        ([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], -1.0),
        ([0.0, 0.0, 0.3, 0.4], [0.5, 0.1, 0.4, 0.4], None),
    ):
        one, other = (Standing(rule_of(kvpatch.Policy(aggregation="single"))) for _ in range(2))
        one.update(look_of(a))
        other.update(look_of(b))
        expected = stats.spearmanr(a, b).statistic if expected is None else expected
        assert rankings.spearman(one, other).item() == pytest.approx(expected)
    other = Standing(other.rule)
    other.update(look_of([1.0] * 4))
    assert math.isnan(rankings.spearman(one, other).item())


def test_a_random_ranking_has_nothing_to_do_with_attention():
    text = text_of(length=400 + 8)
    ((measures, _),) = stability.measured(llama(), text, 400, [way(budget=40)])
    assert abs(measures["spearman_random"]) < 0.15
    assert abs(measures["jaccard_random"] - 40 / (800 - 40)) < 0.08  # of two random sets


@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_independent_scores_leave_the_bounds_variance(alpha):
    generator = torch.Generator().manual_seed(0)
    rule = kvpatch.Policy(alpha=alpha)
    ema, own = Standing(rule_of(rule)), Standing(rule_of(rule), forgets=True)
    found = rankings.Variance(ema, own, rankings.weight_of_past(rule, 1), 40)
    for n in range(40, 440):
        look = look_of(torch.rand(n, generator=generator).tolist())
        ema.update(look)
        own.update(look)
        found.look()
    assert found.left == pytest.approx(rankings.variance_bound(alpha), rel=0.1)


def test_the_past_weighs_alpha_to_the_power_of_the_layers():
    assert rankings.weight_of_past(kvpatch.Policy(), 30) == pytest.approx(0.8**30)
    assert rankings.weight_of_past(kvpatch.Policy(score_layers=[3, 5]), 30) == pytest.approx(0.64)
    assert rankings.weight_of_past(kvpatch.Policy(coupling="uniform"), 30) == 0.8
    assert rankings.weight_of_past(kvpatch.Policy(aggregation="cumulative"), 30) is None


# ---- samples, lines and what is held


def batch_of(count=2) -> list[Sample]:
    rows = prompts((PROMPT,) * count, seed=5)
    return [Sample(f"stability/44/0/{i}", "stability", 44, tuple(row), (), FORCED) for i, row in enumerate(rows)]


def test_lines_are_of_the_full_caches_own_text(tmp_path):
    model, batch, clock = llama(dtype=torch.float32), batch_of(), Clock()
    ways = [way("full", None), way("inertia"), way("tova", 12)]
    with kvpatch.patched(model, "full", compile=False) as handle:
        found = list(stability.lines(handle, TOKENIZER, batch, ways, FORCED, clock, tmp_path))
    assert [one for one, _ in found] == ways and clock.read > 0 and clock.decode > 0
    model.generation_config.eos_token_id = None
    for row, sample in enumerate(batch):
        ids = torch.tensor([sample.prompt_ids])
        more = {"bad_words_ids": [[EOS]], "pad_token_id": PAD, "attention_mask": torch.ones_like(ids)}
        text = model.generate(ids, max_new_tokens=FORCED, do_sample=False, **more)[0]
        for (one, lines), (measures, series) in zip(found, measured(model, *ways, text=text), strict=True):
            line = lines[row]
            assert (line.policy, line.budget, line.sample) == (one.name, one.text, sample.id)
            assert line.held == (None if one.budget is None else one.budget.value)
            assert line.measures == pytest.approx(measures, rel=1e-4) and line.series == series
            assert line.score is None and line.tokens == FORCED
    rows = cells(line for _, lines in found for line in lines)
    assert {row["measure"] for row in rows} >= {"churn_raw", "churn_ema", "at_most_one_ema", "jaccard_vnorm"}
    assert all(row["n"] == 2 for row in rows)


@pytest.mark.parametrize("policy", ["inertia", "tova", "h2o-decode"])
def test_what_is_held_is_what_the_cache_says(policy):
    model, sample = llama(dtype=torch.float32), batch_of(1)[0]
    tokens, one = prompts((FORCED,), seed=8)[0], way(policy, 8)
    with kvpatch.patched(model, "full", compile=False) as handle:
        held = retention.recorded(handle, TOKENIZER, sample, tokens, [one])[one.name, one.text]
        cache = kvpatch.SlotCache(model.config, one.policy, 8)
        assert held.shape == (FORCED - 1, PROMPT + FORCED - 1) and held.dtype == np.uint8
        with torch.no_grad():
            model(torch.tensor([sample.prompt_ids]), **{handle.keyword: cache})
            for row, token in zip(held, tokens, strict=False):
                model(torch.tensor([[token]]), **{handle.keyword: cache})
                sets = cache.retained()[:, 0].reshape(-1, cache.retained().shape[-1])
                share = [(sets == position).sum().item() / len(sets) for position in range(len(row))]
                assert row.tolist() == [round(255 * value) for value in share]
                assert row.sum() == pytest.approx(8 * 255, abs=len(row) / 2)
        assert distinct(cache, one.policy).shape[0] in (1, 3)


def test_only_the_first_sample_is_kept_and_further_ways_join_it(tmp_path):
    model, batch, tokens = llama(dtype=torch.float32), batch_of(2), prompts((FORCED,))[0]
    with kvpatch.patched(model, "full", compile=False) as handle:
        noted = [(batch[0], [way("full", None), way()]), (batch[1], [way("tova")]), (batch[0], [way("tova")])]
        for sample, ways in noted:
            retention.note(tmp_path, handle, TOKENIZER, sample, tokens, ways)
    found = Retention.load(tmp_path)
    assert (found.sample, found.prompt) == (batch[0].id, PROMPT)
    assert list(found.held) == [("inertia", "7"), ("tova", "7")]
    assert [path.name for path in tmp_path.iterdir()] == ["retention.npz"]
    drawn = draw_retention(found, tmp_path / "retention.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_broken_file_is_named(tmp_path):
    assert Retention.load(tmp_path) is None
    (tmp_path / "retention.npz").write_bytes(b"no zip")
    with pytest.raises(ValueError, match="retention.npz can't be read"):
        Retention.load(tmp_path)


def test_samples_are_the_prompts_of_fidelity():
    tokenizer = tokenizer_of("demo")
    ours = stability.samples(tokenizer, 256, 2, 42, Sources(), 64)
    theirs = continuation.samples(tokenizer, 256, 2, 42, Sources(), 64)
    assert [one.prompt_ids for one in ours] == [one.prompt_ids for one in theirs]
    assert ours[0].task == "stability" and ours[0].id == "stability/256/42/0"
    for length, forced in ((100, 64), (256, 2)):
        with pytest.raises(CellError, match="stability at length"):
            stability.samples(tokenizer, length, 1, 42, Sources(), forced)


def test_the_ablation_crosses_time_with_depth_and_sharing():
    ways = Config.load(RECIPE).ways()
    policies = {name: policy for name, policy, _ in ways if name != "full"}
    rules = {(one.coupling, one.aggregation, one.alpha, one.score_layers, one.head_pool) for one in policies.values()}
    assert len(rules) == len(policies) and {text for _, _, text in ways} == {"full", "10%", "5%"}
    for coupling in kvpatch.policy.COUPLINGS:
        for aggregation in ("single", "ema", "cumulative"):
            assert (coupling, aggregation, 0.8, "all", "mean") in rules
