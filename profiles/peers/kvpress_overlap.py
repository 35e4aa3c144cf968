"""Which entries kvpress and kvpatch keep of the same prompt, and how far they agree.

    python profiles/peers/kvpress_overlap.py            # the demo model; prints a table
    python profiles/peers/kvpress_overlap.py --out profiles/peers/overlap.csv

kvpress runs its released code in a virtual environment of its own below kvpatch's cache folder, made on first use. For
each method, layer and KV head the sets of positions are compared (Jaccard: entries that both keep over those that one
keeps). The
README's table says what the two do differently on purpose; nothing is tuned to agree.
"""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import kvpatch
from kvpatch import demo, needle
from kvpatch.bench import peers
from kvpatch.bench.record import append_rows, provenance
from kvpatch.compression.rule import PRESETS

# Method: the press as kvpress spells it, and the attention that it needs.
PRESSES = {
    "snapkv": ("SnapKVPress(compression_ratio=ratio, window_size=32)", "sdpa"),
    "pyramidkv": ("PyramidKVPress(compression_ratio=ratio, window_size=32)", "sdpa"),
    "adakv": ("AdaKVPress(SnapKVPress(compression_ratio=ratio, window_size=32))", "sdpa"),
    "criticalkv": ("CriticalKVPress(SnapKVPress(compression_ratio=ratio, window_size=32))", "sdpa"),
    "expected-attention": ("ExpectedAttentionPress(compression_ratio=ratio)", "sdpa"),
    "tova": ("TOVAPress(compression_ratio=ratio)", "sdpa"),
    "h2o": ("ObservedAttentionPress(compression_ratio=ratio)", "eager"),
    "keydiff": ("KeyDiffPress(compression_ratio=ratio)", "sdpa"),
    "knorm": ("KnormPress(compression_ratio=ratio)", "sdpa"),
    "streaming-llm": ("StreamingLLMPress(compression_ratio=ratio)", "sdpa"),
}


def ours(model, name: str, ids: torch.Tensor, budget: int) -> list[list[list[int]]]:
    """Positions that kvpatch keeps of a prompt [n], by layer and KV head."""
    policy = kvpatch.Policy(name, prefill=PRESETS[name], grows=True, coupling="per_head")
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        model.generate(ids[None], attention_mask=torch.ones_like(ids)[None], max_new_tokens=1, do_sample=False)
        held = handle.retained()[:, 0]
    return [[sorted(x for x in head.tolist() if x >= 0) for head in layer] for layer in held]


def theirs(folder: str, ids: torch.Tensor, budget: int, tell) -> dict:
    """Positions that kvpress keeps, by method, layer and KV head."""
    python = peers.environment("kvpress", tell)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "kept.json"
        # Half an entry more than is to go, so that rounding can't take the budget's last one.
        given = {"model": folder, "ids": ids.tolist(), "presses": PRESSES, "out": str(out)}
        given["ratio"] = 1 - (budget + 0.5) / len(ids)
        script = Path(__file__).with_name("kvpress_kept.py")
        done = subprocess.run([str(python), str(script), json.dumps(given)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"kvpress stopped:\n{done.stderr[-2000:]}")
        return json.loads(out.read_text())


def main(
    length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    share: Annotated[float, typer.Option(help="Of them that are kept.")] = 0.25,
    seed: Annotated[int, typer.Option(help="Of the prompt.")] = 0,
    out: Annotated[Path | None, typer.Option(help="CSV file that rows are added to.")] = None,
) -> None:
    """Compare what is kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(demo.path())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = needle.document(length, AutoTokenizer.from_pretrained(folder), seed).prompt_ids
    budget = int(share * length)
    console = Console()
    peer = theirs(folder, ids, budget, console.print)
    table = Table("method", "Jaccard, mean", "least layer", "kept a head, here", "there")
    rows = []
    for name in PRESSES:
        mine = ours(model, name, ids, budget)
        layers = [
            sum(len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in zip(one, other, strict=True)) / len(one)
            for one, other in zip(mine, peer[name], strict=True)
        ]
        counts = [sum(len(head) for layer in side for head in layer) for side in (mine, peer[name])]
        heads = sum(map(len, mine))
        table.add_row(
            name,
            f"{sum(layers) / len(layers):.3f}",
            f"{min(layers):.3f}",
            *(f"{count / heads:.1f}" for count in counts),
        )
        for layer, jaccard in enumerate(layers):
            rows.append(
                provenance()
                | {"method": name, "prompt": length, "budget": budget, "seed": seed}
                | {"layer": layer, "jaccard": round(jaccard, 6)}
                | {"kept": sum(map(len, mine[layer])), "kept_there": sum(map(len, peer[name][layer]))}
            )
    console.print(table)
    if out is not None:
        append_rows(out, rows)


if __name__ == "__main__":
    typer.run(main)
