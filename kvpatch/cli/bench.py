"""`kvpatch bench`: speed and memory of kvpatch beside plain transformers and peers, in one run."""

import contextlib
import importlib.util
import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvpatch.cli import _shared
from kvpatch.cli._shared import Model


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str, option: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"must be whole numbers >= 1 separated by commas, got {text!r}", param_hint=option)
    return numbers


def bench(
    model: Model = "demo",
    policies: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "inertia,inertia-lazy,score-free",
    budgets: Annotated[str, typer.Option(help='Budgets of the policies that evict: "10%,5%,1024".')] = "10%",
    batches: Annotated[str, typer.Option(help="Rows of a batch.")] = "1,8",
    prompt_lengths: Annotated[str, typer.Option(help="Tokens of each prompt.")] = "2048",
    dtypes: Annotated[str, typer.Option(help="float32, bfloat16, float16.")] = "float32",
    threads: Annotated[str | None, typer.Option(help="CPU threads; torch's own choice if left out.")] = None,
    baselines: Annotated[
        str, typer.Option(help='dynamic (plain generate), static (StaticCache + torch.compile), full; or "none".')
    ] = "dynamic,static,full",
    peer: Annotated[list[str] | None, typer.Option(help="Another project's released code: kvpress.")] = None,
    new_tokens: Annotated[int, typer.Option(help="New tokens of a call.", min=12)] = 96,
    slow_tokens: Annotated[int, typer.Option(help="Those of a way slower than --slow-over.", min=12)] = 24,
    slow_over: Annotated[float, typer.Option(help="Seconds a step from which a way is slow.")] = 1.0,
    skip: Annotated[int, typer.Option(help="First steps of a call that are left out.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Calls of each way, interleaved.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the first row's text.")] = 0,
    stream_gib: Annotated[float, typer.Option(help="Size of the streaming read.")] = 1.0,
    compile: Annotated[bool, typer.Option(help="Compile kvpatch's decode step.")] = True,
    out: Annotated[Path | None, typer.Option(help="CSV file that the rows are added to.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots (needs matplotlib).")] = None,
    strict: Annotated[bool, typer.Option(help="Exit 1 if a row is refused.")] = False,
) -> None:
    """Measure decoding, prefill and whole calls, interleaved with plain transformers in one process.

    Medians with 20th and 80th percentiles; bytes a step must move over a streaming read of the same run. A row whose
    steps spread too widely is marked refused, with what disturbed it. Let nothing else run meanwhile.

    [bold]Examples[/]:

    kvpatch bench --out bench.csv

    kvpatch bench --policies inertia-lazy --budgets 10%,5% --batches 1,2,4,8 --plots plots

    kvpatch bench --batches 1 --peer kvpress
    """
    console = Console()
    names = _words(policies)
    plain = [] if baselines == "none" else _words(baselines)
    unknown = set(plain) - {"dynamic", "static", "full"}
    if unknown:
        raise typer.BadParameter(f"must be dynamic, static or full, got {unknown.pop()!r}", param_hint="--baselines")
    if min(new_tokens, slow_tokens) < skip + 3:
        raise typer.BadParameter(f"must be at least --skip + 3 = {skip + 3}", param_hint="--new-tokens")
    kinds = _words(dtypes)
    for kind in kinds:
        if kind not in _shared.DTYPES[1:]:
            raise typer.BadParameter(f"must be one of {', '.join(_shared.DTYPES[1:])}", param_hint="--dtypes")
    limits = {text: _shared.budget_of(text, "")["budget"] for text in _words(budgets)}
    if not names and not plain and not peer:
        raise typer.BadParameter("nothing is left to measure", param_hint="--policies")
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter('needs matplotlib: pip install "kvpatch[plot]"', param_hint="--plots")
    sizes, lengths = _numbers(batches, "--batches"), _numbers(prompt_lengths, "--prompt-lengths")
    with _shared.told():
        import torch

        from kvpatch import policy
        from kvpatch.bench import peers, report
        from kvpatch.bench.record import append_rows, read_columns
        from kvpatch.bench.runner import COLUMNS, Cell, Workload, run_cell

        for name in names:
            if name != policy.OF_MODEL:
                policy.resolve(name)
        if out is not None and read_columns(out) not in (None, COLUMNS):
            raise typer.BadParameter(f"{out} has other columns, give another file", param_hint="--out")
        if plots is not None:
            plots.mkdir(parents=True, exist_ok=True)
        for name in peer or ():
            if name not in peers.PEERS:
                raise typer.BadParameter(f"must be one of {', '.join(peers.PEERS)}, got {name!r}", param_hint="--peer")
        named = [(name, None) for name in plain]
        named += [(name, limit) for name in names if name != "full" for limit in limits.values()]
        named += [("full", None)] if "full" in names and "full" not in plain else []
        counts = _numbers(threads, "--threads") if threads else [torch.get_num_threads()]
        guests = _guests(peer or [], limits, console)
        calls = len(counts) * len(kinds) * len(sizes) * len(lengths) * (len(named) + len(guests)) * (rounds + 1)
        rows: list[dict] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=calls)

            def tick(description: str, done: int) -> None:
                progress.update(task, advance=done, **({"description": description} if description else {}))

            for kind in kinds:
                tick("loading the model", 0)
                base, tokenizer = _shared.load(model, kind, None)
                base.generation_config.eos_token_id = None  # every call makes all of its tokens
                for count in counts:
                    with contextlib.ExitStack() as running:
                        here = [start(_folder(model), kind, count) for start in guests]
                        for guest in here:
                            running.callback(guest.close)
                        for batch, length in itertools.product(sizes, lengths):
                            work = Workload(length, new_tokens, slow_tokens, slow_over, skip, 16, compile)
                            cell = Cell(count, kind, batch, length)
                            options = {"seed": seed, "stream_gib": stream_gib, "tick": tick, "guests": tuple(here)}
                            found = run_cell(base, tokenizer, cell, named, work, rounds, **options)
                            rows += found
                            if out is not None:
                                append_rows(out, found)
        report.show(console, rows)
        if out is not None:
            console.print(f"{len(rows)} rows added to {out}", markup=False)
        if plots is not None:
            for path in report.plot(rows, plots):
                console.print(f"drawn: {path}", markup=False)
    if strict and any(row["refused"] for row in rows):
        raise typer.Exit(1)


def _folder(model: str) -> str:
    """A checkpoint that another process can load."""
    from kvpatch import demo

    if model == "demo":
        return str(demo.path())
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def _guests(names: list[str], limits: dict, console: Console) -> list:
    """A function for each setting of each peer that starts it: (model folder, dtype, threads) -> guest."""
    from kvpatch.bench import peer_kvpress, peers

    shares = [limit.value for limit in limits.values() if isinstance(limit.value, float)]
    if names and not shares:
        raise typer.BadParameter('a peer needs a share such as "10%"', param_hint="--budgets")
    settings = {"kvpress": list(peer_kvpress.SETTINGS)}
    return [
        lambda folder, dtype, threads, name=name, setting=setting: peers.start(
            name, setting, folder, dtype, threads, shares[0], console.print
        )
        for name in names
        for setting in settings[name]
    ]
