"""What each attention back end runs at a decode step: a layer's attention, and the ledger's two ends.

Pure tensor code; shapes as in `kvpatch.slots`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch import attention, scoring, selection, slots
from kvpatch.policy import Policy


class Backend(NamedTuple):
    """One back end.

    attend: (policy, scorers, scored, window) -> the function for `LayerSlots.attend`, as `slots.make_attend`; one
        object per arguments.
    begin: (ledger, policy), as `slots.begin`.   finish: (ledger, policy, scored), as `slots.finish`.
    paged: for `LayerSlots.attend` where slots lie in pages, at a step that does not score; None: it can't.
    """

    name: str
    attend: Callable
    begin: Callable
    finish: Callable
    paged: Callable | None = None


@functools.cache
def backend(name: str, site: attention.Site) -> Backend:
    """The back end of that name, which `attention.choose` found to run there."""
    if name in attention.PLAIN:
        decode = attention.PLAIN[name]

        def attend(policy, scorers, scored, window):
            return slots.make_attend(policy, scorers, decode, scored, window)

        return Backend(name, attend, slots.begin, slots.finish, slots.make_paged(attention.PAGED[name]))
    if name == "triton":
        return Backend(name, _fused, _begin, _finish, _fused_pages)
    capability = torch.cuda.get_device_capability(site.device) if site.device.type == "cuda" else None
    which = attention.flash.version(capability)

    def flash_attend(policy, scorers, scored, window):
        return _flash(policy, scorers, scored, which)  # `attention.choose` lets no window come here

    return Backend(name, flash_attend, _begin, _finish)


# Scorers that kernels compute; another function under the same name is not one of them.
_KERNELS = {scoring.attention: "attention", scoring.vnorm: "vnorm", scoring.entropy: "entropy"}


def _score(of_layer: slots.LayerSlots, policy: Policy, scorers, scored, weights: Tensor | None, window) -> None:
    """Let scores that no kernel computes into the utility, which is mutated; weights for those that use attention."""
    if weights is None:
        weights = torch.empty(0, dtype=torch.float32, device=of_layer.keys.device)
    rankings, valid = policy.rankings, slots.valid_slots(of_layer, window)
    for number in scored:
        slots.score(of_layer, policy, number, rankings[number], scorers[number], weights, valid)


def _kernel_of(policy: Policy, scorers: tuple[scoring.Scorer, ...], scored: tuple[int, ...]) -> str:
    """The one scorer that the attention kernel computes on the way: the first ranking's, where no other one scores."""
    fits = scored == (0,) and policy.score_heads == "all"
    return _KERNELS.get(scorers[0].score, "") if fits else ""


@functools.cache
def _fused(policy: Policy, scorers: tuple, scored: tuple[int, ...], window: int | None) -> Callable:
    from kvpatch.attention import triton

    own, inside = policy.rankings[0], _kernel_of(policy, scorers, scored)
    by_torch = bool(scored) and not inside
    needs_weights = by_torch and any(scorers[number].uses_attention for number in scored)

    def attend(of_layer: slots.LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        n = of_layer.index.shape[0]
        places = (of_layer.positions, of_layer.free, of_layer.length, of_layer.newest, of_layer.active)
        if needs_weights:
            output, weights = triton.attend_weights(
                q, k, v, of_layer.keys, of_layer.values, *places, n, scale, window or 0
            )
        else:
            weights = None
            output = triton.attend(
                q,
                k,
                v,
                of_layer.keys,
                of_layer.values,
                of_layer.utility,
                *places,
                n,
                scale,
                window or 0,
                inside,
                own.head_pool,
                slots.layer_rule(policy, own),
                float(own.alpha),
            )
        if by_torch:
            _score(of_layer, policy, scorers, scored, weights, window)
        return output

    return attend


def _fused_pages(of_layer: slots.LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    from kvpatch.attention import triton

    places = (of_layer.pages.table, of_layer.free, of_layer.length, of_layer.active)
    return triton.attend_pages(q, k, v, of_layer.keys, of_layer.values, *places, scale)


@functools.cache
def _flash(policy: Policy, scorers: tuple, scored: tuple[int, ...], which: int) -> Callable:
    from kvpatch.attention import flash, triton

    own, inside = policy.rankings[0], _kernel_of(policy, scorers, scored) == "attention"
    needs_weights = any(scorers[number].uses_attention for number in scored)

    def attend(of_layer: slots.LayerSlots, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        n = of_layer.index.shape[0]
        slots.write(of_layer, k, v)
        output, lse = flash.decode(q, of_layer.keys, of_layer.values, of_layer.length.amax(-1), scale, which)
        if inside:
            triton.pooled(
                q,
                of_layer.keys,
                lse,
                of_layer.length,
                of_layer.active,
                of_layer.utility,
                n,
                scale,
                own.head_pool,
                slots.layer_rule(policy, own),
                float(own.alpha),
            )
        elif scored:
            weights = _weights(q, of_layer, lse, n, scale) if needs_weights else None
            _score(of_layer, policy, scorers, scored, weights, None)
        return output

    return attend


def _weights(q: Tensor, of_layer: slots.LayerSlots, lse: Tensor, n: int, scale: float) -> Tensor:
    """Attention weights [B, G, R, n] float32 from the natural log-sum-exp [B, H, 1]; 0 where nothing is held."""
    batch, heads = q.shape[:2]
    groups = of_layer.keys.shape[1]
    packed = q.view(batch, groups, heads // groups, -1)
    logits = torch.matmul(packed, of_layer.keys[:, :, :n].transpose(-1, -2)).float() * scale
    held = (of_layer.index < of_layer.length[..., None]).unsqueeze(2)
    return torch.where(held, torch.exp(logits - lse.view(batch, groups, -1, 1)), 0.0)


def _begin(ledger: slots.Ledger, policy: Policy) -> None:
    from kvpatch.attention import triton

    if policy.blend is not None:  # the kernels know one ranking
        slots.begin(ledger, policy)
        return

    ledger.newest.add_(ledger.active)
    triton.admit(
        ledger.utility,
        ledger.positions,
        ledger.free,
        ledger.length,
        ledger.newest,
        ledger.active,
        policy.trims,
        policy.new_token == "mean",
    )


def _finish(ledger: slots.Ledger, policy: Policy, scored: tuple[int, ...]) -> None:
    from kvpatch.attention import triton

    if policy.blend is not None:
        slots.finish(ledger, policy, scored)
        return

    triton.choose(
        ledger.utility,
        ledger.pending,
        ledger.positions,
        ledger.free,
        ledger.length,
        ledger.newest,
        ledger.active,
        list(ledger.rows[:5]),
        policy.trims,
        bool(policy.sinks or policy.recent or policy.reserve),
        scored[0] if scored and policy.coupling == "uniform" else 0,
        policy.aggregation,
        float(policy.alpha),
        selection.TIE,
        ledger.window or 0,
    )
