"""Trying policies out: needles that are still found, and distance from the full cache on prose."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from kvpatch import needle
from kvpatch.budget import Budget
from kvpatch.evaluation.answers import pad_of
from kvpatch.evaluation.continuation import FIRST, Feeding
from kvpatch.evaluation.forcing import endless

NEW_TOKENS = 14


@torch.no_grad()
def hits(handle, tokenizer, hidden: list[needle.Needle], ways: list[tuple], tick: Callable[[], None]) -> list[Tensor]:
    """Which needles each way finds: bool [needles] a way.

    Args:
        hidden: of one length.
        ways: (policy, budget) pairs; ("full", None) among them.
        tick: called when a way is done.
    """
    ids = torch.stack([one.prompt_ids for one in hidden]).to(handle.model.device)
    source, found = handle.read(ids), []
    for policy, budget in ways:
        cache = source.fork(policy, budget)
        made = handle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=pad_of(tokenizer),
        )
        cache.free()
        texts = tokenizer.batch_decode(made[:, ids.shape[1] :])
        found.append(torch.tensor([one.answer in text for one, text in zip(hidden, texts, strict=True)]))
        tick()
    source.free()
    return found


@torch.no_grad()
def divergences(handle, tokenizer, texts: Tensor, prompt: int, ways: list[tuple], tick: Callable[[], None]):
    """KL(full || way) of the next token in nats, mean over each text: [texts] a way.

    Args:
        texts: [texts, prompt + forced] int64.   prompt: tokens that are read at once.
        ways: (policy, budget) pairs that evict.
    """
    texts = texts.to(handle.model.device)
    ids, tokens = texts[:, :prompt], texts[:, prompt:]
    source = handle.read(ids)

    def feed(policy, budget, expected) -> Feeding:
        cache, feeding = source.fork(policy, budget), Feeding(prompt, tokens, expected)
        with endless(handle.model):
            handle.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=tokens.shape[1],
                do_sample=False,
                pad_token_id=pad_of(tokenizer),
                logits_processor=LogitsProcessorList([feeding]),
            )
        cache.free()
        tick()
        return feeding

    expected = feed("full", None, None).kept
    found = [torch.stack(feed(policy, budget, expected).divergence, 1)[:, FIRST:].mean(1) for policy, budget in ways]
    source.free()
    return found


def share(value: float) -> Budget:
    """That share of the prompt, however few tokens it comes to."""
    return Budget(value, min_budget=1)
