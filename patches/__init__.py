"""Architectures that kvpatch can patch: one module each, holding only what differs.

A module offers `MODEL_TYPES` (of the config), `check(config)`, `find_parts(model)`, `project(attention, hidden,
position_embeddings, position_ids)`, and `uncompilable(config)` where a setting of the model's rules compiling out.
Nothing here knows of policies: `attend` comes in with the slots.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvpatch.errors import UnsupportedModelError

_MODULES = ("llama", "mistral", "qwen")
# Models whose text part is supported, but not inside this wrapper.
_WRAPPERS = {
    "mistral3": "Mistral 3's vision wrapper; load its text model with AutoModelForCausalLM from its own folder"
}


class Parts(NamedTuple):
    """The pieces of a decoder-only model that a decode step calls, in order."""

    base: nn.Module
    embed: nn.Module
    rotary: nn.Module
    layers: list[nn.Module]
    attentions: list[nn.Module]
    norm: nn.Module
    head: nn.Module


class Architecture(NamedTuple):
    """A patch module's entry: its name, the config's model types, and its functions.

    uncompilable: (config) -> why a layer's step can't be compiled, or None.
    """

    name: str
    model_types: tuple[str, ...]
    find_parts: Callable[[nn.Module], Parts]
    project: Callable[[nn.Module, Tensor, tuple[Tensor, Tensor], Tensor | None], tuple[Tensor, Tensor, Tensor]]
    check: Callable[[object], None]
    uncompilable: Callable[[object], str | None]


def architectures() -> list[Architecture]:
    """All supported architectures."""
    found = []
    for name in _MODULES:
        module = importlib.import_module(f"{__name__}.{name}")
        uncompilable = getattr(module, "uncompilable", lambda config: None)
        found.append(
            Architecture(name, module.MODEL_TYPES, module.find_parts, module.project, module.check, uncompilable)
        )
    return found


def find(model: nn.Module) -> Architecture:
    """The architecture of a loaded model.

    Raises:
        UnsupportedModelError: naming the model type and what is supported.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(f"model must be a loaded transformers model, got {type(model).__name__}")
    supported = ", ".join(sorted(kind for entry in architectures() for kind in entry.model_types))
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} is an encoder-decoder; kvpatch supports decoder-only models: {supported}"
        )
    for entry in architectures():
        if config.model_type in entry.model_types:
            if not hasattr(model, "lm_head"):
                raise UnsupportedModelError(
                    f"{type(model).__name__} has no lm_head; load the model with AutoModelForCausalLM"
                )
            entry.check(config)
            return entry
    why = _WRAPPERS.get(config.model_type, "no patch module")
    raise UnsupportedModelError(
        f"model_type {config.model_type!r} ({type(model).__name__}) is not supported ({why}); supported: {supported}"
    )


def cache_keyword(attention: nn.Module) -> str:
    """What this release of transformers calls the cache argument: "cache", before 5.24 "past_key_values"."""
    forward = inspect.unwrap(type(attention).forward)
    names = inspect.signature(forward).parameters
    for name in ("cache", "past_key_values"):
        if name in names:
            return name
    raise UnsupportedModelError(
        f"{type(attention).__name__}.forward takes neither `cache` nor `past_key_values`; this release of "
        "transformers is not supported"
    )


def rewritten_forward(
    original: Callable, project: Callable, keyword: str, slots_of: Callable, watch_of: Callable
) -> Callable:
    """An attention forward that decodes over slots, and is the original in every other case.

    Args:
        original: the forward that stood there, bound.
        project: (attention, hidden [B, 1, E], position_embeddings, position_ids) -> q [B, H, 1, D], k and v
            [B, G, 1, D], rotated.
        keyword: name of the cache argument.
        slots_of: (cache, layer index) -> the layer's slots, or None where the cache is not ours or reads the prompt.
        watch_of: (cache, layer index) -> what wants to know of a prompt's queries (`show`), or None.
    """

    def forward(self, hidden_states: Tensor, position_embeddings=None, attention_mask=None, slots=None, **kwargs):
        if slots is None and kwargs.get(keyword) is not None:
            slots = slots_of(kwargs[keyword], self.layer_idx)
        if slots is None:
            result = original(
                hidden_states=hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
            watch = watch_of(kwargs.get(keyword), self.layer_idx)
            if watch is not None:
                show(self, project, watch, hidden_states, position_embeddings, kwargs.get("position_ids"))
            return result
        q, k, v = project(self, hidden_states, position_embeddings, kwargs.get("position_ids"))
        output = slots.attend(slots, q, k, v, self.scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None

    return forward


def show(attention: nn.Module, project: Callable, watch, hidden: Tensor, position_embeddings, position_ids) -> None:
    """Show a watch the queries of the columns that it wants.

    Args:
        project: as of `rewritten_forward`.
        watch: columns(block) -> how many of a block's last columns; raw, output: whether queries before RoPE and the
            output projection are wanted; note(block, queries, raw, scale, output).
        hidden: [B, q, E], what the layer was given.
    """
    block = hidden.shape[1]
    first = block - watch.columns(block)
    cos, sin = (part[:, first:] for part in position_embeddings)
    last, places = hidden[:, first:], None if position_ids is None else position_ids[:, first:]
    queries = project(attention, last, (cos, sin), places)[0]
    # A rotation by nothing leaves them as they are before RoPE.
    unturned = (torch.ones_like(cos), torch.zeros_like(sin))
    raw = project(attention, last, unturned, places)[0] if watch.raw else None
    watch.note(block, queries, raw, attention.scaling, output_weight(attention) if watch.output else None)


def output_weight(attention: nn.Module) -> Tensor:
    """[E, H * D], what the output projection does, its adapters included."""
    projection = attention.o_proj
    if type(projection) is nn.Linear and type(projection.weight) is nn.Parameter:
        return projection.weight
    like = next(one for one in projection.parameters() if one.is_floating_point())
    width = attention.q_proj.out_features
    basis = torch.eye(width + 1, width, dtype=like.dtype, device=like.device)  # the last row, zero, gives the bias
    given = projection(basis)
    return (given[:-1] - given[-1]).T


def split_heads(states: Tensor, width: int) -> Tensor:
    """[B, q, heads * D] to [B, heads, q, D]."""
    return states.view(*states.shape[:-1], -1, width).transpose(1, 2)


def standard_parts(model: nn.Module) -> Parts:
    """The parts of a model laid out as Llama's."""
    base = model.model
    layers = list(base.layers[: base.config.num_hidden_layers])
    return Parts(
        base,
        base.embed_tokens,
        base.rotary_emb,
        layers,
        [layer.self_attn for layer in layers],
        base.norm,
        model.lm_head,
    )


def project(attention: nn.Module, hidden: Tensor, position_embeddings, position_ids=None):
    """q [B, H, q, D], k and v [B, G, q, D] of hidden [B, q, E], rotated: projections as Llama has them."""
    q = split_heads(attention.q_proj(hidden), attention.head_dim)
    k = split_heads(attention.k_proj(hidden), attention.head_dim)
    v = split_heads(attention.v_proj(hidden), attention.head_dim)
    return *rotate(q, k, position_embeddings), v


def rotate(q: Tensor, k: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Rotary embedding in the half-split layout: q, k [B, heads, q, D], cos and sin [B, q, D]."""
    cos, sin = (part.unsqueeze(1) for part in position_embeddings)
    return q * cos + half_turned(q) * sin, k * cos + half_turned(k) * sin


def half_turned(states: Tensor) -> Tensor:
    """A quarter turn of every pair of the half-split layout: states [..., D]."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
