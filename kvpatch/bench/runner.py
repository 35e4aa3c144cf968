"""Rounds of interleaved calls, and the rows that come of them."""

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import kvpatch
from kvpatch import needle
from kvpatch.bench.disturbance import Stream
from kvpatch.bench.record import PROVENANCE, provenance
from kvpatch.bench.variants import Variant, Workload, cache_bytes, parameter_bytes

MOST_SPREAD = 1.25  # p80 over p20 above which a row is refused
Tick = Callable[[str, int], None]
# Of a row, in order.
COLUMNS = [
    *PROVENANCE,
    "dtype",
    "batch",
    "prompt",
    "variant",
    "budget",
    "new_tokens",
    "rounds",
    "steps",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "mean_ms",
    "decode_tok_per_s",
    "first_token_ms",
    "prefill_tok_per_s",
    "whole_s",
    "whole_tok_per_s",
    "paired_over_static",
    "paired_over_dynamic",
    "held",
    "bytes_per_step",
    "gb_per_s",
    "stream_gb_per_s",
    "share_of_stream",
    "peak_cache_bytes",
    "peak_process_bytes",
    "compile_seconds",
    "compiles",
    "timed_compiles",
    "break_even_tokens",
    "graph_active",
    "spread",
    "refused",
    "disturbance",
]


@dataclass(frozen=True)
class Cell:
    """One setting, in which all variants are measured side by side."""

    threads: int
    dtype: str
    batch: int
    prompt: int


def prompts_of(cell: Cell, tokenizer, seed: int, device) -> torch.Tensor:
    """[batch, prompt] int64: another passage of prose a row."""
    rows = [needle.prose(cell.prompt, tokenizer, seed + row) for row in range(cell.batch)]
    return torch.stack(rows).to(device)


def run_cell(
    base,
    tokenizer,
    cell: Cell,
    named: list[tuple[str, kvpatch.Budget | None]],
    work: Workload,
    rounds: int,
    *,
    seed: int = 0,
    stream_gib: float = 1.0,
    tick: Tick = lambda description, done: None,
    guests: tuple = (),
) -> list[dict]:
    """Measure the variants of one cell.

    Args:
        base: the model, unpatched, in the cell's dtype; its generation config must end no row.
        named: (name, budget) of each variant.
        rounds: calls of each variant after its warm-up.
        tick: told what begins, and how many calls are done.
        guests: started peers, measured in the same rounds.

    Returns:
        a row a variant and guest, for the record.
    """
    torch.set_num_threads(cell.threads)
    torch._dynamo.reset()  # static shapes for this cell, as in a process that serves no other
    prompts = prompts_of(cell, tokenizer, seed, base.device)
    variants = [Variant.over(base, name, budget, work.compile) for name, budget in named]
    stream = Stream(stream_gib, base.device)
    everyone = [*variants, *(guest.fresh() for guest in guests)]
    where = f"batch {cell.batch}, prompt {cell.prompt:,}, {cell.dtype}"
    for variant in everyone:
        tick(f"{where}: {variant.name} warms up", 0)
        variant.warm_up(prompts, work)
        tick("", 1)
    for turn in range(rounds):
        stream.measure()
        # Each round begins with another variant, so that none is always behind the same neighbour.
        start = turn % len(everyone)
        for variant in everyone[start:] + everyone[:start]:
            tick(f"{where}, round {turn + 1}: {variant.name}", 0)
            variant.measure(prompts, work)
            tick("", 1)
    rows = make_rows(everyone, stream, cell, work, base)
    del variants, everyone, stream
    gc.collect()
    return rows


def paired(of: Variant | None, over: Variant, skip: int) -> float | None:
    """Median over rounds of the two variants' ratio in that round."""
    if of is None:
        return None
    pairs = zip(of.steps(skip), over.steps(skip), strict=True)
    return statistics.median(statistics.median(slow) / statistics.median(fast) for slow, fast in pairs)


def break_even(variant: Variant, plain: Variant | None, skip: int) -> float | None:
    """New tokens after which compiling has paid for itself, against plain generate; None if it never does."""
    if plain is None or variant.compile_seconds == 0:
        return None
    plain_step, step = (statistics.median(sum(one.steps(skip), [])) for one in (plain, variant))
    return variant.compile_seconds / (plain_step - step) if plain_step > step else None


def make_rows(variants: list[Variant], stream: Stream, cell: Cell, work: Workload, base) -> list[dict]:
    """The record's rows of one cell."""
    by_name = {variant.name: variant for variant in variants}
    static, dynamic = by_name.get("static"), by_name.get("dynamic")
    stream_rate, skip = statistics.median(stream.rounds), work.skip
    weights = parameter_bytes(base)
    rows = []
    for variant in variants:
        seconds = sum(variant.steps(skip), [])
        p20, p50, p80 = np.percentile(seconds, (20, 50, 80)).tolist()
        first = statistics.median(call.first for call in variant.calls)
        whole = statistics.median(call.whole for call in variant.calls)
        held = variant.held(work)
        moved = weights + cell.batch * cache_bytes(base, held)
        wide, again = p80 / p20 > MOST_SPREAD, variant.timed_compiles > 0
        rows.append(
            {
                **provenance(),
                "dtype": cell.dtype,
                "batch": cell.batch,
                "prompt": cell.prompt,
                "variant": variant.name,
                "budget": "" if variant.budget is None else str(variant.budget),
                "new_tokens": variant.tokens,
                "rounds": len(variant.calls),
                "steps": len(seconds),
                "p20_ms": 1e3 * p20,
                "p50_ms": 1e3 * p50,
                "p80_ms": 1e3 * p80,
                "mean_ms": 1e3 * statistics.fmean(seconds),
                "decode_tok_per_s": cell.batch / p50,
                "first_token_ms": 1e3 * first,
                "prefill_tok_per_s": cell.batch * cell.prompt / first,
                "whole_s": whole,
                "whole_tok_per_s": cell.batch * variant.tokens / whole,
                "paired_over_static": paired(static, variant, skip),
                "paired_over_dynamic": paired(dynamic, variant, skip),
                "held": held,
                "bytes_per_step": int(moved),
                "gb_per_s": moved / p50 / 1e9,
                "stream_gb_per_s": stream_rate,
                "share_of_stream": moved / p50 / 1e9 / stream_rate,
                "peak_cache_bytes": int(variant.cache_peak(cell.batch, work)),
                "peak_process_bytes": variant.peak_bytes,
                "compile_seconds": variant.compile_seconds,
                "compiles": variant.compiles,
                "timed_compiles": variant.timed_compiles,
                "break_even_tokens": break_even(variant, dynamic, skip),
                "graph_active": False,  # CUDA graphs: none are captured yet
                "spread": p80 / p20,
                "refused": "compiled while timed" if again else "spread" if wide else "",
                "disturbance": variant.others.told(stream.rounds) if wide else "",
            }
        )
    return rows
