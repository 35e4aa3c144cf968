"""The oracle against hand arithmetic and identities; numbers are derived in the comments."""

import math

import behavior_oracle as oracle
import pytest
import torch
from behavior_oracle import Layer, ModelData


def t(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(t(found) if not torch.is_tensor(found) else found, t(expected), rtol=1e-12, atol=1e-12)


def random_model(top_k=64):
    """Two layers, four query heads on two KV heads, six tokens, hidden 6, vocabulary 9."""
    g = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    layers = [Layer(draw(4, 6, 3), draw(2, 6, 3), draw(2, 6, 3), draw(6, 12), 3**-0.5) for _ in range(2)]
    return ModelData(layers, draw(6, 6), draw(6), 1e-5, draw(9, 6), [4, 5], top_k)


def mean_layer(v, wo=1.0):
    """Equal weights: q = 0, so that o is the mean of v; two query heads on one KV head, the second without W_O."""
    n = len(v)
    return Layer(torch.zeros(2, n, 1), torch.zeros(1, n, 1), t(v).view(1, n, 1), t([[wo, 0], [0, 0]]), 1.0)


def coin(*layers):
    """A model whose divergence is ln cosh(s/2), s the sum over layers of wo (o' - o) at the last position.

    x = [3, 4], eps = 3.5: mean x^2 = 12.5, r = 4, y = [3/4, 1]; unembedding row 1 = [4, -3] gives the logits [0, 0], so
    p = 1/2, 1/2. dx = [s, 0]: x.dx = 3s, d r^3 = 128, dy = s [1/4 - 9/128, -12/128] = s [23, -12]/128, and
    dz = [0, s (92 + 36)/128] = [0, s]. KL = ln(1/2 + e^s/2) - s/2 = ln cosh(s/2).
    """
    n = layers[0].q.shape[1]
    return ModelData(list(layers), t([[3.0, 4.0]] * n), t([1.0, 1.0]), 3.5, t([[0.0, 0.0], [4.0, -3.0]]), [n - 1])


def kl(s):
    return math.log(math.cosh(s / 2))


def on(tokens, layer=0):
    return [(layer, 0, i) for i in tokens]


def test_deletion():
    # q = 0: weights 1/4; o = 12/4 = 3, o' = 6/3 = 2, m = 1/4, c = 6/4.
    gone = oracle.deletion(t([0]), t([[5], [1], [2], [3]]), t([[1], [2], [3], [6]]), {3}, 1.0)
    close([*gone.before, *gone.after, gone.mass, *gone.contribution], [3, 2, 0.25, 1.5])
    # Scores 0.5 * 2 * ln 1, ln 2, ln 3: weights 1/6, 2/6, 3/6; o = 1 + 1 + 1, without token 2 weights 1/3, 2/3: 2 + 2.
    keys = t([[0], [math.log(2)], [math.log(3)]])
    gone = oracle.deletion(t([2]), keys, t([[6], [3], [2]]), {2}, 0.5)
    close([*gone.before, *gone.after, gone.mass, *gone.contribution], [3, 4, 0.5, 1])
    with pytest.raises(ValueError, match="every token"):
        oracle.deletion(t([2]), keys, keys, {0, 1, 2}, 1.0)


@pytest.mark.parametrize("evicted", [set(), {2}, {0, 3, 4}, {1, 2, 3, 4, 5}])
def test_deletion_has_the_closed_form(evicted):
    layer = random_model().layers[0]
    gone = oracle.deletion_at(layer, 2, 5, evicted)
    close(gone.after - gone.before, ((gone.mass * gone.before - gone.contribution) / (1 - gone.mass)).tolist())


def test_residual_shift():
    # Head 0 (q = 0) means, head 1 (q = 1) weights 1 : 2 : 3; v = 0, 3, 6; token 1 is evicted.
    # u=0: does not see it. u=1: 3/2 -> 0, 2 -> 0. u=2: 3 -> 3, 1 + 3 = 4 -> 0/4 + 6 * 3/4 = 4.5.
    q = t([[0, 0, 0], [1, 1, 1]]).unsqueeze(2)
    layer = Layer(q, t([[[0], [math.log(2)], [math.log(3)]]]), t([[[0], [3], [6]]]), t([[1, 0], [0, 2]]), 1.0)
    close(oracle.residual_shift(layer, [{1}], [0, 1, 2]), [[0, 0], [-1.5, -4], [0, 1]])


def test_residual_shift_touches_the_group_of_the_kv_head_only():
    layer = random_model().layers[0]
    layer.wo = torch.eye(12, dtype=torch.float64)
    shift = oracle.residual_shift(layer, [set(), {1, 2}], [5])[0]
    assert (shift[:6] == 0).all() and (shift[6:] != 0).all()
    by_head = [oracle.deletion(layer.q[h, 5], layer.k[1], layer.v[1], {1, 2}, layer.scale) for h in (2, 3)]
    close(shift[6:], torch.cat([head.after - head.before for head in by_head]).tolist())


def test_logit_shift():
    # As in coin(), with gamma = [1, 2] and dx = [1, 0]: dy = [23, -24]/128; row 2 = [1, 1] gives -1/128.
    args = t([[3, 4]]), t([[1, 0]]), t([1, 2]), 3.5, t([[1, 0], [0, 1], [1, 1]]), torch.tensor([[2, 0]])
    for function in (oracle.logit_shift, oracle.logit_shift_jvp):
        dy, dz = function(*args)
        close(dy * 128, [[23, -24]])
        close(dz * 128, [[-1, 23]])


def test_logit_shift_is_the_jvp():
    m = random_model()
    dx = oracle.residual_shift(m.layers[0], [{1, 3}, {0}], m.positions)
    support = oracle.top_support(oracle.full_logits(m), 4)
    args = m.x[m.positions], dx, m.gamma, m.eps, m.unembedding, support
    for formula, jvp in zip(oracle.logit_shift(*args), oracle.logit_shift_jvp(*args), strict=True):
        close(formula, jvp.tolist())


def test_divergence():
    # p = 1/4, 3/4 on the support, dz = ln 2, 0: ln(2/4 + 3/4) - ln(2)/4. The second row is shifted as a whole: 0.
    logits, support = t([[0, math.log(3), 9], [1, 2, 3]]), torch.tensor([[0, 1], [2, 1]])
    close(oracle.divergence(logits, t([[math.log(2), 0], [7, 7]]), support), (math.log(1.25) - math.log(2) / 4) / 2)
    dz = t([[1, -1, 0.5], [0.2, 0, -3]])
    log_p, log_q = torch.log_softmax(logits, 1), torch.log_softmax(logits + dz, 1)
    everything = torch.tensor([[0, 1, 2]] * 2)
    close(oracle.divergence(logits, dz, everything), float((log_p.exp() * (log_p - log_q)).sum(1).mean()))
    assert oracle.top_support(t([[1, 5, 5, 2]]), 3).tolist() == [[1, 2, 3]]


def test_mask_divergence():
    # Layer 0: v = 1, 2, 3, 6 without 6: 3 -> 2. Layer 1: v = 0, 0, 0, 4, W_O = 3, without a 0: 1 -> 4/3, so s = -1 + 1.
    model = coin(mean_layer([1, 2, 3, 6]), mean_layer([0, 0, 0, 4], wo=3.0))
    close(oracle.mask_divergence(model, {(0, 0, 3)}), kl(-1))
    close(oracle.mask_divergence(model, {(1, 0, 0)}), kl(1))
    close(oracle.mask_divergence(model, {(0, 0, 3), (1, 0, 0)}), 0)
    assert oracle.mask_divergence(model, set(on(range(4)))) == math.inf
    assert oracle.mask_divergence(random_model(top_k=1), {(0, 0, 1)}) == pytest.approx(0, abs=1e-15)


def test_greedy_and_best_subset():
    # v = 0, 6, 4, 1, 4, mean 3; s = mean of the kept - 3, for one token (3 - v)/4: 3/4, -3/4, -1/4, 1/2, -1/4.
    model = coin(mean_layer([0, 6, 4, 1, 4]))
    # First token 2 (a tie with 4), pool of 3 = {2, 4, 3}. Then without 4: 7/3 - 3 = -2/3, without 3: 10/3 - 3 = 1/3.
    found = oracle.greedy(model, on(range(5)), 2)
    assert (found.order, found.halvings) == (on([2, 3]), 0)
    close(found.divergences, [kl(1 / 4), kl(1 / 3)])
    assert oracle.greedy(model, on(range(5)), 2, pool_factor=1.0).order == on([2, 4])
    # Of tokens 0, 1, 2 greedy takes 2 and then 0 (11/3 - 3 = 2/3; token 1: 5/3 - 3). The best pair is 0, 1: 9/3 = 3.
    found = oracle.greedy(model, on(range(3)), 2)
    assert found.order == on([2, 0])
    close(found.divergences[-1], kl(2 / 3))
    subset, score = oracle.best_subset(model, on(range(3)), 2)
    assert subset == tuple(on([0, 1])) and score == pytest.approx(0, abs=1e-15)


def test_greedy_stability_rule():
    # Head 1 gives token 3 the weight 97/100, although its W_O is 0; to head 0 the mean stays 4/4 without token 3.
    layer = mean_layer([0, 0, 3, 1])
    layer.q[1], layer.k[0, 3] = 1.0, math.log(97)
    model = coin(layer)
    assert oracle.greedy(model, on([2, 3]), 1, epsilon=0.02).order == on([3])
    assert oracle.greedy(model, on([2, 3]), 1)[::2] == (on([2]), 0)
    # Token 3 alone: 3/100 < 1/20, 1/40 lets it pass.
    assert oracle.greedy(model, on([3]), 1).halvings == 1
    # Equal weights: 3/4 < 1, so epsilon = 1/2; then 2/4 is not below 1/2, then 1/4 is: 1/4.
    assert oracle.greedy(coin(mean_layer([1, 2, 3, 6])), on(range(4)), 3, epsilon=1.0).halvings == 2
    other = random_model()
    masses = [oracle.deletion_at(other.layers[1], h, u, {0, 2}).mass for h in (2, 3) for u in other.positions]
    close(oracle.lowest_retained_mass(other, {(1, 1, 0), (1, 1, 2), (0, 1, 1), (1, 0, 3)}, 1, 1), 1 - max(masses))
    with pytest.raises(ValueError, match="without attention mass"):
        oracle.greedy(coin(mean_layer([1, 2])), on(range(2)), 2)


def test_greedy_uniform():
    # Layer 1 has W_O = 0 and costs nothing; per layer one has to go from layer 0 as well: token 1, (3 - 2)/3 = 1/3.
    model = coin(mean_layer([1, 2, 3, 6]), mean_layer([1, 2, 3, 6], wo=0.0))
    eligible = on([0, 1, 3]) + on([1, 2], layer=1)
    assert oracle.greedy(model, eligible, 2).order == on([1, 2], layer=1)
    found = oracle.greedy(model, eligible, 2, uniform=True)
    assert found.order == [(1, 0, 1), (0, 0, 1)]
    close(found.divergences, [0, kl(1 / 3)])
    with pytest.raises(ValueError, match="same number"):
        oracle.greedy(model, eligible, 3, uniform=True)


def test_access_terms():
    # One token; q = 1, 0 against 1/2, 1/2; d = 2, 3 against 1; f = 0.4, 0.2 against 0.1, 0.5.
    # query law 1/2 * 2 * 0.4 - 1/2 * 3 * 0.2 = 0.1; exposure 1/2 * 1 * 0.4 + 1/2 * 2 * 0.2 = 0.4;
    # pooling 1/2 * 0.3 - 1/2 * 0.3 = 0; total 2 * 0.4 - (0.1 + 0.5)/2 = 0.5.
    d, f, ones, f_ref = t([[2], [3]]), t([[0.4], [0.2]]), t([[1], [1]]), t([[0.1], [0.5]])
    terms = oracle.access_terms(t([1, 0]), d, f, t([0.5, 0.5]), ones, f_ref)
    for name, expected in (("query_law", 0.1), ("exposure", 0.4), ("pooling", 0.0), ("total", 0.5)):
        close(terms[name], [expected])
    # Two layers of one head: f* is their mean; q* is over the first two of the three decode queries.
    attention = t([[[[1.0, 0.0]] * 4], [[[0.5, 0.5]] * 4]])
    q_ref, d_ref, f_ref = oracle.access_referents(attention, [False, True, True, True], first=2)
    close(q_ref, [0, 0.5, 0.5, 0])
    close(f_ref, [[0.75, 0.25]] * 4)
    draw = torch.rand(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    terms = oracle.access_terms(draw[0, :, 0], draw[1], draw[2], q_ref, d_ref, f_ref)
    close(terms["query_law"] + terms["exposure"] + terms["pooling"], terms["total"].tolist())


def test_value_probe():
    # v = 1, 2, 3, 6 | 0, 0, blocks of 4, equal weights. u=4: mean 12/5; without block 0: m = 4/5, 0, ratio 1; without
    # block 1: m = 1/5, 3, ratio (3/5)/(12/5) = 1/4. u=5: mean 2; m = 2/3, ratio 1; m = 1/3, 3, ratio 1/2.
    probe = oracle.value_probe(mean_layer([1, 2, 3, 6, 0, 0]), 0, [4, 5], 6, block=4)
    close(probe["mass"], [11 / 15, 4 / 15])
    close(probe["change"], [1, 3 / 8])
    close(probe["score"], [11 / 15, 1 / 10])
    layer = random_model().layers[0]
    before = oracle.value_probe(layer, 1, [4, 5], 4, block=2)["score"]
    layer.wo[:, :6] = 0  # heads 0 and 1 belong to KV head 0
    close(oracle.value_probe(layer, 1, [4, 5], 4, block=2)["score"], before.tolist())


def test_projection():
    close(oracle.projection_loss(t([1, 2, 3, 4]), [2, 3]), 0.3)
    # A run of 16, of 2 and of 1: 3 of 19 tokens.
    close(oracle.fragmentation([*range(5, 21), 30, 31, 40]), 3 / 19)
    # Blocks 0-3, 4-7, 8-9 in the order 1, 0, 2: block 0 does not fit into 7, block 2 does. One token is left: 2.
    kept = oracle.block_projection(t([2, 3, 1]), 10, 7, block=4)
    assert kept == [4, 5, 6, 7, 8, 9]
    assert oracle.block_projection(t([2, 3, 1]), 10, 8, block=4) == list(range(8))
    assert oracle.token_fill(kept, t([0, 1, 5, 2, 9, 9, 9, 9, 9, 9]), 7) == [2, 4, 5, 6, 7, 8, 9]


def test_swaps_and_boundary_lemma():
    # a keeps 0..3; the band of 2 is 2, 3 | 4, 5, of which b ranks 5 and 2 best. b's favourite 7 is outside the band.
    a, b = t([8, 7, 6, 5, 4, 3, 2, 1]), t([0, 0, 5, 1, 2, 6, 0, 9])
    assert oracle.boundary_swap(a, b, 4, share=0.5) == ([0, 1, 2, 5], 1)
    assert oracle.boundary_swap(a, a, 4) == ([0, 1, 2, 3], 0)
    swapped = oracle.random_swap(range(4), 8, 2, torch.Generator().manual_seed(0))
    assert len(swapped) == 4 and len(set(swapped) & set(range(4))) == 2
    # Kept 0, 1 (s = 5, 3), evicted 2 (s = 2): +1.5 takes it past 1 (3.5 > 3), not past 0.
    assert oracle.boundary_lemma(t([5, 3, 2]), t([0, 0, 1.5]), [0, 1]) == ({(2, 1)}, {(2, 1)})
    for scores, delta in torch.randn(20, 2, 9, generator=torch.Generator().manual_seed(0)):
        by_score, by_lemma = oracle.boundary_lemma(scores, delta, oracle.ranking(scores)[:4])
        assert by_score == by_lemma
