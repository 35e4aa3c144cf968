"""A run's pictures: quality by budget, needles by depth, and how it goes along the text."""

import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kvpatch.evaluation import retention
from kvpatch.evaluation.drawing import PANELS, Way, figure_of, grid_of, rolling_median, saved, stacked, styles
from kvpatch.evaluation.runs import Line, Run
from kvpatch.evaluation.summary import FULL, LEAST_FULL, SCORE, grouped

TICKS = (1, 2, 5, 10, 20, 50, 100)  # per cent of the prompt


def draw_all(run: Run, metrics: dict, lines: Iterable[Line]) -> list[Path]:
    """Every picture that the lines allow, as PNG files in the run's folder `plots`, in place of older ones.

    Args:
        metrics: of `summary.summarise`.
        lines: of the run.

    Raises:
        ModuleNotFoundError: without matplotlib, naming the extra that brings it.
    """
    figure_of(1, 1)
    folder = run.folder / "plots"
    folder.mkdir(exist_ok=True)
    look, groups = styles(row["policy"] for row in metrics["cells"]), grouped(lines)
    scores = [row for row in metrics["cells"] if row["measure"] == SCORE]
    found = []
    whole = {task for row in metrics["overall"] for task in row["tasks"]}
    if whole:
        counts = sorted({len(row["tasks"]) for row in metrics["overall"]})
        title = f"RULER, mean of {' or '.join(map(str, counts))} task{'' if counts == [1] else 's'}"
        found.append(quality(metrics["overall"], 1.0, title, look, folder / "quality_ruler.png"))
    for task in dict.fromkeys(row["task"] for row in scores if row["task"] not in whole):
        some = [row for row in scores if row["task"] == task]
        found.append(quality(some, 100.0, task, look, folder / f"quality_{task}.png"))
    for task in dict.fromkeys(task for task, _ in groups):
        some = {length: ways for (name, length), ways in sorted(groups.items()) if name == task}
        found.append(needles(some, task, folder / f"needles_{task}.png"))
    for (task, length), ways in groups.items():
        title, end = f"{task}, {length:,} tokens" if length else task, f"{task}_{length}.png"
        found.append(kl(ways, title, look, folder / f"kl_{end}"))
        found.append(churn(ways, title, look, folder / f"churn_{end}"))
    if held := retention.Retention.load(run.folder):
        found.append(retention.draw_retention(held, folder / "retention.png"))
    return [path for path in found if path is not None]


def quality(rows: list[dict], scale: float, title: str, look: dict, path: Path) -> Path:
    """Score by budget, a panel for each length; bars are the means' 95 % intervals.

    Args:
        rows: cells or rows of `overall`.   scale: what makes their means x100.   look: of `styles`.
    """
    lengths = sorted({row["length"] for row in rows})
    figure, panels = figure_of(len(lengths), min(len(lengths), PANELS), 3.6, 3.2, 0.5, sharey=True)
    names = [name for name in look if any(row["policy"] == name for row in rows)]
    left = 100 * min(row["share"] for row in rows) / 1.5
    handles = {}
    for axes, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        for place, name in enumerate(names):
            some = sorted((row for row in here if row["policy"] == name), key=lambda row: row["share"])
            if not some:
                continue
            # Side by side, so that bars of the same budget don't hide each other.
            side = 1.0 if name == FULL else 1.025 ** (place - len(names) / 2)
            x, y = [100 * row["share"] * side for row in some], [scale * row["mean"] for row in some]
            bars = [
                [0.0 if row[end] is None else scale * abs(row["mean"] - row[end]) for row in some]
                for end in ("low", "high")
            ]
            handles[name] = axes.errorbar(x, y, bars, capsize=2.5, markersize=5, linewidth=1.2, **look[name])
            if name == FULL:
                axes.axhline(y[0], color="black", linestyle=":", linewidth=0.8)
        counts = sorted({row["n"] for row in here})
        n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        axes.set_title(f"{length:,} tokens, {n}" if length else n, fontsize="medium")
        if any(row["grey"] for row in here):
            axes.set_facecolor("#e8e8e8")
            note = f"full below {100 * LEAST_FULL:.0f}: tells no policies apart"
            axes.text(0.5, 0.97, note, transform=axes.transAxes, ha="center", va="top", fontsize="small")
        axes.set(xscale="log", xlabel="cache held, % of the prompt", xlim=(left, 135), ylim=(-3, 103))
        ticks = [tick for tick in TICKS if tick >= left]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("score x100")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize="small")
    return saved(figure, title, path)


def needles(by_length: dict[int, dict[Way, dict[str, Line]]], task: str, path: Path) -> Path | None:
    """Score x100 by length and depth, a panel for each way; None where no line says how deep its needle lies."""
    found: dict[Way, dict[tuple[int, int], list[float]]] = {}
    for length, ways in by_length.items():
        for way, lines in ways.items():
            for line in lines.values():
                for depth, value in _depths(line):
                    found.setdefault(way, {}).setdefault((round(10 * depth), length), []).append(value)
    depths = sorted({depth for cells in found.values() for depth, _ in cells})
    if len(depths) < 2:
        return None
    lengths = sorted(by_length)
    width, height = max(1.7, 0.55 * len(lengths) + 0.3), 0.19 * len(depths) + 0.5
    figure, panels = grid_of(found, width, height, 0.0, "length, tokens", "depth, %")
    for way, axes in panels.items():
        values = np.full((len(depths), len(lengths)), np.nan)
        for (depth, length), some in found[way].items():
            values[depths.index(depth), lengths.index(length)] = 100 * np.mean(some)
        # A map of even steps in lightness, so that grey shows the same.
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            text = "-" if math.isnan(value) else f"{value:.0f}"
            colour = "white" if value < 55 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axes.set_yticks(range(len(depths)), [str(10 * depth) for depth in depths])
    figure.colorbar(image, ax=list(figure.axes), label="score x100", aspect=40, fraction=0.03, pad=0.02)
    return saved(figure, f"{task}: score by depth and length", path)


def _depths(line: Line) -> list[tuple[float, float]]:
    """Pairs of a needle's depth and its score, both 0 to 1; none where one score counts for several depths."""
    depths = line.facts.get("depths") or []
    each = [(depth, line.measures.get(f"depth_{round(100 * depth)}")) for depth in depths]
    if each and all(value is not None for _, value in each):
        return each
    depth = line.facts.get("depth", depths[0] if len(depths) == 1 else None)
    return [] if depth is None or line.score is None else [(depth, line.score)]


def kl(ways: dict[Way, dict[str, Line]], title: str, look: dict, path: Path) -> Path | None:
    """KL to the full cache along the text, a panel for each way; None without series "kl" that are above 0."""
    found = {way: rows for way, rows in _series(ways, "kl").items() if np.nanmax(rows) > 0}
    if not found:
        return None
    figure, panels = grid_of(found, 2.4, 1.6, 0.4, "token behind the prompt", "KL, nats")
    for way, axes in panels.items():
        rows = np.where(found[way] > 0, found[way], np.nan)  # the first places are 0, which has no place on the axis
        some = rows[:, ~np.isnan(rows).all(axis=0)]
        places = np.flatnonzero(~np.isnan(rows).all(axis=0))
        colour, mean = look[way[0]]["color"], np.nanmean(some, axis=0)
        _band(axes, places, some, colour)
        axes.plot(places, mean, color=colour, linewidth=0.4, alpha=0.8)
        axes.plot(places, rolling_median(mean), color="black", linewidth=1.3)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.set_title(f"{axes.get_title()}, n = {len(rows)}", fontsize="small")
    what = "coloured line: mean; black: its rolling median; band: middle half of the samples"
    figure.supxlabel(what, fontsize="small")
    return saved(figure, f"{title}: KL to the full cache", path)


def churn(ways: dict[Way, dict[str, Line]], title: str, look: dict, path: Path) -> Path | None:
    """Churn of the best-ranked set along the text, by raw scores and by the smoothed ones; None without such series."""
    raw, smooth = _series(ways, "churn_raw"), _series(ways, "churn_ema")
    found = {way: (raw.get(way), smooth.get(way)) for way in ways if way in raw or way in smooth}
    if not found:
        return None
    figure, panels = grid_of(found, 2.4, 1.6, 0.4, "score behind the prompt", "churn, share")
    for way, axes in panels.items():
        for rows, colour, line in zip(found[way], ("#555555", look[way[0]]["color"]), ("--", "-"), strict=True):
            if rows is not None:
                places = np.arange(rows.shape[1])
                _band(axes, places, rows, colour)
                axes.plot(places, rolling_median(np.nanmean(rows, axis=0)), line, color=colour, linewidth=1.5)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
        n = max(len(rows) for rows in found[way] if rows is not None)
        axes.set_title(f"{axes.get_title()}, n = {n}", fontsize="small")
    what = "rolling medians of the means; dashed: raw scores, solid: smoothed; band: middle half of the samples"
    figure.supxlabel(what, fontsize="small")
    return saved(figure, f"{title}: churn of the best-ranked set (1 - Jaccard)", path)


def _series(ways: dict[Way, dict[str, Line]], name: str) -> dict[Way, np.ndarray]:
    """Samples [n, places] of each way that has such a series."""
    found = {
        way: [line.series[name] for line in lines.values() if line.series.get(name)] for way, lines in ways.items()
    }
    return {way: stacked(rows) for way, rows in found.items() if rows}


def _band(axes, places: np.ndarray, rows: np.ndarray, colour: str) -> None:
    """The middle half of samples [n, places], smoothed as the line is."""
    low, high = (rolling_median(one) for one in np.nanpercentile(rows, (25, 75), axis=0))
    axes.fill_between(places, low, high, color=colour, alpha=0.25, linewidth=0)
