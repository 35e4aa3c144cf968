"""A run's pictures: quality by budget, needles by depth, and how it goes along the text.

A policy looks the same in all of them: its colour (Okabe and Ito's, told apart by the colour-blind), marker and line
style, so that a print in grey can be read too.
"""

import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import kvpatch
from kvpatch.evaluation import retention
from kvpatch.evaluation.runs import Line, Run
from kvpatch.evaluation.summary import FULL, LEAST_FULL, SCORE, grouped

DPI, PALETTE = 150, 64
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 3)))
TICKS = (1, 2, 5, 10, 20, 50, 100)  # per cent of the prompt
PANELS = 4  # beside each other

Way = tuple[str, str]  # policy, budget


def draw_all(run: Run, metrics: dict, lines: Iterable[Line]) -> list[Path]:
    """Every picture that the lines allow, as PNG files in the run's folder `plots`.

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
        few = sorted({len(row["tasks"]) for row in metrics["overall"]})
        title = f"RULER, mean of {' or '.join(map(str, few))} task(s)"
        found.append(quality(metrics["overall"], 1.0, title, look, folder / "quality_ruler.png"))
    for task in dict.fromkeys(row["task"] for row in scores if row["task"] not in whole):
        some = [row for row in scores if row["task"] == task]
        found.append(quality(some, 100.0, task, look, folder / f"quality_{task}.png"))
    for task in dict.fromkeys(task for task, _ in groups):
        some = {length: ways for (name, length), ways in groups.items() if name == task}
        found.append(needles(some, task, folder / f"needles_{task}.png"))
    for (task, length), ways in groups.items():
        title, end = f"{task}, {length:,} tokens" if length else task, f"{task}_{length}.png"
        found.append(along(ways, ("kl",), title, look, folder / f"kl_{end}"))
        found.append(along(ways, ("churn_raw", "churn_ema"), title, look, folder / f"churn_{end}"))
    if held := retention.Retention.load(run.folder):
        found.append(retention.draw_retention(held, folder / "retention.png"))
    return [path for path in found if path is not None]


def styles(policies: Iterable[str]) -> dict[str, dict]:
    """How each policy is drawn: the full cache black, a preset the same in every run, others with what is left."""
    names = list(dict.fromkeys(policies))
    presets = [name for name in kvpatch.list_policies() if name != FULL]
    taken = {name: presets.index(name) for name in names if name in presets}
    free = [place for place in range(len(COLOURS)) if place not in {one % len(COLOURS) for one in taken.values()}]
    others = [name for name in names if name not in taken and name != FULL]
    taken |= {name: free[at] if at < len(free) else at for at, name in enumerate(others)}
    # Beyond the colours a marker of another place tells two policies of one colour apart.
    found = {FULL: {"color": "black", "marker": "*", "linestyle": ":"}}
    for at, (name, place) in enumerate(taken.items()):
        clash = any(place % len(COLOURS) == other % len(COLOURS) for other in list(taken.values())[:at])
        shape = (place + 3 * clash) % len(MARKERS)
        found[name] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[shape], "linestyle": LINES[shape]}
    return found


def quality(rows: list[dict], scale: float, title: str, look: dict, path: Path) -> Path:
    """Score by budget, a panel for each length; bars are the means' 95 % intervals."""
    lengths = sorted({row["length"] for row in rows})
    figure, panels = figure_of(len(lengths), min(len(lengths), PANELS), 3.6, 3.2, legend=0.5, sharey=True)
    names = [name for name in look if any(row["policy"] == name for row in rows)]
    least = min(row["share"] for row in rows)
    for axes, length in zip(panels, lengths, strict=False):
        here = [row for row in rows if row["length"] == length]
        for place, name in enumerate(names):
            some = sorted((row for row in here if row["policy"] == name), key=lambda row: row["share"])
            # Side by side, so that bars of the same budget don't hide each other.
            side = 1.0 if name == FULL else 1.04 ** (place - len(names) / 2)
            x = [100 * row["share"] * side for row in some]
            y = [scale * row["mean"] for row in some]
            low, high = ([scale * (row[end] if row[end] is not None else row["mean"]) for row in some] for end in ENDS)
            bars = [np.subtract(y, low), np.subtract(high, y)]
            axes.errorbar(x, y, bars, capsize=2.5, markersize=5, linewidth=1.2, label=name, **look[name])
            if name == FULL and some:
                axes.axhline(y[0], **{**look[name], "marker": None}, linewidth=0.8)
        counts = sorted({row["n"] for row in here})
        n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
        dim = any(row["grey"] for row in here)
        axes.set_title(f"{length:,} tokens, {n}" if length else n, fontsize="medium")
        if dim:
            axes.set_facecolor("#e8e8e8")
            axes.text(0.5, 0.97, f"full below {100 * LEAST_FULL:.0f}", transform=axes.transAxes, ha="center", va="top")
        axes.set(xscale="log", xlabel="cache held, % of the prompt", ylim=(-3, 103))
        axes.set_xlim(100 * least / 1.5, 135)
        ticks = [tick for tick in TICKS if tick >= 100 * least / 1.5]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("score x100")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize="small")
    return saved(figure, title, path)


ENDS = ("low", "high")


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
    columns = min(len(found), PANELS)
    width = max(1.7, 0.55 * len(lengths) + 0.6)
    figure, panels = figure_of(len(found), columns, width, 0.24 * len(depths) + 0.7, sharey=True, sharex=True)
    for place, (axes, (way, cells)) in enumerate(zip(panels, found.items(), strict=False)):
        values = np.full((len(depths), len(lengths)), np.nan)
        for (depth, length), some in cells.items():
            values[depths.index(depth), lengths.index(length)] = 100 * np.mean(some)
        # Of even steps in lightness, so that grey shows the same.
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            text = "-" if math.isnan(value) else f"{value:.0f}"
            dark = not math.isnan(value) and value < 55
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        axes.set_title(_named(way), fontsize="small")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [str(10 * depth) for depth in depths], fontsize=7)
        if place >= len(found) - columns:
            axes.set_xlabel("length, tokens", fontsize="small")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel("depth, %", fontsize="small")
    figure.colorbar(image, ax=list(panels), label="score x100", shrink=0.8)
    return saved(figure, f"{task}: found by depth and length", path)


def _depths(line: Line) -> list[tuple[float, float]]:
    """Pairs of a needle's depth and its score, both 0 to 1; none where one score counts for several depths."""
    depths = line.facts.get("depths") or []
    each = [(depth, line.measures.get(f"depth_{round(100 * depth)}")) for depth in depths]
    if each and all(value is not None for _, value in each):
        return each
    depth = line.facts.get("depth", depths[0] if len(depths) == 1 else None)
    return [] if depth is None or line.score is None else [(depth, line.score)]


def along(ways: dict[Way, dict[str, Line]], names: tuple[str, ...], title: str, look: dict, path: Path) -> Path | None:
    """Series along the text, a panel for each way: mean, middle half of the samples, rolling median of the mean."""
    found = {}
    for way, lines in ways.items():
        series = [_stacked([line.series[name] for line in lines.values() if name in line.series]) for name in names]
        # The full cache is at no distance from itself.
        if any(one.size and np.nanmax(one) > 0 for one in series):
            found[way] = series
    if not found:
        return None
    columns, kl = min(len(found), PANELS), names == ("kl",)
    figure, panels = figure_of(len(found), columns, 2.3, 1.7, legend=0.35, sharey=True, sharex=True)
    for place, (axes, (way, series)) in enumerate(zip(panels, found.items(), strict=False)):
        for name, rows in zip(names, series, strict=True):
            if rows.size:
                colour = "#888888" if name == "churn_raw" else look[way[0]]["color"]
                _band(axes, rows, colour, "" if kl else name.replace("_", ", "))
        axes.set_title(f"{_named(way)}, n = {max(map(len, series))}", fontsize="small")
        axes.set_yscale("log" if kl else "linear")
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if place >= len(found) - columns:
            axes.set_xlabel("token behind the prompt", fontsize="small")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel("KL, nats" if kl else "churn, share", fontsize="small")
    if kl:
        medians = [np.median(np.nanmean(rows, axis=0)) for (rows,) in found.values()]
        panels[0].set_ylim(bottom=max(1e-5, min(medians) / 30))  # a step without loss would stretch the axis down
    else:
        panels[0].set_ylim(0, 1)
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower center", ncols=3, fontsize="small")
    what = "KL to the full cache" if kl else "churn of the kept set (1 - Jaccard) from one score to the next"
    return saved(figure, f"{title}: {what}", path)


def _band(axes, rows: np.ndarray, colour: str, name: str) -> None:
    """Samples [n, places] as mean, band and rolling median."""
    places, mean = np.arange(rows.shape[1]), np.nanmean(rows, axis=0)
    low, high = np.nanpercentile(rows, (25, 75), axis=0)
    what = f"{name}: " if name else ""
    axes.fill_between(places, low, high, color=colour, alpha=0.25, linewidth=0, label=f"{what}middle half")
    axes.plot(places, mean, color=colour, linewidth=0.5, alpha=0.7, label=f"{what}mean")
    style = "--" if name.endswith("raw") else "-"
    median = rolling_median(mean)
    axes.plot(places, median, color="black", linewidth=1.3, linestyle=style, label=f"{what}rolling median")


def rolling_median(values: np.ndarray) -> np.ndarray:
    """[places]: median of a sixteenth of all places around each, at least of five; ends repeat."""
    width = max(5, len(values) // 16) | 1
    padded = np.pad(values, width // 2, mode="edge")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)


def _stacked(rows: list[list[float]]) -> np.ndarray:
    """[n, places], NaN behind a shorter row's end."""
    found = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found


def _named(way: Way) -> str:
    policy, budget = way
    return policy if budget == FULL else f"{policy}, {budget}"


def figure_of(panels: int, columns: int, width: float = 1.0, height: float = 1.0, legend: float = 0.0, **shared):
    """A figure of so many panels, each width x height inches, and its axes in one row."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('plots need matplotlib: pip install "kvpatch[plot]"', name=error.name) from error
    rows = math.ceil(panels / columns)
    figure = Figure((width * columns + 0.6, height * rows + 0.5 + legend), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in axes[panels:]:
        unused.set_axis_off()
    return figure, axes[:panels]


def saved(figure, title: str, path: Path) -> Path:
    """Write a figure as a PNG of few colours; returns its path."""
    from PIL import Image  # comes with matplotlib

    figure.suptitle(title, fontsize="medium")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    # So many colours show no difference, and take a third of the bytes.
    image = Image.open(drawn).convert("RGB").quantize(PALETTE)
    image.save(path, optimize=True, dpi=(DPI, DPI))
    return path
