"""Hand-worked checks of the two oracles: numbers small enough to follow on paper.

Most layers have D = 1 and keys log(c), so that a query of 1 attends with weights c and a query of -1 with weights 1/c.
"""

import itertools
import math

import decode_oracle as dec
import prefill_oracle as pre
import pytest
import torch

F64 = torch.float64


def weighted(weights, queries=1.0, values=None):
    """One layer with D = 1. weights: per KV head a list c. queries: a number, or per query head a number or list."""
    c = torch.tensor(weights, dtype=F64)
    groups, length = c.shape
    if not isinstance(queries, list):
        queries = [queries] * groups
    q = torch.stack([torch.as_tensor(x, dtype=F64).expand(length) for x in queries])
    v = torch.ones(groups, length) if values is None else torch.tensor(values)
    return pre.Layer(q=q[..., None], k=c.log()[..., None], v=v[..., None])


def keyed(keys):
    """One layer with one head whose keys are the rows given."""
    k = torch.tensor([keys], dtype=F64)
    return pre.Layer(q=torch.zeros_like(k), k=k, v=torch.ones_like(k))


def turn(x, position):
    """RoPE of D = 2 with one radian per position."""
    c, s = math.cos(position), math.sin(position)
    return torch.stack([x[..., 0] * c - x[..., 1] * s, x[..., 0] * s + x[..., 1] * c], dim=-1)


def random_layers(n_layers=3, heads=4, kv_heads=2, length=24, size=4, hidden=8):
    make = torch.Generator().manual_seed(7)

    def rand(*shape):
        return torch.randn(*shape, generator=make, dtype=F64)

    def rope(x, position):
        return torch.cat([turn(x[..., :2], position), turn(x[..., 2:], 0.1 * position)], dim=-1)

    layers = []
    for _ in range(n_layers):
        q_raw, k_raw = rand(heads, length, size), rand(kv_heads, length, size)
        q = torch.stack([rope(q_raw[:, i], i) for i in range(length)], dim=1)
        k = torch.stack([rope(k_raw[:, i], i) for i in range(length)], dim=1)
        wo = rand(hidden, heads * size)
        layers.append(pre.Layer(q, k, rand(kv_heads, length, size), q_raw=q_raw, wo=wo, rope=rope, k_raw=k_raw))
    return layers


def close(a, b):
    return torch.allclose(torch.as_tensor(a, dtype=F64), torch.as_tensor(b, dtype=F64), rtol=1e-12, atol=1e-14)


# ---- shared pieces ---------------------------------------------------------------------------------------------------


def test_attention_is_a_causal_softmax():
    rows = pre.attention(weighted([[1.0, 3.0, 4.0]]), [0, 1, 2])
    assert close(rows[0], [[1, 0, 0], [0.25, 0.75, 0], [0.125, 0.375, 0.5]])


def test_attention_divides_by_the_root_of_the_head_size():
    k = torch.tensor([[[0.0, 0, 0, 0], [2 * math.log(3), 0, 0, 0]]])
    q = torch.tensor([[[1.0, 0, 0, 0], [1, 0, 0, 0]]])
    assert torch.allclose(pre.attention(pre.Layer(q, k, k), [1])[0, 0], torch.tensor([0.25, 0.75], dtype=F64))


def test_query_head_reads_kv_head_h_over_r():
    layer = weighted([[1.0, 3.0], [1.0, 1.0]], queries=[1.0, -1.0, 1.0, -1.0])
    assert close(pre.attention(layer, [1])[:, 0], [[0.25, 0.75], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])


def test_pooling_leaves_places_outside_out():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=F64)
    assert close(pre.pool_same(x, 3), [1.5, 3, 4])
    assert close(pre.pool_same(-x, 3, "max"), [-1, -1, -2])
    assert close(pre.pool_same(x, 5), [3, 3, 3])
    assert close(pre.pool_same(x, 1), x)


def test_of_equal_scores_the_lower_position_is_dropped_first():
    assert pre.keep_top([1, 1, 1, 5], range(4), 2) == [2, 3]
    assert pre.keep_top([5, 1, 1, 1], range(4), 2) == [0, 3]


def test_protected_entries_count_and_must_fit():
    assert pre.keep_top([1, 2, 3, 4], range(4), 2, [0]) == [0, 3]
    assert pre.keep_top([1, 2, 3, 4], range(4), 1, [0]) == [0]
    with pytest.raises(ValueError, match="2 protected entries"):
        pre.keep_top([1, 2, 3, 4], range(4), 1, [0, 1])


def test_largest_remainder_keeps_the_total():
    assert pre.whole_budgets([1.5, 2.75, 1.75], 6) == [1, 3, 2]
    assert pre.whole_budgets([1.5, 1.5], 3) == [2, 1]


# ---- SnapKV and its allocations --------------------------------------------------------------------------------------


def test_snapkv_keeps_the_window_and_the_best_others():
    # the last query attends 4:1:3:2 outside the window
    assert pre.snapkv([weighted([[4.0, 1, 3, 2, 9]])], 3, window=1, width=1) == [[[0, 2, 4]]]


def test_snapkv_pools_outside_the_window_only():
    # pooled: 2.5, 2.67, 1.67, 2; with the window's 9 position 3 would win
    assert pre.snapkv([weighted([[4.0, 1, 3, 1, 9]])], 3, window=1, width=3) == [[[0, 1, 4]]]


def test_snapkv_takes_the_mean_over_the_group():
    # head 0: .5 .125 .25; head 1: .091 .364 .182; mean .295 .244 .216
    layer = weighted([[4.0, 1, 2, 1]], queries=[1.0, -1.0])
    assert close(pre.snapkv_scores(layer, 1, 1)[0], [(4 / 8 + 1 / 11) / 2, (1 / 8 + 4 / 11) / 2, (2 / 8 + 2 / 11) / 2])
    assert pre.snapkv([layer], 2, window=1, width=1) == [[[0, 3]]]


def test_snapkv_takes_the_mean_over_the_window():
    # query 2 sees 1:3:4, query 3 with the sign turned sees 1/1 : 1/3 : 1/4 : 1/4, which add up to 11/6
    layer = weighted([[1.0, 3, 4, 4]], queries=[[1.0, 1.0, 1.0, -1.0]])
    assert close(pre.snapkv_scores(layer, 2, 1)[0], [(1 / 8 + 6 / 11) / 2, (3 / 8 + 2 / 11) / 2])


def test_snapkv_window_alone_and_window_too_large():
    layer = weighted([[1.0] * 6])
    assert pre.snapkv([layer], 3, window=3) == [[[3, 4, 5]]]
    assert pre.snapkv([layer], 6, window=32) == [[[0, 1, 2, 3, 4, 5]]]
    with pytest.raises(ValueError, match="window of 4"):
        pre.snapkv([layer], 3, window=4)


def test_pyramid_budgets_by_hand():
    # B-w = 10: min 0.5, max 19.5, so 19.5, 10, 0.5; the entry left over goes to the first layer
    assert pre.pyramidkv_budgets(3, 100, 14, window=4) == [24, 14, 4]
    # max 19.5 > S-w = 12: max 12, min 8
    assert pre.pyramidkv_budgets(3, 16, 14, window=4) == [16, 14, 12]
    assert pre.pyramidkv_budgets(1, 100, 14, window=4) == [14]


def test_pyramidkv_gives_the_lower_layer_more():
    # B-w = 2, min 0.1, max 3.9: 3.9 and 0.1, made whole 4 and 0
    layer = weighted([[5.0, 4, 3, 2, 1, 1]])
    assert pre.pyramidkv([layer, layer], 3, window=1, width=1) == [[[0, 1, 2, 3, 5]], [[5]]]


def test_adakv_lets_heads_compete_within_a_layer():
    # head 0: .5 .25 .125 .0625; head 1: .2 each. The top four: .5, .25, and of four equal .2 the two newest.
    layer = weighted([[8.0, 4, 2, 1, 1], [1.0, 1, 1, 1, 1]])
    assert pre.adakv([layer], 3, window=1, width=1) == [[[0, 1, 4], [2, 3, 4]]]


def test_adakv_floor_holds_for_a_head_that_loses():
    # head 1 has .001 .002 .004 .008 outside its window
    layer = weighted([[8.0, 4, 2, 1, 1], [1.0, 2, 4, 8, 985]])
    assert pre.adakv([layer], 3, window=1, width=1) == [[[0, 1, 2, 3, 4], [4]]]
    assert pre.adakv([layer], 3, floor_share=2 / 3, window=1, width=1) == [[[0, 1, 2, 4], [3, 4]]]


# ---- CAKE ------------------------------------------------------------------------------------------------------------


def test_cake_preference_by_hand():
    # uniform attention: row 2 is 1/3 each, row 3 is 1/4 each; two keys outside the window
    entropy = (2 * math.log(3) / 3 + 2 * math.log(4) / 4) / 2
    variance = 2 * (1 / 24) ** 2
    layer = weighted([[1.0] * 4])
    assert math.isclose(pre.cake_preference(layer, window=2), entropy * variance)
    assert math.isclose(pre.cake_preference(layer, window=2, tau1=2, tau2=0.5), entropy**0.5 * variance**2)
    assert close(pre.cake_scores(layer, window=2, width=1), [[7 / 24 + 200 / 24**2] * 2])


def test_cake_redistributes_what_a_layer_cannot_take():
    assert pre.share_out([3.0, 1.0], 8, ceiling=9) == [6, 2]
    assert pre.share_out([3.0, 1.0], 8, ceiling=5) == [5, 3]
    # 8, 1, 1 of ten: clipped to 4, the six left are 3 and 3
    assert pre.share_out([8.0, 1.0, 1.0], 10, ceiling=4) == [4, 3, 3]
    # the second clip follows from the first: 12 * (10, 5, 1)/16 = 7.5, 3.75, .75 -> 4; 8 * 5/6 = 6.7 -> 4; 4
    assert pre.share_out([10.0, 5.0, 1.0], 12, ceiling=4) == [4, 4, 4]
    assert pre.share_out([0.0, 0.0], 3, ceiling=4) == [2, 1]


def test_cake_variance_can_beat_the_mean():
    # rows 2 and 3 outside the window: key 0 has 1/2, 1/2; key 1 has 1/4 and 1/3; only key 1 varies
    q = [[0.0, 0.0, 1.0, -1.0]]
    layer = pre.Layer(
        q=torch.tensor(q)[..., None],
        k=torch.tensor([[[math.log(2)], [0.0], [0.0], [math.log(2)]]]),
        v=torch.ones(1, 4, 1),
    )
    # row 2: 2:1:1; row 3: 1/2 : 1 : 1 : 1/2, so key 0 goes .5 -> 1/6 and key 1 .25 -> 1/3
    scores = pre.cake_scores(layer, window=2, width=1)[0]
    assert torch.allclose(scores, torch.tensor([1 / 3 + 200 / 36, 7 / 24 + 200 / 576], dtype=F64))
    assert pre.cake([layer], 3, window=2, width=1) == [[[0, 2, 3]]]


# ---- Expected Attention, CriticalKV, KVzip, ReST-KV ------------------------------------------------------------------


def expected_layer(v_four):
    """Queries before RoPE outside the first 4: 1 and 3, so mu = 2 and Sigma = 1. Keys there: 0 and 1. No rotation."""
    q_raw = torch.tensor([[[50.0], [60], [70], [80], [1], [3]]])
    k = torch.tensor([[[9.0], [9], [9], [9], [0], [1]]])
    v = torch.tensor([[[1.0], [1], [1], [1], [-v_four], [1]]])
    return pre.Layer(q_raw, k, v, q_raw=q_raw, rope=lambda x, position: x)


def test_expected_attention_by_hand():
    # z = 2k + k^2/2: 0 and 2.5; e^2.5 = 12.18
    total = 1 + math.exp(2.5)
    assert torch.allclose(
        pre.expected_attention_scores(expected_layer(20.0)),
        torch.tensor([[20 / total, math.exp(2.5) / total]], dtype=F64),
    )
    assert pre.expected_attention([expected_layer(20.0)], 5) == [[[0, 1, 2, 3, 4]]]
    assert pre.expected_attention([expected_layer(10.0)], 5) == [[[0, 1, 2, 3, 5]]]
    with pytest.raises(ValueError):
        pre.expected_attention([expected_layer(10.0)], 3)


def test_expected_attention_starts_the_future_after_the_prompt():
    layer = keyed([[1.0, 0.0]] * 3)
    layer.rope = turn
    c, s = math.cos(3), math.sin(3)
    assert close(pre.mean_rotation(layer, 3, 1), [[c, -s], [s, c]])
    layer.rope = lambda x, position: turn(x, position * math.pi / 2)
    assert torch.allclose(pre.mean_rotation(layer, 3, 4), torch.zeros(2, 2, dtype=F64), atol=1e-12)


def test_expected_attention_without_spread_is_attention_of_the_rotated_mean():
    layer = random_layers(1)[0]
    layer.q_raw = layer.q_raw[:, :1].expand(-1, layer.length, -1)
    scores = pre.expected_attention_scores(layer, sinks=0, future=1)
    for g in range(2):
        rows = []
        for h in (2 * g, 2 * g + 1):
            query = layer.rope(layer.q_raw[h, 0], layer.length)
            rows.append(torch.softmax(layer.k[g] @ query / 2, dim=0))
        assert torch.allclose(scores[g], (rows[0] + rows[1]) / 2 * layer.v[g].norm(dim=1))


def test_criticalkv_second_half_goes_by_the_projected_value():
    # s: .5 .25 .125 .0625; times |v|: 100 * .0625 = 6.25 beats the rest
    layer = weighted([[8.0, 4, 2, 1, 1]], values=[[1.0, 1, 1, -100, 1]])
    layer.wo = torch.tensor([[1.0], [-1.0]], dtype=F64)
    assert close(pre.projected_value_norm(layer), [[2, 2, 2, 200, 2]])
    assert pre.criticalkv([layer], 3, window=1, width=1) == [[[0, 3, 4]]]
    assert pre.criticalkv([layer], 3, first_share=1.0, window=1, width=1) == [[[0, 1, 4]]]
    assert pre.criticalkv([layer], 2, window=1, width=1) == [[[3, 4]]]  # half of one is none


def test_projected_value_norm_takes_each_heads_own_columns():
    layer = weighted([[1.0, 1.0]], queries=[1.0, 1.0], values=[[3.0, -1.0]])
    layer.wo = torch.tensor([[1.0, 0.0], [1.0, 5.0]], dtype=F64)  # head 0: (1, 1), head 1: (0, 5)
    assert close(pre.projected_value_norm(layer), [[(6 + 15) / 2, (2 + 5) / 2]])


def test_kvzip_has_one_pool_over_heads():
    attention = [torch.tensor([[[0.1, 0.5, 0.4]], [[0.8, 0.1, 0.1]]])]
    assert pre.kvzip(attention, 2, kv_heads=2, protected=1) == [[[0, 1, 2], [0]]]


def test_kvzip_has_one_pool_over_layers_and_takes_the_maximum():
    low = torch.tensor([[[0.0, 0.1, 0.1, 0.1]], [[0.0, 0.1, 0.1, 0.1]]])
    high = torch.tensor([[[0.0, 0.9, 0.0, 0.2]], [[0.0, 0.0, 0.3, 0.0]]])  # two query heads, one KV head
    assert pre.kvzip([low, high], 2, kv_heads=1, protected=1) == [[[0]], [[0, 1, 2]]]
    queries = torch.tensor([[[0.0, 0.9, 0.0, 0.2], [0.0, 0.0, 0.3, 0.0]]])  # one head, two repeat queries
    assert pre.kvzip([queries], 3, kv_heads=1, protected=1) == [[[0, 1, 2]]]


def test_kvzip_protects_the_first_four():
    attention = [torch.tensor([[[0.0, 0, 0, 0, 0.5, 0.5, 0.0]]])]
    assert pre.kvzip(attention, 5, kv_heads=1) == [[[0, 1, 2, 3, 5]]]
    with pytest.raises(ValueError):
        pre.kvzip(attention, 3, kv_heads=1)


def test_deletion_change_is_what_deleting_does():
    a = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    v = torch.tensor([[1.0, 0], [0, 2], [3, 1]], dtype=F64)
    for i in range(3):
        rest = [j for j in range(3) if j != i]
        without = (a[rest] / a[rest].sum()) @ v[rest]
        assert torch.isclose(pre.deletion_change(a, v)[i], (without - a @ v).norm())


def test_restkv_by_hand():
    # uniform attention of the last query: o = 4, a/(1-a) = 1/3, |o - v| = 4, 0, 6; one EMA step of 0.2
    layer = weighted([[1.0] * 4], values=[[0.0, 4, 10, 2]])
    assert torch.allclose(
        pre.restkv_scores(layer, window=1, width_of=lambda h: 1), 0.2 * torch.tensor([[4 / 3, 0, 2]]).double()
    )
    assert pre.restkv([layer], 2, window=1, width_of=lambda l, h: 1) == [[[2, 3]]]


def test_restkv_newer_query_weighs_a_fifth():
    # one competing entry, uniform attention. query 1: o = 1, a/(1-a) = 1, x = 1. query 2: o = 3, a/(1-a) = 1/2, x = 3/2
    layer = weighted([[1.0] * 3], values=[[0.0, 2, 7]])
    assert torch.allclose(pre.restkv_scores(layer, window=2), torch.tensor([[0.8 * 0.2 * 1 + 0.2 * 1.5]]).double())


# ---- keys alone, and decode methods at the end of the prompt ---------------------------------------------------------


def test_keydiff_drops_what_looks_like_the_mean():
    # mean (2/3, 1/3): cosines 2/sqrt5, 2/sqrt5, 1/sqrt5; the length of a key does not matter for its own score
    layer = keyed([[1.0, 0], [1.0, 0], [0, 7.0]])
    assert torch.allclose(pre.keydiff_scores(layer.k[0]), -torch.tensor([2.0, 2.0, 1.0]).double() / math.sqrt(5))
    assert pre.keydiff([layer], 2) == [[[1, 2]]]
    assert pre.keydiff([layer], 1) == [[[2]]]


def test_keydiff_block_by_block_differs_from_one_shot():
    x, y = [1.0, 0.0], [0.0, 1.0]
    layer = keyed([x, y, x, x, y, y])
    # after block 2: mean (3, 1)/4, y stays and the newest x; after block 3: mean (1, 3)/4, x stays and the newest y
    assert pre.keydiff([layer], 2, block=2) == [[[3, 5]]]
    assert pre.keydiff([layer], 2) == [[[4, 5]]]  # mean (1, 1)/2: all equal


def test_knorm_keeps_small_keys():
    layer = keyed([[1.0], [5], [2], [3], [0.5]])
    assert pre.knorm([layer], 2) == [[[0, 4]]]
    assert pre.knorm([layer], 2, block=2) == [[[0, 4]]]
    assert pre.knorm([layer], 5) == [[[0, 1, 2, 3, 4]]]


def test_h2o_prompt_by_hand():
    # uniform: 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3; the last B/2 = 1 is protected
    layer = weighted([[1.0] * 3])
    assert torch.allclose(pre.accumulated_attention(layer, 3), torch.tensor([[11 / 6, 5 / 6, 1 / 3]]).double())
    assert pre.h2o_prompt([layer], 2) == [[[0, 2]]]
    assert pre.h2o_prompt([layer], 1) == [[[0]]]  # B/2 rounds down to none


def test_accumulated_attention_sums_over_the_group():
    layer = weighted([[1.0, 3.0]], queries=[1.0, 0.0])
    assert close(pre.accumulated_attention(layer, 2), [[1 + 0.25 + 1 + 0.5, 0.75 + 0.5]])


def test_tova_prompt_has_one_set_for_a_layer():
    # last query: 4:1:2:1 and 1:1:1:5 of eight; mean 5 2 3 6 of sixteen
    layer = weighted([[4.0, 1, 2, 1], [1.0, 1, 1, 5]])
    assert pre.tova_prompt([layer], 2) == [[[0, 3], [0, 3]]]


def test_streaming_prompt_keeps_sinks_and_the_newest():
    layer = weighted([[1.0] * 9, [2.0] * 9])
    assert pre.streaming_prompt([layer], 6) == [[[0, 1, 2, 3, 7, 8]] * 2]
    assert pre.streaming_prompt([layer], 4) == [[[0, 1, 2, 3]] * 2]
    with pytest.raises(ValueError):
        pre.streaming_prompt([layer], 3)


def test_vatp_protects_first_and_recent_and_fits_them():
    assert pre.vatp_protected(100) == (20, 50)
    assert pre.vatp_protected(40) == (20, 20)
    assert pre.vatp_protected(5) == (3, 2)
    layer = weighted([[1.0] * 12])
    assert pre.vatp_prompt([layer], 5) == [[[0, 1, 2, 10, 11]]]


def test_vatp_weighs_attention_with_the_value():
    # sums 25/12, 13/12, 7/12, 1/4; B = 3: first 1, recent 1; position 1: 13/12, position 2: 7/12 * 2 = 14/12
    layer = weighted([[1.0] * 4], values=[[1.0, 1, -2, 1]])
    assert pre.vatp_prompt([layer], 3, sinks=1) == [[[0, 2, 3]]]
    assert pre.vatp_prompt([weighted([[1.0] * 4])], 3, sinks=1) == [[[0, 1, 3]]]


PREFILL = {
    "snapkv": (lambda ls, b: pre.snapkv(ls, b, window=3), "window"),
    "pyramidkv": (lambda ls, b: pre.pyramidkv(ls, b, window=3), "window"),
    "adakv": (lambda ls, b: pre.adakv(ls, b, window=3), "window"),
    "cake": (lambda ls, b: pre.cake(ls, b, window=3), "window"),
    "expected_attention": (lambda ls, b: pre.expected_attention(ls, b, future=8), "sinks"),
    "criticalkv": (lambda ls, b: pre.criticalkv(ls, b, window=3), "window"),
    "kvzip": (lambda ls, b: pre.kvzip([pre.attention(la, [20, 23]) for la in ls], b, 2), "sinks"),
    "restkv": (lambda ls, b: pre.restkv(ls, b, window=3), "window"),
    "keydiff": (pre.keydiff, ""),
    "keydiff blocks": (lambda ls, b: pre.keydiff(ls, b, block=5), ""),
    "knorm": (pre.knorm, ""),
    "h2o": (pre.h2o_prompt, ""),
    "tova": (pre.tova_prompt, ""),
    "streaming": (pre.streaming_prompt, "sinks"),
    "vatp": (pre.vatp_prompt, ""),
}


@pytest.mark.parametrize("name", PREFILL)
@pytest.mark.parametrize("budget", [7, 10, 24, 30])
def test_prefill_spends_the_budget_and_keeps_the_protected(name, budget):
    method, protected = PREFILL[name]
    layers = random_layers()
    kept = method(layers, budget)
    flat = [positions for heads in kept for positions in heads]
    assert [len(heads) for heads in kept] == [2, 2, 2]
    assert all(p == sorted(set(p)) and set(p) <= set(range(24)) for p in flat)
    assert sum(map(len, flat)) == 3 * 2 * min(budget, 24)
    if name not in ("adakv", "pyramidkv", "cake", "kvzip"):
        assert all(len(p) == min(budget, 24) for p in flat)
    if name == "adakv":
        assert all(sum(map(len, heads)) == 2 * min(budget, 24) for heads in kept)
    must = {"window": {21, 22, 23}, "sinks": {0, 1, 2, 3}, "": set()}[protected]
    assert all(must <= set(p) for p in flat)


# ---- decode ----------------------------------------------------------------------------------------------------------


def only(history):
    """The kept positions of the one head of one layer, per step."""
    return [kept[0][0] for kept in history]


def test_recency_cuts_all_at_once_then_one_in_one_out():
    layer = weighted([[1.0] * 8, [1.0] * 8])
    history = dec.run(dec.Recency(), [layer, layer], 5, 3, 3)
    assert history == [[[p, p], [p, p]] for p in ([3, 4, 5], [4, 5, 6], [5, 6, 7])]


def test_nothing_is_dropped_while_the_budget_holds():
    assert only(dec.run(dec.Recency(), [weighted([[1.0] * 8])], 2, 4, 3)) == [[0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]


def test_random_drops_the_lowest_draw_the_same_in_every_head():
    draw = {0: 0.9, 1: 0.1, 2: 0.5, 3: 0.4, 4: 0.2, 5: 0.7}
    layer = weighted([[1.0] * 6, [1.0] * 6])
    history = dec.run(dec.Random(lambda seed, p: draw[p] * seed, seed=3), [layer], 3, 2, 3)
    assert history == [[[[0, 2], [0, 2]]], [[[0, 2], [0, 2]]], [[[0, 5], [0, 5]]]]


def test_h2o_counts_the_prompt_and_protects_the_recent_half():
    # t = 1 uniform over 3: sums 1 + 1/2 + 1/3, 1/2 + 1/3, 1/3 (protected). t = 2: 0 has 13/6, 2 has 2/3, 3 is protected
    assert only(dec.run(dec.H2O(), [weighted([[1.0] * 4])], 2, 2, 2)) == [[0, 2], [0, 3]]


def test_h2o_attends_over_what_each_head_holds():
    # t = 1: head 0 is uniform and drops 1; head 1 has 1:98:1, so 0 has 1 + 1/99 + 1/100 and 1 has 98/99 + 98/100
    layer = weighted([[1.0] * 4, [1.0, 98, 1, 1]])
    method = dec.H2O()
    assert dec.run(method, [layer], 2, 2, 2) == [[[[0, 2], [1, 2]]], [[[0, 3], [1, 3]]]]
    # t = 2: head 0 meets 0, 2, 3 with 1:1:1 and head 1 meets 1, 2, 3 with 98:1:1
    assert method.sums[0][0][0] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 3)
    assert method.sums[0][1][1] == pytest.approx(98 / 99 + 98 / 100 + 98 / 100)


def test_vatp_decode_weighs_the_sum_with_the_value():
    # B = 3, first 1, recent 1. t = 1: uniform, 1 has 1/2 + 1/3 + 1/4 = 13/12, 2 has 1/3 + 1/4 = 7/12
    plain, loud = [1.0] * 4, [1.0, 1, 2, 1]
    assert only(dec.run(dec.VATP(1), [weighted([[1.0] * 4], values=[plain])], 3, 3, 1)) == [[0, 1, 3]]
    assert only(dec.run(dec.VATP(1), [weighted([[1.0] * 4], values=[loud])], 3, 3, 1)) == [[0, 2, 3]]


def test_gkv_maximum_decays():
    # t = 1: 2:1:1, of the two equal the older goes. t = 2: 2:1:5, m = .4, .2, .625
    # t = 3 with the sign turned: 1/2 : 1/5 : 1 of 1.7 = .29 .12 .59; m = max(.32, .29), max(.5, .12), .59
    layer = weighted([[2.0, 1, 1, 5, 1]], queries=[[0.0, 0, 1, 1, -1]])
    assert only(dec.run(dec.GKV(), [layer], 2, 2, 3)) == [[0, 2], [0, 3], [3, 4]]
    # without memory the last step keeps 0 instead of 3
    assert only(dec.run(dec.GKV(decay=0.0), [layer], 2, 2, 3)) == [[0, 2], [0, 3], [0, 4]]


def test_gkv_takes_the_mean_over_the_group():
    # weights 1:3:4 of 8 and 12:4:3 of 19; the sums of the pairs are .757, .586, .658
    layer = weighted([[1.0, 3.0, 4.0]], queries=[1.0, -1.0])
    method = dec.GKV()
    assert only(dec.run(method, [layer], 2, 2, 1)) == [[0, 2]]
    assert method.m[0][0][0] == pytest.approx((1 / 8 + 12 / 19) / 2)


def test_scissorhands_counts_low_attention():
    # query 1: .75 .25 against 1/2, so 1 is low. query 2: .6 .2 .2 against 1/3, so 1 and 2 are low.
    # query 3 (t = 1): 3 1 1 3 of 8 against 1/4, so 1 and 2 are low. Full at 4, so 2 go.
    layer = weighted([[3.0, 1, 1, 3, 1]])
    method = dec.ScissorHands(recent=1)
    method.start([layer], 3, 4)
    assert method.step() == [[[0, 3]]]
    lows = [{0: 0}, {0: 0, 1: 1}, {0: 0, 1: 1, 2: 1}, {0: 0, 1: 1, 2: 1, 3: 0}]
    assert method.history[0][0] == list(enumerate(lows))
    # t = 2: over 0, 3, 4: 3 3 1 of 7 against 1/3
    assert method.step() == [[[0, 3, 4]]]
    assert method.scores(0, 0) == {0: 0.0, 3: 0.0, 4: -1.0}


def test_scissorhands_forgets_queries_outside_its_window():
    method = dec.ScissorHands(window=2, recent=1)
    dec.run(method, [weighted([[3.0, 1, 1, 3, 1]])], 3, 5, 1)
    assert method.scores(0, 0) == {0: 0.0, 1: -2.0, 2: -2.0, 3: 0.0}  # queries 2 and 3 only


def test_scissorhands_drops_half_when_full():
    # uniform attention is never below 1/t, so all counts are 0 and the oldest go
    history = only(dec.run(dec.ScissorHands(recent=1), [weighted([[1.0] * 9])], 4, 4, 5))
    assert history == [[3, 4], [3, 4, 5], [5, 6], [5, 6, 7], [7, 8]]
    with pytest.raises(ValueError):
        dec.run(dec.ScissorHands(), [weighted([[1.0] * 30])], 20, 18, 1)


def test_scissorhands_adds_the_counts_of_the_group():
    # query 1 meets 1:3, head 0 finds 0 low, head 1 (sign turned) finds 1 low, head 2 (zero) finds none
    method = dec.ScissorHands(recent=1)
    dec.run(method, [weighted([[1.0, 3.0]], queries=[1.0, -1.0, 0.0])], 1, 9, 1)
    assert method.scores(0, 0) == {0: -1.0, 1: -1.0}


def test_rkv_spares_the_newest_copy():
    keys = torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]], dtype=F64)
    e = math.exp(1 / 3)
    assert close(dec.rkv_redundancy(keys), torch.tensor([e, 1, 1], dtype=F64) / (e + 2))
    assert close(dec.rkv_redundancy(keys, only_newer=False), [1 / 3] * 3)
    # below the threshold nothing is spared
    assert close(dec.rkv_redundancy(keys, threshold=1.5), torch.tensor([e, e, 1], dtype=F64) / (2 * e + 1))


def test_rkv_importance_by_hand():
    # last 1 query; the group's maximum of log c and -log c is |log c|: 4, 2, 4 of ten; the new key plays no part
    layer = weighted([[4.0, 2.0, 0.25, 100.0]], queries=[1.0, -1.0])
    assert close(dec.rkv_importance(layer, 0, [0, 1, 2, 3], recent=1, width=1), [0.4, 0.2, 0.4])
    assert close(dec.rkv_importance(layer, 0, [0, 1, 2, 3], recent=1, width=3), [0.4, 0.4, 0.4])


def test_rkv_cuts_at_its_interval_and_never_exceeds_the_budget():
    layers = random_layers(1, length=24)
    history = dec.run(dec.RKV(interval=3, recent=2), layers, 12, 8, 10)
    assert [len(p) for p in only(history)] == [5, 6, 7, 5, 6, 7, 5, 6, 7, 5]
    for t, kept in enumerate(only(history)):
        assert kept[-2:] == [12 + t - 1, 12 + t]
    with pytest.raises(ValueError):
        dec.run(dec.RKV(), layers, 12, 128, 1)
    with pytest.raises(ValueError):
        dec.run(dec.RKV(), layers, 12, 135, 1)


def test_rkv_drops_the_redundant_key():
    # equal importance (queries 0); keys 0 and 1 are copies, the older is redundant; 3 is the protected newest
    layer = keyed([[1.0, 0], [1.0, 0], [0, 1.0], [0, -1.0]])
    assert only(dec.run(dec.RKV(interval=1, recent=1), [layer], 3, 3, 1)) == [[1, 2, 3]]


def test_keydiff_and_knorm_rescore_what_is_held():
    x, y = [1.0, 0.0], [0.0, 1.0]
    # t = 1: x y x x: the y and the newest x; t = 2: y x y, mean (1, 2)/3: the x stays and the newer y
    assert only(dec.run(dec.KeyDiff(), [keyed([x, y, x, x, y])], 3, 2, 2)) == [[1, 3], [3, 4]]
    assert only(dec.run(dec.KNorm(), [keyed([[1.0], [5], [2], [9], [0.5]])], 2, 2, 3)) == [[0, 2], [0, 2], [0, 4]]


DECODE = {
    "h2o": dec.H2O,
    "vatp": lambda: dec.VATP(2),
    "gkv": dec.GKV,
    "keydiff": dec.KeyDiff,
    "knorm": dec.KNorm,
    "recency": dec.Recency,
    "random": lambda: dec.Random(lambda seed, p: (p * 37 + seed) % 11),
    "streaming": dec.StreamingCompact,
}


@pytest.mark.parametrize("name", DECODE)
def test_decode_holds_the_budget_and_never_takes_back(name):
    history = dec.run(DECODE[name](), random_layers(2), 14, 6, 10)
    for l, g in itertools.product(range(2), range(2)):
        for t, kept in enumerate(history):
            assert len(kept[l][g]) == 6
            before = range(14) if t == 0 else history[t - 1][l][g]
            assert set(kept[l][g]) <= set(before) | {14 + t}


# ---- compact positions -----------------------------------------------------------------------------------------------


def compact_layer(length):
    """Raw queries and keys (1, 0), one radian per position, values equal to their position."""
    raw = torch.tensor([[[1.0, 0.0]] * length], dtype=F64)
    k = torch.stack([turn(raw[:, i], i) for i in range(length)], dim=1)
    v = torch.arange(length, dtype=F64)[None, :, None].expand(1, length, 2)
    return pre.Layer(q=k, k=k, v=v, q_raw=raw, rope=turn, k_raw=raw)


def test_streaming_compact_positions_by_hand():
    first, second = dec.run_compact(dec.StreamingCompact(sinks=1), [compact_layer(8)], 5, 3, 2)
    assert (first.seen, first.seen_positions) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert (first.kept, first.kept_positions) == ([0, 4, 5], [0, 1, 2])
    assert (second.seen, second.seen_positions) == ([0, 4, 5, 6], [0, 1, 2, 3])
    assert (second.kept, second.kept_positions) == ([0, 5, 6], [0, 1, 2])
    # the sink is 3 places away from the query, not 6
    weights = [math.exp(math.cos(d) / math.sqrt(2)) for d in (3, 2, 1, 0)]
    p = torch.tensor(weights, dtype=F64) / sum(weights)
    assert torch.allclose(second.probabilities[0][0], p)
    assert torch.allclose(second.outputs[0][0], (p @ torch.tensor([0.0, 4, 5, 6], dtype=F64)).expand(2))


def test_streaming_compact_equals_plain_attention_before_any_cut():
    layers = random_layers(2)
    step = dec.run_compact(dec.StreamingCompact(), layers, 10, 6, 1)[0]
    for l, layer in enumerate(layers):
        assert torch.allclose(step.probabilities[l], pre.attention(layer, [10])[:, 0, :11])


def test_streaming_compact_needs_room_for_its_sinks():
    with pytest.raises(ValueError):
        dec.run(dec.StreamingCompact(), [compact_layer(8)], 5, 3, 1)
