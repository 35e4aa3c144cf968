"""Naive float64 reference of the prefill baselines in methods.md: which prompt positions each method keeps.

One row at a time, no padding. L layers, H query heads, G KV heads, R = H/G (query head h belongs to KV head h // R),
D head size, S prompt tokens, B budget. Token i sits at RoPE position i. A result is a list over layers of a list over
KV heads of the sorted kept positions. The budget counts the protected entries. Lines that begin with "Choice:" name
what methods.md leaves open. Three choices hold for every function here:

Choice: of equal scores the entry at the lower position is dropped first.
Choice: if B >= S, everything is kept and nothing else is checked, not even that the protected entries fit.
Choice: if the protected entries do not fit in B, a ValueError is raised (VATP and H2O derive theirs from B and always
fit).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

Kept = list[list[list[int]]]


@dataclass
class Layer:
    """What one decoder layer computed for the row. Every tensor is turned into float64.

    q [H, S, D] and k [G, S, D] after RoPE, v [G, S, D], q_raw [H, S, D] and k_raw [G, S, D] before RoPE,
    wo [hidden, H*D], rope(x [.., D], position) -> x rotated to that position. The last four are needed by some methods
    only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_raw: Tensor | None = None
    wo: Tensor | None = None
    rope: Callable[[Tensor, int], Tensor] | None = None
    k_raw: Tensor | None = None

    def __post_init__(self):
        for name in ("q", "k", "v", "q_raw", "wo", "k_raw"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).double())
        if self.q.shape[0] % self.k.shape[0] != 0:
            raise ValueError(f"query heads {self.q.shape[0]} are not a multiple of KV heads {self.k.shape[0]}")

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def head_size(self) -> int:
        return self.k.shape[2]

    @property
    def length(self) -> int:
        return self.k.shape[1]


# ---- shared pieces ---------------------------------------------------------------------------------------------------


def attention_row(layer: Layer, h: int, u: int) -> Tensor:
    """Softmax of q.k/sqrt(D) of query head h at position u over positions 0..u. Returns [u + 1]."""
    return torch.softmax(layer.k[h // layer.group, : u + 1] @ layer.q[h, u] / math.sqrt(layer.head_size), dim=0)


def attention(layer: Layer, queries) -> Tensor:
    """Causal softmax of q.k/sqrt(D) for the query positions given. Returns [H, len(queries), S]; future keys get 0."""
    rows = torch.zeros(layer.heads, len(queries), layer.length, dtype=torch.float64)
    for h in range(layer.heads):
        for n, u in enumerate(queries):
            rows[h, n, : u + 1] = attention_row(layer, h, u)
    return rows


def heads_of(layer: Layer, g: int) -> range:
    """The query heads that read KV head g."""
    return range(g * layer.group, (g + 1) * layer.group)


def group_mean(layer: Layer, per_head: Tensor) -> Tensor:
    """[H, ...] -> [G, ...]: mean over the query heads of each KV head."""
    return torch.stack([per_head[list(heads_of(layer, g))].mean(dim=0) for g in range(layer.kv_heads)])


def group_sum(layer: Layer, per_head: Tensor) -> Tensor:
    """[H, ...] -> [G, ...]: sum over the query heads of each KV head."""
    return torch.stack([per_head[list(heads_of(layer, g))].sum(dim=0) for g in range(layer.kv_heads)])


def pool_same(scores: Tensor, width: int, kind: str = "avg") -> Tensor:
    """Centred one-dimensional pooling, [n] -> [n].

    Choice: the width is odd, the output has the input's length, and places outside the input are left out of the mean
    or maximum (they are not zeros). The caller passes the positions outside the window only, so that the window's
    scores never leak into its neighbours.
    """
    if width < 1 or width % 2 == 0:
        raise ValueError(f"width must be odd and positive, got {width}")
    if kind not in ("avg", "max"):
        raise ValueError(f"kind must be 'avg' or 'max', got {kind!r}")
    pooled = torch.empty_like(scores)
    for i in range(len(scores)):
        near = scores[max(0, i - width // 2) : i + width // 2 + 1]
        pooled[i] = near.mean() if kind == "avg" else near.max()
    return pooled


def keep_top(scores, positions, count: int, protected=()) -> list[int]:
    """Sorted positions that stay: the protected ones, then the best of the others until count is reached.

    scores: anything that maps a position to a number. Of equal scores the lower position is dropped first.
    """
    protected = sorted(set(protected))
    if len(protected) > count:
        raise ValueError(f"{len(protected)} protected entries do not fit in a budget of {count}")
    ranked = [(float(scores[p]), p) for p in positions if p not in protected]
    if any(math.isnan(score) for score, _ in ranked):
        raise ValueError("a score is not a number")
    ranked.sort()
    drop = max(0, len(positions) - count)
    return sorted(protected + [p for _, p in ranked[drop:]])


def everything(layers: list[Layer]) -> Kept:
    """The result that drops nothing."""
    return [[list(range(layer.length)) for _ in range(layer.kv_heads)] for layer in layers]


def window_positions(length: int, window: int, budget: int) -> list[int]:
    """The last `window` prompt positions.

    Choice: B < w raises ValueError; B = w keeps exactly the window. S < w never gets here with room: then
    B >= w > S would have kept everything, and B < w raises.
    """
    if budget < window:
        raise ValueError(f"the window of {window} entries does not fit in a budget of {budget}")
    return list(range(length - window, length))


def keep_with_window(layer: Layer, scores: Tensor, budget: int, window: int) -> list[list[int]]:
    """Per KV head the window and the best others. scores [G, S - w]; budget is that of each KV head in this layer."""
    protected = window_positions(layer.length, window, budget)
    everyone = range(layer.length)
    return [keep_top(dict(enumerate(scores[g])), everyone, budget, protected) for g in range(layer.kv_heads)]


def whole_budgets(exact: list, total: int) -> list[int]:
    """Turns exact layer budgets that add up to total into whole numbers that add up to total.

    Choice: largest remainder. Every layer gets the floor, then the entries left over go one each to the
    layers with the largest fraction; of equal fractions the lower layer is served first.
    """
    whole = [math.floor(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda l: (-(exact[l] - whole[l]), l))
    for l in order[: total - sum(whole)]:
        whole[l] += 1
    return whole


# ---- SnapKV and the methods on top of its scores ---------------------------------------------------------------------


def snapkv_scores(layer: Layer, window: int = 32, width: int = 5, pooling: str = "avg") -> Tensor:
    """Mean over the window queries of attention, pooled, mean over the group. Returns [G, S - w].

    Choice: the softmax runs over the whole causal row, the window's keys included; only then are its columns cut off.
    Choice: pooling comes before the group mean (the order matters for pooling="max" only).
    """
    outside = layer.length - window
    rows = attention(layer, range(outside, layer.length)).mean(dim=1)[:, :outside]
    pooled = torch.stack([pool_same(rows[h], width, pooling) for h in range(layer.heads)])
    return group_mean(layer, pooled)


def snapkv(layers, budget: int, window: int = 32, width: int = 5, pooling: str = "avg") -> Kept:
    """SnapKV. Score: see snapkv_scores. Protected: the window. Granularity: KV head. Keeps B for each KV head.

    Choice: see snapkv_scores, pool_same and window_positions.
    """
    if budget >= layers[0].length:
        return everything(layers)
    window_positions(layers[0].length, window, budget)
    return [keep_with_window(la, snapkv_scores(la, window, width, pooling), budget, window) for la in layers]


def pyramidkv_budgets(n_layers: int, length: int, budget: int, window: int = 32, beta: int = 20) -> list[int]:
    """Entries of each KV head per layer, the window included. Computed in exact fractions, then made whole.

    min = (B-w)/20, max = 2(B-w)-min; if max > S-w then max = S-w and min = 2(B-w)-max;
    budget_l = max - (l-1)(max-min)/(N-1), l = 1..N, plus w.
    Choice: whole numbers by largest remainder (see whole_budgets), so the total is exactly N*B.
    Choice: with one layer the formula divides by zero; that layer gets B.
    """
    if n_layers == 1:
        return [budget]
    low = Fraction(budget - window, beta)
    high = 2 * (budget - window) - low
    if high > length - window:
        high = Fraction(length - window)
        low = 2 * (budget - window) - high
    exact = [high - l * (high - low) / (n_layers - 1) for l in range(n_layers)]
    return [window + x for x in whole_budgets(exact, n_layers * (budget - window))]


def pyramidkv(layers, budget: int, window: int = 32, width: int = 5, pooling: str = "avg", beta: int = 20) -> Kept:
    """PyramidKV. Score: SnapKV's. Layer budgets: see pyramidkv_budgets. Protected: the window. Granularity: KV head.

    Choice: every KV head of a layer gets the same number; see also pyramidkv_budgets and snapkv_scores.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    window_positions(length, window, budget)
    budgets = pyramidkv_budgets(len(layers), length, budget, window, beta)
    scores = [snapkv_scores(layer, window, width, pooling) for layer in layers]
    return [keep_with_window(layer, s, b, window) for layer, s, b in zip(layers, scores, budgets, strict=True)]


def adaptive_heads(layer: Layer, scores: Tensor, budget: int, protected: list[int], floor_share: float):
    """Ada-KV's allocation in one layer: the top B*G over (head, token) pairs. scores maps [g][position].

    Choice: the floor counts all kept entries of a head, the protected ones included, and is rounded up.
    Choice: each head first takes its protected entries and its own best up to the floor, then all heads compete.
    Choice: of equal scores at equal positions the pair of the lower KV head is dropped first.
    """
    floor = min(budget, math.ceil(floor_share * budget - 1e-9))
    secured = max(floor, len(protected))
    kept = [keep_top(scores[g], range(layer.length), secured, protected) for g in range(layer.kv_heads)]
    pairs = []
    for g in range(layer.kv_heads):
        pairs += [(float(scores[g][p]), p, g) for p in range(layer.length) if p not in kept[g]]
    room = (budget - secured) * layer.kv_heads
    for _, p, g in sorted(pairs, reverse=True)[:room]:
        kept[g].append(p)
    return [sorted(positions) for positions in kept]


def adakv(
    layers, budget: int, floor_share: float = 0.2, window: int = 32, width: int = 5, pooling: str = "avg"
) -> Kept:
    """Ada-KV over SnapKV scores: per layer the top B*G pairs, every head at least 0.2 B.

    Protected: the window in every head. Granularity: KV head, ragged; each layer holds exactly B*G pairs.
    Choice: see adaptive_heads and snapkv_scores.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    protected = window_positions(length, window, budget)
    kept = []
    for layer in layers:
        scores = snapkv_scores(layer, window, width, pooling)
        by_head = [dict(enumerate(scores[g])) for g in range(layer.kv_heads)]
        kept.append(adaptive_heads(layer, by_head, budget, protected, floor_share))
    return kept


# ---- CAKE ------------------------------------------------------------------------------------------------------------


def cake_preference(layer: Layer, window: int = 32, tau1: float = 1.0, tau2: float = 1.0) -> float:
    """P_l = Hent_l^(1/tau1) * Var_l^(1/tau2) of the window queries' attention.

    Choice: both read the columns outside the window only, and the row is not renormalised there (inside the window the
    causal zeros would make a variance that says nothing).
    Choice: entropy is -sum_i a log a, mean over window queries and query heads; natural logarithm, 0 log 0 = 0.
    Choice: variance over the window is the population variance, summed over keys, mean over query heads.
    Choice: entropy and variance are averaged over heads first and multiplied after.
    """
    outside = layer.length - window
    rows = attention(layer, range(outside, layer.length))[:, :, :outside]
    entropy = -torch.special.xlogy(rows, rows).sum(dim=2).mean()
    variance = rows.var(dim=1, correction=0).sum(dim=1).mean()
    return float(entropy ** (1 / tau1) * variance ** (1 / tau2))


def share_out(preference: list[float], total: int, ceiling: int) -> list[int]:
    """Splits total over the layers in proportion to preference, none above ceiling.

    Choice: what a clipped layer cannot take goes to the unclipped layers in proportion to their preference, again and
    again until none exceeds the ceiling; if the rest have no preference at all, they share equally.
    Choice: whole numbers by largest remainder (see whole_budgets).
    """
    exact: list[float] = [0.0] * len(preference)
    free, left = list(range(len(preference))), total
    while free:
        weight = sum(preference[l] for l in free)
        for l in free:
            exact[l] = left * preference[l] / weight if weight > 0 else left / len(free)
        over = [l for l in free if exact[l] > ceiling]
        if not over:
            break
        for l in over:
            exact[l] = ceiling
        free, left = [l for l in free if l not in over], left - ceiling * len(over)
    return whole_budgets(exact, total)


def cake_scores(layer: Layer, window: int = 32, gamma: float = 200.0, width: int = 5) -> Tensor:
    """mean_u a + 200 var_u a over the window queries, average pooling 5, group mean. Returns [G, S - w].

    Choice: population variance; pooling per query head before the group mean (both linear, so the order does not
    matter).
    """
    outside = layer.length - window
    rows = attention(layer, range(outside, layer.length))[:, :, :outside]
    raw = rows.mean(dim=1) + gamma * rows.var(dim=1, correction=0)
    return group_mean(layer, torch.stack([pool_same(raw[h], width) for h in range(layer.heads)]))


def cake(
    layers, budget: int, window: int = 32, gamma: float = 200.0, tau1: float = 1.0, tau2: float = 1.0, width: int = 5
) -> Kept:
    """CAKE. Score: cake_scores. Layer budgets proportional to cake_preference.

    Protected: the window. Granularity: KV head.

    Choice: what is shared out is N*(B-w); every layer has its window on top and no other floor. All KV heads of a layer
    get the same number.
    Choice: see cake_preference, share_out and cake_scores.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    window_positions(length, window, budget)
    preference = [cake_preference(layer, window, tau1, tau2) for layer in layers]
    extra = share_out(preference, len(layers) * (budget - window), length - window)
    scores = [cake_scores(layer, window, gamma, width) for layer in layers]
    return [keep_with_window(layer, s, window + x, window) for layer, s, x in zip(layers, scores, extra, strict=True)]


# ---- Expected Attention, CriticalKV, KVzip, ReST-KV ------------------------------------------------------------------


def mean_rotation(layer: Layer, first: int, count: int) -> Tensor:
    """Mean of the RoPE matrices of positions first .. first+count-1, M [D, D]: a column vector x becomes M x."""
    total = torch.zeros(layer.head_size, layer.head_size, dtype=torch.float64)
    for position in range(first, first + count):
        total += layer.rope(torch.eye(layer.head_size, dtype=torch.float64), position).T
    return total / count


def expected_attention_scores(layer: Layer, sinks: int = 4, future: int = 512) -> Tensor:
    """z = mu.k/sqrt(D) + k' Sigma k/(2D), softmax, group mean, times ||v||_2. Returns [G, S - sinks].

    Choice: mu and Sigma over the prompt queries from position `sinks` on; Sigma is the population covariance.
    Choice: the next 512 positions are S .. S+511; M is the mean of their RoPE matrices; mu -> M mu, Sigma -> M Sigma
    M'.
    Choice: the softmax runs over the keys outside the first 4 only.
    Choice: the norm of the value is the 2-norm and nothing is added to the score before the product.
    """
    rotation = mean_rotation(layer, layer.length, future)
    probabilities = []
    for h in range(layer.heads):
        queries = layer.q_raw[h, sinks:]
        mu = queries.mean(dim=0)
        sigma = (queries - mu).T @ (queries - mu) / len(queries)
        mu, sigma = rotation @ mu, rotation @ sigma @ rotation.T
        z = []
        for key in layer.k[h // layer.group, sinks:]:
            z.append(mu @ key / math.sqrt(layer.head_size) + key @ sigma @ key / (2 * layer.head_size))
        probabilities.append(torch.softmax(torch.stack(z), dim=0))
    return group_mean(layer, torch.stack(probabilities)) * layer.v[:, sinks:].norm(dim=2)


def expected_attention(layers, budget: int, sinks: int = 4, future: int = 512) -> Kept:
    """Expected Attention. Score: see expected_attention_scores. Protected: first 4. Granularity: KV head.

    Choice: see expected_attention_scores. B < 4 raises ValueError.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    if budget < sinks:
        raise ValueError(f"the first {sinks} entries do not fit in a budget of {budget}")
    kept = []
    for layer in layers:
        scores = expected_attention_scores(layer, sinks, future)
        by_head = [{sinks + i: s for i, s in enumerate(scores[g])} for g in range(layer.kv_heads)]
        kept.append([keep_top(by_head[g], range(length), budget, range(sinks)) for g in range(layer.kv_heads)])
    return kept


def projected_value_norm(layer: Layer) -> Tensor:
    """Mean over the group of ||W_O^h v||_1. Returns [G, S]. W_O^h is columns h*D .. (h+1)*D-1 of wo."""
    norms = torch.zeros(layer.heads, layer.length, dtype=torch.float64)
    for h in range(layer.heads):
        w_head = layer.wo[:, h * layer.head_size : (h + 1) * layer.head_size]
        for i in range(layer.length):
            norms[h, i] = (w_head @ layer.v[h // layer.group, i]).abs().sum()
    return group_mean(layer, norms)


def criticalkv(
    layers,
    budget: int,
    first_share: float = 0.5,
    epsilon: float = 1e-4,
    window: int = 32,
    width: int = 5,
    pooling: str = "avg",
) -> Kept:
    """CriticalKV over SnapKV scores: half by s, the rest by (s + 1e-4) * mean over the group of ||W_O^h v||_1.

    Protected: the window. Granularity: KV head.
    Choice: the half is taken of the B-w entries that compete, rounded down; the second stage fills the rest.
    Choice: s is the KV head's SnapKV score (its group mean already taken), the same in both stages and for every head
    of the group, so the group mean falls on the norm alone.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    protected = window_positions(length, window, budget)
    first = window + math.floor(first_share * (budget - window) + 1e-9)
    kept = []
    for layer in layers:
        base = snapkv_scores(layer, window, width, pooling)
        product = (base + epsilon) * projected_value_norm(layer)[:, : length - window]
        heads = []
        for g in range(layer.kv_heads):
            stage_one = keep_top(dict(enumerate(base[g])), range(length), first, protected)
            heads.append(keep_top(dict(enumerate(product[g])), range(length), budget, stage_one))
        kept.append(heads)
    return kept


def kvzip(repeat_attention: list[Tensor], budget: int, kv_heads: int, protected: int = 4) -> Kept:
    """KVzip from the attention [H, U, S] of the repeat queries, one tensor per layer.

    Score: max over the group and the U repeat queries. One global top-k of L*G*B entries over layers and heads.
    Protected: the first 4 in every layer and head. Granularity: global.
    Choice: the 4*L*G protected entries count in L*G*B; a head may keep no more than those.
    Choice: of equal scores at equal positions the lower layer, then the lower KV head, is dropped first.
    """
    length = repeat_attention[0].shape[2]
    kept = [[list(range(min(protected, length))) for _ in range(kv_heads)] for _ in repeat_attention]
    if budget >= length:
        return [[list(range(length)) for _ in range(kv_heads)] for _ in repeat_attention]
    if budget < protected:
        raise ValueError(f"the first {protected} entries do not fit in a budget of {budget}")
    entries = []
    for l, rows in enumerate(repeat_attention):
        group = rows.shape[0] // kv_heads
        for g in range(kv_heads):
            scores = rows[g * group : (g + 1) * group].double().amax(dim=(0, 1))
            entries += [(float(scores[i]), i, l, g) for i in range(protected, length)]
    room = len(repeat_attention) * kv_heads * (budget - protected)
    for _, i, l, g in sorted(entries, reverse=True)[:room]:
        kept[l][g].append(i)
    return [[sorted(positions) for positions in heads] for heads in kept]


def deletion_change(probabilities: Tensor, values: Tensor) -> Tensor:
    """a/(1-a) * ||o - v_i||_2: how far the head's output moves when entry i alone is deleted.

    probabilities [n], values [n, D] -> [n], with o = sum_j a_j v_j.
    """
    output = probabilities @ values
    return probabilities / (1 - probabilities) * (output - values).norm(dim=1)


def restkv_scores(layer: Layer, window: int = 32, new_weight: float = 0.2, width_of=lambda h: 5) -> Tensor:
    """deletion_change per window query, EMA over the window, average pooling, group mean. Returns [G, S - w].

    Choice: o sums over the whole causal row of the query, the window's keys included; only competing i are scored.
    Choice: the EMA starts at 0 and reads the window from its oldest query: m = (1 - 0.2) m + 0.2 x. So 0.2 is the
    weight of the newer query (in the notation of methods.md's own EMA that is alpha = 0.8).
    Choice: "avg-pool adapted to drift" gives no rule for the width. width_of(query head) is a parameter; 5 by default.
    Choice: pooling per query head, then the group mean.
    """
    outside = layer.length - window
    pooled = []
    for h in range(layer.heads):
        m = torch.zeros(outside, dtype=torch.float64)
        for u in range(outside, layer.length):
            probabilities = attention_row(layer, h, u)
            x = deletion_change(probabilities, layer.v[h // layer.group, : u + 1])[:outside]
            m = (1 - new_weight) * m + new_weight * x
        pooled.append(pool_same(m, width_of(h)))
    return group_mean(layer, torch.stack(pooled))


def restkv(layers, budget: int, window: int = 32, new_weight: float = 0.2, width_of=None) -> Kept:
    """ReST-KV. Score: see restkv_scores. Protected: the window. Granularity: KV head. Uniform budget B.

    width_of(layer index, query head) -> odd pooling width; None means 5 everywhere.
    Choice: see restkv_scores.
    """
    if budget >= layers[0].length:
        return everything(layers)
    window_positions(layers[0].length, window, budget)
    kept = []
    for l, layer in enumerate(layers):
        scores = restkv_scores(layer, window, new_weight, lambda h, l=l: 5 if width_of is None else width_of(l, h))
        kept.append(keep_with_window(layer, scores, budget, window))
    return kept


# ---- keys alone ------------------------------------------------------------------------------------------------------


def keydiff_scores(keys: Tensor) -> Tensor:
    """-cos(k_i, mean_j k_j/||k_j||) over the keys given. [n, D] -> [n].

    Choice: plain division, no epsilon: a key of norm 0, or a mean of norm 0, is not a number and is refused later.
    """
    mean = (keys / keys.norm(dim=1, keepdim=True)).mean(dim=0)
    return -(keys @ mean) / (keys.norm(dim=1) * mean.norm())


def knorm_scores(keys: Tensor) -> Tensor:
    """-||k_i||_2, so that small keys stay. [n, D] -> [n]."""
    return -keys.norm(dim=1)


def blockwise(layers, budget: int, block: int | None, score) -> Kept:
    """Feeds the prompt in blocks; whenever more than B are held after a block, drops the lowest down to B.

    The score is recomputed over what is held, the new block included. block=None is the one-shot form: one block of S.
    Choice: the last block may be shorter and is treated like the others.
    """
    length = layers[0].length
    block = length if block is None else block
    kept = []
    for layer in layers:
        heads = []
        for g in range(layer.kv_heads):
            held: list[int] = []
            for start in range(0, length, block):
                held += range(start, min(start + block, length))
                if len(held) > budget:
                    held = keep_top(dict(zip(held, score(layer.k[g, held]), strict=True)), held, budget)
            heads.append(held)
        kept.append(heads)
    return kept


def keydiff(layers, budget: int, block: int | None = None) -> Kept:
    """KeyDiff on keys after RoPE. Score: see keydiff_scores. Protected: none. Granularity: KV head.

    Choice: see blockwise and keydiff_scores.
    """
    return blockwise(layers, budget, block, keydiff_scores)


def knorm(layers, budget: int, block: int | None = None) -> Kept:
    """KNorm: -||k_i||_2, small keys stay. Protected: none. Granularity: KV head.

    Choice: keys after RoPE (a rotation does not change the norm). See blockwise.
    """
    return blockwise(layers, budget, block, knorm_scores)


# ---- decode methods cut once at the end of the prompt ----------------------------------------------------------------


def accumulated_attention(layer: Layer, prompt: int) -> Tensor:
    """Attention of all prompt queries summed, then summed over the group. Returns [G, prompt].

    Choice: no division by the number of queries that could see the entry.
    """
    return group_sum(layer, attention(layer, range(prompt)).sum(dim=1)[:, :prompt])


def h2o_prompt(layers, budget: int) -> Kept:
    """H2O at the end of the prompt. Score: accumulated_attention. Protected: last B/2. Granularity: KV head.

    Choice: B/2 is rounded down.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    recent = range(length - budget // 2, length)
    kept = []
    for layer in layers:
        sums = accumulated_attention(layer, length)
        kept.append([keep_top(sums[g], range(length), budget, recent) for g in range(layer.kv_heads)])
    return kept


def tova_prompt(layers, budget: int) -> Kept:
    """TOVA at the end of the prompt: mean over all H heads of the last query's attention.

    Protected: none. Granularity: layer, so every KV head of a layer has the same list.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    kept = []
    for layer in layers:
        scores = attention(layer, [length - 1])[:, 0].mean(dim=0)
        kept.append([keep_top(scores, range(length), budget) for _ in range(layer.kv_heads)])
    return kept


def streaming_prompt(layers, budget: int, sinks: int = 4) -> Kept:
    """StreamingLLM at the end of the prompt: the first 4 and the newest B-4. Granularity: shared.

    Choice: B < 4 raises ValueError; B = 4 keeps the first 4 only.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    chosen = keep_top(range(length), range(length), budget, range(sinks))
    return [[list(chosen) for _ in range(layer.kv_heads)] for layer in layers]


def vatp_protected(budget: int, sinks: int = 20) -> tuple[int, int]:
    """How many first and how many recent entries VATP protects under a budget: (first, recent).

    Choice: recent = B/2 rounded down. If 20 + B/2 > B the recent part stays and the first part shrinks to B - B/2, so
    that below B = 40 everything kept is protected and the score decides nothing.
    """
    recent = budget // 2
    return min(sinks, budget - recent), recent


def vatp_prompt(layers, budget: int, sinks: int = 20) -> Kept:
    """VATP at the end of the prompt: accumulated attention (sum over the group) * ||v_i||_1.

    Protected: first 20 and the most recent B/2, fitted as vatp_protected says. Granularity: KV head.
    Choice: see vatp_protected and accumulated_attention.
    """
    length = layers[0].length
    if budget >= length:
        return everything(layers)
    first, recent = vatp_protected(budget, sinks)
    protected = list(range(first)) + list(range(length - recent, length))
    kept = []
    for layer in layers:
        scores = accumulated_attention(layer, length) * layer.v.abs().sum(dim=2)
        kept.append([keep_top(scores[g], range(length), budget, protected) for g in range(layer.kv_heads)])
    return kept
