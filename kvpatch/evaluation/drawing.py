"""What a run's pictures share: how a policy looks, panels, and files of few bytes."""

import io
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import kvpatch
from kvpatch.evaluation.summary import FULL

DPI, PALETTE = 150, 256
# Okabe and Ito's, told apart by the colour-blind; markers and lines go with them, for a print in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
MARKERS = "osD^vPX"
LINES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)), (0, (3, 3)))
PANELS = 4  # beside each other

Way = tuple[str, str]  # policy, budget


def styles(policies: Iterable[str]) -> dict[str, dict]:
    """How each policy is drawn: the full cache black, a preset the same in every run, others with what is left.

    With more policies than colours two have the same one, and another marker and line.
    """
    names = list(dict.fromkeys(policies))
    presets = [name for name in kvpatch.list_policies() if name != FULL]
    places = {name: presets.index(name) for name in names if name in presets}
    free = [place for place in range(len(COLOURS)) if place not in {one % len(COLOURS) for one in places.values()}]
    others = [name for name in names if name not in places and name != FULL]
    places |= {name: free[at] if at < len(free) else at for at, name in enumerate(others)}
    found = {FULL: {"color": "black", "marker": "*", "linestyle": ":"}} if FULL in names else {}
    looks: set[tuple[int, int]] = set()
    for name, place in places.items():  # presets first: what stands beside them changes nothing of theirs
        colour = place % len(COLOURS)
        shape = (colour + 3 * (place // len(COLOURS) if name in presets else 0)) % len(MARKERS)
        for _ in MARKERS:
            if (colour, shape) not in looks:
                break
            shape = (shape + 3) % len(MARKERS)
        looks.add((colour, shape))
        found[name] = {"color": COLOURS[colour], "marker": MARKERS[shape], "linestyle": LINES[shape]}
    return found


def figure_of(panels: int, columns: int, width: float = 1.0, height: float = 1.0, legend: float = 0.0, **shared):
    """A figure with so many panels, each width x height inches, and their axes [panels].

    Args:
        legend: inches below, for a legend.
        shared: of matplotlib's `subplots`.

    Raises:
        ModuleNotFoundError: without matplotlib, naming the extra that brings it.
    """
    try:
        # No pyplot: it would keep state, and may look for a screen.
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('plots need matplotlib: pip install "kvpatch[plot]"', name=error.name) from error
    rows = math.ceil(panels / columns)
    figure = Figure((width * columns + 0.6, height * rows + 0.5 + legend), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared).ravel()[:panels]


def grid_of(ways: Iterable[Way], width: float, height: float, legend: float, x: str, y: str):
    """A figure with a panel for each way, a row for each policy if there are several budgets.

    Args:
        width, height, legend: as `figure_of`.
        x, y: labels of the outer axes.

    Returns:
        The figure, and its axes by way.
    """
    ways = list(ways)
    budgets = list(dict.fromkeys(budget for _, budget in ways if budget != FULL))
    if 2 <= len(budgets) <= PANELS:
        columns, slots = len(budgets), []
        for policy in dict.fromkeys(policy for policy, _ in ways):
            row = [FULL] + [None] * (columns - 1) if (policy, FULL) in ways else budgets
            slots += [(policy, budget) if (policy, budget) in ways else None for budget in row]
    else:
        columns, slots = min(len(ways), PANELS), ways
    figure, panels = figure_of(len(slots), columns, width, height, legend, sharex=True, sharey=True)
    for unused in figure.axes[len(slots) :]:
        unused.set_axis_off()
    found = {}
    for place, (axes, way) in enumerate(zip(panels, slots, strict=True)):
        if way is None:
            axes.set_axis_off()
            continue
        found[way] = axes
        axes.tick_params(labelsize=7)
        axes.set_title(named(way), fontsize="small")
        if place + columns >= len(slots) or slots[place + columns] is None:
            axes.set_xlabel(x, fontsize="small")
            axes.tick_params(labelbottom=True)
        if place % columns == 0:
            axes.set_ylabel(y, fontsize="small")
    return figure, found


def saved(figure, title: str, path: Path) -> Path:
    """Write a figure with its title as a PNG of few colours, which takes a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    figure.suptitle(title, fontsize="medium")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI)
    image = Image.open(drawn).convert("RGB").quantize(PALETTE, method=Image.Quantize.MAXCOVERAGE)
    image.save(path, optimize=True, dpi=(DPI, DPI))
    return path


def named(way: Way) -> str:
    """A policy with its budget, if it has one."""
    policy, budget = way
    return policy if budget == FULL else f"{policy}, {budget}"


def stacked(rows: list[list[float]]) -> np.ndarray:
    """[n, places], NaN behind a shorter row's end."""
    found = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found


def rolling_median(values: np.ndarray) -> np.ndarray:
    """[places]: median of a sixteenth of all places around each, at least of five; fewer at the ends."""
    width = max(5, len(values) // 16) | 1
    padded = np.pad(np.asarray(values, dtype=np.float64), width // 2, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, width), axis=-1)
