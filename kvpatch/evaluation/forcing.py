"""Making `generate` say given tokens, so that different caches are compared on the same text."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import kvpatch

Tick = Callable[[int], None]


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


class Each:
    """A streamer that calls `tick()` for the prompt and for every token."""

    def __init__(self, tick: Callable[[], None]):
        self.tick, self.tokens = tick, -1

    def put(self, value) -> None:
        """Called by generate."""
        self.tokens += 1
        self.tick()

    def end(self) -> None:
        """Called by generate at the end."""


@contextlib.contextmanager
def decoding(model, policy: str | kvpatch.Policy | None, budget) -> Iterator[kvpatch.Patch | None]:
    """The model under a policy; as it is for None."""
    if policy is None:
        yield None
        return
    evicts = policy != "full"
    with kvpatch.patched(model, policy, **({"budget": budget} if evicts else {})) as handle:
        yield handle


@contextlib.contextmanager
def endless(model) -> Iterator[None]:
    """No token ends a row."""
    config = model.generation_config
    eos, config.eos_token_id = config.eos_token_id, None
    try:
        yield
    finally:
        config.eos_token_id = eos


def silent(done: int) -> None:
    """Nobody is told."""


def generate(model, prompts: Tensor, tokens: int, tick: Tick = silent, script=None, after=None, mask=None, **more):
    """Greedy decoding.

    Args:
        prompts: [B, L] int64.   mask: [B, L], left-padded; None: no pads.
        tokens: most new tokens.
        tick: told of every n tokens that are done.
        script: a logits processor, such as one that chooses tokens whatever the model says.
        after: called after the prompt and after every token.
    """

    def step() -> None:
        if streamer.tokens > 0:
            tick(1)
        if after is not None:
            after()

    streamer = Each(step)
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts) if mask is None else mask,
        max_new_tokens=tokens,
        do_sample=False,
        streamer=streamer,
        logits_processor=LogitsProcessorList([script] if script else []),
        **more,
    )
    tick(tokens - streamer.tokens)  # a batch may end early
    return output
