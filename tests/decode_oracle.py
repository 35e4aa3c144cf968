"""Naive float64 simulators of the decode-time baselines in methods.md: which positions are held after each step.

Each layer owns the tensors of the whole sequence: q [H, T, D], k and v [G, T, D], of which the first `prompt` positions
are the prompt and the others are decode tokens. Decode step t = 1, 2, ... feeds position prompt + t - 1. Its query
meets exactly what each KV head still holds plus the new token itself. What comes out of the attention is not fed back:
the tensors are given.

    run(H2O(), layers, prompt, budget, steps) -> list over steps of list over layers of list over KV heads of positions

Choices that hold for every method:
Choice: nothing is dropped before t = 1. Then all prompt entries and the new token are scored and everything is cut to
B. From then on one in, one out. While B or fewer are held, nothing is dropped.
Choice: the new token is scored by its own query and may itself be the victim, unless it is protected.
Choice: of equal scores the entry at the lower position is dropped first.
Choice: protected entries count in B; a ValueError is raised where they do not fit.
Choice: interval n > 1 cuts at t = 1, 1+n, 1+2n, ... down to B - n, also when fewer than B are held then. So a query
meets B entries at most after the first step, and B - 1 at most are held after a step. n >= B raises ValueError.
"""

import math
from dataclasses import dataclass

import torch
from prefill_oracle import (
    Kept,
    Layer,
    accumulated_attention,
    attention,
    heads_of,
    keep_top,
    keydiff_scores,
    knorm_scores,
    pool_same,
    vatp_protected,
)
from torch import Tensor


def held_logits(layer: Layer, h: int, query: int, held: list[int]) -> Tensor:
    """q.k/sqrt(D) of query head h at position `query` with the entries held. Returns [len(held)]."""
    return layer.k[h // layer.group, held] @ layer.q[h, query] / math.sqrt(layer.head_size)


def held_attention(layer: Layer, h: int, query: int, held: list[int]) -> Tensor:
    """Softmax of held_logits: attention over exactly what is held. Returns [len(held)]."""
    return torch.softmax(held_logits(layer, h, query, held), dim=0)


def newest(held: list[int], count: int) -> list[int]:
    """The last `count` entries held."""
    return held[max(0, len(held) - count) :]


class Method:
    """A decode-time method. Subclasses give `scores`, and where they need them `begin`, `observe` and `protected`."""

    def __init__(self, interval: int = 1):
        self.interval = interval

    def start(self, layers: list[Layer], prompt: int, budget: int) -> None:
        """Takes the tensors of the whole sequence; the prompt's entries are all held."""
        if self.interval > 1 and self.interval >= budget:
            raise ValueError(f"interval {self.interval} must be below the budget {budget}")
        self.layers, self.prompt, self.budget, self.t = layers, prompt, budget, 0
        self.held = [[list(range(prompt)) for _ in range(layer.kv_heads)] for layer in layers]
        self.begin()

    def step(self) -> Kept:
        """Feeds one token, cuts, and returns the positions held after the step."""
        self.t += 1
        new = self.prompt + self.t - 1
        for l, g in self.cells():
            self.held[l][g].append(new)
        self.observe(new)
        for l, g in self.cells():
            held = self.held[l][g]
            target = self.target(len(held))
            if target < len(held):
                self.held[l][g] = keep_top(self.scores(l, g), held, target, self.protected(held))
        return [[list(held) for held in heads] for heads in self.held]

    def cells(self):
        """All (layer, KV head) pairs."""
        return [(l, g) for l, layer in enumerate(self.layers) for g in range(layer.kv_heads)]

    def target(self, count: int) -> int:
        """How many of the `count` entries held may stay after this step."""
        if self.interval == 1:
            return min(count, self.budget)
        return min(count, self.budget - self.interval) if (self.t - 1) % self.interval == 0 else count

    def begin(self) -> None:
        """Reads the prompt."""

    def observe(self, new: int) -> None:
        """Reads the step's attention; the new token is already held."""

    def scores(self, l: int, g: int) -> dict[int, float]:
        """Held position -> score; the lowest is dropped first."""
        raise NotImplementedError

    def protected(self, held: list[int]) -> list[int]:
        """The entries that a cut must keep."""
        return []


def run(method: Method, layers: list[Layer], prompt: int, budget: int, steps: int) -> list[Kept]:
    """Positions held after each of the steps, per layer and KV head."""
    method.start(layers, prompt, budget)
    return [method.step() for _ in range(steps)]


# ---- attention -------------------------------------------------------------------------------------------------------


class Accumulated(Method):
    """Base of H2O and VATP: per KV head the attention of all queries so far, summed over the group.

    Choice: all prompt queries count with their causal attention, then every decode query with its attention over what
    is held.
    """

    def begin(self):
        self.sums = []
        for layer in self.layers:
            prompt_sums = accumulated_attention(layer, self.prompt)
            self.sums.append([dict(enumerate(prompt_sums[g].tolist())) for g in range(layer.kv_heads)])

    def observe(self, new):
        for l, g in self.cells():
            held = self.held[l][g]
            for h in heads_of(self.layers[l], g):
                for p, a in zip(held, held_attention(self.layers[l], h, new, held).tolist(), strict=True):
                    self.sums[l][g][p] = self.sums[l][g].get(p, 0.0) + a


class H2O(Accumulated):
    """H2O. Score: attention summed over all queries so far and over the group.

    Protected: last B/2. Granularity: KV head.

    Choice: B/2 is rounded down; the new token is among the last B/2.
    """

    def scores(self, l, g):
        return self.sums[l][g]

    def protected(self, held):
        return newest(held, self.budget // 2)


class VATP(Accumulated):
    """VATP. Score: H2O's sum * ||v_i||_1. Protected: first 20 and the recent B/2. Granularity: KV head.

    Choice: if 20 + B/2 > B, the recent part stays and the first part shrinks (see vatp_protected).
    Choice: "first 20" are sequence positions 0..19, decode tokens included when the prompt is shorter than 20.
    """

    def __init__(self, sinks: int = 20):
        super().__init__()
        self.sinks = sinks

    def scores(self, l, g):
        norms = self.layers[l].v[g].abs().sum(dim=1)
        return {p: total * float(norms[p]) for p, total in self.sums[l][g].items()}

    def protected(self, held):
        first, recent = vatp_protected(self.budget, self.sinks)
        return [p for p in held if p < first] + newest(held, recent)


class ScissorHands(Method):
    """ScissorHands. Over the last w = 400 queries, how often attention is below 1/t; the most often low go first.

    t is the number of entries that the query meets. Protected: last 10. Granularity: KV head. Drops B/2 at once when
    full.
    Choice: the 400 queries end with the newest one; the prompt's last queries are among them, with their causal
    attention.
    Choice: group: each query head is counted by itself, the counts are summed over the group.
    Choice: an entry is counted only by the queries that met it (not by those before it), and the count is not made a
    rate.
    Choice: "below" is strict.
    Choice: full means that B or more are held after the new token has come in; the cut leaves B - B/2 (B/2 rounded
    down), at the first step too. That is the interval n = B/2 of methods.md section 3: a query meets B entries at most.
    Choice: protected entries that do not fit in B - B/2 raise ValueError.
    """

    def __init__(self, window: int = 400, recent: int = 10):
        super().__init__()
        self.window, self.recent = window, recent

    def begin(self):
        queries = range(max(0, self.prompt - self.window), self.prompt)
        self.history = []  # per layer and KV head: (query position, {entry: number of query heads that found it low})
        for layer in self.layers:
            rows = attention(layer, queries)
            heads = [[] for _ in range(layer.kv_heads)]
            for g in range(layer.kv_heads):
                for n, u in enumerate(queries):
                    heads[g].append((u, self.low(layer, g, rows[:, n, : u + 1], range(u + 1))))
            self.history.append(heads)

    def low(self, layer, g, rows, positions) -> dict[int, int]:
        """rows [H, n]: for each of the n positions the number of the group's heads whose attention is below 1/n."""
        n = len(positions)
        return {p: sum(int(rows[h, j] < 1 / n) for h in heads_of(layer, g)) for j, p in enumerate(positions)}

    def observe(self, new):
        for l, g in self.cells():
            layer, held = self.layers[l], self.held[l][g]
            rows = torch.zeros(layer.heads, len(held), dtype=torch.float64)
            for h in heads_of(layer, g):
                rows[h] = held_attention(layer, h, new, held)
            self.history[l][g].append((new, self.low(layer, g, rows, held)))

    def scores(self, l, g):
        now = self.prompt + self.t - 1
        recent = [low for u, low in self.history[l][g] if u > now - self.window]
        return {p: -float(sum(low.get(p, 0) for low in recent)) for p in self.held[l][g]}

    def target(self, count):
        return count if count < self.budget else self.budget - self.budget // 2

    def protected(self, held):
        return newest(held, self.recent)


class GKV(Method):
    """G-KV's decayed maximum: m = max(0.8 m, s), s the newest query's attention. Protected: none. Granularity: KV head.

    Choice: s is the mean over the group's query heads.
    Choice: prompt queries do not count: m = 0 for every prompt entry before t = 1, and for the new token before its own
    step.
    Choice: one in, one out; interval > 1 cuts as the module says, with m updated on every step.
    """

    def __init__(self, decay: float = 0.8, interval: int = 1):
        super().__init__(interval)
        self.decay = decay

    def begin(self):
        self.m = [[{} for _ in range(layer.kv_heads)] for layer in self.layers]

    def observe(self, new):
        for l, g in self.cells():
            layer, held, m = self.layers[l], self.held[l][g], self.m[l][g]
            s = torch.stack([held_attention(layer, h, new, held) for h in heads_of(layer, g)]).mean(dim=0)
            for p, value in zip(held, s.tolist(), strict=True):
                m[p] = max(self.decay * m.get(p, 0.0), value)

    def scores(self, l, g):
        return self.m[l][g]


class RKV(Method):
    """R-KV. 0.07 * importance - 0.93 * redundancy, every 128 decode steps. Protected: last 8. Granularity: KV head.

    Choice: capacity and interval: the cut at t = 1, 129, 257, ... leaves B - 128, so B is never exceeded between cuts
    (after the first step a query meets B entries at most). B - 128 must hold the last 8, otherwise ValueError.
    Choice: with an interval of 1 the cut leaves B, like the other methods.
    Choice: only the state at a cut counts; nothing is carried over between cuts.
    """

    def __init__(
        self,
        interval: int = 128,
        weight: float = 0.07,
        recent: int = 8,
        width: int = 7,
        threshold: float = 0.5,
        only_newer: bool = True,
    ):
        super().__init__(interval)
        self.weight, self.recent, self.width = weight, recent, width
        self.threshold, self.only_newer = threshold, only_newer

    def start(self, layers, prompt, budget):
        super().start(layers, prompt, budget)
        room = budget if self.interval == 1 else budget - self.interval
        if room < self.recent:
            raise ValueError(f"the last {self.recent} entries do not fit in the {room} that a cut leaves")

    def scores(self, l, g):
        layer, held = self.layers[l], self.held[l][g]
        outside = held[: len(held) - self.recent]
        importance = rkv_importance(layer, g, held, self.recent, self.width)
        redundancy = rkv_redundancy(layer.k[g, held], self.threshold, self.only_newer)[: len(outside)]
        return dict(zip(outside, (self.weight * importance - (1 - self.weight) * redundancy).tolist(), strict=True))

    def protected(self, held):
        return newest(held, self.recent)


def rkv_importance(layer: Layer, g: int, held: list[int], recent: int = 8, width: int = 7) -> Tensor:
    """Importance of the entries outside the last 8. Returns [len(held) - recent].

    Choice: in this order: logits q.k/sqrt(D) of the queries at the last 8 positions, maximum over the group, softmax,
    mean over the 8 queries, maximum pooling 7.
    Choice: the softmax runs over the entries outside the last 8 only. They all precede the 8 queries, so no mask is
    needed.
    Choice: pooling runs over neighbours in the cache, whatever their original positions, and leaves out the last 8.
    """
    outside, queries = held[: len(held) - recent], held[len(held) - recent :]
    total = torch.zeros(len(outside), dtype=torch.float64)
    for u in queries:
        logits = torch.stack([held_logits(layer, h, u, outside) for h in heads_of(layer, g)])
        total += torch.softmax(logits.max(dim=0).values, dim=0)
    return pool_same(total / len(queries), width, "max")


def rkv_redundancy(keys: Tensor, threshold: float = 0.5, only_newer: bool = True) -> Tensor:
    """Softmax over all held entries of the mean cosine of entry j with the others. [n, D] -> [n].

    Choice: the mean over i of cos(k_i, k_j) divides by n and counts 0 for i = j; negative cosines count as they are.
    Choice: newest copy spared: for each i let j be the newest other entry with cosine above 0.5 (strict); the pair's
    cosine counts 0 in j's mean, and still counts in i's own mean.
    Choice: only_newer=True looks for j among the entries newer than i, so that of two copies the older one stays
    redundant and the newest is spared; only_newer=False looks among all other entries, so that two copies spare each
    other.
    Choice: the last 8 entries take part, as copies and in the softmax.
    """
    n = len(keys)
    unit = keys / keys.norm(dim=1, keepdim=True)
    cosine = unit @ unit.T
    counted = cosine.clone()
    for i in range(n):
        counted[i, i] = 0.0
        copies = [j for j in range(n) if j != i and cosine[i, j] > threshold and (j > i or not only_newer)]
        if copies:
            counted[i, max(copies)] = 0.0
    return torch.softmax(counted.sum(dim=0) / n, dim=0)


# ---- keys, positions, chance -----------------------------------------------------------------------------------------


class KeyDiff(Method):
    """KeyDiff: -cos(k_i, mean_j k_j/||k_j||), keys after RoPE. Protected: none. Granularity: KV head.

    Choice: the mean is recomputed at every step over what is held, the new token included. The prompt is cut in one
    shot at t = 1.
    """

    def scores(self, l, g):
        held = self.held[l][g]
        return dict(zip(held, keydiff_scores(self.layers[l].k[g, held]).tolist(), strict=True))


class KNorm(Method):
    """KNorm: -||k_i||_2, small keys stay. Protected: none. Granularity: KV head."""

    def scores(self, l, g):
        held = self.held[l][g]
        return dict(zip(held, knorm_scores(self.layers[l].k[g, held]).tolist(), strict=True))


class Recency(Method):
    """Recency: the score is the position. Protected: none. Granularity: shared."""

    def scores(self, l, g):
        return {p: float(p) for p in self.held[l][g]}


class Random(Method):
    """Random: the score is hash_fn(seed, position) -> float. Protected: none. Granularity: shared.

    Choice: the number is drawn once per position and stays for the whole run; the lowest is dropped. Positions count
    from the row's own first token.
    """

    def __init__(self, hash_fn, seed: int = 0):
        super().__init__()
        self.hash_fn, self.seed = hash_fn, seed

    def scores(self, l, g):
        return {p: float(self.hash_fn(self.seed, p)) for p in self.held[l][g]}


# ---- compact positions -----------------------------------------------------------------------------------------------


def compact_attention(layer: Layer, held: list[int], query: int) -> tuple[Tensor, Tensor]:
    """Attention with positions inside the cache. held is sorted and ends with `query`.

    Returns the probabilities [H, n] and the outputs [H, D].
    The n entries are re-assigned 0 .. n-1 in the order of their original positions, un-rotated keys are rotated to
    these, and the query is rotated to n-1, the re-assigned position of its own token.
    """
    if held[-1] != query:
        raise ValueError(f"the last entry held must be the query's own token {query}, got {held[-1]}")
    n = len(held)
    probabilities = torch.zeros(layer.heads, n, dtype=torch.float64)
    outputs = torch.zeros(layer.heads, layer.head_size, dtype=torch.float64)
    for h in range(layer.heads):
        g = h // layer.group
        rotated_query = layer.rope(layer.q_raw[h, query], n - 1)
        keys = torch.stack([layer.rope(layer.k_raw[g, p], j) for j, p in enumerate(held)])
        probabilities[h] = torch.softmax(keys @ rotated_query / math.sqrt(layer.head_size), dim=0)
        outputs[h] = probabilities[h] @ layer.v[g, held]
    return probabilities, outputs


@dataclass
class CompactStep:
    """One step of StreamingLLM with compact positions. The set is shared by all layers and KV heads.

    seen, seen_positions: original and re-assigned positions that the step's query met, its own token last.
    kept, kept_positions: original and re-assigned positions after the step; the next token comes in at len(kept).
    probabilities, outputs: per layer [H, len(seen)] and [H, D].
    """

    seen: list[int]
    seen_positions: list[int]
    kept: list[int]
    kept_positions: list[int]
    probabilities: list[Tensor]
    outputs: list[Tensor]


class StreamingCompact(Method):
    """StreamingLLM with compact positions: first 4 and the newest. Granularity: shared. Needs q_raw, k_raw and rope.

    Choice: at t = 1 nothing has been dropped, so the re-assigned positions are the original ones; from t = 2 on the
    query meets B + 1 entries at 0 .. B and sits at B itself. After the cut the entries are re-assigned 0 .. B-1.
    Choice: the first 4 are sequence positions 0..3. B < 4 raises ValueError at the first cut; B = 4 keeps the first 4
    only.
    """

    def __init__(self, sinks: int = 4):
        super().__init__()
        self.sinks = sinks

    def attend(self, l: int, new: int) -> tuple[Tensor, Tensor]:
        """compact_attention of layer l over what is held now, the new token included."""
        return compact_attention(self.layers[l], self.held[l][0], new)

    def observe(self, new):
        self.seen = list(self.held[0][0])
        self.attended = [self.attend(l, new) for l in range(len(self.layers))]

    def scores(self, l, g):
        return {p: float(p) for p in self.held[l][g]}

    def protected(self, held):
        return [p for p in held if p < self.sinks]

    def compact_step(self) -> CompactStep:
        """Like step, with the re-assigned positions and what the query saw."""
        kept = self.step()[0][0]
        probabilities, outputs = [p for p, _ in self.attended], [o for _, o in self.attended]
        return CompactStep(self.seen, list(range(len(self.seen))), kept, list(range(len(kept))), probabilities, outputs)


def run_compact(
    method: StreamingCompact, layers: list[Layer], prompt: int, budget: int, steps: int
) -> list[CompactStep]:
    """The steps of StreamingLLM with compact positions."""
    method.start(layers, prompt, budget)
    return [method.compact_step() for _ in range(steps)]
