"""The first call of a fresh installation: how long compiling takes while the compile cache is empty.

    python profiles/record_cold.py

Every repetition is a process of its own with an empty TORCHINDUCTOR_CACHE_DIR, at batch 1. Its first call
reads the prompt and makes a few tokens, so that both kinds of step (scoring and plain) are compiled; the
second call does the same again, compiled. Loading the weights is not part of either.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from _shared import DTYPES, HERE, Dtype, Threads, budget_of, needle_prompts, workload
from rich.console import Console
from rich.progress import track
from rich.table import Table

import kvpatch
from kvpatch import demo
from kvpatch.bench.record import append_rows, provenance


def first_calls(policy: str, prompt: int, new_tokens: int, budget: float, dtype: str, seed: int) -> dict:
    """Two calls in this process, whose compile cache is what the environment says."""
    model, tokenizer = demo.load(DTYPES[dtype])
    prompts = needle_prompts(prompt, 1, tokenizer, seed)
    started = time.perf_counter()
    handle = kvpatch.patch(model, policy, **budget_of(policy, budget))
    times = [time.perf_counter() - started]
    prefill = []
    for _ in range(2):
        started = time.perf_counter()
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
        )
        times.append(time.perf_counter() - started)
        prefill.append(handle.stats.prefill_seconds)
    return {
        "patch_seconds": times[0],
        "compile_seconds": handle.stats.compile_seconds,
        "graphs": handle.stats.compiles,
        "first_call_seconds": times[1],
        "first_prefill_seconds": prefill[0],
        "second_call_seconds": times[2],
    }


def in_fresh_process(arguments: list[str]) -> dict:
    """Run this script as a child whose compile cache is an empty folder."""
    with tempfile.TemporaryDirectory(prefix="kvpatch-cold-") as folder:
        fresh = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
        child = subprocess.run(
            [sys.executable, __file__, "--child", *arguments],
            env=os.environ | fresh,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(child.stdout.splitlines()[-1])


def main(
    policy: Annotated[str, typer.Option(help="Policy of kvpatch.")] = "inertia-lazy",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each call.", min=8)] = 16,
    budget: Annotated[float, typer.Option(help="Share of the prompt that is held.")] = 0.1,
    repetitions: Annotated[int, typer.Option(help="Fresh processes.")] = 3,
    threads: Threads = 2,
    dtype: Dtype = "float32",
    seed: Annotated[int, typer.Option(help="Of the document.")] = 0,
    out: Annotated[Path, typer.Option(help="CSV file that the rows are added to.")] = HERE / "cold.csv",
    child: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Record the first call with an empty compile cache."""
    torch.set_num_threads(threads)
    if child:
        print(json.dumps(first_calls(policy, prompt, new_tokens, budget, dtype, seed)))
        return
    console = Console()
    options = {
        "--policy": policy, "--prompt": prompt, "--new-tokens": new_tokens, "--budget": budget,
        "--threads": threads, "--dtype": dtype, "--seed": seed,
    }  # fmt: skip
    arguments = [str(part) for option in options.items() for part in option]
    demo.path()  # built here, not in the first child
    common = workload(dtype, prompt, policy, budget, new_tokens)
    columns = ("repetition", "compile s", "graphs", "first call s", "second call s")
    table = Table(*columns, title="Empty compile cache")
    for repetition in track(range(1, repetitions + 1), "fresh processes", console=console):
        found = in_fresh_process(arguments)
        append_rows(out, [{**provenance(), **common, "repetition": repetition, **found}])
        table.add_row(
            str(repetition),
            f"{found['compile_seconds']:.1f}",
            str(found["graphs"]),
            f"{found['first_call_seconds']:.1f}",
            f"{found['second_call_seconds']:.1f}",
        )
    console.print(table)
    console.print(f"{repetitions} rows added to {out}")


if __name__ == "__main__":
    typer.run(main)
