"""`python -m kvpatch.profiling.gpu_check`: whether kvpatch is right and fast on this machine's GPU, within minutes.

    python -m kvpatch.profiling.gpu_check --out gpu
    python -m kvpatch.profiling.gpu_check --out gpu --only checks
    python -m kvpatch.profiling.gpu_check --out gpu --only figures
    python -m kvpatch.profiling.gpu_check --out toy --device cpu --small

Nothing is downloaded: all models have random weights. Every result is in the folder before the next part begins:
checks.csv has a row for each part (ok, failed, skipped), figures.csv one for each number, roofline.png a picture.
"""

import faulthandler
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

GRACE = 120  # seconds after the end until a part that hangs is ended, with its stack on standard error
COLOURS = {"ok": "green", "failed": "red", "skipped": "yellow"}


def check(
    out: Annotated[Path, typer.Option(help="Folder that the rows are added to.")],
    device: Annotated[str, typer.Option(help="cuda or cpu; on a CPU kernels run in Triton's interpreter.")] = "cuda",
    small: Annotated[bool, typer.Option("--small", help="Toy sizes, without targets.")] = False,
    minutes: Annotated[float, typer.Option(help="Parts that would end later are skipped.", min=0.0)] = 8.0,
    only: Annotated[
        list[str] | None, typer.Option(help='Parts whose name holds this, "checks" for all but figures; repeatable.')
    ] = None,
    after: Annotated[str | None, typer.Option(hidden=True)] = None,
    failures: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Check a GPU: right numbers first, then speeds. Exit code 1 if a part failed.

    A target that is missed is told, and is no failure.
    """
    console = Console() if sys.stdout.isatty() else Console(width=150)
    _prepare(device, small)
    faulthandler.dump_traceback_later(60 * minutes + GRACE, exit=True, file=sys.__stderr__)
    try:
        code = _check(console, out, device, small, 60 * minutes, only or [], after, failures)
    finally:
        faulthandler.cancel_dump_traceback_later()
    raise typer.Exit(code)


def _prepare(device: str, small: bool) -> None:
    """What must be so before torch and triton are imported."""
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"must be cuda or cpu, got {device!r}", param_hint="--device")
    if device == "cpu":
        if not small:
            raise typer.BadParameter("a CPU takes days for the real sizes: add --small", param_hint="--device")
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
        return
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise typer.BadParameter(
            "TRITON_INTERPRET is set, which runs no kernel on a GPU: unset it", param_hint="--device"
        )
    import torch

    if not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here", param_hint="--device")


def _check(
    console: Console,
    out: Path,
    device: str,
    small: bool,
    seconds: float,
    only: list[str],
    after: str | None,
    failures: int,
) -> int:
    from kvpatch.profiling.parts import Deadline, Figure, Record, Runner

    deadline = Deadline(seconds)
    import torch

    from kvpatch.bench.record import provenance
    from kvpatch.profiling.models import Place

    place = Place(torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu"), small)
    name = torch.cuda.get_device_name(place.device) if place.cuda else provenance()["device"]
    try:
        record = Record(out, provenance() | {"device": name})
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error

    def say(part: str, status: str, detail: str, took: float) -> None:
        told = escape(detail if status == "failed" else detail[:400])
        console.print(f"[{COLOURS[status]}]{status:8}[/]{took:6.1f} s  {escape(part)}: {told}", highlight=False)

    def tell(one: Figure) -> None:
        value = "none" if one.value is None else f"{one.value:,.4g}"
        goal = f" ({one.target}: {one.met})" if one.met else ""
        console.print(f"  {escape(f'{one.name}: {value} {one.unit}{goal}; {one.detail}')}", highlight=False)

    runner = Runner(record, deadline, say, tell, lambda: healthy(place), place.tidy, targets=not small)
    runner.failures = failures
    parts = chosen(all_parts(place, deadline), only, after)
    console.print(f"{name}, {len(parts)} part(s), {seconds / 60:.1f} minutes", highlight=False)
    left = runner.run(parts)
    if left:
        _start_anew(console, out, device, small, deadline.left, only, left, parts, runner.failures)
    _summary(console, record, name, out)
    return 1 if runner.failures else 0


def all_parts(place, deadline) -> list:
    """Every part, the most important first."""
    from kvpatch.profiling import (
        kernel_checks,
        kernel_figures,
        loop_checks,
        model_figures,
        model_runs,
        operator_checks,
        runner_checks,
    )

    ceiling = kernel_figures.Ceiling(place)
    bench = model_runs.Bench(place, ceiling, deadline)
    return [
        *kernel_checks.parts(place),
        *loop_checks.parts(place),
        *runner_checks.parts(place),
        *kernel_figures.parts(place, ceiling),
        *model_figures.parts(bench),
        *operator_checks.parts(place),
        *kernel_figures.more_parts(place, ceiling),
        *model_figures.more_parts(bench),
        *loop_checks.more_parts(place),
        *kernel_checks.more_parts(place),
    ]


def chosen(parts: list, only: list[str], after: str | None = None) -> list:
    """Those whose name holds one of the texts, all without any; behind the one of the name `after`.

    Raises:
        typer.BadParameter: if none is left by the texts.
    """

    def wanted(name: str) -> bool:
        return any(text in name or (text == "checks" and not name.startswith("figures")) for text in only)

    found = [part for part in parts if not only or wanted(part.name)]
    if not found:
        names = "\n".join(part.name for part in parts)
        raise typer.BadParameter(f"no part's name holds {' or '.join(map(repr, only))}; there are\n{names}")
    names = [part.name for part in found]
    return found[names.index(after) + 1 :] if after in names else found


def healthy(place) -> bool:
    """Whether the device still computes: after a bad memory access no call of this process ever does."""
    import torch

    try:
        return torch.ones(2, device=place.device).sum().item() == 2.0
    except RuntimeError:
        return False


def _start_anew(console, out, device, small, seconds, only, left, parts, failures) -> None:
    """Become a new process, which goes on behind the part that broke the device for this one."""
    broken = parts[len(parts) - len(left) - 1].name
    console.print(f"[red]the device answers no more after {escape(repr(broken))}: a new process goes on[/]")
    arguments = ["--out", str(out), "--device", device, "--minutes", f"{max(0.0, seconds / 60):.3f}"]
    arguments += ["--small"] if small else []
    for text in only:
        arguments += ["--only", text]
    arguments += ["--after", broken, "--failures", str(failures)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvpatch.profiling.gpu_check", *arguments])


def _summary(console: Console, record, device: str, out: Path) -> None:
    """Tables of the last row of every name of this device, and a short one last."""
    from kvpatch.bench.record import read_rows
    from kvpatch.profiling import roofline

    checks, figures = (
        {row["name"]: row for row in read_rows(path) if row["device"] == device}
        for path in (record.checks, record.figures)
    )
    table = Table("figure", title="Figures")
    for column in ("value", "unit", "target", "met"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    for name, row in figures.items():
        style = {"yes": "green", "no": "red"}.get(row["met"])
        table.add_row(escape(name), row["value"], row["unit"], row["target"], row["met"], style=style)
    console.print(table)
    for status in ("skipped", "failed"):
        for name, row in checks.items():
            if row["status"] == status:
                last = row["detail"].splitlines()[-1] if row["detail"] else ""
                console.print(f"[{COLOURS[status]}]{status}[/] {escape(name)}: {escape(last)}", highlight=False)
    try:
        drawn = roofline.draw(list(figures.values()), out / "roofline.png")
    except ModuleNotFoundError:
        drawn = False
    counts = [sum(row["status"] == status for row in checks.values()) for status in COLOURS]
    met = [sum(row["met"] == word for row in figures.values()) for word in ("yes", "no")]
    short = Table(*COLOURS, "figures", "targets met", "targets missed", "roofline.png", title=f"Summary: {device}")
    short.add_row(*map(str, (*counts, len(figures), *met)), "drawn" if drawn else "not drawn")
    console.print(short)


def main() -> None:
    """Entry point: exit code 0, 1 if a part failed, 2 for bad usage."""
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command()(check)
    app()


if __name__ == "__main__":
    main()
