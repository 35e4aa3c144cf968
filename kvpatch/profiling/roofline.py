"""The picture of what was measured: bytes that a step must move against the rate at which it did."""

from pathlib import Path

from kvpatch.bench.report import MARKERS

CEILING, RATE = "copy bandwidth", ": rate"


def points(rows: list[dict[str, str]]) -> tuple[dict[str, list[tuple[float, float]]], float | None]:
    """Rates in GB/s over bytes a step, by kind of step, and the ceiling, from the rows of figures.csv.

    Of rows of one name the last one counts.
    """
    last = {row["name"]: row for row in rows if row["unit"] == "GB/s" and row["value"]}
    ceiling = last.get(CEILING)
    found: dict[str, list[tuple[float, float]]] = {}
    for name, row in last.items():
        if row["bytes"]:
            words = name.split(", ")
            # Of a model's row its way to decode too.
            kind = f"{words[0]}, {words[-1].removesuffix(RATE)}" if name.endswith(RATE) else words[0]
            found.setdefault(kind, []).append((float(row["bytes"]), float(row["value"])))
    return {kind: sorted(some) for kind, some in found.items()}, None if ceiling is None else float(ceiling["value"])


def draw(rows: list[dict[str, str]], path: Path) -> bool:
    """Draw the rows of one device; whether there was anything to draw.

    Raises:
        ModuleNotFoundError: without matplotlib.
    """
    found, ceiling = points(rows)
    if not found:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.style.use("tableau-colorblind10")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (kind, some) in enumerate(found.items()):
        axes.plot(*zip(*some, strict=True), marker=MARKERS[index % len(MARKERS)], linestyle="none", label=kind)
    if ceiling is not None:
        axes.axhline(ceiling, color="black", label=f"large copy, {ceiling:,.0f} GB/s")
    axes.set(xlabel="bytes that a step must move", ylabel="achieved GB/s", xscale="log", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
