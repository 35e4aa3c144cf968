"""One long generation: whether steps stay as fast, and memory as small, after thousands of tokens.

    python profiles/record_long.py
    python profiles/record_long.py --new-tokens 5000

Needs psutil. Step times are compared early and late in the one call; memory is the process's resident set.
"""

import statistics
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from _shared import DTYPES, HERE, Dtype, Threads, budget_of, needle_prompts, workload
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import kvpatch
from kvpatch import demo
from kvpatch.bench.record import Clock, CompileWatch, append_rows, provenance

POSITIONS = demo.POSITIONS


class Meter:
    """Reads memory and compilations while the tokens come."""

    def __init__(self, handle: kvpatch.Patch, watch: CompileWatch, warm: int, mark: int):
        self.handle, self.watch, self.warm, self.mark = handle, watch, warm, mark
        self.graphs_when_warm = self.rss_at_mark = self.bytes_at_mark = 0

    def at(self, tokens: int) -> None:
        """Called after each token."""
        if tokens == self.warm:
            self.graphs_when_warm = self.watch.graphs
        if tokens == self.mark:
            self.rss_at_mark = psutil.Process().memory_info().rss
            self.bytes_at_mark = self.handle.stats.cache_bytes


def window_ms(seconds: list[float], start: int, end: int) -> float:
    """Median of steps start to end, in milliseconds."""
    return 1e3 * statistics.median(seconds[start:end])


def main(
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=24)] = 3100,
    policy: Annotated[str, typer.Option(help="Policy of kvpatch.")] = "inertia-lazy",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    budget: Annotated[float, typer.Option(help="Share of the prompt that is held.")] = 0.1,
    warm: Annotated[int, typer.Option(help="Step where the early window begins.")] = 50,
    window: Annotated[int, typer.Option(help="Steps of the early and of the late window.")] = 100,
    rss_at: Annotated[int, typer.Option(help="Step at which the resident set is read first.")] = 500,
    threads: Threads = 2,
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of the document.")] = 0,
    out: Annotated[Path, typer.Option(help="CSV file that the row is added to.")] = HERE / "long.csv",
) -> None:
    """Record one long generation."""
    if prompt + new_tokens > POSITIONS:
        raise typer.BadParameter(f"prompt and new tokens must fit into the model's {POSITIONS} positions")
    least = max(2 * (warm + window), rss_at)
    if new_tokens < least:
        raise typer.BadParameter(f"--new-tokens must be at least {least} for these windows")
    console = Console()
    torch.set_num_threads(threads)
    model, tokenizer = demo.load(DTYPES[dtype])
    model.generation_config.eos_token_id = None
    prompts = needle_prompts(prompt, 1, tokenizer, seed)
    handle = kvpatch.patch(model, policy, **budget_of(policy, budget))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with CompileWatch() as watch, Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens", total=new_tokens)
        meter = Meter(handle, watch, warm, rss_at)

        def tick(tokens: int) -> None:
            meter.at(tokens)
            if tokens % 20 == 0:  # drawing takes time of its own
                progress.update(task, completed=tokens)

        clock = Clock(tick)
        mask = torch.ones_like(prompts)
        output = model.generate(
            prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, streamer=clock
        )
        rss_at_end = psutil.Process().memory_info().rss
        recompiles = watch.graphs - meter.graphs_when_warm
    if output.shape[1] != prompt + new_tokens:
        raise RuntimeError(f"made {output.shape[1] - prompt} tokens instead of {new_tokens}")
    seconds = clock.step_seconds()
    late = new_tokens - warm - window
    early_ms, late_ms = window_ms(seconds, warm, warm + window), window_ms(seconds, late, late + window)
    row = {
        **provenance(),
        **workload(dtype, prompt, policy, budget, new_tokens),
        "early_steps": f"{warm}-{warm + window}",
        "early_p50_ms": early_ms,
        "late_steps": f"{late}-{late + window}",
        "late_p50_ms": late_ms,
        "late_over_early": late_ms / early_ms,
        "rss_step": rss_at,
        "rss_bytes": meter.rss_at_mark,
        "rss_bytes_end": rss_at_end,
        "cache_bytes": meter.bytes_at_mark,
        "cache_bytes_end": handle.stats.cache_bytes,
        "held": handle.stats.held,
        "compiles": meter.graphs_when_warm,
        "recompiles": recompiles,
        "compile_seconds": handle.stats.compile_seconds,
    }
    append_rows(out, [row])
    sizes = (meter.rss_at_mark, rss_at_end, handle.stats.cache_bytes)
    mib, end_mib, cache_mib = (size / 2**20 for size in sizes)
    console.print(f"steps {row['early_steps']}: {early_ms:.2f} ms; {row['late_steps']}: {late_ms:.2f} ms")
    console.print(f"resident: {mib:.1f} MiB at step {rss_at}, {end_mib:.1f} MiB at the end")
    console.print(f"cache: {cache_mib:.1f} MiB; {recompiles} graphs compiled after step {warm}")
    console.print(f"1 row added to {out}")


if __name__ == "__main__":
    typer.run(main)
