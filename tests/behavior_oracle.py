"""Naive float64 reference of methods.md sections 4 to 6: deletion from a softmax, the value-aware diagnostic and the
behaviour-preserving score with its greedy selection.

One row, no padding. N layers, H query heads, G KV heads, R = H/G (query head h belongs to KV head h // R), D head size,
S tokens, U scoring queries, V vocabulary, K support of the top-K. The query at position u sees tokens 0..u. An entry is
a triple (layer, KV head, token). Everything is recomputed from q, k, v every time; no closed form of section 4 is used.
Lines that begin with "Choice:" name what methods.md leaves open. Three choices hold for every function here:

Choice: of equal scores the entry at the lower position is dropped first (kept last).
Choice: ties are equal float64 values, without a tolerance.
Choice: sizes that are a share of a number are floor(share * number + 1e-9), as for budgets, unless said otherwise.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

Entry = tuple[int, int, int]
Pair = tuple[Tensor, Tensor]
Pairs = set[tuple[int, int]]


@dataclass
class Layer:
    """What one decoder layer computed for the row; tensors are turned into float64.

    q [H, S, D] and k [G, S, D] after RoPE, v [G, S, D], wo [hidden, H*D] (head h owns columns h*D..(h+1)*D-1), scale of
    q.k (1/sqrt(D) as a rule).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    wo: Tensor
    scale: float

    def __post_init__(self):
        self.q, self.k, self.v, self.wo = self.q.double(), self.k.double(), self.v.double(), self.wo.double()
        self.heads, self.kv_heads = self.q.shape[0], self.k.shape[0]
        self.group = self.heads // self.kv_heads
        if self.heads % self.kv_heads != 0:
            raise ValueError(f"query heads {self.heads} are not a multiple of KV heads {self.kv_heads}")

    def output_matrix(self, head: int) -> Tensor:
        """W_O^h [hidden, D]."""
        size = self.q.shape[2]
        return self.wo[:, head * size : (head + 1) * size]


@dataclass
class ModelData:
    """All that the score of a mask needs; tensors are turned into float64.

    layers (N of them), x [S, hidden] the final states before the last RMSNorm, gamma [hidden], eps, unembedding
    [V, hidden], positions: the U scoring positions u, top_k: K (more than V means V).
    """

    layers: list[Layer]
    x: Tensor
    gamma: Tensor
    eps: float
    unembedding: Tensor
    positions: list[int]
    top_k: int = 64

    def __post_init__(self):
        self.x, self.gamma, self.unembedding = self.x.double(), self.gamma.double(), self.unembedding.double()


# Section 4: deletion


class Deletion(NamedTuple):
    """before [D] and after [D]: head outputs o and o'; mass: m; contribution [D]: c."""

    before: Tensor
    after: Tensor
    mass: float
    contribution: Tensor


def attention_weights(q: Tensor, k: Tensor, scale: float, evicted: Collection[int] = ()) -> Tensor:
    """Softmax over tokens [n] of scale * q.k, with the evicted tokens masked; q [D], k [n, D]."""
    logits = torch.stack([scale * torch.dot(q, key) for key in k])
    for i in evicted:
        logits[i] = -math.inf
    return torch.softmax(logits, dim=0)


def deletion(q: Tensor, k: Tensor, v: Tensor, evicted: Collection[int], scale: float) -> Deletion:
    """Removes the evicted tokens from one head at one query and renormalises; q [D], k [n, D], v [n, D].

    Choice: evicting every token the query sees is a ValueError.
    """
    q, k, v = q.double(), k.double(), v.double()
    if len(set(evicted)) == len(k):
        raise ValueError("every token that the query sees is evicted")
    weights = attention_weights(q, k, scale)
    before = weights @ v
    after = attention_weights(q, k, scale, evicted) @ v
    mass, contribution = 0.0, torch.zeros(v.shape[1], dtype=torch.float64)
    for i in sorted(set(evicted)):
        mass += float(weights[i])
        contribution = contribution + weights[i] * v[i]
    return Deletion(before, after, mass, contribution)


def deletion_at(layer: Layer, head: int, u: int, evicted: Collection[int]) -> Deletion:
    """The deletion of tokens from query head `head` of a layer at position u; evicted tokens after u do nothing."""
    g = head // layer.group
    visible = {i for i in evicted if i <= u}
    return deletion(layer.q[head, u], layer.k[g, : u + 1], layer.v[g, : u + 1], visible, layer.scale)


# Section 6: behaviour-preserving compression


def residual_shift(layer: Layer, evicted: Sequence[Collection[int]], positions: Sequence[int]) -> Tensor:
    """Sum over query heads of W_O^h (o' - o) [U, hidden]; evicted: the evicted tokens of each of the G KV heads."""
    shift = torch.zeros(len(positions), layer.wo.shape[0], dtype=torch.float64)
    for row, u in enumerate(positions):
        for h in range(layer.heads):
            removed = deletion_at(layer, h, u, evicted[h // layer.group])
            shift[row] += layer.output_matrix(h) @ (removed.after - removed.before)
    return shift


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """gamma x / sqrt(mean x^2 + eps), over the last dimension; x [.., hidden], gamma [hidden]."""
    return gamma * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def logit_shift(x: Tensor, dx: Tensor, gamma: Tensor, eps: float, unembedding: Tensor, support: Tensor) -> Pair:
    """(dy [U, hidden], dz [U, K]) by the formula of section 6.

    x and dx [U, hidden], gamma [hidden], unembedding [V, hidden], support [U, K] token ids.
    """
    hidden = x.shape[1]
    dy, dz = torch.zeros_like(x), torch.zeros(support.shape, dtype=torch.float64)
    for u in range(len(x)):
        r = torch.sqrt(x[u].pow(2).mean() + eps)
        dy[u] = gamma * (dx[u] / r - x[u] * torch.dot(x[u], dx[u]) / (hidden * r**3))
        dz[u] = unembedding[support[u]] @ dy[u]
    return dy, dz


def logit_shift_jvp(x: Tensor, dx: Tensor, gamma: Tensor, eps: float, unembedding: Tensor, support: Tensor) -> Pair:
    """The same as logit_shift, by forward-mode differentiation through RMSNorm and the head."""

    def head(state):
        y = rms_norm(state, gamma, eps)
        return y, y @ unembedding.T

    _, (dy, dz) = torch.func.jvp(head, (x,), (dx,))
    return dy, dz.gather(1, support)


def full_logits(model: ModelData) -> Tensor:
    """Logits of the full cache at the scoring positions [U, V]."""
    return rms_norm(model.x[model.positions], model.gamma, model.eps) @ model.unembedding.T


def top_support(logits: Tensor, top_k: int) -> Tensor:
    """Token ids of the top-K of logits [U, V], best first: [U, min(K, V)].

    Choice: of equal logits the lower token id comes first.
    """
    return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]


def divergence(logits: Tensor, dz: Tensor, support: Tensor) -> float:
    """Mean over u of KL = logsumexp_k(log p_k + dz_k) - sum_k p_k dz_k, p renormalised on the support.

    logits [U, V], dz [U, K], support [U, K].

    Choice: rounding may leave a value just below 0; it is not clamped.
    """
    total = 0.0
    for z, shift, ids in zip(logits, dz, support, strict=True):
        log_p = torch.log_softmax(z[ids], dim=0)
        total += float(torch.logsumexp(log_p + shift, dim=0) - (log_p.exp() * shift).sum())
    return total / len(logits)


def evicted_tokens(evicted: Collection[Entry], layer: int, kv_head: int) -> set[int]:
    """The tokens that a mask evicts from one KV head of one layer."""
    return {token for at, g, token in evicted if at == layer and g == kv_head}


def mask_divergence(model: ModelData, evicted: Collection[Entry]) -> float:
    """Score of a mask (a set of evicted triples), from scratch.

    Choice: a mask that leaves some scoring query of some head no token, so that o' does not exist, scores infinity.
    """
    dx = torch.zeros(len(model.positions), model.x.shape[1], dtype=torch.float64)
    for number, layer in enumerate(model.layers):
        tokens = [evicted_tokens(evicted, number, g) for g in range(layer.kv_heads)]
        if any(set(range(u + 1)) <= gone for gone in tokens for u in model.positions):
            return math.inf
        dx += residual_shift(layer, tokens, model.positions)
    logits = full_logits(model)
    support = top_support(logits, model.top_k)
    _, dz = logit_shift(model.x[model.positions], dx, model.gamma, model.eps, model.unembedding, support)
    return divergence(logits, dz, support)


def lowest_retained_mass(model: ModelData, evicted: Collection[Entry], layer: int, kv_head: int) -> float:
    """Least 1 - m over the scoring queries of all query heads of one KV head, as the sum of the weights that remain."""
    data = model.layers[layer]
    gone = evicted_tokens(evicted, layer, kv_head)
    lowest = 1.0
    for h in range(kv_head * data.group, (kv_head + 1) * data.group):
        for u in model.positions:
            weights = attention_weights(data.q[h, u], data.k[kv_head, : u + 1], data.scale).tolist()
            lowest = min(lowest, sum(weight for i, weight in enumerate(weights) if i not in gone))
    return lowest


class Greedy(NamedTuple):
    """order of the evictions, divergence of the mask after each, number of times that epsilon was halved."""

    order: list[Entry]
    divergences: list[float]
    halvings: int


def greedy(
    model: ModelData,
    eligible: Collection[Entry],
    count: int,
    pool_factor: float = 1.5,
    epsilon: float = 0.05,
    uniform: bool = False,
) -> Greedy:
    """Two-stage greedy, one entry at a time, every mask scored from scratch; ties: lower (layer, head, token) first.

    Choice: the pool holds ceil(pool_factor * number to evict) entries, at most all eligible ones; the stability rule
    plays no part in choosing it.
    Choice: "all are rejected" means all that are left in the pool (uniform: in the layers that still have to evict).
    Choice: epsilon stays halved for the rest of the run; an entry is rejected if the retained mass is strictly below.
    Choice: an entry that leaves some query no mass at all is never admissible; if only such are left: ValueError.
    Choice: uniform: count is the total and must be a multiple of N; each layer has a pool of its own, while the next
    entry is the best over all layers that still have to evict.
    """
    eligible = sorted(set(eligible))
    parts = [[e for e in eligible if e[0] == number] for number in range(len(model.layers))] if uniform else [eligible]
    if count % len(parts) != 0:
        raise ValueError(f"{count} evictions cannot be the same number in each of {len(parts)} layers")
    quota = count // len(parts)
    single = {entry: mask_divergence(model, {entry}) for entry in eligible}
    pools = []
    for part in parts:
        size = min(math.ceil(pool_factor * quota - 1e-9), len(part))
        if size < quota:
            raise ValueError(f"a pool of {size} entries is too small to evict {quota}")
        pools.append(sorted(part, key=lambda entry: (single[entry], entry))[:size])

    order, divergences, halvings = [], [], 0
    while len(order) < count:
        candidates = []
        for pool in pools:
            left = [entry for entry in pool if entry not in order]
            if len(pool) - len(left) < quota:
                candidates += left
        retained = {e: lowest_retained_mass(model, {*order, e}, e[0], e[1]) for e in candidates}
        if max(retained.values()) <= 0:
            raise ValueError("every candidate leaves some query without attention mass")
        while not any(mass > 0 and mass >= epsilon for mass in retained.values()):
            epsilon /= 2
            halvings += 1
        admissible = [e for e in candidates if retained[e] > 0 and retained[e] >= epsilon]
        score, entry = min((mask_divergence(model, {*order, e}), e) for e in admissible)
        order.append(entry)
        divergences.append(score)
    return Greedy(order, divergences, halvings)


def best_subset(
    model: ModelData, eligible: Collection[Entry], count: int, epsilon: float = 0.0
) -> tuple[tuple[Entry, ...], float]:
    """The subset of `count` eligible entries with the least mask divergence, by exhaustive search, and that divergence.

    Choice: no stability rule unless epsilon is given: then every retained mass of every touched KV head must reach it.
    Choice: of equal divergences the subset that sorts first.
    """
    best = None
    for subset in itertools.combinations(sorted(set(eligible)), count):
        if epsilon > 0 and any(lowest_retained_mass(model, subset, e[0], e[1]) < epsilon for e in subset):
            continue
        found = (mask_divergence(model, subset), subset)
        best = found if best is None else min(best, found)
    if best is None:
        raise ValueError("no subset is admissible")
    return best[1], best[0]


# Section 5: value-aware diagnostic


def pooled_attention(attention: Tensor, beta: Tensor) -> Tensor:
    """f [U, n]: sum over layers and heads of beta A[u, i]; attention [N, H, U, n], beta [N, H] (or [N, U, n], [N])."""
    pooled = torch.zeros(attention.shape[-2:], dtype=torch.float64)
    for weight, weights in zip(beta.double().flatten(), attention.double().flatten(0, -3), strict=True):
        pooled = pooled + weight * weights
    return pooled


def access_referents(attention: Tensor, decode: Sequence[bool], first: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """(q* [U], d* [U, n], f* [U, n]); attention [N, H, U, n], decode[u]: whether u is a decode query, in order of time.

    Choice: U holds the window's queries and the decode queries together; each law is zero outside its own.
    Choice: with fewer than `first` decode queries q* is uniform over those there are.
    """
    chosen = [u for u, is_decode in enumerate(decode) if is_decode][:first]
    q = torch.zeros(len(decode), dtype=torch.float64)
    for u in chosen:
        q[u] = 1 / len(chosen)
    beta = torch.full(attention.shape[:-2], 1 / math.prod(attention.shape[:-2]), dtype=torch.float64)
    return q, torch.ones(attention.shape[-2:], dtype=torch.float64), pooled_attention(attention, beta)


def access(q: Tensor, d: Tensor, f: Tensor) -> Tensor:
    """u_acc [n]: sum over u of q(u) d(i, u) f(u, i); q [U], d [U, n] (row u, column i), f [U, n]."""
    queries, tokens = f.shape
    total = torch.zeros(tokens, dtype=torch.float64)
    for i in range(tokens):
        for u in range(queries):
            total[i] += q[u] * d[u, i] * f[u, i]
    return total


def access_terms(q: Tensor, d: Tensor, f: Tensor, q_ref: Tensor, d_ref: Tensor, f_ref: Tensor) -> dict[str, Tensor]:
    """The terms of the error of u_acc: "query_law", "exposure", "pooling", and the "total" error, each [n].

    q [U], d [U, n], f [U, n] of the estimator and their referents in the same shapes.

    Choice: error = estimator - referent, and referents replace the estimator's parts in the order q, d, f. So the
    query-law term carries the estimator's d and f, the exposure term q* and f, the pooling term q* and d*.
    """
    return {
        "query_law": access(q - q_ref, d, f),
        "exposure": access(q_ref, d - d_ref, f),
        "pooling": access(q_ref, d_ref, f - f_ref),
        "total": access(q, d, f) - access(q_ref, d_ref, f_ref),
    }


def blocks_of(tokens: int, block: int = 16) -> list[list[int]]:
    """Blocks of contiguous tokens aligned to 0. Choice: the last block is short if `block` does not divide `tokens`."""
    return [list(range(start, min(start + block, tokens))) for start in range(0, tokens, block)]


def value_probe(layer: Layer, kv_head: int, window: Sequence[int], tokens: int, block: int = 16) -> dict[str, Tensor]:
    """Of one KV head's blocks the "mass" and the "change" alone and the "score" = mass * change, each [blocks].

    window: positions of the window's queries; only tokens 0..tokens-1 compete. Heads run over the group of the KV head,
    in the means and in both sums of the norm ratio.

    Choice: no smoothing of the scores (SnapKV's avg-pool works on tokens).
    Choice: the window is not cut off here: pass tokens = S - w to leave it out; a short last block then ends there.
    Choice: a block that is all a window query sees is a ValueError (from deletion); a zero ‖sum W_O o‖ is not guarded.
    """
    heads = range(kv_head * layer.group, (kv_head + 1) * layer.group)
    masses, changes = [], []
    for members in blocks_of(tokens, block):
        mass, change = [], []
        for u in window:
            shift, output = 0.0, 0.0
            for h in heads:
                removed = deletion_at(layer, h, u, members)
                mass.append(removed.mass)
                shift = shift + layer.output_matrix(h) @ (removed.after - removed.before)
                output = output + layer.output_matrix(h) @ removed.before
            change.append(float(shift.norm() / output.norm()))
        masses.append(sum(mass) / len(mass))
        changes.append(sum(change) / len(change))
    mass, change = torch.tensor(masses, dtype=torch.float64), torch.tensor(changes, dtype=torch.float64)
    return {"score": mass * change, "mass": mass, "change": change}


def projection_loss(access_mass: Tensor, kept: Collection[int]) -> float:
    """1 - p(K), p = u_acc normalised to sum 1 over all tokens; access_mass [n]."""
    values = access_mass.double().tolist()
    return 1 - sum(values[i] for i in set(kept)) / sum(values)


def fragmentation(kept: Collection[int], block: int = 16) -> float:
    """Share of kept tokens in runs shorter than a block.

    Choice: a run is a maximal row of consecutive kept tokens, wherever it starts; nothing kept gives 0.
    """
    runs = []
    for i in sorted(set(kept)):
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    short = sum(len(run) for run in runs if len(run) < block)
    return short / len(set(kept)) if runs else 0.0


def ranking(scores: Tensor) -> list[int]:
    """Positions of scores [n] from the best to the worst."""
    return sorted(range(len(scores)), key=lambda i: (float(scores[i]), i), reverse=True)


def boundary_swap(scores_a: Tensor, scores_b: Tensor, k: int, share: float = 0.05) -> tuple[list[int], int]:
    """Selector a's kept tokens (sorted) with the boundary decided by selector b, and how many entries changed sides.

    scores_a, scores_b [n]; the other direction is the call with the two exchanged.

    Choice: w = max(1, floor(share * k + 1e-9)), at most k and at most n - k. The band is the 2w entries that a ranks
    k-w+1..k+w (first = 1). a's best k - w stay, and the w of the band that b ranks best are kept with them.
    """
    order = ranking(scores_a)
    width = min(max(1, math.floor(share * k + 1e-9)), k, len(order) - k)
    band = order[k - width : k + width]
    chosen = [i for i in ranking(scores_b) if i in band][:width]
    kept = sorted(order[: k - width] + chosen)
    return kept, len(set(kept) - set(order[:k]))


def random_swap(kept: Collection[int], tokens: int, size: int, generator: torch.Generator) -> list[int]:
    """Kept tokens (sorted) after `size` of them, drawn at random, change sides with as many evicted ones.

    Choice: both draws are uniform over all kept and all evicted tokens of 0..tokens-1, not only those at the boundary.
    """
    inside = sorted(set(kept))
    outside = [i for i in range(tokens) if i not in inside]
    leave = [inside[j] for j in torch.randperm(len(inside), generator=generator).tolist()[:size]]
    enter = [outside[j] for j in torch.randperm(len(outside), generator=generator).tolist()[:size]]
    return sorted((set(inside) - set(leave)) | set(enter))


def block_projection(block_scores: Tensor, tokens: int, budget: int, block: int = 16) -> list[int]:
    """Kept tokens (sorted): whole blocks, best score first, within the budget; block_scores [blocks].

    Choice: a block that does not fit is skipped and the next ones are tried, so a short last block may still enter.
    """
    members, kept = blocks_of(tokens, block), []
    for b in ranking(block_scores):
        if len(kept) + len(members[b]) <= budget:
            kept += members[b]
    return sorted(kept)


def token_fill(kept: Collection[int], token_scores: Tensor, budget: int) -> list[int]:
    """Kept tokens (sorted) with what is left of the budget filled by the best other tokens; token_scores [n]."""
    others = [i for i in ranking(token_scores) if i not in set(kept)]
    return sorted([*set(kept), *others[: max(0, budget - len(set(kept)))]])


def boundary_lemma(scores: Tensor, delta: Tensor, kept: Collection[int]) -> tuple[Pairs, Pairs]:
    """Pairs (evicted i, kept j) where i overtakes j under s' = s + delta, and those the lemma names; both [n], exact.

    The lemma: delta_i - delta_j > s_j - s_i. Choice: to overtake is to be strictly greater.
    """
    s, d = [Fraction(x) for x in scores.tolist()], [Fraction(x) for x in delta.tolist()]
    pairs = [(i, j) for i in range(len(s)) if i not in set(kept) for j in kept]
    by_score = {(i, j) for i, j in pairs if s[i] + d[i] > s[j] + d[j]}
    by_lemma = {(i, j) for i, j in pairs if d[i] - d[j] > s[j] - s[i]}
    return by_score, by_lemma
