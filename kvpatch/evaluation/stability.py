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
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvpatch.evaluation import rankings, retention
from kvpatch.evaluation.answers import Clock, Way, left_padded, pad_of
from kvpatch.evaluation.continuation import LEAST, prose
from kvpatch.evaluation.fidelity import QUERIES
from kvpatch.evaluation.forcing import Script, endless
from kvpatch.evaluation.rankings import Churn, Look, Standing, Variance, rule_of
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import CellError, Sample, Sources, rng_of
from kvpatch.policy import Policy
from kvpatch.scoring import scorer

REFERENCE = "attention"
COMPARED = ("vnorm", "entropy", "keydiff", "knorm", "recency", "random")
FEWEST = 3  # tokens of a continuation: two steps, of which the second can be held against the first


def samples(tokenizer, length: int, count: int, seed: int, sources: Sources, forced: int) -> list[Sample]:
    """The prompts of fidelity, exactly `length` - `forced` tokens, so that both measure the same texts.

    Raises:
        CellError: if the continuation leaves no room for a prompt, or has no two steps.
    """
    prompt = length - forced
    if prompt < LEAST or forced < FEWEST:
        raise CellError(f"stability at length {length} needs {FEWEST} <= forced <= {length - LEAST}, got {forced}")
    found = []
    for index in range(count):
        start = rng_of("fidelity", length, seed, index).random()
        ids = prose(tokenizer, prompt, start, sources)
        found.append(Sample(f"stability/{length}/{seed}/{index}", "stability", length, ids, (), forced))
    return found


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
    ids, mask = left_padded(batch, pad_of(tokenizer), handle.model.device)
    started = time.perf_counter()
    source = handle.read(ids, mask)
    took = time.perf_counter() - started
    clock.read += took
    clock.saved += took * (len(ways) - 1)
    started = time.perf_counter()
    tokens = continued(handle, tokenizer, source, ids, mask, forced)
    source.free()
    found = []
    for row, sample in enumerate(batch):
        text = torch.cat((ids[row, mask[row].bool()], tokens[row]))
        found.append(measured(handle.model, text, len(sample.prompt_ids), ways))
    if folder is not None:
        retention.note(folder, handle, tokenizer, batch[0], tokens[0].tolist(), ways)
    clock.decode += time.perf_counter() - started
    for number, way in enumerate(ways):
        yield way, [_line(one, way, forced, *found[row][number]) for row, one in enumerate(batch)]


def continued(handle, tokenizer, source, ids: Tensor, mask: Tensor, forced: int) -> Tensor:
    """[B, forced] int64: the full cache's greedy continuation, which no token ends."""
    script = Script(ids.shape[1], forced, [[]] * len(ids), tokenizer.eos_token_id)
    cache = source.fork("full")
    with endless(handle.model):
        made = handle.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=forced,
            do_sample=False,
            pad_token_id=pad_of(tokenizer),
            logits_processor=LogitsProcessorList([script]),
        )
    cache.free()
    return made[:, ids.shape[1] :]


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


def _line(sample: Sample, way: Way, forced: int, measures: dict, series: dict) -> Line:
    return Line(
        task=sample.task,
        length=sample.length,
        sample=sample.id,
        prompt_id=sample.prompt_id,
        policy=way.name,
        budget=way.text,
        held=None if way.budget is None else way.budget.tokens(len(sample.prompt_ids)),
        prompt_tokens=len(sample.prompt_ids),
        tokens=forced,
        measures=measures,
        series=series,
    )
