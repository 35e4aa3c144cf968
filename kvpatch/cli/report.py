"""`kvpatch report`: what runs of `kvpatch eval` come to, together."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvpatch.cli import _shared


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs.", metavar="DIR...")],
    markdown: Annotated[str | None, typer.Option(help='File for Markdown tables, "-" for standard output.')] = None,
    compare: Annotated[
        str | None, typer.Option(help='Two policies on the same samples, "best,inertia", in place of the tables.')
    ] = None,
    html: Annotated[bool, typer.Option(help="Write each run's plots and report.html anew.")] = False,
) -> None:
    """Merge runs of `kvpatch eval` into tables.

    Runs of one model, commit and configuration become one table; of what two of them ran, the newer counts.

    [bold]Examples[/]:

    kvpatch report runs/ruler runs/longer

    kvpatch report runs/ruler --markdown tables.md --html

    kvpatch report runs/best --compare best,inertia
    """
    with _shared.told():
        from kvpatch.evaluation import plots, report, tables
        from kvpatch.evaluation.runs import PREDICTIONS, Run

        for folder in folders:
            if not (folder / PREDICTIONS).is_file():
                raise typer.BadParameter(f"{folder} holds no run: it has no {PREDICTIONS}", param_hint="DIR")
        runs = [Run(folder) for folder in folders]
        found = tables.merge(runs)
        if html:
            for run in runs:
                own = found[0] if len(runs) == 1 else tables.merge([run])[0]
                drawn = plots.draw_all(run, own.metrics, own.lines)
                typer.echo(report.write(run, own, drawn))
        shown = [(_tables(merged, compare), merged.replaced) for merged in found]
        if markdown is None:
            for part, notes in shown:
                report.show(Console(), part, notes)
            return
        text = "\n".join(tables.markdown(part) + "".join(f"\n{note}\n" for note in notes) for part, notes in shown)
        if markdown == "-":
            typer.echo(text)
        else:
            Path(markdown).write_text(text, encoding="utf-8")


def _tables(merged, compare: str | None) -> list:
    from kvpatch.evaluation import comparing, tables

    if compare is None:
        return tables.tables_of(merged)
    names = [name.strip() for name in compare.split(",")]
    if len(names) != 2:
        raise typer.BadParameter(f"two policies by a comma, got {compare!r}", param_hint="--compare")
    return [comparing.comparison(merged, *names), *comparing.kept(merged)]
