"""Trying policies out: needles that are still found, and distance from the full cache on prose."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpatch import needle
from kvpatch.budget import Budget
from kvpatch.evaluation.continuation import FIRST, Feeding
from kvpatch.evaluation.reading import Reading

NEW_TOKENS = 14


@torch.no_grad()
def hits(handle, tokenizer, hidden: list[needle.Needle], ways: list[tuple], tick: Callable[[], None]) -> list[Tensor]:
    """Which needles each way finds: bool [needles] a way.

    Args:
        hidden: of one length.
        ways: (policy, budget) pairs; ("full", None) among them.
        tick: called when a way is done.
    """
    found = []
    with Reading(handle, tokenizer, torch.stack([one.prompt_ids for one in hidden]).to(handle.model.device)) as reading:
        for policy, budget in ways:
            texts = tokenizer.batch_decode(reading.generate(policy, budget, NEW_TOKENS, ends=True))
            found.append(torch.tensor([one.answer in text for one, text in zip(hidden, texts, strict=True)]))
            tick()
    return found


@torch.no_grad()
def divergences(handle, tokenizer, texts: Tensor, forced: int, ways: list[tuple], tick: Callable[[], None]):
    """KL(full || way) of the next token in nats on the full cache's own continuation, a mean [texts] of each way.

    Its own, because that is where a policy runs: fed the text that follows in the document, the same policies come out
    in another order.

    Args:
        texts: [texts, tokens] int64, read at once.   forced: tokens of the continuation, which are fed to each way.
        ways: (policy, budget) pairs that evict.
    """
    with Reading(handle, tokenizer, texts.to(handle.model.device)) as reading:
        tokens = reading.continuation(forced, tokenizer.eos_token_id)
        tick()

        def feed(policy, budget, expected) -> Feeding:
            feeding = Feeding(texts.shape[1], tokens, expected)
            reading.generate(policy, budget, forced, feeding)
            tick()
            return feeding

        expected = feed("full", None, None).kept
        fed = [feed(policy, budget, expected) for policy, budget in ways]
    return [torch.stack(one.divergence, 1)[:, FIRST:].mean(1) for one in fed]


def share(value: float) -> Budget:
    """That share of the prompt, however few tokens it comes to."""
    return Budget(value, min_budget=1)
