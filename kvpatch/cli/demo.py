"""`kvpatch demo`: one hidden fact, asked for under each operating point."""

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

OPERATING_POINTS = ("full", "inertia", "inertia-lazy", "score-free")


@dataclass(frozen=True)
class Run:
    """One way of answering: its text, steps a second, peak bytes of its cache and seconds of compiling."""

    name: str
    text: str
    found: bool
    steps_per_second: float
    cache_bytes: int
    compile_seconds: float


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self, tick):
        self.tick, self.times = tick, []

    def put(self, value):
        self.times.append(time.perf_counter())
        self.tick()

    def end(self):
        pass

    def steps_per_second(self) -> float:
        # The prompt, the first token and the first steps (which may compile) are not steady decoding.
        times = self.times[8:]
        return 1.0 / statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def demo(
    length: Annotated[int, typer.Option(help="Tokens of the document with its question.", min=256)] = 2048,
    budget: Annotated[float, typer.Option(help="Share of the prompt that stays in the cache.")] = 0.1,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=24)] = 64,
    seed: Annotated[int, typer.Option(help="Which document, fact and place.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's own choice if left out.")] = None,
) -> None:
    """Hide a fact in a long document and ask for it, under the full cache and under each operating point.

    Builds the demo model (SmolLM2-135M-Instruct) into the user's cache folder the first time.

    [bold]Example[/]: kvpatch demo --length 1024 --budget 0.05
    """
    console = Console()
    if not 0 < budget < 1:
        raise typer.BadParameter(f"must be a share in (0, 1), got {budget}", param_hint="--budget")
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as progress:
        loading = progress.add_task("loading the demo model (built once, about 20 s)", total=None)
        import torch

        from kvpatch import demo as model_room
        from kvpatch.needle import document

        if threads:
            torch.set_num_threads(threads)
        model, tokenizer = model_room.load()
        needle = document(length, tokenizer, seed)
        progress.remove_task(loading)
        runs = [_unpatched(model, tokenizer, needle, new_tokens, progress)]
        runs += [_patched(model, tokenizer, needle, new_tokens, progress, name, budget) for name in OPERATING_POINTS]
    console.print(f'Asked: "{needle.question}" (hidden {needle.depth:.0%} into {length:,} tokens)')
    console.print(f"Right answer: {needle.answer}. Cache budget: {budget:.0%} of the prompt.\n")
    console.print(_table(runs))
    console.print(
        "Steps a second are medians of one row; the peak holds the whole prompt, which is read before it is cut."
    )


def _generate(model, tokenizer, needle, new_tokens, progress, name, **more):
    task = progress.add_task(f"{name}: reading {needle.prompt_ids.shape[0]:,} tokens", total=new_tokens)

    def tick():
        progress.update(task, description=f"{name}: decoding", advance=1)

    clock = Clock(tick)
    output = model.generate(
        needle.prompt_ids[None].to(model.device),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,  # so that every way is timed over as many steps
        do_sample=False,
        streamer=clock,
        **more,
    )
    progress.remove_task(task)
    return output, clock


def _answer(tokenizer, needle, sequences) -> tuple[str, bool]:
    text = tokenizer.decode(sequences[0, needle.prompt_ids.shape[0] :], skip_special_tokens=True)
    return text.strip().split("\n")[0], needle.answer in text


def _unpatched(model, tokenizer, needle, new_tokens, progress) -> Run:
    output, clock = _generate(model, tokenizer, needle, new_tokens, progress, "unpatched", return_dict_in_generate=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return Run(
        "generate, unpatched",
        *_answer(tokenizer, needle, output.sequences),
        clock.steps_per_second(),
        held,
        0.0,
    )


def _patched(model, tokenizer, needle, new_tokens, progress, name, budget) -> Run:
    import kvpatch

    limit = {} if name == "full" else {"budget": budget}
    with kvpatch.patched(model, name, **limit) as handle:
        output, clock = _generate(model, tokenizer, needle, new_tokens, progress, name)
        return Run(
            name,
            *_answer(tokenizer, needle, output),
            clock.steps_per_second(),
            handle.stats.cache_bytes,
            handle.stats.compile_seconds,
        )


def _table(runs: list[Run]) -> Table:
    table = Table("policy", "answer", "found", "steps/s", "times", "cache MiB", "compile s")
    for column in table.columns[3:]:
        column.justify = "right"
    base = runs[0].steps_per_second
    for run in runs:
        table.add_row(
            run.name,
            escape(run.text[:60]),
            "yes" if run.found else "no",
            f"{run.steps_per_second:.1f}",
            f"{run.steps_per_second / base:.1f}x",
            f"{run.cache_bytes / 2**20:.1f}",
            f"{run.compile_seconds:.0f}",
        )
    return table
