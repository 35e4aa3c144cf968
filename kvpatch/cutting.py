"""Cutting a prompt to the budget: by a method before anything is decoded, or by what the first step has scored.

What stays moves into buffers of the generation's size, one layer at a time, and the prompt's memory is given back.
"""

import torch
from torch import Tensor

from kvpatch import moving, selection
from kvpatch.cachelayer import heads_of
from kvpatch.compression import rule as compression
from kvpatch.compression import watch as watching
from kvpatch.compression.prompt import Prompt
from kvpatch.rows import at_most


def by_method(cache, valid: Tensor) -> None:
    """Cut every row's prompt by the policy's method. Mutates the cache, whose books are open and which has not decoded.

    Args:
        valid: [B, columns] bool, which of the columns that were read held a token.

    Raises:
        ValueError: if what the method protects does not fit a row's budget.
    """
    cache.let_go()
    n, shape, rule = max(cache.entries), cache.shape, cache.policy.prefill
    columns = (~valid).to(torch.int8).argsort(dim=-1, stable=True)[:, :n]  # that each slot's token was read in
    ahead = None
    if cache.needs.law:
        rotary = cache.rotary
        # From what the model rotates by now: asking it for positions to come may change that.
        ahead = watching.factors_ahead(rotary.inv_freq, rotary.attention_scaling, cache.state.rows.prompt)
    prompts = [_prompt(cache, layer, columns, ahead) for layer in range(shape.layers)]
    utility = cache.current.utility[0, ..., :n]
    before = torch.tensor(cache.before or [0] * len(cache.entries), device=utility.device)
    earlier = torch.where(prompts[0].places < before[None, :, None, None], utility, 0.0) if rule.carries else None
    found = compression.cut(rule, prompts, cache.budgets, shape.ranked_layers, shape.ranked_heads, earlier)
    if rule.carries:
        utility.copy_(torch.stack(found.scores))
    keep = torch.stack(found.keep)
    counts = keep.sum(-1)
    fullest = counts.amax((0, 2))
    cache.entries = fullest.tolist()
    cache.state.entries.copy_(fullest)
    _bring(cache, selection.kept_order(keep, max(cache.entries)), counts, cache.room(cache.entries))


def _prompt(cache, layer: int, columns: Tensor, ahead: tuple[Tensor, Tensor] | None) -> Prompt:
    """What a method sees of one layer's prompt.

    Args:
        columns: [B, n] int64, in which column each slot's token was read.
        ahead: the rotary factors' means over the positions that come next, where they are asked for.
    """
    n, watch, needs = columns.shape[1], cache.watch, cache.needs
    keys, values = (side[layer][:, :, :n] for side in (cache.current.keys, cache.current.values))
    length, reach = cache.state.entries, cache.windows[layer]
    parts: dict = {"spared": torch.zeros_like(length), "reach": reach}
    if watch is None or not needs.window:
        heads, _, width = heads_of(cache.config)
        queries, asks = keys.new_zeros(len(keys), heads, 0, width), length.new_zeros(len(keys), 0, dtype=torch.bool)
    else:
        queries, asks = watch.queries[layer][:, :, -needs.window :], watch.asks[layer][:, -needs.window :]
    if needs.law:
        parts["law"] = watch.law(layer, *ahead)
    if needs.output:
        parts["output"] = watch.outputs[layer]
    if needs.mass:
        mass = watch.masses[layer]
        parts["mass"] = mass.gather(-1, columns[:, None].expand(-1, mass.shape[1], -1))
    return Prompt(queries, keys, values, length, 1.0 if watch is None else watch.scale, asks, **parts)


def first_step(cache) -> None:
    """Cut every row to its budget by what the first step has scored. Mutates the cache."""
    cache.let_go()
    source, state, policy = cache.current, cache.state, cache.policy
    n = state.ledger.index.shape[0]
    held = max(at_most(length + 1, limit) for length, limit in zip(cache.entries, cache.limits, strict=True))
    utility, positions = source.utility[..., :n], source.positions[..., :n]
    valid = state.may_stay(positions)
    shielded = selection.protected(positions, state.newest, state.rows) & valid
    blend = policy.blend
    if blend is not None:
        large = valid.sum(-1, keepdim=True) - selection.per_row(state.rows.budget) > 1
        least = blend.least
        if blend.focus is not None:
            found = large & (selection.focus(utility[1], positions, valid) >= blend.focus)
            least = torch.where(found, blend.least_in_focus, blend.least)
        closed = selection.closed(utility[1], valid, blend.closing)
        utility[1] = torch.where(large, closed, utility[1])
        shielded |= selection.best(utility[1], positions, valid, state.rows.blended, least)
    keep = selection.first_cut(utility[0], valid, shielded, positions, state.rows.budget, policy.rescue)
    _bring(cache, selection.kept_order(keep, held), keep.sum(-1), max(cache.planned, held + 1))


def _bring(cache, order: Tensor, counts: Tensor, needed: int) -> None:
    """Bring what stays into buffers of the generation's size.

    Args:
        order: [Lc, B, Gc, m] slots that stay, then others.   counts: [Lc, B, Gc] how many stay.
        needed: slots that the generation needs.
    """
    source, target = cache.current, cache.current
    if source is not cache.kept:
        if cache.kept is None or cache.kept.capacity < needed:
            cache.drop_kept()
            cache.kept = cache.allocate(source.batch, needed)
        target = cache.kept
    moving.cut(source, target, order, cache.note_bytes)
    cache.state.shorten(counts)
    cache.current = target
    cache.note_bytes()
    cache.state.bind(target)
