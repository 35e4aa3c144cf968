"""The README's tables of recorded runs (`runs/*/`), made from their predictions."""

from pathlib import Path

from kvpatch.evaluation import ruler, summary
from kvpatch.evaluation.runs import Line, Run
from kvpatch.evaluation.tables import span
from kvpatch.profiles._shared import markdown

RUNS = Path(__file__).parent / "runs"


def lines_of(name: str) -> list[Line]:
    """What a recorded run holds; nothing if it is not there."""
    return summary.latest(Run(RUNS / name).lines()) if (RUNS / name).is_dir() else []


def best(one: str = "best", other: str = "inertia") -> str:
    """Both policies on the same samples: rows tasks and measures, columns budgets."""
    lines = lines_of("best")
    rows: dict[str, dict[str, str]] = {}
    for measure, scale, form in ((summary.SCORE, 100.0, ".0f"), ("kl", 1.0, ".3f"), ("top1", 100.0, ".1f")):
        for row in summary.compare(lines, one, other, measure):
            mark = "**" if row["nonzero"] else ""
            what = row["task"] if measure == summary.SCORE else f"{row['task']}, {MEASURED[measure]}"
            cell = f"{mark}{scale * row['one']:{form}}{mark} / {scale * row['other']:{form}}"
            cell += f" ({span(row, 'difference', scale, '+' + form)})"
            rows.setdefault(f"{what}, n = {row['pairs']}", {})[row["budget"]] = cell
    budgets = by_share({row["budget"] for row in summary.cells(lines) if row["budget"] != summary.FULL})
    head = [f"{one} / {other} (difference)", *budgets]
    return markdown(head, [[name, *(cells.get(x, "-") for x in budgets)] for name, cells in rows.items()])


MEASURED = {"kl": "mean KL, nats", "top1": "same first token, %"}


def kept(one: str = "best", other: str = "inertia") -> str:
    """Of the needles that the full cache finds, what two policies find too; rows tasks, columns budgets."""
    lines = lines_of("best")
    cells = {
        (row["task"], row["budget"], row["policy"]): row
        for row in summary.cells(lines)
        if row["measure"] == summary.SCORE and row["kept_of"]
    }
    budgets = by_share({budget for _, budget, _ in cells})
    rows = []
    for task in dict.fromkeys(task for task, _, _ in cells):
        row = [task, str(next(cell["kept_of"] for key, cell in cells.items() if key[0] == task))]
        for budget in budgets:
            mine, theirs = cells[task, budget, one], cells[task, budget, other]
            ends = f"{100 * mine['kept_low']:.0f} to {100 * mine['kept_high']:.0f}"
            row.append(f"{100 * mine['kept']:.0f} ({ends}) / {100 * theirs['kept']:.0f}")
        rows.append(row)
    return markdown(["kept of the full cache's, %", "of", *budgets], rows)


def ruler_means() -> str:
    """RULER's mean: rows policies, columns length x budget."""
    lines = lines_of("ruler")
    found = summary.overall(lines, {task.name for task in ruler.TASKS}) if lines else []
    columns = sorted(
        {(row["length"], row["budget"]) for row in found if row["budget"] != summary.FULL},
        key=lambda pair: (pair[0], -float(pair[1].rstrip("%"))),
    )
    at = {(row["policy"], row["length"], row["budget"]): row for row in found}
    rows = []
    for policy in sorted({row["policy"] for row in found}, key=lambda name: (name != summary.FULL, name)):
        cells = [at.get((policy, *pair)) or at.get((policy, pair[0], summary.FULL)) for pair in columns]
        rows.append([policy, *(_mean(cell, 1.0) for cell in cells)])
    head = [
        "RULER x100",
        *(f"{length:,} tokens, {budget}" for length, budget in columns),
    ]
    return markdown(head, rows)


def ruler_tasks(length: int = 1024, budget: str = "10%") -> str:
    """RULER's tasks at one length and budget: rows policies, columns tasks; in italics where the full cache fails."""
    cells = [
        row
        for row in summary.cells(lines_of("ruler"))
        if row["measure"] == summary.SCORE and row["length"] == length and row["budget"] in (budget, summary.FULL)
    ]
    at = {(row["policy"], row["task"]): row for row in cells}
    tasks = list(dict.fromkeys(row["task"] for row in cells))
    rows = []
    for policy in sorted({row["policy"] for row in cells}, key=lambda name: (name != summary.FULL, name)):
        found = [at.get((policy, task)) for task in tasks]
        marks = ["*" if row and row["grey"] else "" for row in found]
        texts = ["-" if row is None else _mean(row, 100.0) for row in found]
        rows.append([policy, *(f"{mark}{text}{mark}" for mark, text in zip(marks, texts, strict=True))])
    return markdown([f"{length:,} tokens, {budget}", *(task.removeprefix("niah_") for task in tasks)], rows)


def _mean(row: dict | None, scale: float) -> str:
    if row is None:
        return "-"
    if row["difference_low"] is None:
        return f"{scale * row['mean']:.0f}"
    return f"{scale * row['mean']:.0f} ({span(row, 'difference', scale, '+.0f')})"


def ablation() -> str:
    """InertiaKV's rule taken apart: rows rules, columns what came out, with 95 % intervals."""
    cells = summary.cells(lines_of("ablation"))
    wanted = [
        (row["task"], row["measure"], row["budget"])
        for row in cells
        if row["policy"] != summary.FULL and (row["task"], row["measure"]) in ABLATED
    ]
    order = list(ABLATED)
    columns = sorted(set(wanted), key=lambda key: (order.index(key[:2]), -float(key[2].rstrip("%"))))
    at = {(row["policy"], row["task"], row["measure"], row["budget"]): row for row in cells}
    rows = []
    for policy in dict.fromkeys(row["policy"] for row in cells if row["policy"] != summary.FULL):
        texts = []
        for key in columns:
            row, (_, scale, form) = at.get((policy, *key)), ABLATED[key[:2]]
            if row is None:
                texts.append("-")
                continue
            ends = "" if row["low"] is None else f" ({scale * row['low']:{form}} to {scale * row['high']:{form}})"
            texts.append(f"{scale * row['mean']:{form}}{ends}")
        rows.append([policy, *texts])
    return markdown(["rule", *(f"{ABLATED[key[:2]][0]}, {key[2]}" for key in columns)], rows)


# Task and measure: what the README calls it, its factor, its form.
ABLATED = {
    ("niah_single_2", summary.SCORE): ("needles x100", 100.0, ".0f"),
    ("fidelity", "kl"): ("KL, nats", 1.0, ".3f"),
    ("stability", "churn_raw"): ("churn of scores", 1.0, ".3f"),
    ("stability", "churn_ema"): ("churn of the rule", 1.0, ".3f"),
}


def by_share(budgets) -> list[str]:
    """Budgets in per cent, the largest first."""
    return sorted(budgets, key=lambda text: -float(text.rstrip("%")))
