"""Eviction policies: one frozen dataclass whose fields are the axes, and presets by name."""

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from kvpatch.budget import UNSET, Budget
from kvpatch.compression import rule as prompts
from kvpatch.ranking import Blend, Ranking, check_part, check_seed, is_int, one_of, part_of

COUPLINGS = ("sequential", "uniform", "per_layer", "per_head")


@dataclass(frozen=True)
class Policy:
    """What is scored, how scores become a utility, and which entries may go.

    Args:
        scorer: name of a registered scorer (`kvpatch.scoring.list_scorers()`).
        head_pool: how query heads' scores become one, "mean", "max" or "rms"; only for scorers that use attention.
        score_layers: "all", or the layers whose scores count (a range or a sequence of indices).
        score_heads: "all", or the (layer, query head) pairs whose attention counts, pooled within each layer; a
            third number is a weight that it is multiplied by before.
        aggregation: "single" (the newest score), "cumulative" (sum), "ema" (``alpha m + (1 - alpha) s``) or "peak"
            (``max(alpha m, s)``).
        alpha: weight of the past in "ema" and "peak", in [0, 1).
        coupling: "sequential" (one utility, updated layer after layer, as InertiaKV does), "uniform" (one utility,
            one update a step by the layers' mean), "per_layer", "per_head" (per layer and KV head).
        refresh: scores are taken every `refresh` steps, or at the first step only ("once").
        sinks: first positions that are never evicted.
        recent: last positions that are never evicted.
        reserve: prompt positions, evenly spread, that are never evicted.
            `sinks`, `recent` and `reserve` are counts (int) or shares of the budget (float in [0, 1)).
        rescue: at the first large eviction keep the best entry of every 16 positions before filling by rank.
        new_token: utility that a new token starts with: "mean" of the held entries' or "zero".
        blend: a second ranking with the same coupling and refresh, which keeps a share of the budget.
        compact: keys and queries are turned to where they stand in the cache, not in the text; only for
            scorer="recency", aggregation="single" and a number of sinks, with nothing else that is protected. A model
            with sliding windows, or whose rotary frequencies or queries' scale follow the position, keeps the text's.
        seed: for the "random" scorer.
        prefill: how the prompt is cut before anything is decoded, a name of `list_prefill()` or a `kvpatch.Prefill`;
            None: the first decode step scores it whole, then it is cut.
        grows: after that cut nothing is evicted: what is generated is kept.
        interval: what is generated is kept until the budget is full; then the same method cuts again, to so many tokens
            (an int, at most half the budget; a float: that share of it) below the budget. Only with `grows`.
        name: what reports call this policy.
        evicts: False for "full", which keeps everything.

    Raises:
        ValueError, TypeError: for a value outside its axis or a combination that makes no sense.
    """

    name: str = "custom"
    evicts: bool = True
    scorer: str = "attention"
    head_pool: str = "mean"
    score_layers: str | Sequence[int] = "all"
    score_heads: str | Sequence[tuple] = "all"
    aggregation: str = "ema"
    alpha: float = 0.8
    coupling: str = "sequential"
    refresh: int | str = 1
    sinks: int | float = 0
    recent: int | float = 0
    reserve: int | float = 0
    rescue: bool = False
    new_token: str = "mean"
    blend: Blend | None = None
    seed: int = 0
    prefill: "str | prompts.Prefill | None" = None
    grows: bool = False
    interval: int | float | None = None
    compact: bool = False

    def __post_init__(self):
        one_of("coupling", self.coupling, COUPLINGS)
        if self.refresh != "once" and not (is_int(self.refresh) and self.refresh >= 1):
            raise ValueError(f'refresh must be an int >= 1 or "once", got {self.refresh!r}')
        for field in ("sinks", "recent", "reserve"):
            check_part(field, getattr(self, field))
        check_seed(self.seed)
        for field in ("evicts", "rescue", "grows", "compact"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"{field} must be True or False, got {getattr(self, field)!r}")
        if not isinstance(self.name, str):
            raise ValueError(f"name must be a str, got {self.name!r}")
        if self.blend is not None and not isinstance(self.blend, Blend):
            raise TypeError(f"blend must be a kvpatch.Blend or None, got {self.blend!r}")
        self._check_prefill()
        self._check_interval()
        own = Ranking(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Ranking)})
        for field in ("score_layers", "score_heads"):
            object.__setattr__(self, field, getattr(own, field))
        object.__setattr__(self, "_rankings", (own,) if self.blend is None else (own, self.blend))
        for ranking in self._rankings:
            ranking.check_coupling(self.coupling, self.refresh)
        self._check_compact()

    def _check_compact(self) -> None:
        if not self.compact:
            return
        for field, wanted in (("scorer", "recency"), ("aggregation", "single")):
            if getattr(self, field) != wanted:
                raise ValueError(
                    f"compact=True with {field}={getattr(self, field)!r}, which may leave gaps behind the sinks: use "
                    f"{field}={wanted!r}, or compact=False"
                )
        if not is_int(self.sinks):
            raise ValueError(f"compact=True with sinks={self.sinks!r}: use a count of sinks, or compact=False")
        for field in ("recent", "reserve", "rescue", "blend", "prefill"):
            if getattr(self, field):
                shown = self.prefill.name if field == "prefill" else getattr(self, field)
                raise ValueError(
                    f"compact=True with {field}={shown!r}, which may leave gaps behind the sinks: leave {field} out, "
                    "or use compact=False"
                )

    def _check_prefill(self) -> None:
        rule = self.prefill
        if isinstance(rule, str):
            if rule not in prompts.PRESETS:
                known = ", ".join(list_prefill())
                raise ValueError(f"unknown prefill {rule!r}{_nearest(rule, prompts.PRESETS)}; known: {known}")
            rule = prompts.PRESETS[rule]
            object.__setattr__(self, "prefill", rule)
        if rule is None:
            if self.grows:
                raise ValueError("grows=True needs prefill: without a cut of the prompt nothing would ever be evicted")
            return
        if not isinstance(rule, prompts.Prefill):
            raise TypeError(f"prefill must be a name, a kvpatch.Prefill or None, got {rule!r}")
        if not self.evicts:
            raise ValueError(f"prefill={rule.name!r} with evicts=False, which keeps everything: leave prefill out")
        fits = COUPLINGS if rule.even else ("per_head",) if rule.by_head else ("per_layer", "per_head")
        if self.coupling not in fits:
            raise ValueError(
                f"prefill={rule.name!r} shares its budget out by {rule.allocation!r}, which needs coupling "
                f"{' or '.join(map(repr, fits))}, got {self.coupling!r}"
            )
        if rule.search is not None and self.coupling != "per_head":
            raise ValueError(
                f"prefill={rule.name!r} removes entries of single heads, which needs coupling 'per_head', got "
                f"{self.coupling!r}"
            )
        if not rule.even and not self.grows:
            raise ValueError(
                f"prefill={rule.name!r} leaves layers or heads different budgets, which eviction while decoding does "
                "not keep: use grows=True, or a prefill with allocation='uniform'"
            )

    def _check_interval(self) -> None:
        interval, rule = self.interval, self.prefill
        if interval is None:
            return
        whole = is_int(interval) and interval >= 1
        if not whole and not (isinstance(interval, float) and 0.0 < interval < 1.0):
            raise ValueError(
                f"interval must be None, an int >= 1 or a float in (0, 1) (share of budget), got {interval!r}"
            )
        if not self.grows:
            raise ValueError(f"interval={interval!r} with grows=False: it says when a prefill's method cuts again")
        if not rule.even or rule.needs.all_queries or rule.needs.exit:
            why = "looks at all queries" if rule.needs.all_queries else "looks at the last layer's states of a prompt"
            raise ValueError(
                f"interval={interval!r} with prefill={rule.name!r}, which "
                + (why if rule.even else "leaves layers or heads different budgets")
                + ": use one that looks at the last queries, or at none, with allocation='uniform'"
            )

    def check_backend(self, name: str) -> None:
        """Whether an attention back end that was asked for by name can run this policy.

        Raises:
            ValueError: for FlashAttention where heads hold unlike numbers of entries: it knows one length a row.
        """
        if name == "flash" and self.prefill is not None and not self.prefill.even:
            raise ValueError(
                f"backend='flash' with prefill={self.prefill.name!r}, which leaves layers or heads different lengths: "
                "use backend='auto'"
            )

    def check_model(self, windows: Sequence[int | None], heads: int, evicts: bool = True) -> None:
        """Whether this policy can run on a model of so many KV heads, whose layers have these sliding windows or None.

        Args:
            evicts: whether the budget does.

        Raises:
            ValueError: if a table of budgets has another shape; where there is a window, if its method cuts again, by
                places, which no longer are positions, or has the model repeat a prompt that it no longer meets.
        """
        if self.prefill is not None:
            self.prefill.check_shape(len(windows), heads)
        if self.prefill is not None and self.prefill.needs.repeat and any(windows) and evicts:
            raise ValueError(
                f"prefill={self.prefill.name!r} on a model with a sliding window of {min(filter(None, windows))} "
                "tokens: there the model does not look back at the prompt that it repeats; use another method"
            )
        if self.interval is not None and any(windows) and evicts:
            raise ValueError(
                f"interval={self.interval!r} on a model with a sliding window of {min(filter(None, windows))} tokens: "
                "a method can't cut again there; use a policy without interval"
            )

    @property
    def trims(self) -> bool:
        """Whether decode steps evict."""
        return self.evicts and not self.grows

    @property
    def bounded(self) -> bool:
        """Whether the budget bounds what is held while decoding."""
        return self.evicts and (not self.grows or self.interval is not None)

    @property
    def rankings(self) -> tuple[Ranking, ...]:
        """The policy's own ranking, and that of `blend` if it has one."""
        return self._rankings

    def replace(self, **fields) -> "Policy":
        """A copy with other fields; unknown names raise with the nearest ones."""
        known = [f.name for f in dataclasses.fields(self)]
        for field in fields:
            if field not in known:
                raise TypeError(f"unknown policy field {field!r}{_nearest(field, known)}; fields: {', '.join(known)}")
        return dataclasses.replace(self, **fields)

    def scores_at(self, step: int) -> bool:
        """Whether decode step `step` (1, 2, ...) is a scoring step."""
        if not self.trims:
            return False
        return step == 1 if self.refresh == "once" else (step - 1) % self.refresh == 0

    def protected(self, budget: int) -> tuple[int, int, int]:
        """(sinks, recent, reserve) as counts under a budget of that many tokens.

        Raises:
            ValueError: if they leave no entry that may be evicted.
        """
        counts = tuple(part_of(getattr(self, field), budget) for field in ("sinks", "recent", "reserve"))
        total = " + ".join(map(str, counts))
        if sum(counts) >= budget and sum(counts) > 0:
            raise ValueError(
                f"sinks + recent + reserve = {total} = {sum(counts)} must be below the budget of {budget} tokens"
            )
        if sum(counts) + self.blended(budget) > budget:
            raise ValueError(
                f"sinks + recent + reserve = {total} and {self.blended(budget)} entries of the blend exceed the budget "
                f"of {budget} tokens"
            )
        return counts

    def check_budget(self, budget: int, length: int | None = None) -> None:
        """Whether a budget of that many tokens has room for what is protected of a prompt of that length (None: any).

        Raises:
            ValueError: if not.
        """
        self.protected(budget)
        if self.prefill is not None and (length is None or budget < length or self.interval is not None):
            if self.interval is not None and budget < 2:
                raise ValueError(f"budget must be at least 2 tokens with interval={self.interval!r}, got {budget}")
            self.prefill.protected(budget - (self.leaving(budget) or 0))

    def leaving(self, budget: int) -> int | None:
        """Tokens that leave at once when a budget of that many is full; None: one at a time, or none."""
        if self.interval is None:
            return None
        if isinstance(self.interval, float):
            return max(1, part_of(self.interval, budget))
        return max(1, min(self.interval, budget // 2))

    def blended(self, budget: int) -> int:
        """Entries that `blend` keeps under a budget of that many tokens."""
        return 0 if self.blend is None else self.blend.count(budget)


def _nearest(name: str, known) -> str:
    known = list(known)
    close = [one for one in known if one.startswith(str(name))]
    close = close or difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""


OF_MODEL = "best"  # the preset that needs a model: `kvpatch.best`
_PRESETS = {
    policy.name: policy
    for policy in (
        Policy("full", evicts=False),
        Policy("inertia"),
        Policy("inertia-lazy", refresh=4),
        Policy("score-free", refresh="once"),
        Policy("cumulative", aggregation="cumulative"),
        Policy("tova", aggregation="single", coupling="per_layer"),
        # Only the decode part of H2O: the prompt's own attention is not summed.
        Policy("h2o-decode", aggregation="cumulative", coupling="per_head", recent=0.5),
        Policy("streaming-llm", scorer="recency", aggregation="single", sinks=4, compact=True),
        Policy("h2o", aggregation="cumulative", coupling="per_head", recent=0.5, new_token="zero", prefill="h2o"),
        Policy(
            "vatp",
            scorer="value-mass",
            aggregation="cumulative",
            coupling="per_head",
            sinks=20,
            recent=0.5,
            new_token="zero",
            prefill="vatp",
        ),
        Policy("gkv", aggregation="peak", coupling="per_head", new_token="zero"),
        Policy("keydiff", scorer="keydiff", aggregation="single", coupling="per_head"),
        Policy("knorm", scorer="knorm", aggregation="single", coupling="per_head"),
        Policy("recency", scorer="recency", aggregation="single"),
        Policy("random", scorer="random", aggregation="single"),
        # The prompt is cut by a method, and all that is generated is kept.
        *(
            Policy(name, coupling="per_head", prefill=name, grows=True)
            for name in ("snapkv", "pyramidkv", "adakv", "cake", "criticalkv", "restkv", "expected-attention", "kvzip")
        ),
        Policy("rkv", coupling="per_head", prefill="rkv", grows=True, interval=128),
        Policy("scissorhands", coupling="per_head", prefill="scissorhands", grows=True, interval=0.5),
    )
}


def list_prefill() -> list[str]:
    """Names that `Policy(prefill=...)` accepts."""
    return sorted(prompts.PRESETS)


PAPERS = {
    "inertia": "2609.03515",
    "inertia-lazy": "2609.03515",
    "score-free": "2609.03515",
    "cumulative": "2609.03515",
    "tova": "2401.06104",
    "h2o": "2306.14048",
    "h2o-decode": "2306.14048",
    "streaming-llm": "2309.17453",
    "vatp": "2406.12335",
    "snapkv": "2404.14469",
    "pyramidkv": "2406.02069",
    "adakv": "2407.11550",
    "cake": "2503.12491",
    "criticalkv": "2502.03805",
    "expected-attention": "2510.00636",
    "kvzip": "2505.23416",
    "rkv": "2505.24133",
    "scissorhands": "2305.17118",
    "keydiff": "2504.15364",
    "knorm": "2406.11430",
}  # arXiv


def list_policies() -> list[str]:
    """Names that `patch` accepts."""
    return sorted([*_PRESETS, OF_MODEL])


def resolve(policy: "str | Policy", **fields) -> Policy:
    """The policy of that name, with some fields replaced.

    Raises:
        ValueError: for an unknown name, with the nearest known ones.
        TypeError: for something that is neither a name nor a Policy, or an unknown field.
    """
    if policy == OF_MODEL:
        raise ValueError(
            f"policy {OF_MODEL!r} is made for a model: give it to patch, or take the policy of a patched model's handle"
        )
    if isinstance(policy, str):
        if policy not in _PRESETS:
            raise ValueError(
                f"unknown policy {policy!r}{_nearest(policy, list_policies())}; known: {', '.join(list_policies())}"
            )
        policy = _PRESETS[policy]
    elif not isinstance(policy, Policy):
        raise TypeError(f"policy must be a name or a kvpatch.Policy, got {policy!r}")
    return policy.replace(**fields) if fields else policy


def settle(policy: str | Policy, budget, fields: dict) -> tuple[Policy, Budget]:
    """Policy and budget as objects; the budget may be left out for a policy that evicts nothing."""
    policy = resolve(policy, **fields)
    if budget is UNSET and policy.evicts:
        raise ValueError(
            f'budget must be given for policy {policy.name!r}: tokens (int), a share of the prompt (float), or "full"'
        )
    budget = Budget.of(None if budget is UNSET else budget)
    if not policy.evicts and budget.evicts:
        raise ValueError(f"budget={budget} with policy {policy.name!r}, which evicts nothing: leave budget out")
    return policy, budget
