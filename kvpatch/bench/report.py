"""What a person sees of a benchmark: a table, plots, and which rows are refused."""

from pathlib import Path

from rich.console import Console
from rich.table import Table


def label(row: dict) -> str:
    """A variant with its budget."""
    return row["variant"] + (f" {row['budget']}" if row["budget"] else "")


def _ratio(value) -> str:
    return f"{float(value):.2f}x" if value not in (None, "") else ""


DECODE = ("ms a step", "p20-p80", "tok/s", "over static", "over dynamic", "GB/s", "of stream")
CALL = ("first token ms", "prefill tok/s", "whole tok/s", "cache MiB", "process MiB", "compile s", "pays after")


def show(console: Console, rows: list[dict]) -> None:
    """Two tables for each setting, of steps and of whole calls, and what disturbed the rows that are refused."""
    cells = dict.fromkeys((row["batch"], row["prompt"], row["dtype"], row["threads"]) for row in rows)
    for cell in cells:
        batch, prompt, dtype, threads = cell
        where = f"batch {batch}, prompt {prompt:,}, {dtype}, {threads} thread(s)"
        some = [row for row in rows if (row["batch"], row["prompt"], row["dtype"], row["threads"]) == cell]
        for name, columns, values in (("Decode steps", DECODE, _decode), ("Whole calls", CALL, _call)):
            table = Table("way", title=f"{name}: {where}")
            for column in columns:
                table.add_column(column, justify="right")
            for row in some:
                mark = " (refused)" if row["refused"] else ""
                table.add_row(label(row) + mark, *values(row), style="red" if row["refused"] else None)
            console.print(table)
        for row in some:
            if row["refused"]:
                spread = f" {row['spread']:.2f} (p80 / p20); {row['disturbance']}" if row["disturbance"] else ""
                console.print(f"[red]refused[/] {label(row)}: {row['refused']}{spread}")


def _decode(row: dict) -> tuple[str, ...]:
    return (
        f"{row['p50_ms']:.1f}",
        f"{row['p20_ms']:.1f}-{row['p80_ms']:.1f}",
        f"{row['decode_tok_per_s']:.1f}",
        _ratio(row["paired_over_static"]),
        _ratio(row["paired_over_dynamic"]),
        f"{row['gb_per_s']:.1f}",
        f"{row['share_of_stream']:.2f}",
    )


def _call(row: dict) -> tuple[str, ...]:
    even, process = row["break_even_tokens"], row["peak_process_bytes"]
    return (
        f"{row['first_token_ms']:,.0f}",
        f"{row['prefill_tok_per_s']:,.0f}",
        f"{row['whole_tok_per_s']:.1f}",
        f"{row['peak_cache_bytes'] / 2**20:,.1f}",
        "" if process is None else f"{process / 2**20:,.0f}",
        f"{row['compile_seconds']:.1f}",
        "" if even is None else f"{even:,.0f} tok",
    )


MARKERS = "osD^vP*X"


def plot(rows: list[dict], folder: Path) -> list[Path]:
    """Draw what the rows allow: speed by batch and by budget, a step by length, and the roofline. Returns the files.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use("tableau-colorblind10")
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    axes_of = {
        "batch": ("batch", "rows a batch", "decode_tok_per_s", "decoded tokens a second"),
        "length": ("prompt", "tokens of the prompt", "p50_ms", "ms a step (median)"),
        "budget": ("held", "tokens held a row", "decode_tok_per_s", "decoded tokens a second"),
    }
    for name, (x, x_label, y, y_label) in axes_of.items():
        by = (lambda row: row["variant"]) if name == "budget" else label
        lines = _lines(rows, by, x, y, ("batch", "prompt", "dtype", "threads"), x)
        if lines:
            made.append(_draw(pyplot, lines, x_label, y_label, folder / f"{name}.png"))
    made.append(_roofline(pyplot, rows, folder / "roofline.png"))
    return made


def _lines(rows, by, x: str, y: str, fixed: tuple[str, ...], varied: str) -> dict[str, list[tuple[float, float]]]:
    """Points of each line that has two or more, in settings that differ in `varied` only."""
    lines: dict[str, dict[float, float]] = {}
    settings = [name for name in fixed if name != varied]
    several = [name for name in settings if len({row[name] for row in rows}) > 1]
    for row in rows:
        name = ", ".join([by(row), *(f"{setting} {row[setting]}" for setting in several)])
        lines.setdefault(name, {})[float(row[x])] = float(row[y])
    return {name: sorted(points.items()) for name, points in lines.items() if len(points) > 1}


def _draw(pyplot, lines, x_label: str, y_label: str, path: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (name, points) in enumerate(lines.items()):
        axes.plot(*zip(*points, strict=True), marker=MARKERS[index % len(MARKERS)], label=name)
    axes.set(xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _roofline(pyplot, rows, path: Path) -> Path:
    """Tokens a second against tokens that one pass over a step's bytes serves; the roof is the streaming read."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        served = row["batch"] / row["bytes_per_step"] * 1e9  # tokens a GB
        points.setdefault(label(row), []).append((served, row["decode_tok_per_s"]))
    for index, (name, some) in enumerate(points.items()):
        axes.plot(*zip(*sorted(some), strict=True), marker=MARKERS[index % len(MARKERS)], linestyle=":", label=name)
    edge = sorted(served for some in points.values() for served, _ in some)
    roof = max(row["stream_gb_per_s"] for row in rows)
    ends = [edge[0], edge[-1]] if edge[0] < edge[-1] else [0.5 * edge[0], 2 * edge[0]]
    axes.plot(ends, [roof * served for served in ends], color="black", label=f"streaming read, {roof:.1f} GB/s")
    axes.set(xlabel="tokens made of each GB that a step must read", ylabel="decoded tokens a second")
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
