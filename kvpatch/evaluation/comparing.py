"""Two policies held against each other, and what each keeps of the full cache's answers, as tables."""

from kvpatch.evaluation.summary import FULL, SCORE, compare
from kvpatch.evaluation.tables import Entry, Merged, Table, bracket, budgets_of, span, titled, unique, with_unit

# Measures of which less is better; of all others more is.
LESS = ("kl", "kl_p95", "lost_mass")
MEASURES = ("kl", "top1", "lost_mass", "diverged")


def comparison(merged: Merged, one: str, other: str) -> Table:
    """Rows task x budget: both policies' means with their 95 % intervals, and the difference on the same samples.

    Raises:
        ValueError: for a policy that was not run.
    """
    rows = []
    for measure in (SCORE, *(name for name in MEASURES if any(name in line.measures for line in merged.lines))):
        for row in compare(merged.lines, one, other, measure):
            rows.append(_compared(row, measure))
    head = ["task", "budget", "n", one, other, "difference", "verdict"]
    notes = [
        "Scores x100; [low, high]: 95 % interval of the mean. The difference is "
        f"{one} less {other} on the same samples, with its 95 % paired-bootstrap interval. better, worse: this "
        "interval leaves 0 out; clearly: the two means' intervals share no point either."
    ]
    return Table(f"{one} against {other}: {merged.label}", head, rows, notes)


def _compared(row: dict, measure: str) -> list[Entry]:
    scale, form = (100.0, ".1f") if measure == SCORE else (1.0, ".3g")
    what = row["task"] if measure == SCORE else f"{row['task']}, {with_unit(measure)}"
    sides = [_mean(row, side, scale, form) for side in ("one", "other")]
    change = (
        "-"
        if row["difference_low"] is None
        else f"{scale * row['difference']:+{form}} ({span(row, 'difference', scale, '+' + form)})"
    )
    cells = [titled(what, row["length"]), row["budget"], str(row["pairs"]), *sides, change, _verdict(row, measure)]
    return [Entry(cell) for cell in cells]


def _verdict(row: dict, measure: str) -> str:
    if not row["nonzero"]:
        return "-"
    better = (row["difference"] < 0) == (measure in LESS)
    return ("clearly " if row["disjoint"] else "") + ("better" if better else "worse")


def _mean(row: dict, side: str, scale: float, form: str) -> str:
    mean = format(scale * row[side], form)
    return mean if row[f"{side}_low"] is None else mean + bracket(row, f"{side}_", scale, form)


def kept(merged: Merged) -> list[Table]:
    """For each length: of the samples that the full cache solves, the share that each policy solves too."""
    cells = [row for row in merged.metrics["cells"] if row["measure"] == SCORE and row["policy"] != FULL]
    found = []
    for length in sorted({row["length"] for row in cells}):
        here = [row for row in cells if row["length"] == length and row["kept_of"]]
        names, policies = unique(row["task"] for row in here), unique(row["policy"] for row in here)
        at = {(row["task"], row["budget"], row["policy"]): row for row in here}
        rows = []
        for name in names:
            for budget in budgets_of([row for row in here if row["task"] == name]):
                some = [at.get((name, budget, policy)) for policy in policies]
                count = "/".join(unique(str(row["kept_of"]) for row in some if row))
                rows.append([Entry(name), Entry(budget), Entry(count), *map(_kept, some)])
        if rows:
            title = f"Kept of what the full cache solves, %: {titled(merged.label, length)}"
            notes = ["of: samples that the full cache solves. [low, high]: 95 % interval (Wilson)."]
            found.append(Table(title, ["task", "budget", "of", *policies], rows, notes))
    return found


def _kept(row: dict | None) -> Entry:
    if row is None:
        return Entry("-")
    return Entry(f"{100 * row['kept']:.0f} [{100 * row['kept_low']:.0f}, {100 * row['kept_high']:.0f}]", row["grey"])
