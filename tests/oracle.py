"""A naive float64 simulator of KV-cache eviction during decoding: the reference for testing fast code.

It runs an ordinary transformers causal LM (Llama, Mistral, Qwen) one row at a time, module by module, and writes
attention, scores, utilities and eviction out as plain loops over layers, heads and cached positions. Nothing
here is meant to be fast, and nothing here is shared with the library.

Notation (InertiaKV, arXiv 2609.03515): layer l, query head h, KV head g (a group of R = H/G query heads), prompt length
L0, decode step t = 1, 2, ..., cached position i, attention weight a_h(i) of the newest query, budget B.
"""

import math
from dataclasses import dataclass

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

CHOICES = {
    "scorer": ("attention", "vnorm", "value-mass", "output-change", "entropy", "keydiff", "knorm", "recency", "random"),
    "head_pool": ("mean", "max", "rms"),
    "aggregation": ("single", "cumulative", "ema", "peak"),
    "coupling": ("sequential", "uniform", "per_layer", "per_head"),
    "new_token": ("mean", "zero"),
}
USES_ATTENTION = ("attention", "vnorm", "value-mass", "output-change", "entropy")
TIE = 1e-6  # relative
BLOCK = 16  # rescue keeps the best entry of every block of this many positions


def check_rule(rule):
    """What a ranking cannot be made of, be it the policy's first or its second."""
    for field, allowed in CHOICES.items():
        if hasattr(rule, field) and getattr(rule, field) not in allowed:
            raise ValueError(f"{field} must be one of {allowed}, not {getattr(rule, field)!r}")
    if rule.scorer not in USES_ATTENTION and rule.head_pool != "mean":
        raise ValueError(f"scorer {rule.scorer!r} reads no attention: its head_pool can only be 'mean'")


@dataclass(frozen=True)
class Blend:
    """A second ranking: the K = floor(share * B + 1e-9) entries that it ranks highest are kept.

    It has utilities of its own, with the policy's coupling and seed, updated on the policy's scoring steps.
    """

    share: float
    scorer: str = "attention"
    head_pool: str = "mean"
    score_layers: object = "all"
    aggregation: str = "ema"
    alpha: float = 0.8
    new_token: str = "mean"
    score_heads: object = "all"  # or (layer, query head[, weight]), pooled within each layer; only with "attention"
    closing: int = 1  # at the first large cut: see `closed`
    least: float = 0.0  # of the K, those only that have this part of the sum of all held second utilities
    focus: object = None  # or a part: a row that is not `in_focus` at step 1 goes without the second ranking, from the
    # first large cut on, or where step 1 makes none, from step 2 on

    def __post_init__(self):
        check_rule(self)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"the share of a blend lies between 0 and 1, not {self.share}")


@dataclass(frozen=True)
class Axes:
    """One point on the axes that policies vary; the defaults are InertiaKV's."""

    scorer: str = "attention"
    head_pool: str = "mean"
    aggregation: str = "ema"
    alpha: float = 0.8
    coupling: str = "sequential"
    score_layers: object = "all"  # "all" or a tuple of layer indices, counted from 0
    refresh: object = 1  # score on steps with (t - 1) % refresh == 0, or "once": step 1 alone
    sinks: object = 0  # these three: an int is a count, a float a share of B
    recent: object = 0
    reserve: object = 0
    rescue: bool = False
    new_token: str = "mean"
    score_heads: object = "all"
    seed: int = 0
    blend: object = None  # None or a Blend

    def __post_init__(self):
        check_rule(self)
        if self.refresh != "once" and self.refresh < 1:
            raise ValueError("refresh must be at least 1, or 'once'")
        for rule in (self, self.blend):
            if rule is not None and rule.score_layers != "all" and self.coupling in ("per_layer", "per_head"):
                raise ValueError(f"score_layers cannot be combined with coupling {self.coupling!r}")
        if self.blend is not None and self.blend.scorer == "entropy" and self.coupling == "per_head":
            raise ValueError("scorer 'entropy' of a blend cannot be combined with coupling 'per_head'")


@dataclass
class Side:
    """One of the two rankings that a row keeps: its rule (Axes or Blend), the layers it scores, its utilities."""

    rule: object
    layers: tuple
    utilities: dict  # ranking -> {position: utility}


def share_or_count(value, whole):
    """An int is a count; a float x is floor(x * whole + 1e-9)."""
    return math.floor(value * whole + 1e-9) if isinstance(value, float) else value


def tokens_kept(budget, prompt_length, min_budget=64):
    """B, the number of entries kept; None means no eviction.

    None, "full" and 1.0: no eviction. A float x in (0, 1): max(floor(x * L0 + 1e-9), min_budget).
    An int: that many tokens.
    """
    if budget is None or budget == "full":
        return None
    if isinstance(budget, float):
        if budget == 1.0:
            return None
        if not 0.0 < budget < 1.0:
            raise ValueError(f"a float budget is a share in (0, 1], not {budget}")
        return max(share_or_count(budget, prompt_length), min_budget)
    if budget < 1:
        raise ValueError(f"an int budget is a number of tokens, at least 1, not {budget}")
    return budget


def mean(numbers):
    numbers = list(numbers)
    return math.fsum(numbers) / len(numbers)


def pool(numbers, kind):
    """mean, max, or rms = sqrt(mean of squares) of a few numbers."""
    if kind == "max":
        return max(numbers)
    if kind == "rms":
        return math.sqrt(mean(x * x for x in numbers))
    return mean(numbers)


def aggregate(rule, alpha, utility, score):
    """single: m = s. cumulative: m = m + s. ema: m = alpha m + (1 - alpha) s.
    peak: m = max(alpha m, s)."""
    if rule == "single":
        return score
    if rule == "peak":
        return max(alpha * utility, score)
    if rule == "cumulative":
        return utility + score
    return alpha * utility + (1.0 - alpha) * score


def random_score(seed, position):
    """A hash of seed and position in [0, 1), in 32-bit arithmetic."""
    x = (position * 2654435761 + seed * 40503 + 12345) % 2**32
    x ^= x >> 16
    x = (x * 2246822519) % 2**32
    x ^= x >> 13
    x = (x * 3266489917) % 2**32
    x ^= x >> 16
    return x / 2**32


def moved(attention, values, deleted):
    """How far sum_i a(i) v_i moves where one entry is deleted; what is left is nothing if that was the only one."""
    whole = sum(attention[i] * values[i] for i in values)
    left = sum(attention[i] for i in values if i != deleted)
    rest = [attention[i] / left * values[i] for i in values if i != deleted] if left > 0 else []
    return float((sum(rest) - whole).norm()) if rest else float(whole.norm())


def clamped_norm(vector):
    return max(float(vector.norm()), 1e-12)


def relative_gap(a, b):
    """Relative to the larger magnitude of the two."""
    return abs(a - b) / max(abs(a), abs(b), 1e-300)


def closed(utility, width):
    """Morphological closing over the entries in order of position: {position: utility}.

    The value at one entry is the minimum, over all runs of `width` consecutive places that contain it, of the run's
    maximum; places before the first and behind the last entry hold nothing.
    """
    order = sorted(utility)
    result = {}
    for place, i in enumerate(order):
        runs = [range(start, start + width) for start in range(place - width + 1, place + 1)]
        result[i] = min(max(utility[order[j]] for j in run if 0 <= j < len(order)) for run in runs)
    return result


def in_focus(utility, part):
    """Whether the 30 highest utilities, position 0 not among them, come to at least this part of all of them."""
    others = sorted((value for i, value in utility.items() if i != 0), reverse=True)
    whole = math.fsum(utility.values())
    return whole > 0 and math.fsum(others[:30]) >= part * whole


class Row:
    """One batch row, alone: its own unpadded prompt at positions 0 .. L0-1, its own cache and utilities."""

    def __init__(self, model, axes, budget, min_budget=64):
        if next(model.parameters()).dtype != torch.float64:
            raise ValueError("the simulated model must be in float64")
        self.model, self.axes, self.budget, self.min_budget = model, axes, budget, min_budget
        self.layers = list(model.model.layers)
        self.kv_heads = model.config.num_key_value_heads
        self.group = model.config.num_attention_heads // self.kv_heads
        self.first = self.side(axes)
        self.second = None if axes.blend is None else self.side(axes.blend)
        self.sides = [side for side in (self.first, self.second) if side is not None]
        self.windows = [self.window_of(index) for index in range(len(self.layers))]
        self.step_number = 0
        self.adopted = 0
        self.focused = True

    def side(self, rule):
        everything = tuple(range(len(self.layers)))
        layers = everything if rule.score_layers == "all" else tuple(rule.score_layers)
        if rule.score_heads != "all":
            layers = tuple({layer for layer, *_ in rule.score_heads})
        if not layers or not set(layers) <= set(everything):
            raise ValueError(f"score_layers {rule.score_layers} must name some of the layers {everything}")
        return Side(rule, layers, {})

    def window_of(self, layer):
        """Tokens that this layer's queries meet, themselves included; infinite without a sliding window."""
        config = self.model.config
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        sliding = window is not None and (kinds is None or kinds[layer] == "sliding_attention")
        return window if sliding else math.inf

    # ---- what the caller reads

    @property
    def retained(self):
        """[layer][kv_head] -> the original positions held, ascending."""
        return [[sorted(held) for held in layer] for layer in self.keys]

    def utility(self, layer, head):
        """position -> utility of every entry that this layer and KV head hold."""
        return dict(self.first.utilities[self.ranking(layer, head)])

    def second_utility(self, layer, head):
        """The same in the blend's ranking."""
        return dict(self.second.utilities[self.ranking(layer, head)])

    # ---- the run

    @torch.no_grad()
    def prefill(self, prompt):
        """Full causal attention over the prompt; all of it is cached, with utility 0. Returns last logits."""
        self.prompt_length = len(prompt)
        self.kept = tokens_kept(self.budget, self.prompt_length, self.min_budget)
        self.count_protected()
        positions = list(range(self.prompt_length))
        # [layer][kv_head]: {position: key after RoPE}, {position: value}
        self.keys = [[{} for _ in range(self.kv_heads)] for _ in self.layers]
        self.values = [[{} for _ in range(self.kv_heads)] for _ in self.layers]
        for side in self.sides:
            side.utilities = {}
            for l in range(len(self.layers)):
                for g in range(self.kv_heads):
                    side.utilities[self.ranking(l, g)] = {i: 0.0 for i in positions}
        hidden = self.embed(prompt)
        for l in range(len(self.layers)):
            queries = self.append(l, hidden, positions)
            rows = []
            for i in positions:
                seen = positions[: i + 1]
                outputs = [self.attend(l, h, queries[h][i], seen, i)[1] for h in range(len(queries))]
                rows.append(torch.cat(outputs))
            hidden = self.finish_layer(l, hidden, torch.stack(rows))
        return self.logits(hidden)

    @torch.no_grad()
    def turn(self, prompt):
        """A later turn's prompt: it attends to what is held and to itself; its tokens begin as new ones do.

        A share of the budget, and the reserve, are then of all tokens seen; the next step is step 1 again. Returns
        the last logits.
        """
        first = self.prompt_length + self.step_number
        self.prompt_length, self.step_number = first + len(prompt), 0
        self.kept = tokens_kept(self.budget, self.prompt_length, self.min_budget)
        self.count_protected()
        positions = list(range(first, self.prompt_length))
        self.begin(positions)
        hidden = self.embed(prompt)
        for l in range(len(self.layers)):
            queries = self.append(l, hidden, positions)
            rows = []
            for n, i in enumerate(positions):
                outputs = []
                for h in range(len(queries)):
                    met = sorted(j for j in self.keys[l][h // self.group] if j <= i)
                    outputs.append(self.attend(l, h, queries[h][n], met, i)[1])
                rows.append(torch.cat(outputs))
            hidden = self.finish_layer(l, hidden, torch.stack(rows))
        return self.logits(hidden)

    @torch.no_grad()
    def step(self, token, observed=None, tolerance=1e-6):
        """Step t: feeds `token` at position L0 + t - 1, scores, aggregates, evicts. Returns the logits.

        `observed`, [layer][kv_head] -> positions, is what the implementation under test holds after this
        step. Where it differs from the choice made here by a near-tie only, it is adopted; otherwise
        AssertionError.
        """
        self.step_number += 1
        newest = self.prompt_length + self.step_number - 1
        self.begin([newest])
        refresh = self.axes.refresh
        scoring = self.step_number == 1 if refresh == "once" else (self.step_number - 1) % refresh == 0

        collected = [[] for _ in self.sides]  # uniform coupling: the scores of every scoring layer
        hidden = self.embed([token])
        for l in range(len(self.layers)):
            queries = self.append(l, hidden, [newest])
            attention, outputs = [], []  # attention[h] = {position: a_h(position)}
            for h in range(len(queries)):
                held = sorted(self.keys[l][h // self.group])
                weights, output = self.attend(l, h, queries[h][0], held, newest)
                attention.append(dict(zip(held, weights, strict=True)))
                outputs.append(output)
            hidden = self.finish_layer(l, hidden, torch.cat(outputs)[None])
            if scoring:
                for side, gathered in zip(self.sides, collected, strict=True):
                    self.score_layer(side, l, attention, gathered)
        for side, gathered in zip(self.sides, collected, strict=True):
            if gathered:
                self.update(side, ("all", "all"), {i: mean(s[i] for s in gathered) for i in gathered[0]})

        self.evict(newest, observed, tolerance)
        return self.logits(hidden)

    # ---- scores and utilities

    def ranking(self, layer, head):
        """The ranking that this layer and KV head follow: one in all, one per layer, or one each."""
        if self.axes.coupling == "per_head":
            return (layer, head)
        if self.axes.coupling == "per_layer":
            return (layer, "all")
        return ("all", "all")

    def begin(self, positions):
        """New entries, in each ranking by its own new_token: at the mean over the entries held so far, or at 0."""
        for side in self.sides:
            for utility in side.utilities.values():
                start = mean(utility.values()) if side.rule.new_token == "mean" else 0.0
                utility.update((i, start) for i in positions)

    def score_layer(self, side, l, attention, gathered):
        if l not in side.layers:
            return
        per_head = self.head_scores(l, attention, side.rule)
        if self.axes.coupling == "per_head":
            for g in range(self.kv_heads):
                self.update(side, (l, g), per_head[g])
            return
        scores = self.pool_kv_heads(per_head, side.rule.head_pool)
        if side.rule.score_heads != "all":
            named = {h: weight[0] if weight else 1.0 for layer, h, *weight in side.rule.score_heads if layer == l}
            held = attention[next(iter(named))]
            scores = {i: pool([w * attention[h][i] for h, w in named.items()], side.rule.head_pool) for i in held}
        if self.axes.coupling == "uniform":
            gathered.append(scores)
        else:  # sequential: the one shared utility, layer after layer; per_layer: this layer's own
            self.update(side, self.ranking(l, 0), scores)

    def update(self, side, ranking, scores):
        """One application of the aggregation rule to every entry of one ranking."""
        utility = side.utilities[ranking]
        assert set(utility) == set(scores)
        for i in utility:
            utility[i] = aggregate(side.rule.aggregation, side.rule.alpha, utility[i], scores[i])

    def head_scores(self, l, attention, rule):
        """Per KV head g of layer l: {position: score}. `attention[h]` is {position: a_h(position)}.

        attention: pool over the group of a_h(i).  vnorm: pool of a_h(i) * ||v_i|| / mean_j ||v_j||.
        value-mass: pool of a_h(i) * sum_d |v_i[d]|.
        output-change: pool of ||o' - o||, o' the output with i deleted and the rest normalised anew.
        entropy: the attention score times H(mean_h a_h) / log(held), one scalar of the layer.
        keydiff: -cos(k_i, mean_j k_j / ||k_j||).  knorm: -||k_i||.  recency: i.  random: hash of seed and i.
        """
        scorer, head_pool = rule.scorer, rule.head_pool
        scalar = self.layer_entropy(attention) if scorer == "entropy" else 1.0
        result = []
        for g in range(self.kv_heads):
            keys, values = self.keys[l][g], self.values[l][g]
            heads = range(g * self.group, (g + 1) * self.group)
            if scorer == "attention":
                scores = {i: pool([attention[h][i] for h in heads], head_pool) for i in keys}
            elif scorer == "entropy":
                scores = {i: pool([attention[h][i] for h in heads], head_pool) for i in keys}
                scores = {i: scalar * scores[i] for i in keys}
            elif scorer == "vnorm":
                norms = {i: float(values[i].norm()) for i in values}
                average = mean(norms.values())
                scores = {}
                for i in keys:
                    weighted = [attention[h][i] * norms[i] / average for h in heads]
                    scores[i] = pool(weighted, head_pool)
            elif scorer == "value-mass":
                sizes = {i: sum(abs(x) for x in values[i].tolist()) for i in values}
                scores = {i: pool([attention[h][i] * sizes[i] for h in heads], head_pool) for i in keys}
            elif scorer == "output-change":
                scores = {i: pool([moved(attention[h], values, i) for h in heads], head_pool) for i in keys}
            elif scorer == "keydiff":
                centre = sum(k / clamped_norm(k) for k in keys.values()) / len(keys)
                length = clamped_norm(centre)
                scores = {i: -float(k @ centre) / (clamped_norm(k) * length) for i, k in keys.items()}
            elif scorer == "knorm":
                scores = {i: -float(k.norm()) for i, k in keys.items()}
            elif scorer == "recency":
                scores = {i: float(i) for i in keys}
            else:
                scores = {i: random_score(self.axes.seed, i) for i in keys}
            result.append(scores)
        return result

    def layer_entropy(self, attention):
        """-sum_i p(i) log p(i) / log(held), p = the mean of a_h over ALL query heads of the layer.

        Where the heads hold different positions (per_head), a position that a head lacks has a_h = 0 there.
        """
        entropy = 0.0
        for i in sorted(set().union(*attention)):
            p = mean(a.get(i, 0.0) for a in attention)
            if p > 0.0:
                entropy -= p * math.log(p)
        return entropy / math.log(len(attention[0]))

    def pool_kv_heads(self, per_head, head_pool):
        """{position: score} of a layer: head_pool over its KV heads (scorers without attention: the mean)."""
        return {i: pool([scores[i] for scores in per_head], head_pool) for i in per_head[0]}

    # ---- eviction

    def count_protected(self):
        """The three counts; sinks + recent + reserve must stay below B, and with K must not exceed it."""
        if self.kept is None:
            return
        axes, kept = self.axes, self.kept
        self.sinks, self.recent, self.reserve = (
            share_or_count(x, kept) for x in (axes.sinks, axes.recent, axes.reserve)
        )
        counts = f"{self.sinks} + {self.recent} + {self.reserve}"
        if self.sinks + self.recent + self.reserve >= kept:
            raise ValueError(f"sinks + recent + reserve = {counts} must stay below the budget of {kept}")
        self.blended = 0 if axes.blend is None else math.floor(axes.blend.share * kept + 1e-9)
        if self.blended + self.sinks + self.recent + self.reserve > kept:
            raise ValueError(
                f"the blend's share + sinks + recent + reserve = {self.blended} + {counts} "
                f"must not exceed the budget of {kept}"
            )

    def protected(self, i, newest):
        """positions < sinks; positions > newest - recent; floor(j * L0 / R) for j = 0 .. R-1."""
        reserved = [j * self.prompt_length // self.reserve for j in range(self.reserve)]
        return i < self.sinks or i > newest - self.recent or i in reserved

    def evict(self, newest, observed, tolerance):
        """Down to B, once per step: lowest utility first, then lowest position; never a protected entry.

        Where one entry goes, utilities within a relative 1e-6 of the lowest count as equal to it: tokens that
        started at the mean of the others come so close to each other that only rounding would order them.

        blend: whenever something has to go, the K entries of highest second utility, of all that are held, stay.

        rescue, at step 1 if more than one has to go: the best entry of every block goes after all others.
        """
        adopted = False
        for ranking, utility in self.first.utilities.items():
            # What no layer will meet again goes before everything else, protected or not.
            gone = {i for i in utility if i <= newest + 1 - max(self.windows)}
            utility = {i: value for i, value in utility.items() if i not in gone}
            second = {} if self.second is None else self.second.utilities[ranking]
            second = {i: value for i, value in second.items() if i not in gone}
            large = self.step_number == 1 and self.exceeds_by_many(utility)
            if self.second is not None and self.step_number == 1 and self.axes.blend.focus is not None:
                self.focused = in_focus(second, self.axes.blend.focus)
            focused = self.focused or (self.step_number == 1 and not large)
            if self.second is not None and large:
                second = closed(second, self.axes.blend.closing)
                self.second.utilities[ranking].update(second)
            excess = 0 if self.kept is None else max(len(utility) - self.kept, 0)
            guarded = set() if self.kept is None else {i for i in utility if self.protected(i, newest)}
            rescuing = self.axes.rescue and self.step_number == 1 and excess > 1
            rescued = self.best_of_blocks(utility) if rescuing else []
            top = self.top(second) if excess and focused else set()
            dropped = self.victims(utility, guarded | top, rescued, excess)
            members = [
                (l, g) for l in range(len(self.layers)) for g in range(self.kv_heads) if self.ranking(l, g) == ranking
            ]
            if observed is not None:
                own = dropped
                dropped = self.check_observed(members, utility, second, own, guarded, top, rescued, observed, tolerance)
                adopted = adopted or dropped != own
            for i in dropped | gone:
                for side in self.sides:
                    del side.utilities[ranking][i]
                for l, g in members:
                    del self.keys[l][g][i]
                    del self.values[l][g][i]
        self.adopted += adopted

    def exceeds_by_many(self, utility):
        """Whether more than one entry has to go."""
        return self.kept is not None and len(utility) - self.kept > 1

    def top(self, second):
        """The K entries of highest second utility.

        Those within a relative 1e-6 of the K-th highest count as equal to it; of equals, the highest positions.
        """
        if self.second is None or self.blended == 0:
            return set()
        edge = sorted(second.values(), reverse=True)[self.blended - 1]
        above = [i for i in second if second[i] > edge + TIE * abs(edge)]
        equal = [i for i in second if abs(second[i] - edge) <= TIE * abs(edge)]
        chosen = set(above) | set(sorted(equal, reverse=True)[: self.blended - len(above)])
        if not self.axes.blend.least:
            return chosen
        floor = self.axes.blend.least * (1 - TIE) * math.fsum(second.values())
        return {i for i in chosen if second[i] >= floor}

    def victims(self, utility, safe, rescued, excess):
        """The `excess` entries that go, none of them safe."""
        order = sorted(set(utility) - safe, key=lambda i: (i in rescued, utility[i], i))
        if excess == 1:
            lowest = utility[order[0]]
            return {min(i for i in order if utility[i] <= lowest + TIE * abs(lowest))}
        return set(order[:excess])

    def best_of_blocks(self, utility):
        """Of every block floor(position / 16), the entry of highest utility, then highest position."""
        best = {}
        for i in utility:
            block = i // BLOCK
            if block not in best or (utility[i], i) > (utility[best[block]], best[block]):
                best[block] = i
        return list(best.values())

    def check_observed(self, members, utility, second, dropped, guarded, top, rescued, observed, tolerance):
        """The set that the implementation under test dropped, if near-ties explain it."""
        first = None
        for l, g in members:
            where = f"step {self.step_number}, layer {l}, kv head {g}"
            listed = [int(i) for i in observed[l][g]]
            kept = set(listed)
            assert len(kept) == len(listed), f"{where}: a position is held twice: {sorted(listed)}"
            alien = sorted(kept - set(utility))
            assert not alien, f"{where}: holds {alien}, which are not in the cache"
            expected = len(utility) - len(dropped)
            assert len(kept) == expected, f"{where}: holds {len(kept)} entries, expected {expected}"
            assert kept >= guarded, f"{where}: dropped protected {sorted(guarded - kept)}"
            gone = set(utility) - kept
            first = gone if first is None else first
            differing = sorted(gone ^ first)
            assert not differing, f"{where}: differs from {members[0]} of the same ranking in {differing}"
            if gone != dropped:
                self.check_near_tie(where, utility, second, dropped, gone, guarded, top, rescued, tolerance)
        return first

    def check_near_tie(self, where, utility, second, dropped, gone, guarded, top, rescued, tolerance):
        """AssertionError unless near-ties explain that `gone` went where `dropped` should have.

        First utilities, with some K entries on top: every wrongly kept and every wrongly dropped entry may differ
        by at most `tolerance`, relative to the larger magnitude of the two. A rescue also cuts inside every block,
        not only once in all, so that there the two kinds are compared in order of utility, pair by pair.

        The K on top: every entry that leaves `top` and every entry that takes a place in it may differ from the
        K-th highest second utility by at most `tolerance`. What went leaves; what stayed and could not have done
        so by its first utility takes a place; besides these, the entries nearest to the K-th highest leave or
        enter, as many as it takes.
        """
        found = f"{where}: wrongly kept {sorted(dropped - gone)}, wrongly dropped {sorted(gone - dropped)}"
        edge = sorted(second.values(), reverse=True)[len(top) - 1] if top else math.nan
        gaps = {i: relative_gap(value, edge) for i, value in second.items()}
        entering = set()
        while True:
            staying = sorted(top - gone - entering, key=lambda i: -gaps[i])
            coming = sorted(set(second) - top - gone - entering, key=lambda i: gaps[i])
            supposed = set((sorted(entering) + staying + coming)[: len(top)])
            for i in sorted(top ^ supposed):
                assert gaps[i] <= tolerance, (
                    f"{found}; in the blend's ranking, utility of {i} is {second[i]!r}, and number "
                    f"{len(top)} from the top is {edge!r}: relative gap {gaps[i]:.3g} > {tolerance:.3g}"
                )
            own = self.victims(utility, guarded | supposed, rescued, len(gone))
            wrongly_kept = sorted(own - gone, key=lambda i: (utility[i], i))
            wrongly_dropped = sorted(gone - own, key=lambda i: (utility[i], i))
            if rescued:
                pairs = list(zip(wrongly_kept, wrongly_dropped, strict=True))
            else:
                pairs = [(i, j) for i in wrongly_kept for j in wrongly_dropped]
            apart = [(i, j) for i, j in pairs if relative_gap(utility[i], utility[j]) > tolerance]
            if not apart:
                return
            i, j = apart[0]
            assert len(entering) < len(top), (
                f"{found}; utility of {i} is {utility[i]!r}, of {j} is {utility[j]!r}: "
                f"relative gap {relative_gap(utility[i], utility[j]):.3g} > {tolerance:.3g}"
            )
            entering.add(i)

    # ---- the model, module by module

    def embed(self, tokens):
        return self.model.model.embed_tokens(torch.tensor([tokens], device=self.model.device))

    def append(self, l, hidden, positions):
        """Projects layer l's input, caches the keys (after RoPE) and values; returns queries [H, n, D]."""
        layer = self.layers[l]
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (1, len(positions), -1, attention.head_dim)
        queries, keys = attention.q_proj(normed).view(shape), attention.k_proj(normed).view(shape)
        if hasattr(attention, "q_norm"):  # Qwen 3
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
        values = attention.v_proj(normed).view(shape).transpose(1, 2)
        cos, sin = self.model.model.rotary_emb(hidden, torch.tensor([positions], device=hidden.device))
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        for g in range(self.kv_heads):
            for n, i in enumerate(positions):
                self.keys[l][g][i] = keys[0, g, n]
                self.values[l][g][i] = values[0, g, n]
        return queries[0]

    def attend(self, l, h, query, positions, newest):
        """One query of head h in layer l, at position newest, over cached positions of KV head floor(h / R).

        a(i) = softmax over i of q.k_i / sqrt(D), o = sum_i a(i) v_i. Returns ([a(i), ...], o). Positions outside a
        sliding window have a(i) = 0.
        """
        outside = [i for i in positions if i <= newest - self.windows[l]]
        if outside:
            met = [i for i in positions if i not in outside]
            weights, output = self.attend(l, h, query, met, newest)
            of_met = dict(zip(met, weights, strict=True))
            return [of_met.get(i, 0.0) for i in positions], output
        keys = torch.stack([self.keys[l][h // self.group][i] for i in positions])
        values = torch.stack([self.values[l][h // self.group][i] for i in positions])
        weights = torch.softmax(keys @ query * self.layers[l].self_attn.scaling, dim=0)
        return weights.tolist(), weights @ values

    def finish_layer(self, l, hidden, attended):
        """Output projection, residual, MLP, residual. `attended` is [n, H * D]."""
        layer = self.layers[l]
        hidden = hidden + layer.self_attn.o_proj(attended[None])
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def logits(self, hidden):
        return self.model.lm_head(self.model.model.norm(hidden))[0, -1]
