"""Decode speed of plain transformers, its compiled static cache, and kvpatch, side by side in one process.

    python profiles/record_decode.py --check

Each variant has a model object of its own over the same weights. After a warm-up call of each, every
round runs each variant once, so that a slow minute of the machine hits all of them. A step is the time
between two tokens at the streamer. The variants:

dynamic        model.generate as it is: a DynamicCache, eager.
static         generate(cache_implementation="static"), the forward compiled by transformers itself.
full           kvpatch without eviction.
any other      that policy of kvpatch at the budget.
"""

import contextlib
import copy
import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from _record import DTYPES, HERE, Clock, CompileWatch, append_rows, budget_of, needle_prompts, provenance
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import CompileConfig, StoppingCriteria, StoppingCriteriaList

import kvpatch
from kvpatch import demo

MOST_SPREAD = 1.25  # p80 over p20 above which a row is refused
DEFAULT_VARIANTS = "dynamic,static,full,inertia,inertia-lazy,score-free"

Rows = dict[tuple[int, str], dict]


@dataclass(frozen=True)
class Workload:
    """What every variant does."""

    prompt: int
    steps: int
    slow_steps: int
    slow_over: float
    skip: int
    warmup: int
    budget: float


@dataclass
class Variant:
    """One way to decode, and what was measured of it so far."""

    name: str
    model: torch.nn.Module
    handle: kvpatch.Patch | None
    tokens: int = 0
    rounds: list[list[float]] = field(default_factory=list)
    compiles: int = 0
    compile_seconds: float = 0.0
    timed_compiles: int = 0

    @classmethod
    def over(cls, base, name: str, budget: float) -> "Variant":
        """A model object of its own that shares the base's parameters, patched if the variant is a policy."""
        model = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
        plain = name in ("dynamic", "static")
        return cls(name, model, None if plain else kvpatch.patch(model, name, **budget_of(name, budget)))

    def seconds(self) -> list[float]:
        """All measured steps."""
        return [second for of_round in self.rounds for second in of_round]


class StopAfter(StoppingCriteria):
    """End a call after some tokens, whatever max_new_tokens says: every call has the same shapes."""

    def __init__(self, columns: int):
        self.columns = columns

    def __call__(self, input_ids, scores, **_):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.columns, dtype=torch.bool)


class Stream:
    """The highest rate at which this process reads memory, by the best of a few kernels."""

    def __init__(self, gib: float):
        self.data = torch.ones(int(gib * 2**28))
        wide = self.data.view(-1, 4096)
        vector = torch.ones(4096)
        self.kernels: list[Callable] = [
            self.data.sum,
            self.data.amax,
            lambda: torch.mv(wide, vector),
            lambda: torch.dot(self.data, self.data),
        ]
        self.rounds: list[float] = []

    def measure(self) -> None:
        """One round: GB/s of the best kernel, each run three times."""
        best = 0.0
        for kernel in self.kernels:
            for _ in range(3):
                clock = Clock()
                clock.put(None)
                kernel()
                clock.put(None)
                best = max(best, self.data.nbytes / (clock.times[1] - clock.times[0]) / 1e9)
        self.rounds.append(best)


def call(variant: Variant, prompts: torch.Tensor, work: Workload, tokens: int) -> list[float]:
    """Generate that many tokens; seconds of each decode step."""
    more = {}
    if variant.name == "static":
        # transformers compiles around a static cache, but on a CPU only where this private switch is set.
        config = CompileConfig(mode="default", fullgraph=False)
        config._compile_all_devices = True
        more = {"cache_implementation": "static", "compile_config": config}
    clock = Clock()
    output = variant.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=work.steps,
        do_sample=False,
        streamer=clock,
        stopping_criteria=StoppingCriteriaList([StopAfter(work.prompt + tokens)]),
        **more,
    )
    made = output.shape[1] - work.prompt
    if made != tokens:
        raise RuntimeError(f"{variant.name} made {made} tokens instead of {tokens}")
    return clock.step_seconds()


def warm_up(variant: Variant, prompts: torch.Tensor, work: Workload) -> None:
    """Compile, and see whether the variant is slow enough to be measured over fewer steps."""
    with CompileWatch() as watch:
        seconds = call(variant, prompts, work, min(work.warmup, work.steps))
    variant.compiles, variant.compile_seconds = watch.graphs, watch.seconds
    slow = statistics.median(seconds[len(seconds) // 2 :]) > work.slow_over
    variant.tokens = min(work.slow_steps, work.steps) if slow else work.steps
    if variant.name != "dynamic" and not watch.graphs:
        raise RuntimeError(f"{variant.name} was not compiled")
    if variant.name == "static" and "_compiled_call" not in vars(variant.model):
        raise RuntimeError("transformers did not make a compiled call for the static cache")


def measure(variant: Variant, prompts: torch.Tensor, work: Workload) -> None:
    """One round of one variant."""
    with CompileWatch() as watch:
        seconds = call(variant, prompts, work, variant.tokens)
    variant.timed_compiles += watch.graphs
    variant.rounds.append(seconds[work.skip :])


def run_batch(
    base,
    tokenizer,
    batch: int,
    names: list[str],
    work: Workload,
    rounds: int,
    seed: int,
    stream_gib,
    tick,
):
    """All rounds of one batch size: the measured variants and the stream."""
    torch._dynamo.reset()  # static shapes for this batch, as in a process that serves no other
    prompts = needle_prompts(work.prompt, batch, tokenizer, seed)
    variants = [Variant.over(base, name, work.budget) for name in names]
    stream = Stream(stream_gib)
    for variant in variants:
        tick(f"batch {batch}: {variant.name} warms up", 0)
        warm_up(variant, prompts, work)
        tick("", 1)
    for turn in range(rounds):
        stream.measure()
        # Each round begins with another variant, so that none is always behind the same neighbour.
        start = turn % len(variants)
        for variant in variants[start:] + variants[:start]:
            tick(f"batch {batch}, round {turn + 1}: {variant.name}", 0)
            measure(variant, prompts, work)
            tick("", 1)
    return variants, stream


def parameter_bytes(model) -> int:
    """Bytes of weights that a step reads: all, but of an untied embedding only a few rows (left out)."""
    read = sum(parameter.nbytes for parameter in model.parameters())  # a tied tensor comes once
    embedding = model.get_input_embeddings().weight
    return read if embedding is model.get_output_embeddings().weight else read - embedding.nbytes


def token_bytes(model) -> int:
    """Bytes of one token's keys and values over all layers."""
    config = model.config
    return config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def held_tokens(variant: Variant, work: Workload) -> float:
    """Tokens a row that a measured step attends to, on average; only these have to be read."""
    mean_seen = work.prompt + (work.skip + 1 + variant.tokens - 1) / 2
    return mean_seen if variant.handle is None else min(mean_seen, variant.handle.stats.held)


def cache_peak(variant: Variant, batch: int, work: Workload) -> int:
    """Largest sum of cache buffers; of transformers' caches by their shape."""
    if variant.handle is not None:
        return variant.handle.stats.peak_cache_bytes
    tokens = work.prompt + (work.steps if variant.name == "static" else variant.tokens) - 1
    return batch * tokens * token_bytes(variant.model)


def paired(of: Variant | None, over: Variant) -> float | None:
    """Median over rounds of the two variants' ratio in that round."""
    if of is None:
        return None
    pairs = zip(of.rounds, over.rounds, strict=True)
    return statistics.median(statistics.median(slow) / statistics.median(fast) for slow, fast in pairs)


def make_rows(variants: list[Variant], stream: Stream, batch: int, dtype: str, work: Workload) -> list[dict]:
    """The record's rows of one batch size."""
    by_name = {variant.name: variant for variant in variants}
    static, dynamic = by_name.get("static"), by_name.get("dynamic")
    stream_rate = statistics.median(stream.rounds)
    rows = []
    for variant in variants:
        seconds = variant.seconds()
        p20, p50, p80 = np.percentile(seconds, (20, 50, 80)).tolist()
        held = held_tokens(variant, work)
        moved = parameter_bytes(variant.model) + batch * held * token_bytes(variant.model)
        rate = moved / p50 / 1e9
        rows.append(
            {
                **provenance(),
                "dtype": dtype,
                "batch": batch,
                "prompt": work.prompt,
                "variant": variant.name,
                "budget": work.budget if variant.handle is not None and variant.name != "full" else None,
                "new_tokens": variant.tokens,
                "rounds": len(variant.rounds),
                "steps": len(seconds),
                "p20_ms": 1e3 * p20,
                "p50_ms": 1e3 * p50,
                "p80_ms": 1e3 * p80,
                "mean_ms": 1e3 * statistics.fmean(seconds),
                "tok_per_s": batch / p50,
                "over_static": statistics.median(static.seconds()) / p50 if static else None,
                "over_dynamic": statistics.median(dynamic.seconds()) / p50 if dynamic else None,
                "paired_over_static": paired(static, variant),
                "paired_over_dynamic": paired(dynamic, variant),
                "held": held,
                "bytes_per_step": int(moved),
                "gb_per_s": rate,
                "stream_gb_per_s": stream_rate,
                "share_of_stream": rate / stream_rate,
                "compile_seconds": variant.compile_seconds,
                "compiles": variant.compiles,
                "timed_compiles": variant.timed_compiles,
                "peak_cache_bytes": cache_peak(variant, batch, work),
                "spread": p80 / p20,
                "refused": p80 / p20 > MOST_SPREAD or variant.timed_compiles > 0,
            }
        )
    return rows


def show(console: Console, rows: list[dict]) -> None:
    """The rows' main columns; refused ones in red."""
    table = Table("batch", "variant", "p50 ms", "mean ms", "tok/s", title="Decode steps")
    for name in ("over static", "over dynamic", "of stream", "spread", "cache MiB"):
        table.add_column(name)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        ratios = [row["paired_over_static"], row["paired_over_dynamic"]]
        table.add_row(
            str(row["batch"]),
            row["variant"] + (" (refused)" if row["refused"] else ""),
            f"{row['p50_ms']:.1f}",
            f"{row['mean_ms']:.1f}",
            f"{row['tok_per_s']:.1f}",
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            f"{row['share_of_stream']:.2f}",
            f"{row['spread']:.2f}",
            f"{row['peak_cache_bytes'] / 2**20:.1f}",
            style="red" if row["refused"] else None,
        )
    console.print(table)


def _column(batch: int, variant: str, column: str) -> tuple[list, Callable[[Rows], float]]:
    return [(batch, variant)], lambda rows: rows[batch, variant][column]


def _over_score_free(batch: int) -> tuple[list, Callable[[Rows], float]]:
    pair = [(batch, "inertia"), (batch, "score-free")]
    return pair, lambda rows: rows[pair[0]]["p50_ms"] / rows[pair[1]]["p50_ms"]


# Name: (rows it needs, value), whether the bound is the least or the most, bound. Ratios are paired by round.
TARGETS = {
    "batch 8: inertia-lazy over static": (_column(8, "inertia-lazy", "paired_over_static"), "least", 9.0),
    "batch 8: inertia-lazy over dynamic": (_column(8, "inertia-lazy", "paired_over_dynamic"), "least", 25.0),
    "batch 8: full over static": (_column(8, "full", "paired_over_static"), "least", 4.5),
    "batch 8: inertia p50 / score-free p50": (_over_score_free(8), "most", 1.05),
    "batch 1: inertia-lazy over dynamic": (_column(1, "inertia-lazy", "paired_over_dynamic"), "least", 2.2),
    "batch 1: inertia-lazy share of stream": (_column(1, "inertia-lazy", "share_of_stream"), "least", 0.60),
    "batch 1: inertia p50 / score-free p50": (_over_score_free(1), "most", 1.05),
}


def check(console: Console, rows: list[dict]) -> bool:
    """Print which targets hold. A target whose rows are missing or refused does not hold."""
    by_key = {(row["batch"], row["variant"]): row for row in rows}
    fine = True
    for name, ((needed, value), kind, bound) in TARGETS.items():
        sign = ">=" if kind == "least" else "<="
        number = value(by_key) if set(needed) <= set(by_key) else None
        refused = any(by_key[key]["refused"] for key in needed if key in by_key)
        holds = number is not None and (number >= bound if kind == "least" else number <= bound)
        passed = holds and not refused
        got = "not measured" if number is None else f"{number:.2f}" + (" (a refused row)" if refused else "")
        fine &= passed
        verdict = "[green]pass[/]" if passed else "[red]FAIL[/]"
        console.print(f"{verdict} {name}: {got} {sign} {bound}")
    return fine


def main(
    batches: Annotated[str, typer.Option(help="Rows of a batch, separated by commas.")] = "1,8",
    variants: Annotated[str, typer.Option(help="dynamic, static, policies.")] = DEFAULT_VARIANTS,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 2048,
    steps: Annotated[int, typer.Option(help="New tokens of a call.")] = 96,
    slow_steps: Annotated[int, typer.Option(help="New tokens of a call of a slow variant.", min=12)] = 24,
    slow_over: Annotated[float, typer.Option(help="Seconds a step from which a variant is slow.")] = 1.0,
    skip: Annotated[int, typer.Option(help="First steps of a call that are left out.")] = 8,
    warmup: Annotated[int, typer.Option(help="New tokens of the warm-up call.", min=6)] = 16,
    rounds: Annotated[int, typer.Option(help="Calls of each variant.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    budget: Annotated[float, typer.Option(help="Share of the prompt that evicting policies hold.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the first row's document.")] = 0,
    stream_gib: Annotated[float, typer.Option(help="Size of the streaming read.")] = 1.0,
    out: Annotated[Path, typer.Option(help="CSV file that the rows are added to.")] = HERE / "decode.csv",
    check_targets: Annotated[bool, typer.Option("--check", help="Exit 1 unless the targets hold.")] = False,
) -> None:
    """Record decode speed."""
    console = Console()
    torch.set_num_threads(threads)
    sizes, names = [int(size) for size in batches.split(",")], variants.split(",")
    work = Workload(prompt, steps, slow_steps, slow_over, skip, warmup, budget)
    if min(steps, slow_steps) < skip + 3:
        raise typer.BadParameter(f"steps and slow-steps must be at least {skip + 3}")
    base, tokenizer = demo.load(DTYPES[dtype])
    base.generation_config.eos_token_id = None  # every call makes all of its tokens
    rows: list[dict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(sizes) * len(names) * (rounds + 1))

        def tick(description: str, done: int) -> None:
            progress.update(task, advance=done, **({"description": description} if description else {}))

        for batch in sizes:
            measured, stream = run_batch(base, tokenizer, batch, names, work, rounds, seed, stream_gib, tick)
            rows += make_rows(measured, stream, batch, dtype, work)
            append_rows(out, rows[-len(measured) :])
            del measured, stream
            gc.collect()
    show(console, rows)
    console.print(f"{len(rows)} rows added to {out}")
    if check_targets and not check(console, rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
