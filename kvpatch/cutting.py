"""Cutting a prompt to the budget: by a method before anything is decoded, or by what the first step has scored.

What stays moves into buffers of the generation's size, one layer at a time, and the prompt's memory is given back.
"""

import torch
from torch import Tensor

from kvpatch import moving, progress, selection
from kvpatch.cachelayer import heads_of
from kvpatch.compression import rule as compression
from kvpatch.compression import watch as watching
from kvpatch.compression.prompt import Prompt, window_bounds
from kvpatch.rows import at_most, held_after


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
    bounds = [window_bounds(prompt) for prompt in prompts] if cache.recuts and cache.needs.bounds else []
    utility = cache.current.utility[0, ..., :n]
    before = torch.tensor(cache.before or [0] * len(cache.entries), device=utility.device)
    earlier = torch.where(prompts[0].places < before[None, :, None, None], utility, 0.0) if rule.carries else None
    budgets = _left(cache, [length >= budget for length, budget in zip(cache.entries, cache.budgets, strict=True)])
    way = None if cache.watch is None else cache.watch.exit
    if way is not None and cache.needs.exit:  # another policy's window may be larger
        way = way._replace(states=way.states[:, -cache.needs.window :])
    sizes = (shape.ranked_layers, shape.ranked_heads)
    found = compression.cut(rule, prompts, budgets, *sizes, earlier, way=way, showing=progress.shown)
    if rule.carries:
        utility.copy_(torch.stack(found.scores))
    keep = torch.stack(found.keep)
    counts = keep.sum(-1)
    fullest = counts.amax((0, 2))
    cache.entries = fullest.tolist()
    cache.state.entries.copy_(fullest)
    if not rule.even:
        cache.counts = counts.amax(1).expand(-1, shape.kv_heads).tolist()
    _bring(cache, selection.kept_order(keep, max(cache.entries)), counts, cache.room(cache.entries))
    if cache.recuts:
        _remember(cache, bounds)


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
    for name, wanted, noted in (("mass", needs.mass, "masses"), ("peak", needs.repeat, "peaks")):
        if wanted:
            by_column = getattr(watch, noted)[layer]
            if by_column is None:
                raise RuntimeError(
                    f"prefill {cache.policy.prefill.name!r} has the model repeat its prompt, which a forward of one's "
                    "own does not: use generate, or read the prompt with Patch.read"
                )
            parts[name] = by_column.gather(-1, columns[:, None].expand(-1, by_column.shape[1], -1))
    return Prompt(queries, keys, values, length, 1.0 if watch is None else watch.scale, asks, **parts)


def _left(cache, full: list[bool]) -> list[int]:
    """What a cut leaves each row at most."""
    rows = zip(cache.budgets, cache.leaving, full, strict=True)
    return [budget - (leaving or 0) * cut for budget, leaving, cut in rows]


def _remember(cache, bounds: list[Tensor]) -> None:
    """Keep the prompt's last queries for cuts to come. Mutates the cache, before its watch is dropped.

    Args:
        bounds: of those queries, for each layer as `Prompt.bounds`; none where they are not wanted.
    """
    watch, current, prompt = cache.watch, cache.current, cache.state.rows.prompt
    if watch is not None:
        cache.scale, cache.outputs = watch.scale, watch.outputs
    if not current.queries:
        return
    window = cache.shape.window
    count = watch.queries[0][:, :, -window:].shape[2]
    places = (prompt[:, None] - count + torch.arange(count, device=prompt.device)) % window
    for kept, noted in zip(current.queries, watch.queries, strict=True):
        queries = noted[:, :, -window:]
        kept.scatter_(2, places[:, None, :, None].expand_as(queries), queries)
    for kept, found in zip(current.bounds, bounds, strict=True):
        kept.scatter_(2, places[:, None].expand_as(found), found)
    cache.noted_from = prompt - watch.asks[0][:, -window:].sum(-1)


def again(cache, full: list[bool]) -> None:
    """Let the method cut the rows that are full, all alike in every layer and head. Mutates the cache.

    Rows that were done before this step stay as they are. The host asks its own counts, not the device.
    """
    state, shape, current, rule = cache.state, cache.shape, cache.current, cache.policy.prefill
    lengths = [held_after(cache.step, *row) + (row[2] if cut else 0) for row, cut in zip(cache.rows, full, strict=True)]
    n, length = max(lengths), state.length[0, :, 0]
    places = torch.arange(n, device=length.device)
    asks, order = length.new_zeros(len(length), 0, dtype=torch.bool), None
    if current.queries:
        window = shape.window
        positions = state.newest[:, None] + 1 - window + torch.arange(window, device=length.device)
        asks, order = positions >= cache.noted_from[:, None], positions % window
    prompts = []
    for layer in range(shape.layers):
        keys, values = (side[layer][:, :, :n] for side in (current.keys, current.values))
        queries = keys.new_zeros(len(keys), heads_of(cache.config)[0], 0, keys.shape[-1])
        if order is not None:
            kept = current.queries[layer]
            queries = kept.gather(2, order[:, None, :, None].expand_as(kept))
        parts: dict = {"output": cache.outputs[layer]} if cache.needs.output else {}
        if current.queries:
            parts["at"] = positions
            parts["positions"] = current.positions[layer if shape.ranked_layers > 1 else 0][..., :n]
        if current.bounds:
            bounds = current.bounds[layer]
            parts["bounds"] = bounds.gather(2, order[:, None].expand_as(bounds))
        prompts.append(Prompt(queries, keys, values, length, cache.scale, asks, torch.zeros_like(length), **parts))
    found = compression.cut(rule, prompts, _left(cache, full), shape.ranked_layers, shape.ranked_heads, lengths=lengths)
    keep = torch.stack(found.keep)
    # A row that this step has ended was fed all the same; one that ended before may hold more than n, or less.
    fed = (state.newest - state.rows.prompt + 1 == cache.step)[None, :, None]
    keep = torch.where(fed[..., None], keep, places < state.length[..., None])
    moving.cut(current, current, selection.kept_order(keep, n), cache.note_bytes)
    state.shorten(torch.where(fed, keep.sum(-1), state.length))


def in_focus(cache) -> Tensor | None:
    """In which rows the second ranking has found something when the first step is done, [B] bool; None: not asked."""
    blend, state = cache.policy.blend, cache.state
    if blend is None or blend.focus is None:
        return None
    n = state.ledger.index.shape[0]
    utility, positions = cache.current.utility[1, ..., :n], cache.current.positions[..., :n]
    return (selection.focus(utility, positions, state.may_stay(positions)) >= blend.focus)[0, :, 0, 0]


def first_step(cache, found: Tensor | None = None) -> None:
    """Cut every row to its budget by what the first step has scored. Mutates the cache.

    Args:
        found: [B] bool, where the second ranking has found something; None: everywhere.
    """
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
        blended = state.rows.blended
        if found is not None:  # which rows that lose a single entry were not asked before it was chosen
            blended = blended * (found | ~large[0, :, 0, 0])
        closed = selection.closed(utility[1], valid, blend.closing)
        utility[1] = torch.where(large, closed, utility[1])
        shielded |= selection.best(utility[1], positions, valid, blended, blend.least)
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
        target = cache.bring_to(needed)
    moving.cut(source, target, order, cache.note_bytes)
    cache.state.shorten(counts)
    cache.current = target
    cache.note_bytes()
    cache.state.bind(target)
