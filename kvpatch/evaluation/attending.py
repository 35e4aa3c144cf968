"""The attention of the full cache, step by step."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpatch import patches

QUERIES = 16  # whose attention over the whole text is held at once


@contextlib.contextmanager
def eager(model) -> Iterator[None]:
    """Attention weights are to be had from the eager implementation only."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def full_cache(model) -> dict[str, DynamicCache]:
    """An empty cache under the keyword that the model takes it by."""
    # Without a config: layers with a sliding window keep everything too.
    return {patches.cache_keyword(patches.find(model).find_parts(model).attentions[0]): DynamicCache()}


@torch.no_grad()
def attention_of(
    model, text: Tensor, prompt: int, queries: int = QUERIES
) -> Iterator[tuple[int, list[Tensor], DynamicCache]]:
    """Every decode step of the full cache on a given text; the last token is not fed.

    Args:
        model: outside `generate`; its attention implementation is changed and put back.
        text: [prompt + forced] int64.
        prompt: tokens that are read at once.
        queries: steps whose attention is held at once; nothing but memory depends on it.

    Yields:
        the step's place in the text, each layer's attention [H, place + 1], and the cache, which holds that much or
        more; neither is to be kept.
    """
    given = full_cache(model)
    (cache,) = given.values()
    model(text[None, :prompt], logits_to_keep=1, **given)
    for start in range(prompt, len(text) - 1, queries):
        end = min(start + queries, len(text) - 1)
        with eager(model):
            attentions = model(text[None, start:end], output_attentions=True, logits_to_keep=1, **given).attentions
        for query in range(start, end):
            yield query, [one[0, :, query - start, : query + 1] for one in attentions], cache
