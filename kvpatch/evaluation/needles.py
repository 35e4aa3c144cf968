"""Is a fact that the prompt hides still found: at once, and after many tokens of the model's own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpatch import needle
from kvpatch.evaluation.forcing import Script, Tick, endless, generate, silent

TASK = "Do not answer any question yet. Summarize the text above in your own words, at length."


def found(model, tokenizer, needles: list[needle.Needle], new_tokens: int = 12, tick: Tick = silent) -> list[bool]:
    """Which needles of a batch are in a few greedy tokens.

    Args:
        model: patched or not.
        needles: prompts of one length.
        new_tokens: in which the answer must appear.
        tick: told of every n tokens that are done.
    """
    prompts = torch.stack([one.prompt_ids for one in needles]).to(model.device)
    texts = tokenizer.batch_decode(generate(model, prompts, new_tokens, tick)[:, prompts.shape[1] :])
    return [one.answer in text for one, text in zip(needles, texts, strict=True)]


@dataclass(frozen=True)
class Asked:
    """A needle prompt that asks for a summary, and what is fed after the free continuation."""

    prompt_ids: Tensor
    then: list[int]
    answer: str


def asked_later(length: int, tokenizer, seed: int, kind: str = "number") -> Asked:
    """The document of `needle.document` without its question, in a prompt of exactly that many tokens."""
    opened = needle.document(length, tokenizer, seed, kind=kind)
    before, after = needle.chat_frame(tokenizer, opened.question, opened.prefix, kind)
    before_task, after_task = needle.chat_frame(tokenizer, TASK, "", kind)
    # Keys differ in their number of tokens: ask for as much more document as the other frame leaves room for.
    longer = needle.document(length + len(after) - len(after_task), tokenizer, seed, kind=kind)
    text = longer.prompt_ids[len(before) : len(longer.prompt_ids) - len(after)]
    prompt = torch.cat([torch.tensor(before_task), text, torch.tensor(after_task)])
    then = next_turn(tokenizer, opened.question, opened.prefix)
    return Asked(prompt, tokenizer(then, add_special_tokens=False).input_ids, longer.answer)


def next_turn(tokenizer, question: str, opening: str) -> str:
    """What closes an open answer in the chat template, puts the question and opens the next answer."""
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "[cut]"}, {"role": "assistant", "content": "[cut]"}]
        + [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    return turn.rsplit("[cut]", 1)[1] + opening


def found_later(
    model, tokenizer, asked: list[Asked], free: int, new_tokens: int = 12, tick: Tick = silent
) -> list[bool]:
    """Which needles of a batch are found after `free` greedy tokens of the model's own; arguments as `found`."""
    prompts = torch.stack([one.prompt_ids for one in asked]).to(model.device)
    scripts = [one.then for one in asked]
    eos = tokenizer.eos_token_id
    script = Script(prompts.shape[1], free, scripts, banned=eos)
    with endless(model):
        total = free + max(map(len, scripts)) + new_tokens
        made = generate(model, prompts, total, tick, script)[:, prompts.shape[1] :]
    hits = []
    for one, row in zip(asked, made.tolist(), strict=True):
        end = free + len(one.then)
        if row[free:end] != one.then:
            raise RuntimeError("the question was not fed as it should be")
        scored = row[end : end + new_tokens]
        scored = scored[: scored.index(eos)] if eos in scored else scored
        hits.append(one.answer in tokenizer.decode(scored))
    return hits
