"""What the scripts here share beside `kvpatch.bench.record`."""

from pathlib import Path
from typing import Annotated

import torch
import typer

import kvpatch
from kvpatch.needle import document

HERE = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Threads = Annotated[int, typer.Option(help="CPU threads.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]


def budget_of(policy: str, share: float, min_budget: int = 64) -> dict:
    """The budget argument of `kvpatch.patch`; "full" takes none."""
    return {} if policy == "full" else {"budget": kvpatch.Budget(share, min_budget=min_budget)}


def needle_prompts(length: int, rows: int, tokenizer, seed: int) -> torch.Tensor:
    """[rows, length] int64: one hidden fact a row, seeds `seed`, `seed + 1`, ..."""
    return torch.stack([document(length, tokenizer, seed + row).prompt_ids for row in range(rows)])


def workload(dtype: str, prompt: int, policy: str, budget: float, new_tokens: int) -> dict:
    """The columns that say what one row of one policy did."""
    return {
        "dtype": dtype,
        "batch": 1,
        "prompt": prompt,
        "variant": policy,
        "budget": None if policy == "full" else budget,
        "new_tokens": new_tokens,
    }


def markdown(head: list[str], rows: list[list[str]], figures: bool = True) -> str:
    """A table in markdown, figures to the right."""
    if not rows:
        return "(not recorded yet)\n"
    align = ["---:" if index and figures else "---" for index in range(len(head))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, align, *rows))
