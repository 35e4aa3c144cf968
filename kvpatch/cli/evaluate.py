"""`kvpatch eval`: does the text survive? Tasks, policies and budgets in one run that can be taken up again."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvpatch.cli import _shared

INTERRUPTED = 130


def evaluate(
    config: Annotated[Path | None, typer.Option(help="YAML file of keys; options given here win.")] = None,
    model: Annotated[str | None, typer.Option(help='Folder or hub name, or "demo" (the default).')] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="ruler, niah, needlebench, wordings, later, longbench, longbench-v2, fidelity, stability, or "
            "names of single tasks, by commas."
        ),
    ] = None,
    policies: Annotated[str | None, typer.Option(help="Policies, by commas; include full.")] = None,
    budgets: Annotated[str | None, typer.Option(help='Budgets of those that evict: "10%,5%,128".')] = None,
    lengths: Annotated[str | None, typer.Option(help="Tokens of prompt and answer together.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples of each task and length.", min=1)] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts that are decoded together.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of local datasets (LongBench, SQuAD, ...).")] = None,
    haystack: Annotated[str | None, typer.Option(help="Text file in place of the built-in prose.")] = None,
    template: Annotated[
        bool | None, typer.Option("--template/--no-template", help="The tokenizer's chat template around prompts.")
    ] = None,
    forced: Annotated[int | None, typer.Option(help="Tokens fed in fidelity and stability.", min=8)] = None,
    min_budget: Annotated[int | None, typer.Option(help="Least tokens of a budget that is a share.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Compile decode steps.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder of the run.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Show what would run and how long it would take.")] = False,
) -> None:
    """Evaluate policies on tasks with answers, and against the full cache without any.

    Every prompt is read once, and each policy cuts a copy. Finished samples are never run again: start the same
    command to go on with a run that was stopped.

    [bold]Examples[/]:

    kvpatch eval --task niah --policies full,inertia,tova --budgets 10%,5% --samples 11

    kvpatch eval --task ruler,fidelity --lengths 1024,2048 --budgets 10% --out runs/ruler

    kvpatch eval --config run.yaml --samples 50
    """
    with _shared.told():
        settings = _settings(config, locals())
        kind, tokenizer = _shared.load(settings.model, settings.dtype, settings.threads)
        _evaluate(settings, kind, tokenizer, dry_run)


def _settings(path: Path | None, given: dict):
    from kvpatch.evaluation.config import Config, read_yaml

    keys = {"task": "tasks", "policies": "policies", "budgets": "budgets", "lengths": "lengths"}
    values = {}
    for option, value in given.items():
        if option in ("config", "dry_run") or value is None:
            continue
        if option in keys:
            value = [word.strip() for word in value.split(",") if word.strip()]
            if option == "lengths":
                try:
                    value = [int(word) for word in value]
                except ValueError:
                    raise ValueError(f"lengths must be whole numbers by commas, got {','.join(value)!r}") from None
        values[keys.get(option, option)] = value
    return Config.of({**(read_yaml(path) if path else {}), **values}, str(path or "the command line"))


def _evaluate(settings, model, tokenizer, dry_run: bool) -> None:
    import kvpatch
    from kvpatch.evaluation.runner import Evaluation

    console = Console()
    handle = kvpatch.patch(model, "full", compile=settings.compile)
    evaluation = Evaluation(settings, handle, tokenizer)
    plan = evaluation.plan()
    for note in evaluation.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    for cell in plan.refused:
        console.print(
            f"[yellow]left out[/]: {cell['task']} at {cell['length']}: {escape(cell['reason'])}", soft_wrap=True
        )
    if plan.found:
        console.print(f"{plan.found:,} predictions are there already")
    if not plan.jobs and not plan.found:
        raise ValueError("nothing can be run: every task was left out, for the reasons above")
    if plan.jobs:
        pace = evaluation.pace(plan)
        count = sum(len(job.samples) * len(job.ways) for job in plan.jobs)
        seconds = plan.seconds(pace) + pace.compiling * len(plan.policies)
        console.print(f"{count:,} predictions to make, about {_duration(seconds)}", highlight=False)
        if dry_run:
            return
        try:
            _run(evaluation, plan, pace, console)
        except KeyboardInterrupt:
            console.print(f"stopped; every finished sample is in {settings.out}: the same command goes on from there")
            raise typer.Exit(INTERRUPTED) from None
    _close(evaluation, plan, console)


def _run(evaluation, plan, pace, console: Console) -> None:
    bars = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*bars, TimeRemainingColumn(), console=console) as progress:
        bar, reading = progress.add_task("", total=plan.seconds(pace)), {}

        def tick(job, way) -> None:
            if way is None:
                progress.update(bar, description=f"{job.task} {job.samples[0].length}: reading")
                reading["seconds"] = pace.of(job)
                return
            progress.update(bar, description=f"{job.task} {job.samples[0].length}: {way.name} {way.text}")
            progress.advance(bar, pace.of(job, way) + reading.pop("seconds", 0.0))

        evaluation.execute(plan, tick)


def _close(evaluation, plan, console: Console) -> None:
    from kvpatch.evaluation import plots, report, tables

    metrics, drawn = evaluation.finish(plan), []
    merged = tables.alone(evaluation.run, metrics)
    with contextlib.suppress(ModuleNotFoundError):
        drawn = plots.draw_all(evaluation.run, metrics, merged.lines)
    report.write(evaluation.run, merged, drawn)
    report.show(console, tables.tables_of(merged), merged.replaced)
    seconds = metrics["seconds"]
    console.print(
        f"prompts were read in {_duration(seconds['read'])}; reading them for every policy again would have taken "
        f"{_duration(seconds['saved'])} more",
        highlight=False,
    )
    console.print(f"predictions, metrics, plots and report.html: {evaluation.run.folder}", highlight=False)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
