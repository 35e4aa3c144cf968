"""What follows from a run's lines: means, differences to the full cache on the same samples, and how sure both are.

Everything is in the measure's own unit (scores 0 to 1), except the rows of `overall`, which are x100. What is unknown
is None: an interval of one sample, a difference without the full cache's line.
"""

import math
from collections.abc import Collection, Iterable

import numpy as np

from kvpatch.evaluation.intervals import Interval, disjoint, mean_interval, paired_bootstrap, proportion_interval
from kvpatch.evaluation.runs import Line, Run

FULL = "full"
SCORE = "score"
# Where the full cache itself scores less, no policy can show what it loses.
LEAST_FULL = 0.20
LEVEL, RESAMPLES = 0.95, 10_000

Ways = dict[tuple[str, str], dict[str, Line]]  # (policy, budget): prompt_id: line


def latest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each key, in the order in which the keys first came."""
    return list({line.key: line for line in lines}.values())


def grouped(lines: Iterable[Line]) -> dict[tuple[str, int], Ways]:
    """Lines by (task, length), there by (policy, budget), there by prompt; of one key's lines the last."""
    groups: dict[tuple[str, int], Ways] = {}
    for line in latest(lines):
        ways = groups.setdefault((line.task, line.length), {})
        ways.setdefault((line.policy, line.budget), {})[line.prompt_id] = line
    return groups


def share(lines: Iterable[Line]) -> float:
    """Mean of the tokens that may be held over those of the prompt; 1 without a limit."""
    return float(np.mean([1.0 if one.held is None else min(1.0, one.held / one.prompt_tokens) for one in lines]))


def summarise(run: Run, ruler_tasks: Collection[str], refused: Iterable[dict]) -> dict:
    """What goes into metrics.json.

    Args:
        run: whose lines are read.
        ruler_tasks: names of the tasks that `overall` is the mean of.
        refused: cells that couldn't be made: "task", "length" and "reason".

    Returns:
        "level" (of every interval), "lines" (how many count), "cells" (see `cells`), "overall" (see `overall`),
        "refused". JSON types only, None for what is unknown.

    Raises:
        ValueError: for a line that can't be read.
        ModuleNotFoundError: without the extra `eval`.
    """
    return summary_of(run.lines(), ruler_tasks, refused)


def summary_of(lines: Iterable[Line], ruler_tasks: Collection[str], refused: Iterable[dict]) -> dict:
    """`summarise` of lines that are read already."""
    lines = latest(lines)
    return {
        "level": LEVEL,
        "lines": len(lines),
        "cells": cells(lines),
        "overall": overall(lines, ruler_tasks),
        "refused": [dict(one) for one in refused],
    }


def cells(lines: Iterable[Line]) -> list[dict]:
    """A row for each task, length, policy, budget and measure ("score" and every name in `Line.measures`).

    Keys of a row:
        n, mean, low, high: of all samples of this way.
        share: of the prompt that may be held, see `share`.
        pairs: samples that the full cache ran too; unpaired: those that only one of both ran.
        full_mean, difference, difference_low, difference_high: over the pairs, difference = this way less full.
        kept, kept_low, kept_high, kept_of: of the kept_of samples that the full cache solves (score 1), the share that
            this way solves too. Scores only.
        question_aware: whether the question had been read when the cache was first cut; None where none is asked.
        grey: the full cache's mean score over all its samples is below `LEAST_FULL`, so that the cell can't tell
            policies apart.
    All of the pairs' are None for the full cache itself.
    """
    rows = []
    late = _late_tasks()
    for (task, length), ways in grouped(lines).items():
        full = ways.get((FULL, FULL), {})
        scored = _values(full, SCORE)
        grey = bool(scored) and float(np.mean(list(scored.values()))) < LEAST_FULL
        for (policy, budget), mine in ways.items():
            asked = any(line.score is not None for line in mine.values())
            names = dict.fromkeys(name for line in mine.values() for name in line.measures)
            for measure in [SCORE, *names] if asked else names:
                values = _values(mine, measure)
                row = {"task": task, "length": length, "policy": policy, "budget": budget, "measure": measure}
                row |= {"n": len(values), **_named(mean_interval(list(values.values()), LEVEL, RESAMPLES))}
                row |= {"share": share(mine.values())}
                row |= _against(values, None if policy == FULL else _values(full, measure), measure == SCORE)
                row |= {"question_aware": task not in late if asked else None, "grey": asked and grey}
                rows.append(row)
    return rows


def overall(lines: Iterable[Line], tasks: Collection[str]) -> list[dict]:
    """A row for each length, policy and budget: plain mean x100 over those of `tasks` that were run.

    Keys of a row: tasks (their names), n (samples of all of them), mean, low, high, share; pairs, difference,
    difference_low, difference_high (to the full cache, over the tasks and samples that both ran; None for the full
    cache); grey. Intervals draw samples anew within each task.
    """
    by_way: dict[tuple, dict[str, tuple[dict, dict, Collection[Line]]]] = {}
    for (task, length), ways in grouped(lines).items():
        full = _values(ways.get((FULL, FULL), {}), SCORE)
        for (policy, budget), mine in ways.items():
            values = _values(mine, SCORE)
            if task in tasks and values:
                by_way.setdefault((length, policy, budget), {})[task] = values, full, mine.values()
    rows = []
    for (length, policy, budget), found in by_way.items():
        row = {"length": length, "policy": policy, "budget": budget, "tasks": list(found)}
        row |= {"n": sum(len(values) for values, _, _ in found.values())}
        row |= _named(_stratified([100 * _row(values) for values, _, _ in found.values()]))
        row |= {"share": share(line for _, _, some in found.values() for line in some)}
        pairs = [] if policy == FULL else [_differences(values, full) for values, full, _ in found.values()]
        pairs = [100 * one for one in pairs if len(one)]
        row |= {"pairs": None if policy == FULL else sum(map(len, pairs))}
        row |= _named(_stratified(pairs), "difference")
        full_means = [float(np.mean(_row(full))) for _, full, _ in found.values() if full]
        rows.append(row | {"grey": bool(full_means) and float(np.mean(full_means)) < LEAST_FULL})
    return rows


def compare(lines: Iterable[Line], one: str, other: str, measure: str = SCORE) -> list[dict]:
    """Two policies on the same samples: a row for each task, length and budget that both ran.

    Policy "full" stands beside every budget of the other one.

    Keys of a row: task, length, budget; pairs, unpaired; one, one_low, one_high, other, other_low, other_high (means
    over the pairs); difference (one less other), difference_low, difference_high; disjoint (the intervals of both means
    share no point); nonzero (the difference's interval leaves 0 out). Differences show more than two intervals do: what
    makes a sample hard for both cancels out.

    Raises:
        ValueError: for a policy that no line has.
    """
    lines = latest(lines)
    for name in (one, other):
        if not any(line.policy == name for line in lines):
            raise ValueError(f"no line of policy {name!r}; there are {', '.join(sorted({x.policy for x in lines}))}")
    rows = []
    for (task, length), ways in grouped(lines).items():
        for budget in [budget for policy, budget in ways if policy == (other if one == FULL else one)]:
            a, b = (_values(ways.get((x, FULL if x == FULL else budget), {}), measure) for x in (one, other))
            shared = [prompt for prompt in a if prompt in b]
            if not shared:
                continue
            left, right = (mean_interval([side[x] for x in shared], LEVEL, RESAMPLES) for side in (a, b))
            change = paired_bootstrap(_differences(a, b), LEVEL, RESAMPLES)
            row = {"task": task, "length": length, "budget": budget, "pairs": len(shared)}
            row |= {"unpaired": len(a) + len(b) - 2 * len(shared), **_named(left, "one"), **_named(right, "other")}
            row |= {**_named(change, "difference"), "disjoint": disjoint(left, right)}
            rows.append(row | {"nonzero": disjoint(change, (0.0, 0.0, 0.0))})
    return rows


def _values(lines: dict[str, Line], measure: str) -> dict[str, float]:
    """Prompt to value, where there is one."""
    found = {key: line.score if measure == SCORE else line.measures.get(measure) for key, line in lines.items()}
    return {key: value for key, value in found.items() if value is not None}


def _row(values: dict[str, float]) -> np.ndarray:
    return np.array(list(values.values()), dtype=np.float64)


def _differences(values: dict[str, float], other: dict[str, float]) -> np.ndarray:
    """[pairs], value less the other's on the same prompt."""
    return np.array([value - other[key] for key, value in values.items() if key in other], dtype=np.float64)


def _against(values: dict[str, float], full: dict[str, float] | None, scores: bool) -> dict:
    """The keys of a cell that come from pairs; `full` is None for the full cache's own cells."""
    unknown, pairs, unpaired, full_mean, solved = math.nan, None, None, math.nan, None
    change, kept = (unknown,) * 3, (unknown,) * 3
    if full is not None:
        shared = [key for key in values if key in full]
        pairs, unpaired = len(shared), len(values) + len(full) - 2 * len(shared)
        full_mean = float(np.mean([full[key] for key in shared])) if shared else unknown
        change = paired_bootstrap(_differences(values, full), LEVEL, RESAMPLES)
        if scores:
            right = [key for key in shared if full[key] >= 1]
            solved, kept = len(right), proportion_interval(sum(values[key] >= 1 for key in right), len(right), LEVEL)
    row = {"pairs": pairs, "unpaired": unpaired, "full_mean": _known(full_mean), **_named(change, "difference")}
    return row | {**_named(kept, "kept"), "kept_of": solved}


def _stratified(tasks: list[np.ndarray]) -> Interval:
    """Mean of the tasks' means and its percentile-bootstrap interval, samples [n] drawn within each task."""
    if not tasks:
        return (math.nan,) * 3
    mean = float(_mean_of_means(*tasks))
    if min(map(len, tasks)) < 2:
        return mean, math.nan, math.nan
    from scipy import stats

    # A batch of 100 keeps 13 tasks of 500 samples at some megabytes.
    more = {"n_resamples": RESAMPLES, "batch": 100, "confidence_level": LEVEL, "method": "percentile"}
    found = stats.bootstrap(tasks, _mean_of_means, vectorized=True, rng=np.random.default_rng(0), **more)
    return mean, float(found.confidence_interval.low), float(found.confidence_interval.high)


def _mean_of_means(*tasks: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.mean([np.mean(task, axis=axis) for task in tasks], axis=0)


def _late_tasks() -> set[str]:
    """Tasks whose question comes after the cache was cut."""
    from kvpatch.evaluation import later

    return {task.name for task in later.TASKS}


def _named(interval: Interval, name: str = "") -> dict:
    """An interval under three keys, such as "difference", "difference_low" and "difference_high"."""
    keys = (name, f"{name}_low", f"{name}_high") if name else ("mean", "low", "high")
    return dict(zip(keys, map(_known, interval), strict=True))


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
