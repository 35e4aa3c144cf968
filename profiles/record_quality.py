"""What eviction costs: needles found at once, needles found later, and distance from the full cache.

    python profiles/record_quality.py                          # everything; resumes where it stopped
    python profiles/record_quality.py --no-needle --after 0    # only the third measure

Needs scipy (pip install "kvpatch[eval]").

1. quality_needle.csv: a prompt of `--prompt` tokens hides a number and asks for it; a hit is the number
   in a few greedy tokens. `plain` is the unpatched model; lost hits are its hits that a policy misses.
2. quality_after.csv: the prompt asks for a summary instead. After `--after` greedy tokens of the policy's
   own, the question and the answer's opening are fed token by token, then the answer is scored. One
   generate call.
3. quality_kl.csv: `--texts` prose texts; the policy is fed each text's own tokens behind a prompt, and
   its logits are compared with those of one plain forward over the whole text.

A policy whose row with the same workload is in the file already is skipped, unless --again.
"""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from _record import DTYPES, HERE, Clock, append_rows, budget_of, provenance, read_rows
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
from transformers import LogitsProcessor, LogitsProcessorList

import kvpatch
from kvpatch import demo, needle

PLAIN = "plain"
TASK = "Do not answer any question yet. Summarize the text above in your own words, at length."


@dataclass(frozen=True)
class Asked:
    """A needle prompt of the second measure, and what is fed after the free continuation."""

    prompt_ids: Tensor
    then: list[int]
    answer: str


class Script(LogitsProcessor):
    """Makes generate choose given tokens at given places of the continuation.

    Args:
        first: columns of the prompt.
        start: place of the continuation at which the scripts begin.
        rows: each row's script; behind it the row is free.
        banned: a token that no row may choose before its script begins.
    """

    def __init__(self, first: int, start: int, rows: list[list[int]], banned: int | None = None):
        self.first, self.start, self.rows, self.banned = first, start, rows, banned

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        place = input_ids.shape[1] - self.first - self.start
        if place < 0 and self.banned is not None:
            scores[:, self.banned] = -torch.inf
        for row, ids in enumerate(self.rows):
            if 0 <= place < len(ids):
                scores[row] = -torch.inf
                scores[row, ids[place]] = 0.0
        return scores


@contextlib.contextmanager
def decoding(model, policy: str, budget: dict) -> Iterator[None]:
    """The model under a policy; as it is for `plain`."""
    if policy == PLAIN:
        yield
        return
    with kvpatch.patched(model, policy, **budget):
        yield


@contextlib.contextmanager
def endless(model) -> Iterator[None]:
    """No token ends a row."""
    config = model.generation_config
    eos, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = eos


def generate(
    model,
    prompts: Tensor,
    tokens: int,
    tick: Callable[[int], None],
    script: Script | None = None,
    **more,
):
    """Greedy decoding of equally long prompts; `tick(n)` is told of every n tokens that are done."""
    clock = Clock(lambda made: tick(1) if made else None)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        streamer=clock,
        logits_processor=LogitsProcessorList([script] if script else []),
        **more,
    )
    tick(tokens - (len(clock.times) - 1))  # a batch may end early
    return output


# ---- 1. needles --------------------------------------------------------------------------------------------


def needle_hits(model, tokenizer, needles: list[needle.Needle], tokens: int, tick) -> list[bool]:
    """Which of a batch's needles are found."""
    prompts = torch.stack([one.prompt_ids for one in needles])
    texts = tokenizer.batch_decode(generate(model, prompts, tokens, tick)[:, prompts.shape[1] :])
    return [one.answer in text for one, text in zip(needles, texts, strict=True)]


# ---- 2. needles after a long continuation ------------------------------------------------------------------


def asked_later(length: int, tokenizer, seed: int) -> Asked:
    """The document of `needle.document` without its question, in a prompt of exactly that many tokens."""
    opened = needle.document(length, tokenizer, seed)
    prefix = needle.ANSWER_PREFIX.format(key=opened.key)
    before, after = needle._chat_frame(tokenizer, opened.question, prefix)
    before_task, after_task = needle._chat_frame(tokenizer, TASK, "")
    # Keys differ in their number of tokens: ask for as much more document as the other frame leaves room for.
    longer = needle.document(length + len(after) - len(after_task), tokenizer, seed)
    text = longer.prompt_ids[len(before) : len(longer.prompt_ids) - len(after)]
    prompt = torch.cat([torch.tensor(before_task), text, torch.tensor(after_task)])
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "[cut]"}, {"role": "assistant", "content": "[cut]"}]
        + [{"role": "user", "content": opened.question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    then = turn.rsplit("[cut]", 1)[1] + prefix  # closes the open answer, asks, and opens the next one
    return Asked(prompt, tokenizer(then, add_special_tokens=False).input_ids, longer.answer)


def later_hits(model, tokenizer, asked: list[Asked], free: int, tokens: int, tick) -> list[bool]:
    """Which of a batch's needles are found after `free` tokens of free continuation."""
    prompts = torch.stack([one.prompt_ids for one in asked])
    scripts = [one.then for one in asked]
    eos = tokenizer.eos_token_id
    script = Script(prompts.shape[1], free, scripts, banned=eos)
    with endless(model):
        total = free + max(map(len, scripts)) + tokens
        made = generate(model, prompts, total, tick, script)[:, prompts.shape[1] :]
    hits = []
    for one, row in zip(asked, made.tolist(), strict=True):
        end = free + len(one.then)
        if row[free:end] != one.then:
            raise RuntimeError("the question was not fed as it should be")
        scored = row[end : end + tokens]
        scored = scored[: scored.index(eos)] if eos in scored else scored
        hits.append(one.answer in tokenizer.decode(scored))
    return hits


# ---- 3. distance from the full cache -----------------------------------------------------------------------


def prose(length: int, tokenizer, seed: int) -> Tensor:
    """[length] int64: consecutive sentences of the needle module's prose; the seed draws where they begin."""
    ids: list[int] = []
    for sentence in needle._sentences_from(random.Random(seed).random()):
        ids += tokenizer(" " + sentence, add_special_tokens=False).input_ids
        if len(ids) >= length:
            return torch.tensor(ids[:length])


@torch.no_grad()
def plain_logits(model, texts: Tensor, prompt: int) -> Tensor:
    """[texts, forced, V]: the full cache's logits for every token behind the prompt."""
    forced = texts.shape[1] - prompt
    return torch.cat([model(text[None], logits_to_keep=forced + 1).logits[:, :-1].float() for text in texts])


def distances(model, texts: Tensor, prompt: int, expected: Tensor, tick) -> tuple[Tensor, Tensor]:
    """KL(full || policy) in nats and whether both put the same token first, [texts, forced] each.

    The first two places are equal by construction: the policy evicts only after the first decode step.
    """
    forced = texts.shape[1] - prompt
    script = Script(prompt, 0, texts[:, prompt:].tolist())
    with endless(model):
        more = {"return_dict_in_generate": True, "output_logits": True}
        output = generate(model, texts[:, :prompt], forced, tick, script, **more)
    if not torch.equal(output.sequences, texts):
        raise RuntimeError("the text was not fed as it should be")
    divergence, same = [], []
    for place, logits in enumerate(output.logits):
        full, got = expected[:, place].log_softmax(-1), logits.float().log_softmax(-1)
        divergence.append((full.exp() * (full - got)).sum(-1))
        same.append(full.argmax(-1) == got.argmax(-1))
    return torch.stack(divergence, 1), torch.stack(same, 1)


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
        with decoding(model, policy, budget_for(policy)):
            for start in range(0, len(cases), size):
                hits += hits_of(cases[start : start + size], lambda n: progress.advance(task, n))
        record.add(policy, count_hits(record, policy, hits))


def run_distances(
    record: Record,
    policies: list[str],
    model,
    budget_for,
    texts: Tensor,
    prompt: int,
    progress,
):
    """Measure the distance of each policy that is missing."""
    missing = record.missing(policies)
    if not missing:
        return
    task = progress.add_task(record.path.stem, total=len(missing) * (texts.shape[1] - prompt))
    expected = plain_logits(model, texts, prompt)
    for policy in missing:
        progress.update(task, description=f"{record.path.stem}: {policy}")
        with decoding(model, policy, budget_for(policy)):
            divergence, same = distances(model, texts, prompt, expected, lambda n: progress.advance(task, n))
        outcome = {
            "tokens": divergence.numel(),
            "kl_mean_nats": divergence.mean().item(),
            "kl_p95_nats": divergence.flatten().quantile(0.95).item(),
            "top1_agreement": same.float().mean().item(),
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
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    out: Annotated[Path, typer.Option(help="Folder of the CSV files.")] = HERE,
    again: Annotated[bool, typer.Option(help="Measure policies too whose row is there already.")] = False,
) -> None:
    """Record answer quality."""
    console = Console()
    torch.set_num_threads(threads)
    model, tokenizer = demo.load(DTYPES[dtype])
    chosen = policies.split(",") if policies else [PLAIN, *kvpatch.list_policies()]
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
                return needle_hits(model, tokenizer, some, new_tokens, tick)

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
                return later_hits(model, tokenizer, some, after, new_tokens, tick)

            run_hits(record, chosen, model, budget_for, later, batch, later_hits_of, progress, total)
            shown.append((record, ("n", "hits", "lost_hits", "wilson_low", "wilson_high")))
        if kl:
            seeds = range(text_seed, text_seed + texts)
            whole = torch.stack([prose(prompt + forced, tokenizer, seed) for seed in seeds])
            shape = {"texts": texts, "forced": forced, "text_seed": text_seed}
            inputs = fingerprint(list(whole))
            record = Record(out / "quality_kl.csv", {**common, **shape, "inputs": inputs}, again)
            run_distances(
                record, [name for name in chosen if name != PLAIN], model, budget_for, whole, prompt, progress
            )
            shown.append((record, ("tokens", "kl_mean_nats", "kl_p95_nats", "top1_agreement")))
    for record, columns in shown:
        show(console, record, chosen, columns)


if __name__ == "__main__":
    typer.run(main)
