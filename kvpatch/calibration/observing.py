"""What every head looks at when an answer begins, on prompts that hide one.

Copying heads attend to what comes next in the context (retrieval heads, arXiv 2404.15574). A head's worth here is how
few entries it would have to keep so that the whole answer is among them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpatch import needle, selection
from kvpatch.evaluation.attending import eager, full_cache
from kvpatch.ranking import Blend


@dataclass(frozen=True)
class Observed:
    """One prompt.

    attention: [layers, heads, n] float32, of the step that feeds the answer's first token.
    answer: positions of the answer's other tokens in the prompt.
    solved: whether the model, with its full cache, says the answer.
    """

    attention: Tensor
    answer: tuple[int, ...]
    solved: bool


@torch.no_grad()
def look(model, ids: Tensor) -> Tensor:
    """Attention [layers, heads, n + 1] float32 of the step that feeds what the model says after a text [n].

    Args:
        model: unpatched, or patched and outside `generate`.
    """
    cache = full_cache(model)
    said = model(ids.to(model.device)[None], logits_to_keep=1, **cache).logits[0, -1].argmax(-1)
    with eager(model):
        output = model(said[None, None], output_attentions=True, **cache)
    return torch.stack([one[0, :, 0] for one in output.attentions]).float().cpu()


@torch.no_grad()
def observe(model, tokenizer, hidden: needle.Needle) -> Observed | None:
    """Read one prompt with the full cache, feed the answer, and look; None where the answer is not tokenised alike.

    Args:
        model: unpatched, or patched and outside `generate`.
    """
    ids = hidden.prompt_ids.to(model.device)[None]
    expected = answer_ids(tokenizer, hidden)
    start = place_of(expected, hidden.prompt_ids.tolist())
    if start is None or len(expected) < 2:
        return None
    cache = full_cache(model)
    first = model(ids, logits_to_keep=1, **cache).logits[0, -1]
    fed = torch.tensor(expected, device=model.device)
    with eager(model):
        output = model(fed[None, :-1], output_attentions=True, **cache)
    said = torch.cat((first.argmax(-1)[None], output.logits[0].argmax(-1)))
    attention = torch.stack([one[0, :, 0, : ids.shape[1] + 1] for one in output.attentions]).float().cpu()
    return Observed(attention, tuple(range(start + 1, start + len(expected))), bool(torch.equal(said, fed)))


def answer_ids(tokenizer, hidden: needle.Needle) -> list[int]:
    """Tokens of the answer as they follow its opening."""
    opening = tokenizer(hidden.prefix, add_special_tokens=False).input_ids
    whole = tokenizer(f"{hidden.prefix} {hidden.answer}", add_special_tokens=False).input_ids
    return whole[len(opening) :]


def place_of(part: list[int], whole: list[int]) -> int | None:
    """Where `part` first stands in `whole`."""
    for start in range(len(whole) - len(part) + 1):
        if whole[start : start + len(part)] == part:
            return start
    return None


def worst_rank(scores: Tensor, wanted: tuple[int, ...]) -> int:
    """How many entries must be kept, best first, so that all that are wanted are among them."""
    lowest = scores[list(wanted)].min()
    return int((scores >= lowest).sum())


def cost(ranked: Callable[[Tensor], Tensor], seen: list[Observed]) -> float:
    """Mean over prompts of log2 of `worst_rank`, in bits.

    Args:
        ranked: a prompt's attention [layers, heads, n] to scores [n].
    """
    ranks = torch.tensor([worst_rank(ranked(one.attention), one.answer) for one in seen], dtype=torch.float64)
    return ranks.log2().mean().item()


def foci(ranked: Callable[[Tensor], Tensor], attentions: list[Tensor]) -> Tensor:
    """`selection.focus` of each prompt, [prompts].

    Args:
        ranked: as of `cost`.   attentions: of each prompt [layers, heads, n].
    """
    scores = [ranked(one) for one in attentions]
    return torch.stack([selection.focus(one, torch.arange(len(one)), one >= 0)[0] for one in scores])


def mean_of(heads: list[tuple[int, int]]) -> Callable[[Tensor], Tensor]:
    """The mean attention of these (layer, head) pairs."""
    layers, places = [layer for layer, _ in heads], [head for _, head in heads]
    return lambda attention: attention[layers, places].mean(0)


def weighted(heads: list[tuple[int, int]], seen: list[Observed]) -> list[tuple[int, int, float]]:
    """Heads with weights by which each counts, in a running utility, as the fewer entries the more it has to keep.

    A head that has to keep twice as many entries counts half: what it looks at beside the answer drowns less of it.
    The utility runs through the layers, so what comes before another layer is weighted up.
    """
    needs = {head: 2 ** cost(mean_of([head]), seen) for head in heads}
    layers = sorted({layer for layer, _ in heads})
    found = []
    for layer, head in heads:
        beside = sum(index == layer for index, _ in heads)
        decay = Blend.alpha ** (len(layers) - 1 - layers.index(layer))
        weight = min(needs.values()) / needs[layer, head] * beside / decay
        found.append((layer, head, float(f"{weight:.3g}")))
    return found


def running(heads: list[tuple]) -> Callable[[Tensor], Tensor]:
    """What a `kvpatch.Blend` with these `score_heads` makes of a first step's attention, up to a factor."""
    alpha = Blend.alpha

    def ranked(attention: Tensor) -> Tensor:
        found = torch.zeros_like(attention[0, 0])
        for layer in sorted({layer for layer, *_ in heads}):
            own = [(head, *weight, 1.0)[:2] for index, head, *weight in heads if index == layer]
            mean = torch.stack([weight * attention[layer, head] for head, weight in own]).mean(0)
            found = alpha * found + (1 - alpha) * mean
        return found

    return ranked


def by_cost(seen: list[Observed]) -> list[tuple[int, int]]:
    """All (layer, head) pairs, those first that need to keep fewest entries.

    Adding heads one after the other to the mean, each where it lowers the cost most, gives no lower cost on other
    prompts than taking the best alone, and picks heads that do nothing by themselves.
    """
    layers, heads = seen[0].attention.shape[:2]
    every = [(layer, head) for layer in range(layers) for head in range(heads)]
    return sorted(every, key=lambda pair: cost(mean_of([pair]), seen))
