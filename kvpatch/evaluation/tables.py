"""Tables of one or several runs, as a terminal and a README show them."""

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpatch.evaluation import ruler
from kvpatch.evaluation.config import FREE_KEYS, read_yaml
from kvpatch.evaluation.runs import CONFIG, ENVIRONMENT, METRICS, Line, Run
from kvpatch.evaluation.summary import FULL, SCORE, latest, summary_of

# A table of several tasks has no more columns than this; else each task has its own.
MOST_COLUMNS = 6
GREY = "the full cache itself scores below 20 there, so that such a cell can't tell policies apart"
BRACKETS = (
    "Means x100. [low, high]: 95 % interval of the mean; (low to high), signed: 95 % paired-bootstrap interval of the "
    "difference to the full cache on the same samples."
)
UNITS = {"kl": "nats"}


class Entry(NamedTuple):
    """A table's cell."""

    text: str
    grey: bool = False


@dataclass
class Table:
    """Rows of equally many entries below `head`; notes stand below."""

    title: str
    head: list[str]
    rows: list[list[Entry]]
    notes: list[str] = field(default_factory=list)


@dataclass
class Merged:
    """What runs with the same label come to together."""

    label: str
    metrics: dict
    replaced: list[str]
    lines: list[Line]


def config_of(run: Run) -> dict:
    """A run's configuration; empty where the folder holds none."""
    path = run.folder / CONFIG
    return read_yaml(path) if path.exists() else {}


def labels(runs: list[Run]) -> list[str]:
    """Model and commit of each run, and every setting that changes results and is not the same in all of them."""
    configs = [config_of(run) for run in runs]
    keys = sorted({key for config in configs for key in config} - {"model", *FREE_KEYS})
    unlike = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    found = []
    for run, config in zip(runs, configs, strict=True):
        commit = (run.read_json(ENVIRONMENT) or {}).get("commit")
        parts = [str(config.get("model", "unknown model")), f"commit {str(commit)[:9]}" if commit else "unknown commit"]
        found.append(", ".join(parts + [f"{key} {config.get(key)}" for key in unlike]))
    return found


def alone(run: Run, metrics: dict) -> Merged:
    """One run as it is, with what `summary.summarise` has made of it."""
    return Merged(labels([run])[0], metrics, [], latest(run.lines()))


def merge(runs: list[Run]) -> list[Merged]:
    """Runs with the same label as one. Of a task, length, policy and budget that two of them ran the newer one counts.

    Raises:
        ValueError: for a file that can't be read, naming it.
    """
    groups: dict[str, list[Run]] = {}
    for label, run in zip(labels(runs), runs, strict=True):
        groups.setdefault(label, []).append(run)
    merged = []
    for label, some in groups.items():
        found: dict[tuple, tuple[Run, list[Line]]] = {}
        refused: dict[tuple, dict] = {}
        replaced = []
        for run in sorted(some, key=_when):
            own: dict[tuple, list[Line]] = {}
            for line in latest(run.lines()):
                own.setdefault((line.task, line.length, line.policy, line.budget), []).append(line)
            for key, lines in own.items():
                if key in found:
                    task, length, policy, budget = key
                    older = found[key][0].folder
                    replaced.append(
                        f"{task} at {length}, {policy} {budget}: of two runs the newer, {run.folder} (not {older})"
                    )
                found[key] = run, lines
            for one in (run.read_json(METRICS) or {}).get("refused", ()):
                refused[one.get("task"), one.get("length"), one.get("reason")] = one
        lines = [line for _, part in found.values() for line in part]
        names = {task.name for task in ruler.TASKS}
        merged.append(Merged(label, summary_of(lines, names, refused.values()), replaced, lines))
    return merged


def tables_of(merged: Merged) -> list[Table]:
    """RULER's mean, scores, and other measures; a table or more for each length."""
    metrics, found = merged.metrics, []
    scores = [row for row in metrics["cells"] if row["measure"] == SCORE]
    others = [row for row in metrics["cells"] if row["measure"] != SCORE]
    for length in sorted({row["length"] for row in metrics["cells"]}):
        title = titled(merged.label, length)
        means = [row for row in metrics["overall"] if row["length"] == length and len(row["tasks"]) > 1]
        if means:
            most = max((row["tasks"] for row in means), key=len)
            rows = [row | {"task": f"mean of {len(row['tasks'])}"} for row in means]
            note = f"Mean over {', '.join(most)}. Intervals draw samples anew within each task."
            found.append(_scores(f"RULER: {title}", rows, 1.0, [note]))
        here = [row for row in scores if row["length"] == length]
        names, ways = unique(row["task"] for row in here), budgets_of(here)
        for some in [names] if len(names) * len(ways) <= MOST_COLUMNS else [[name] for name in names]:
            if some:
                what = some[0] if len(some) == 1 else "Scores"
                found.append(_scores(f"{what}: {title}", [row for row in here if row["task"] in some], 100.0, []))
        for name in unique(row["task"] for row in others if row["length"] == length):
            some = [row for row in others if (row["task"], row["length"]) == (name, length)]
            found.append(_measures(f"{name}, measures: {title}", some))
    return found


def _scores(title: str, rows: list[dict], scale: float, notes: list[str]) -> Table:
    """Rows policies, columns task x budget; what evicts nothing stands in every column of its task."""
    budgets, names = budgets_of(rows), unique(row["task"] for row in rows)
    columns = [(name, budget) for name in names for budget in budgets]
    policies = sorted(unique(row["policy"] for row in rows), key=lambda policy: policy != FULL)
    at = {(row["task"], row["budget"], row["policy"]): row for row in rows}
    head, lines = ["policy"], [[Entry(policy)] for policy in policies]
    for name, budget in columns:
        cells = [at.get((name, budget, policy)) or at.get((name, FULL, policy)) for policy in policies]
        counts = {row["n"] for row in cells if row}
        here = [part for part in (name if len(names) > 1 else "", budget) if part]
        head.append(", ".join(here) + (f" (n = {counts.pop()})" if len(counts) == 1 else ""))
        for line, row in zip(lines, cells, strict=True):
            # The counts were unlike if one is left.
            line.append(Entry(_score(row, scale, bool(counts)), row["grey"]) if row else Entry("-"))
    grey = any(entry.grey for line in lines for entry in line)
    return Table(title, head, lines, [BRACKETS, *([f"In italics: {GREY}."] if grey else []), *notes])


def _score(row: dict, scale: float, counted: bool) -> str:
    text = f"{scale * row['mean']:.1f}"
    if row["difference_low"] is not None:
        text += f" ({span(row, 'difference', scale, '+.1f')})"
    elif row["low"] is not None:
        text += bracket(row, "", scale, ".1f")
    return text + (f", n = {row['n']}" if counted else "")


def span(row: dict, name: str, scale: float, form: str) -> str:
    """The interval of a row's difference of that name, signed."""
    return " to ".join(format(scale * row[f"{name}_{end}"], form) for end in ("low", "high"))


def bracket(row: dict, prefix: str, scale: float, form: str) -> str:
    """A mean's interval, whose keys begin with the prefix, to stand behind it."""
    return f" [{', '.join(format(scale * row[prefix + end], form) for end in ('low', 'high'))}]"


def with_unit(measure: str) -> str:
    """A measure's name, with its unit if it has one."""
    return f"{measure} ({UNITS[measure]})" if measure in UNITS else measure


def _measures(title: str, rows: list[dict]) -> Table:
    """Rows policies with their budgets, columns measures."""
    names, ways = unique(row["measure"] for row in rows), unique((row["policy"], row["budget"]) for row in rows)
    at = {(row["measure"], row["policy"], row["budget"]): row for row in rows}
    lines = []
    for policy, budget in sorted(ways, key=lambda way: way[0] != FULL):
        cells = [at.get((name, policy, budget)) for name in names]
        counts = unique(str(row["n"]) for row in cells if row)
        entries = [Entry(measured(row), row["grey"]) if row else Entry("-") for row in cells]
        lines.append([Entry(policy if budget == FULL else f"{policy}, {budget}"), Entry(", ".join(counts)), *entries])
    head = ["policy", "n", *map(with_unit, names)]
    grey = any(entry.grey for line in lines for entry in line)
    notes = [BRACKETS.replace("Means x100", "Means"), *([f"In italics: {GREY}."] if grey else [])]
    return Table(title, head, lines, notes)


def measured(row: dict) -> str:
    """A cell's mean in the measure's own unit, with the interval of its difference to the full cache, else its own."""
    text = f"{row['mean']:.3g}"
    if row["difference_low"] is not None:
        return f"{text} ({span(row, 'difference', 1.0, '+.3g')})"
    return text if row["low"] is None else text + bracket(row, "", 1.0, ".3g")


def markdown(tables: list[Table]) -> str:
    """Tables in Markdown, padded so that they line up as text too."""
    return "\n".join(_one(table) for table in tables)


def _one(table: Table) -> str:
    head = [_escaped(text) for text in table.head]
    rows = [[f"*{_escaped(text)}*" if grey else _escaped(text) for text, grey in row] for row in table.rows]
    widths = [max(4, *(len(row[column]) for row in [head, *rows])) for column in range(len(head))]
    ruled = ["-" * (width - 1) + ("-" if column == 0 else ":") for column, width in enumerate(widths)]
    aligned = [
        [cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
        for pairs in (list(zip(row, widths, strict=True)) for row in [head, *rows])
    ]
    lines = [f"| {' | '.join(row)} |" for row in [aligned[0], ruled, *aligned[1:]]]
    notes = "".join(f"\n{note}\n" for note in table.notes)
    return f"**{_escaped(table.title)}**\n\n" + "\n".join(lines) + "\n" + notes


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("\n", " ")


def unique(values: Iterable) -> list:
    """Each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def budgets_of(rows: list[dict]) -> list[str]:
    """Budgets from the smallest share of the prompt on; without the full cache's, if there is another one."""
    shares = {row["budget"]: row["share"] for row in rows}
    found = sorted(shares, key=shares.get)
    return [budget for budget in found if budget != FULL] or found


def titled(text: str, length: int) -> str:
    """A title with the length of its samples."""
    return f"{text}, " + (f"{length:,} tokens" if length else "lengths as the data have them")


def _when(run: Run) -> str:
    """When a run was begun, as text that sorts; from its predictions' time where it doesn't say."""
    written = datetime.datetime.fromtimestamp(run.predictions.stat().st_mtime, datetime.UTC)
    return str((run.read_json(ENVIRONMENT) or {}).get("started") or written.isoformat())
