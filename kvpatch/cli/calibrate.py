"""`kvpatch calibrate`: find the policy "best" for a model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvpatch.cli import _shared
from kvpatch.cli._shared import Dtype, Model, Threads


def calibrate(
    model: Model = "demo",
    length: Annotated[int, typer.Option(help="Tokens of each prompt.", min=256)] = 1024,
    prompts: Annotated[int, typer.Option(help="Prompts whose attention is read.", min=8)] = 32,
    tries: Annotated[int, typer.Option(help="Prompts that every candidate answers.", min=8)] = 32,
    texts: Annotated[int, typer.Option(help="Prose texts that the best candidates are fed.", min=1)] = 16,
    batch: Annotated[int, typer.Option(help="Prompts that are decoded together.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Of the first prompt.")] = 50_000,
    dtype: Dtype = "auto",
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="File of the profile; else in the user's cache folder.")] = None,
) -> None:
    """Find the heads that copy from the context, and the share of the budget that goes by them.

    Needs no data: prompts hide facts in prose that Python carries. `kvpatch.patch(model, "best", budget=...)` takes the
    profile from then on.

    [bold]Example[/]: kvpatch calibrate --model path/to/checkpoint
    """
    with _shared.told():
        kind, tokenizer = _shared.load(model, dtype, threads)
        _calibrate(kind, tokenizer, (prompts, tries, texts, length, batch), seed, out)


def _calibrate(model, tokenizer, effort: tuple[int, int, int, int, int], seed: int, out: Path | None) -> None:
    from kvpatch import best
    from kvpatch.calibration.choice import NEEDLE_BUDGETS, PROSE_BUDGETS, Effort, calibrate

    prompts, tries, texts, length, batch = effort
    console = Console()
    bars = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*bars, TimeRemainingColumn(), console=console) as progress:
        stages: dict = {}

        def tick(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = progress.add_task(stage)
            progress.update(stages[stage], completed=done, total=total)

        chosen = Effort(observed=prompts, tried=tries, texts=texts, length=length, batch=batch)
        profile = calibrate(model, tokenizer, chosen, seed, tick)
    found = profile.measured
    kinds = (*(f"needles {x:.0%}" for x in NEEDLE_BUDGETS), *(f"KL {x:.0%}" for x in PROSE_BUDGETS))
    table = Table("heads", "share", "focus", *kinds)
    for row in (found["fallback"], *found["tried"]):
        mark = "*" if (row["kept"], row["nats"]) == (found["chosen"]["kept"], found["chosen"]["nats"]) else ""
        numbers = (*(f"{x:.0%}" for x in row["kept"]), *(f"{x:.3f}" for x in row["nats"]))
        table.add_row(
            f"{row.get('heads', best.FALLBACK)}{mark}", f"{row.get('share', '')}", f"{row.get('focus', '')}", *numbers
        )
    console.print(table)
    console.print(f"{found['solved']} of {found['prompts']} prompts are answered with the full cache", highlight=False)
    if profile.policy.blend is None:
        console.print(f"no blend keeps more than {best.FALLBACK!r}: the profile holds that policy")
    path = out or best.user_folder() / best.file_name(model)
    profile.write(path)
    console.print(f"profile: {path}", highlight=False, soft_wrap=True)
