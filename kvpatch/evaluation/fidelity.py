"""How far a policy's predictions are from the full cache's, on text that both are fed.

The first `prompt` tokens of each text are read; the rest is fed token by token, whatever the model would say. Place j
is the prediction of the j-th fed token. Places 0 and 1 are equal by construction: eviction begins after the first step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpatch.evaluation.attending import attention_of
from kvpatch.evaluation.forcing import Script, Tick, decoding, endless, generate


@dataclass(frozen=True)
class Fidelity:
    """One policy against the full cache; [texts, forced] each, on the CPU in float32.

    divergence: KL(full || policy) of the next token, in nats.
    same: whether both put the same token first (bool).
    lost_mass: share of the full cache's attention that lies on what the policy no longer holds, mean over layers and
        heads; None if it was not asked for.
    """

    divergence: Tensor
    same: Tensor
    lost_mass: Tensor | None


@torch.no_grad()
def fidelity(
    model,
    texts: Tensor,
    prompt: int,
    policies: dict[str, tuple],
    *,
    lost_mass: bool = True,
    tick: Tick = lambda done: None,
) -> dict[str, Fidelity]:
    """Compare policies with the full cache on given text.

    Args:
        model: unpatched; patched and restored for each policy.
        texts: [texts, prompt + forced] int64.
        prompt: tokens that are read at once.
        policies: name to (policy, budget).
        lost_mass: also look at the full cache's attention, which takes one more forward.
        tick: told of every n fed tokens.

    Returns:
        name to `Fidelity`.

    Raises:
        ValueError: if no token is left to feed.
    """
    if not 0 < prompt < texts.shape[1] - 1:
        raise ValueError(f"prompt must leave two tokens or more of {texts.shape[1]} to feed, got {prompt}")
    texts = texts.to(model.device)
    expected = _plain_logits(model, texts, prompt)
    compared, sets = {}, {}
    for name, (policy, budget) in policies.items():
        held: list[Tensor] = []
        with decoding(model, policy, budget) as handle:
            look = _looking(handle, held) if lost_mass else None
            compared[name] = _distances(model, texts, prompt, expected, tick, look)
        sets[name] = held
    lost = attention_lost(model, texts, prompt, sets) if lost_mass else {}
    return {name: Fidelity(*pair, lost[name].mean(-1) if lost else None) for name, pair in compared.items()}


def _looking(handle, held: list[Tensor]) -> Callable[[], None]:
    """Notes what is held after each step."""

    def look() -> None:
        if handle.stats.steps > len(held):
            held.append(distinct(handle, handle.policy))

    return look


def distinct(cache, policy) -> Tensor:
    """What a cache, or a handle's last one, holds, for layers and heads that differ only: [Lc, B, Gc, slots] int32."""
    layers = None if policy.coupling in ("per_layer", "per_head") else 1
    heads = None if policy.coupling == "per_head" else 1
    return cache.retained()[:layers, :, :heads].to(torch.int32)


def _plain_logits(model, texts: Tensor, prompt: int) -> Tensor:
    """[texts, forced, V]: the full cache's logits for every token behind the prompt."""
    forced = texts.shape[1] - prompt
    return torch.cat([model(text[None], logits_to_keep=forced + 1).logits[:, :-1].float() for text in texts])


def _distances(model, texts: Tensor, prompt: int, expected: Tensor, tick: Tick, look) -> tuple[Tensor, Tensor]:
    """KL(full || policy) and agreement, [texts, forced] each."""
    forced = texts.shape[1] - prompt
    script = Script(prompt, 0, texts[:, prompt:].tolist())
    with endless(model):
        more = {"return_dict_in_generate": True, "output_logits": True}
        output = generate(model, texts[:, :prompt], forced, tick, script, after=look, **more)
    if not torch.equal(output.sequences, texts):
        raise RuntimeError("the text was not fed as it should be")
    divergence, same = [], []
    for place, logits in enumerate(output.logits):
        apart = between(expected[:, place].log_softmax(-1), logits.float().log_softmax(-1))
        for kept, one in zip((divergence, same), apart, strict=True):
            kept.append(one)
    return torch.stack(divergence, 1).cpu(), torch.stack(same, 1).cpu()


def between(full: Tensor, got: Tensor) -> tuple[Tensor, Tensor]:
    """KL(full || got) in nats, and whether both put the same token first, [B] each, of log-probabilities [B, V]."""
    return (full.exp() * (full - got)).sum(-1), full.argmax(-1) == got.argmax(-1)


@torch.no_grad()
def attention_lost(model, texts: Tensor, prompt: int, sets: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """The share of the full cache's attention, mean over heads, that lies on what each policy no longer holds.

    Args:
        model: outside `generate`; its attention implementation is changed and put back.
        texts: [texts, prompt + forced] int64.
        sets: for each policy what it held after each step, positions [Lc, texts, Gc, slots].

    Returns:
        name to [texts, forced, layers].
    """
    columns, layers = texts.shape[1], model.config.num_hidden_layers
    lost = {name: torch.zeros(texts.shape[0], columns - prompt, layers) for name in sets}
    for row, text in enumerate(texts):
        for query, weights, _ in attention_of(model, text, prompt):
            if query == prompt:
                continue  # the first step meets everything
            seen = torch.stack(weights).float()
            for name, held in sets.items():
                kept = _kept(held[query - prompt - 1][:, row], query, seen.shape)
                lost[name][row, query - prompt + 1] = seen.masked_fill(kept, 0.0).sum(-1).mean(-1).cpu()
    return lost


def _kept(positions: Tensor, query: int, shape: torch.Size) -> Tensor:
    """[layers, H, query + 1] bool of retained positions [Lc, Gc, slots]; the query's own token is always met."""
    kept = torch.zeros(*positions.shape[:2], query + 2, dtype=torch.bool, device=positions.device)
    kept.scatter_(-1, positions.long() % (query + 2), True)  # empty slots are -1: the place behind the query
    kept[..., query] = True
    kept = kept[..., : query + 1].repeat_interleave(shape[1] // kept.shape[1], dim=1)
    return kept.expand(shape)
