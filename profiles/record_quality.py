"""What eviction costs: needles found at once, needles found later, and distance from the full cache.

    python profiles/record_quality.py                          # everything; resumes where it stopped
    python profiles/record_quality.py --no-needle --after 0    # only the third measure

Needs scipy (pip install "kvpatch[eval]").

1. quality_needle.csv: a prompt of `--prompt` tokens hides a number and asks for it; a hit is the number
   in a few greedy tokens. `plain` is the unpatched model; lost hits are its hits that a policy misses.
2. quality_after.csv: the prompt asks for a summary instead. After `--after` greedy tokens of the policy's
   own, the question and the answer's opening are fed token by token, then the answer is scored. One
   generate call.
3. quality_fidelity.csv: `--texts` prose texts; the policy is fed each text's own tokens behind a prompt, and
   its logits are compared with those of one plain forward over the whole text; lost mass is the share of
   the full cache's attention that lies on what the policy no longer holds.

A policy whose row with the same workload is in the file already is skipped, unless --again.
"""

import hashlib
from pathlib import Path
from typing import Annotated

import torch
import typer
from _shared import DTYPES, HERE, Dtype, Threads, budget_of
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from scipy.stats import binomtest
from torch import Tensor

import kvpatch
from kvpatch import demo, needle
from kvpatch.bench.record import append_rows, provenance, read_rows
from kvpatch.evaluation import fidelity, found, found_later
from kvpatch.evaluation.forcing import decoding
from kvpatch.evaluation.needles import asked_later

PLAIN = "plain"


# ---- records -----------------------------------------------------------------------------------------------


def fingerprint(inputs: list[Tensor]) -> str:
    """Of everything that is fed, so that rows made from other text are not taken for the same workload."""
    return hashlib.sha256(torch.cat(inputs).numpy().tobytes()).hexdigest()[:12]


def text_of(value) -> str:
    """A workload's value as it stands in the CSV file."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


class Record:
    """One CSV file, with a row a policy."""

    def __init__(self, path: Path, workload: dict, again: bool):
        self.path, self.workload, self.again = path, workload, again

    def row_of(self, policy: str) -> dict[str, str] | None:
        """The newest row of that policy under this workload."""
        fits = {name: text_of(value) for name, value in self.workload.items()} | {"policy": policy}
        rows = [row for row in read_rows(self.path) if fits.items() <= row.items()]
        return rows[-1] if rows else None

    def missing(self, policies: list[str]) -> list[str]:
        """Policies that are to be run."""
        return [policy for policy in policies if self.again or self.row_of(policy) is None]

    def add(self, policy: str, outcome: dict) -> None:
        """Write a policy's row."""
        append_rows(self.path, [{**provenance(), **self.workload, "policy": policy, **outcome}])


def count_hits(record: Record, policy: str, hits: list[bool]) -> dict:
    """Hits with their Wilson interval, and those of the plain model's that were lost."""
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(confidence_level=0.95, method="wilson")
    plain = record.row_of(PLAIN) if policy != PLAIN else None
    of_plain = [mark == "1" for mark in plain["found"].lstrip("b")] if plain else None
    return {
        "n": len(hits),
        "hits": sum(hits),
        "share": sum(hits) / len(hits),
        "wilson_low": float(low),
        "wilson_high": float(high),
        "plain_hits": sum(of_plain) if of_plain else None,
        "lost_hits": sum(a and not b for a, b in zip(of_plain, hits, strict=True)) if of_plain else None,
        "found": "b" + "".join("01"[hit] for hit in hits),  # the b keeps spreadsheets from reading a number
    }


def run_hits(
    record: Record,
    policies: list[str],
    model,
    budget_for,
    cases: list,
    size: int,
    hits_of,
    progress,
    total,
):
    """Count the hits of each policy that is missing. `hits_of(batch, tick)` scores one batch of cases."""
    missing = record.missing(policies)
    if not missing:
        return
    task = progress.add_task(record.path.stem, total=len(missing) * total)
    for policy in missing:
        progress.update(task, description=f"{record.path.stem}: {policy}")
        hits: list[bool] = []
        with decoding(model, None if policy == PLAIN else policy, budget_for(policy).get("budget")):
            for start in range(0, len(cases), size):
                hits += hits_of(cases[start : start + size], lambda n: progress.advance(task, n))
        record.add(policy, count_hits(record, policy, hits))


def run_fidelity(record: Record, policies: list[str], model, budget_for, texts: Tensor, prompt: int, progress):
    """Measure the distance of each policy that is missing; each costs one more forward over the texts."""
    missing = record.missing(policies)
    task = progress.add_task(record.path.stem, total=len(missing) * (texts.shape[1] - prompt))
    for policy in missing:
        progress.update(task, description=f"{record.path.stem}: {policy}")
        one = {policy: (policy, budget_for(policy).get("budget"))}
        got = fidelity(model, texts, prompt, one, tick=lambda n: progress.advance(task, n))[policy]
        outcome = {
            "tokens": got.divergence.numel(),
            "kl_mean_nats": got.divergence.mean().item(),
            "kl_p95_nats": got.divergence.flatten().quantile(0.95).item(),
            "top1_agreement": got.same.float().mean().item(),
            "lost_mass": got.lost_mass.mean().item(),
        }
        record.add(policy, outcome)


def show(console: Console, record: Record, policies: list[str], columns: tuple[str, ...]) -> None:
    """The newest rows of a record."""
    table = Table("policy", "commit", *columns, title=record.path.name)
    for policy in policies:
        row = record.row_of(policy)
        if row:
            table.add_row(policy, row["commit"], *(row[column] for column in columns))
    console.print(table)


def main(
    needles: Annotated[bool, typer.Option("--needle/--no-needle", help="Run the first measure.")] = True,
    after: Annotated[int, typer.Option(help="Free tokens before the question; 0: no second measure.")] = 512,
    kl: Annotated[bool, typer.Option("--kl/--no-kl", help="Run the third measure.")] = True,
    policies: Annotated[str | None, typer.Option(help="By commas; all and plain if left out.")] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 1024,
    new_tokens: Annotated[int, typer.Option(help="Tokens in which the answer must appear.")] = 12,
    prompts: Annotated[int, typer.Option(help="Prompts of the first measure: seeds 0, 1, ...")] = 128,
    after_prompts: Annotated[int, typer.Option(help="Prompts of the second measure.")] = 32,
    batch: Annotated[int, typer.Option(help="Prompts that are decoded together.")] = 8,
    texts: Annotated[int, typer.Option(help="Prose texts of the third measure, decoded together.")] = 4,
    forced: Annotated[int, typer.Option(help="Tokens of each text behind its prompt.")] = 512,
    text_seed: Annotated[int, typer.Option(help="Seed of the first prose text.")] = 1000,
    budget: Annotated[float, typer.Option(help="Share of the prompt that evicting policies hold.")] = 0.1,
    min_budget: Annotated[int, typer.Option(help="Least tokens held.")] = 1,
    threads: Threads = 2,
    dtype: Dtype = "float32",
    out: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = HERE,
    again: Annotated[bool, typer.Option(help="Measure policies too whose row is there already.")] = False,
) -> None:
    """Record answer quality."""
    console = Console()
    torch.set_num_threads(threads)
    model, tokenizer = demo.load(DTYPES[dtype])
    chosen = policies.split(",") if policies else [PLAIN, *(name for name in kvpatch.list_policies() if name != "best")]
    chosen.sort(key=lambda policy: policy != PLAIN)  # lost hits are counted against it
    common = {"dtype": dtype, "prompt": prompt, "budget": budget, "min_budget": min_budget}
    bars = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())

    def budget_for(policy: str) -> dict:
        return budget_of(policy, budget, min_budget)

    shown = []
    with Progress(*bars, TimeRemainingColumn(compact=True), console=console) as progress:
        if needles:
            cases = [needle.document(prompt, tokenizer, seed) for seed in range(prompts)]
            inputs = fingerprint([one.prompt_ids for one in cases])
            shape = {"prompts": prompts, "batch": batch, "new_tokens": new_tokens}
            record = Record(out / "quality_needle.csv", {**common, **shape, "inputs": inputs}, again)
            total = new_tokens * -(-prompts // batch)

            def hits_of(some, tick):
                return found(model, tokenizer, some, new_tokens, tick)

            run_hits(record, chosen, model, budget_for, cases, batch, hits_of, progress, total)
            shown.append((record, ("n", "hits", "lost_hits", "wilson_low", "wilson_high")))
        if after:
            later = [asked_later(prompt, tokenizer, seed) for seed in range(after_prompts)]
            inputs = fingerprint([torch.cat([one.prompt_ids, torch.tensor(one.then)]) for one in later])
            shape = {"prompts": after_prompts, "batch": batch, "new_tokens": new_tokens, "after": after}
            record = Record(out / "quality_after.csv", {**common, **shape, "inputs": inputs}, again)
            batches = [later[start : start + batch] for start in range(0, after_prompts, batch)]
            total = sum(after + max(len(one.then) for one in some) + new_tokens for some in batches)

            def later_hits_of(some, tick):
                return found_later(model, tokenizer, some, after, new_tokens, tick)

            run_hits(record, chosen, model, budget_for, later, batch, later_hits_of, progress, total)
            shown.append((record, ("n", "hits", "lost_hits", "wilson_low", "wilson_high")))
        if kl:
            seeds = range(text_seed, text_seed + texts)
            whole = torch.stack([needle.prose(prompt + forced, tokenizer, seed) for seed in seeds])
            shape = {"texts": texts, "forced": forced, "text_seed": text_seed}
            inputs = fingerprint(list(whole))
            record = Record(out / "quality_fidelity.csv", {**common, **shape, "inputs": inputs}, again)
            run_fidelity(record, [name for name in chosen if name != PLAIN], model, budget_for, whole, prompt, progress)
            shown.append((record, ("tokens", "kl_mean_nats", "kl_p95_nats", "top1_agreement", "lost_mass")))
    for record, columns in shown:
        show(console, record, chosen, columns)


if __name__ == "__main__":
    typer.run(main)
