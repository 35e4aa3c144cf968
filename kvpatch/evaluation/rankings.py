"""Rankings of everything that the full cache holds, step by step: how a policy orders tokens where nothing is evicted.

Lc layers and Gc KV heads have a ranking of their own (1 where all share one); n tokens are there at a step.
"""

from collections.abc import Callable
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from kvpatch import aggregation, scoring
from kvpatch.cachelayer import windows_of
from kvpatch.evaluation.attending import QUERIES, attention_of
from kvpatch.policy import Policy
from kvpatch.ranking import Ranking

FIRST_STEPS = 0.01  # a utility that began at nothing is left out of variances while it lacks more than this share


class Look:
    """The full cache at one decode step of one text.

    Args:
        weights: of each layer [H, n], attention of the newest query.
        keys, values: of each layer [1, G, n or more, D], keys after RoPE.
        windows: each layer's sliding window, None without.
    """

    def __init__(self, weights: list[Tensor], keys: list[Tensor], values: list[Tensor], windows: list[int | None]):
        self.weights, self.keys, self.values, self.windows = weights, keys, values, windows
        self.layers, self.n = len(weights), weights[0].shape[-1]
        self._found: dict[tuple, list[Tensor]] = {}

    def scores(self, rule: Policy) -> list[Tensor]:
        """Scores [Gc, n] of the layers that count, in order."""
        ranking = rule.rankings[0]
        chosen, apart = ranking.scoring_layers(self.layers), rule.coupling == "per_head"
        key = (ranking.scorer, ranking.head_pool, ranking.score_heads, chosen, rule.seed, apart)
        if key not in self._found:
            self._found[key] = [self._score(layer, ranking, rule.seed, apart) for layer in chosen]
        return self._found[key]

    def _score(self, layer: int, ranking: Ranking, seed: int, apart: bool) -> Tensor:
        scorer, keys = scoring.scorer(ranking.scorer), self.keys[layer][:, :, : self.n]
        groups, weights = keys.shape[1], self.weights[layer]
        factors = ranking.head_weights(layer, weights.shape[0])
        if factors is not None:
            weights = weights * weights.new_tensor(factors)[:, None]
        positions = torch.arange(self.n, device=keys.device)[None, None]
        scene = scoring.Scene(
            weights.view(1, groups, -1, self.n).to(torch.promote_types(weights.dtype, torch.float32)),
            keys,
            self.values[layer][:, :, : self.n],
            positions,
            positions > self.n - 1 - (self.windows[layer] or self.n),
            ranking.head_pool,
            seed,
        )
        found = scorer.score(scene).expand(1, groups, self.n)
        if not apart:
            found = scoring.pool(found, ranking.head_pool if scorer.uses_attention else "mean", 1)
        return found[0]


@torch.no_grad()
def observe(model, text: Tensor, prompt: int, watch: Callable[[Look], None], queries: int = QUERIES) -> None:
    """Show every decode step of the full cache on a given text; the last token is not fed.

    Args:
        model: outside `generate`; its attention implementation is changed and put back.
        text: [prompt + forced] int64.
        prompt: tokens that are read at once.
        watch: called with each step's `Look`, which is not to be kept.
        queries: steps whose attention is held at once; nothing but memory depends on it.
    """
    windows = windows_of(model.config.get_text_config(decoder=True))
    for _, weights, cache in attention_of(model, text, prompt, queries):
        keys, values = ([getattr(one, name) for one in cache.layers] for name in ("keys", "values"))
        watch(Look(weights, keys, values, windows))


def rule_of(policy: Policy, **replaced) -> Policy:
    """What a policy orders tokens by, and nothing of when it scores, what it protects or what it blends in."""
    own = {field.name: getattr(policy, field.name) for field in fields(Ranking)}
    return Policy(**{"name": "rule", "coupling": policy.coupling, "seed": policy.seed, **own, **replaced})


class Standing:
    """The utility of every token under one rule.

    Args:
        rule: of `rule_of`.
        forgets: begin every step at nothing, so that the step's own scores decide, layers weighted as the rule does.

    Attributes:
        utility: [Lc, Gc, n] after the last update, None before the first.
    """

    def __init__(self, rule: Policy, forgets: bool = False):
        self.rule, self.forgets = rule, forgets
        self.utility: Tensor | None = None
        self._order: Tensor | None = None
        self._ranks: np.ndarray | None = None

    def update(self, look: Look) -> None:
        """Let a step's scores in; one token has come since the last step."""
        rule, scores = self.rule, look.scores(self.rule)
        own_layers = rule.coupling in ("per_layer", "per_head")
        m = self._begun(scores, len(scores) if own_layers else 1, look.n)
        if own_layers:
            scores = [torch.stack(scores)]
        elif rule.coupling == "uniform":
            scores = [torch.stack(scores).mean(0)]
        for score in scores:
            m = aggregation.aggregate(m, score, rule.aggregation, rule.alpha)
        self.utility, self._order, self._ranks = m, None, None

    def _begun(self, scores: list[Tensor], layers: int, n: int) -> Tensor:
        if self.utility is None or self.forgets:
            return scores[0].new_zeros(layers, scores[0].shape[0], n)
        first = self.utility.mean(-1, keepdim=True)
        return torch.cat((self.utility, first if self.rule.new_token == "mean" else torch.zeros_like(first)), -1)

    def top(self, count: int) -> Tensor:
        """The `count` best, [Lc, Gc, n] bool; of equals the newest."""
        if self._order is None:
            newest_first = self.utility.flip(-1).argsort(dim=-1, descending=True, stable=True)
            self._order = self.utility.shape[-1] - 1 - newest_first
        return torch.zeros_like(self.utility, dtype=torch.bool).scatter(-1, self._order[..., :count], True)

    @property
    def ranks(self) -> np.ndarray:
        """Place of each token, [Lc, Gc, n]; equals share the mean of theirs."""
        if self._ranks is None:
            self._ranks = _scipy_stats().rankdata(self.utility.cpu().numpy(), axis=-1)
        return self._ranks


def spearman(one: Standing, other: Standing) -> np.ndarray:
    """Rank correlation of two standings of one shape, [Lc, Gc]; NaN where all tokens are equal."""
    a, b = (ranks - ranks.mean(-1, keepdims=True) for ranks in (one.ranks, other.ranks))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def jaccard(one: Tensor, other: Tensor) -> Tensor:
    """Shared over all members of two sets [..., n] bool, [...]; 1 for two empty ones."""
    both, either = (one & other).sum(-1), (one | other).sum(-1)
    return torch.where(either > 0, both / either.clamp_min(1), 1.0)


class Churn:
    """How a standing's `count` best change from one step to the next.

    Attributes:
        churn: for each step but the first 1 - Jaccard with the step before, mean over layers and heads with an own set.
        calm: for the same steps the share of those sets that at most one token entered.
    """

    def __init__(self, standing: Standing, count: int):
        self.standing, self.count = standing, count
        self.churn: list[float] = []
        self.calm: list[float] = []
        self._before: Tensor | None = None

    def look(self) -> None:
        """Take the step that the standing has been updated with."""
        now, before = self.standing.top(self.count), self._before
        if before is not None:
            before = torch.nn.functional.pad(before, (0, now.shape[-1] - before.shape[-1]))
            self.churn.append(1.0 - jaccard(now, before).mean().item())
            self.calm.append(((now & ~before).sum(-1) <= 1).float().mean().item())
        self._before = now


def weight_of_past(rule: Policy, layers: int) -> float | None:
    """Weight a that the step before has in the utility of an EMA, None for other rules: alpha, and with sequential
    coupling alpha to the power of the layers that score."""
    if rule.aggregation != "ema":
        return None
    updates = len(rule.rankings[0].scoring_layers(layers)) if rule.coupling == "sequential" else 1
    return rule.alpha**updates


def variance_bound(past: float) -> float:
    """Share of a difference's variance that scores which are independent from step to step leave, (1 - a) / (1 + a).

    The paper's bound is twice this, over sigma^2: the difference of two scores has twice the variance of one. Over few
    steps an EMA shows less, since it moves slowly about its own mean.
    """
    return (1.0 - past) / (1.0 + past)


class Variance:
    """How much of the scores' variance over steps an EMA leaves: mean over pairs of prompt tokens of Var m(i) - m(j).

    Args:
        utility: standing of the EMA.   own: the same rule's, which forgets.   past: of `weight_of_past`.
        prompt: tokens that are there at every step.
    """

    def __init__(self, utility: Standing, own: Standing, past: float, prompt: int):
        self.utility, self.own, self.past, self.prompt = utility, own, past, prompt
        self.steps, self.count = 0, 0
        self._mean = self._square = None

    def look(self) -> None:
        """Take the step that both standings have been updated with."""
        self.steps += 1
        if self.past**self.steps > FIRST_STEPS:
            return
        pair = torch.stack((self.utility.utility, self.own.utility / (1.0 - self.past)))[..., : self.prompt].double()
        # Over all pairs of tokens, differences vary as tokens do about their mean.
        pair = pair - pair.mean(-1, keepdim=True)
        self.count += 1
        if self._mean is None:
            self._mean, self._square = torch.zeros_like(pair), torch.zeros_like(pair)
        change = pair - self._mean
        self._mean += change / self.count
        self._square += change * (pair - self._mean)

    @property
    def left(self) -> float | None:
        """Share of the variance that is left; None with fewer than two steps, or where nothing varies."""
        if self.count < 2:
            return None
        kept, given = self._square.flatten(1).sum(1).tolist()
        return kept / given if given > 0 else None


def _scipy_stats():
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('rankings need scipy: pip install "kvpatch[eval]"', name=error.name) from error
    return stats
