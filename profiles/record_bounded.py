"""What reading a long prompt in blocks saves and costs: bytes at the peak, and distance from the full cache.

    python profiles/record_bounded.py
    python profiles/record_bounded.py --methods snapkv --prompt 4000 --texts 2

Each method reads the same prose whole, and in blocks after each of which it is cut to the budget. The text behind the
prompt is fed token by token, and the logits are compared with those of one plain forward. The peak is that of all
buffers while one text is read and two tokens are decoded; beside it stand the keys and values of a budget and a block.
"""

import dataclasses
from pathlib import Path
from typing import Annotated

import torch
import typer
from _shared import DTYPES, HERE, Dtype, Threads
from rich.console import Console
from rich.progress import track

import kvpatch
from kvpatch import demo, needle
from kvpatch.bench.record import append_rows, provenance
from kvpatch.cachelayer import heads_of
from kvpatch.evaluation import fidelity


def method(name: str, block: int | None) -> kvpatch.Policy:
    """Cut the prompt by that method, keep what is generated."""
    rule = dataclasses.replace(kvpatch.Policy(prefill=name, grows=True, coupling="per_head").prefill, block=block)
    return kvpatch.Policy(name, prefill=rule, grows=True, coupling="per_head")


def bytes_of_tokens(model, tokens: int) -> int:
    """Keys and values of so many tokens in every layer and head."""
    _, groups, width = heads_of(model.config)
    return 2 * tokens * model.config.num_hidden_layers * groups * width * model.dtype.itemsize


def peak(model, policy, budget: int, prompt: torch.Tensor) -> tuple[int, float]:
    """Most bytes of cache buffers while a prompt [1, L] is read and two tokens are decoded, and seconds of reading."""
    with kvpatch.patched(model, policy, budget=budget) as handle:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
        return handle.stats.peak_cache_bytes, handle.stats.prefill_seconds


def main(
    methods: Annotated[str, typer.Option(help="Of `kvpatch.list_prefill()`, by commas.")] = "snapkv,tova,keydiff,knorm",
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 8000,
    forced: Annotated[int, typer.Option(help="Tokens of each text behind its prompt.")] = 128,
    texts: Annotated[int, typer.Option(help="Prose texts.")] = 4,
    budget: Annotated[int, typer.Option(help="Tokens held a head.")] = 512,
    block: Annotated[int, typer.Option(help="Tokens of a block.")] = 512,
    seed: Annotated[int, typer.Option(help="Of the first text.")] = 1000,
    threads: Threads = 2,
    dtype: Dtype = "float32",
    out: Annotated[Path, typer.Option(help="CSV file that the rows are added to.")] = HERE / "bounded.csv",
) -> None:
    """Record prompts read whole and in blocks."""
    if prompt + forced > demo.POSITIONS:
        raise typer.BadParameter(f"prompt and forced tokens must fit into the model's {demo.POSITIONS} positions")
    torch.set_num_threads(threads)
    model, tokenizer = demo.load(DTYPES[dtype])
    whole = torch.stack([needle.prose(prompt + forced, tokenizer, seed + number) for number in range(texts)])
    ways = {}
    for name in methods.split(","):
        for size in (None, block):
            ways[name, size] = method(name, size)
    rows: dict = {key: [] for key in ways}
    named = {" ".join(map(str, key)): (policy, budget) for key, policy in ways.items()}
    for text in track(whole, "texts"):
        found = fidelity(model, text[None], prompt, named, lost_mass=False)
        for key in ways:
            rows[key].append(found[" ".join(map(str, key))])
    for (name, size), policy in ways.items():
        most, seconds = peak(model, policy, budget, whole[:1, :prompt])
        apart = torch.cat([one.divergence for one in rows[name, size]])
        same = torch.cat([one.same for one in rows[name, size]])
        row = {
            **provenance(),
            "dtype": dtype,
            "prompt": prompt,
            "texts": texts,
            "forced": forced,
            "method": name,
            "budget": budget,
            "block": size,
            "peak_cache_bytes": most,
            "budget_and_block_bytes": bytes_of_tokens(model, budget + block),
            "read_seconds": seconds,
            "kl_mean_nats": apart.mean().item(),
            "kl_of_texts_nats": " ".join(f"{one:.4f}" for one in apart.mean(1).tolist()),
            "top1_agreement": same.float().mean().item(),
        }
        append_rows(out, [row])
        Console().print(
            f"{name}, {'whole' if size is None else f'blocks of {size}'}: peak {most / 2**20:.1f} MiB of "
            f"{row['budget_and_block_bytes'] / 2**20:.1f} MiB, KL {row['kl_mean_nats']:.3f} nats"
        )


if __name__ == "__main__":
    typer.run(main)
