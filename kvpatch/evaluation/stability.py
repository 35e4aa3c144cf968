"""How stable a policy's ranking is from step to step, where nothing is evicted.

The full cache reads prose and continues it greedily. At every decode step all tokens, n of them, are ranked by each
policy's own rule (scorer, pools, layers and heads, aggregation, coupling); when it scores, what it protects and what it
blends in are left out, so that policies which differ in those only give the same numbers. Three rankings stand
beside each other:

    raw     the newest score alone ("single"): with sequential coupling that of the last layer
    step    this step's scores alone, layers weighted as the rule does: what depth does without time
    ema     the policy's utility, whatever its aggregation: what time does beyond that

Without sequential coupling raw and step are the same, and so is ema with an alpha of 0.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpatch.evaluation import rankings, retention
from kvpatch.evaluation.attending import QUERIES
from kvpatch.evaluation.continuation import prose_samples
from kvpatch.evaluation.rankings import Churn, Look, Standing, Variance, rule_of
from kvpatch.evaluation.reading import Clock, Reading, Way
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import Sample, Sources
from kvpatch.policy import Policy
from kvpatch.scoring import scorer

REFERENCE = "attention"
COMPARED = ("vnorm", "entropy", "keydiff", "knorm", "recency", "random")


def samples(tokenizer, length: int, count: int, seed: int, sources: Sources, forced: int) -> list[Sample]:
    """The prompts of fidelity, exactly `length` - `forced` tokens, so that both measure the same texts.

    Raises:
        CellError: if the continuation leaves no room for a prompt, or has no two steps.
    """
    return prose_samples("stability", tokenizer, length, count, seed, sources, forced)


def lines(
    handle,
    tokenizer,
    batch: list[Sample],
    ways: list[Way],
    forced: int,
    clock: Clock,
    folder: Path | None = None,
) -> Iterator[tuple[Way, list[Line]]]:
    """Each way's stability over one batch; the full cache is looked at once for all of them.

    Args:
        folder: of the run; the first sample of it that comes here has what each way holds at each step written there
            (`kvpatch.evaluation.retention`).
    """
    with Reading.of(handle, tokenizer, batch) as reading, clock.decoding():
        tokens = reading.continuation(forced, tokenizer.eos_token_id)
    clock.note_reading(reading.seconds, len(ways))
    found = []
    with clock.decoding():
        for row, sample in enumerate(batch):
            text = torch.cat((reading.ids[row, reading.mask[row].bool()], tokens[row]))
            found.append(measured(handle.model, text, len(sample.prompt_ids), ways))
        if folder is not None:
            retention.note(folder, handle, tokenizer, batch[0], tokens[0].tolist(), ways)
    for number, way in enumerate(ways):
        results = [found[row][number] for row in range(len(batch))]
        yield (
            way,
            [
                way.line(one, tokens=forced, measures=measures, series=series)
                for one, (measures, series) in zip(batch, results, strict=True)
            ],
        )


def measured(
    model, text: Tensor, prompt: int, ways: list[Way], queries: int = QUERIES
) -> list[tuple[dict[str, float], dict[str, list[float]]]]:
    """Measures and series of each way on one text; see `Watch`.

    Args:
        text: [prompt + forced] int64.
        queries: as in `rankings.observe`.
    """
    standings: dict[tuple[Policy, bool], Standing] = {}

    def standing(rule: Policy, forgets: bool = False) -> Standing:
        return standings.setdefault((rule, forgets), Standing(rule, forgets))

    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    watches = [Watch(way, prompt, layers, standing) for way in ways]

    def look(step: Look) -> None:
        for one in standings.values():
            one.update(step)
        for watch in watches:
            watch.look()

    rankings.observe(model, text, prompt, look, queries)
    return [watch.found() for watch in watches]


class Watch:
    """What is noted of one way.

    Measures, means over the steps:
        churn_raw, churn_step, churn_ema: 1 - Jaccard of the best B tokens with those of the step before.
        at_most_one_raw, ..: share of the steps at which no more than one token enters them.
        variance_left: what the EMA leaves of the variance over steps of the scores' differences; variance_bound: what
            independent steps would leave. Both only where enough steps lie behind the EMA's start.
        spearman_<scorer>: rank correlation, over all tokens, of the rule's utility with that scorer in place of its own
            and with attention.   jaccard_<scorer>: the same of the best B.
    Without a budget, that is for the full cache, only spearman_<scorer>, and of one step's mean over layers.
    """

    def __init__(self, way: Way, prompt: int, layers: int, standing):
        self.count = None if way.budget is None else way.budget.tokens(prompt)
        rule = rule_of(way.policy) if self.count else Policy(aggregation="single", coupling="uniform")
        self.reference = standing(with_scorer(rule, REFERENCE))
        self.others = {name: standing(one) for name in COMPARED if (one := with_scorer(rule, name)) is not None}
        self.spearman: dict[str, list[float]] = {name: [] for name in self.others}
        self.jaccard: dict[str, list[float]] = {name: [] for name in self.others}
        self.churns: dict[str, Churn] = {}
        self.variance = None
        if self.count:
            own, ema = standing(rule, forgets=True), standing(rule)
            named = {"raw": standing(rule_of(rule, aggregation="single")), "step": own, "ema": ema}
            self.churns = {name: Churn(one, self.count) for name, one in named.items()}
            past = rankings.weight_of_past(rule, layers)
            self.variance = None if past is None else Variance(ema, own, past, prompt)

    def look(self) -> None:
        """Take one step, with which all standings have been updated."""
        for churn in self.churns.values():
            churn.look()
        if self.variance is not None:
            self.variance.look()
        for name, other in self.others.items():
            self.spearman[name] += rankings.spearman(other, self.reference).ravel().tolist()
            if self.count:
                same = rankings.jaccard(other.top(self.count), self.reference.top(self.count))
                self.jaccard[name].append(same.mean().item())

    def found(self) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Measures, and the churns by step; the first one is the second step's, which feeds the second token."""
        measures = {f"churn_{name}": float(np.mean(one.churn)) for name, one in self.churns.items()}
        measures |= {f"at_most_one_{name}": float(np.mean(one.calm)) for name, one in self.churns.items()}
        if self.variance is not None and self.variance.left is not None:
            measures["variance_left"] = self.variance.left
            measures["variance_bound"] = rankings.variance_bound(self.variance.past)
        for name, values in self.spearman.items():
            known = [value for value in values if math.isfinite(value)]
            measures |= {f"spearman_{name}": float(np.mean(known))} if known else {}
        measures |= {f"jaccard_{name}": float(np.mean(values)) for name, values in self.jaccard.items() if values}
        series = {f"churn_{name}": [round(x, 6) for x in one.churn] for name, one in self.churns.items()}
        return measures, series


def with_scorer(rule: Policy, name: str) -> Policy | None:
    """The rule with another scorer; None where that makes no sense."""
    if rule.score_heads != "all" and name != REFERENCE:
        return None  # no other scorer knows heads
    if name == "entropy" and rule.coupling == "per_head":
        return None  # it is a layer's
    return rule_of(rule, scorer=name, head_pool=rule.head_pool if scorer(name).uses_attention else "mean")
