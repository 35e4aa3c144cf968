"""Scores of prompt entries, one layer at a time: [B, G, n], of which only entries outside what a method protects count.

Each function names its source. Shapes as in `kvpatch.compression.prompt`.
"""

import torch
from torch import Tensor

from kvpatch import deletion, scoring
from kvpatch.compression.prompt import (
    CELLS,
    SINKS,
    Prompt,
    accumulation,
    group_mean,
    pooled,
    window_attention,
    window_bounds,
    window_logits,
    window_mean,
    window_pieces,
    window_variance,
)
from kvpatch.patches import half_turned

CAKE_VARIANCE = 200.0
CRITICAL = 1e-4
RECENT_WEIGHT = 0.2
RKV_IMPORTANCE = 0.07


def snapkv(prompt: Prompt, width: int = 5, kind: str = "mean") -> Tensor:
    """Mean attention of the window's queries, pooled over neighbours, mean over the group (SnapKV, arXiv 2404.14469).

    The window's own keys take part in the softmax, not in the pooling.
    """
    rows = window_mean(prompt, window_attention(prompt))
    return group_mean(pooled(rows, prompt.outside()[:, :, None], width, kind))


def cake(prompt: Prompt, width: int = 5) -> Tensor:
    """Mean over the window of attention, plus 200 times its variance there, pooled (CAKE, arXiv 2503.12491)."""
    rows = window_attention(prompt)
    raw = window_mean(prompt, rows) + CAKE_VARIANCE * window_variance(prompt, rows)
    return group_mean(pooled(raw, prompt.outside()[:, :, None], width))


def cake_preference(prompt: Prompt, tau1: float = 1.0, tau2: float = 1.0) -> Tensor:
    """How much of the budget a layer asks for, [B]: entropy^(1/tau1) * variance^(1/tau2) of the window's attention.

    Both outside the window only, means over heads; the entropy's also over queries, the variance is summed over keys.
    """
    rows = window_attention(prompt).masked_fill(~prompt.outside()[:, :, None, None], 0.0)
    entropy = window_mean(prompt, -torch.special.xlogy(rows, rows)).sum(-1).mean((1, 2))
    variance = window_variance(prompt, rows).sum(-1).mean((1, 2))
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def expected_attention(prompt: Prompt) -> Tensor:
    """Attention that normally distributed queries of the next positions would pay, times ||v||_2 (arXiv 2510.00636)."""
    law, wide = prompt.law, accumulation(prompt.keys)
    batch, groups, slots, width = prompt.keys.shape
    mean, covariance = law.mean.to(wide), law.covariance.to(wide)
    cos, sin = law.cos.to(wide)[:, None], law.sin.to(wide)[:, None]
    mean = _turned(mean, cos, sin)
    # M S M' of a symmetric S: turn the columns, then the rows.
    covariance = _turned(covariance, cos[..., None, :], sin[..., None, :])
    covariance = _turned(covariance.transpose(-1, -2), cos[..., None, :], sin[..., None, :])
    keys = prompt.keys.to(wide)
    mean = mean.view(batch, groups, -1, width)
    covariance = covariance.view(batch, groups, -1, width, width)
    linear = torch.einsum("bgnd,bgrd->bgrn", keys, mean) * prompt.scale
    square = torch.stack([(keys @ covariance[:, :, head] * keys).sum(-1) for head in range(covariance.shape[2])], 2)
    logits = linear + square * (prompt.scale**2 / 2)
    counts = prompt.held() & (prompt.places >= SINKS)
    counts = counts | ~counts.any(-1, keepdim=True)  # a row of sinks alone keeps them all
    logits = logits.masked_fill(~counts[:, :, None], -torch.inf)
    return group_mean(logits.softmax(-1)) * prompt.values.to(wide).norm(dim=-1)


def _turned(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A rotary embedding's mean over positions, in the half-split layout, of states [..., D]."""
    return states * cos + half_turned(states) * sin


def projected_norm(prompt: Prompt) -> Tensor:
    """Mean over the group of ||W_O^h v||_1: [B, G, n] (CriticalKV, arXiv 2502.03805)."""
    wide = accumulation(prompt.keys)
    batch, groups, slots, width = prompt.values.shape
    heads = prompt.queries.shape[1]
    by_head = prompt.output.to(wide).view(-1, heads, width)
    total = torch.zeros(batch, groups, slots, dtype=wide, device=prompt.values.device)
    piece = max(1, CELLS // (batch * by_head.shape[0]))  # no [B, n, E] at once
    for head in range(heads):
        group = head // (heads // groups)
        for start in range(0, slots, piece):
            some = slice(start, start + piece)
            total[:, group, some] += (prompt.values[:, group, some].to(wide) @ by_head[:, head].T).abs().sum(-1)
    return total / (heads // groups)


def restkv(prompt: Prompt, width: int = 5) -> Tensor:
    """How far the head's output moves if an entry alone is deleted, a / (1 - a) * ||o - v||, as an EMA over the window
    in which the newer query has weight 0.2, pooled (ReST-KV)."""
    rows = window_attention(prompt)
    values = prompt.values.to(rows.dtype)
    m = torch.zeros_like(rows[:, :, :, 0])
    for query in range(prompt.window):
        new = (1 - RECENT_WEIGHT) * m + RECENT_WEIGHT * deletion.alone(rows[:, :, :, query], values)
        m = torch.where(prompt.asks[:, query, None, None, None], new, m)
    return group_mean(pooled(m, prompt.outside()[:, :, None], width))


def rkv(prompt: Prompt, width: int = 7) -> Tensor:
    """0.07 * importance - 0.93 * redundancy (R-KV, arXiv 2505.24133).

    Importance: softmax over the entries that are not spared of the group's largest logits, mean over the window's
    queries, maximum over `width` neighbours. Redundancy: softmax over all entries of the mean cosine of their key with
    the others'; of the keys that resemble a key by more than 0.5, the newest, if newer than that key, is spared it.
    """
    outside = prompt.outside()
    rows = window_logits(prompt).amax(2)  # [B, G, w, n]
    # A row of which all is spared has no softmax: it is given all, then zero.
    some = outside.any(-1)[..., None, None]
    rows = rows.masked_fill(~(outside[:, :, None] | ~some), -torch.inf).softmax(-1)
    asks = prompt.asks[:, None, :, None]
    importance = torch.where(asks & some, rows, 0.0).sum(2) / prompt.asks.sum(-1)[:, None, None]
    importance = pooled(importance, outside, width, "max")
    return RKV_IMPORTANCE * importance - (1 - RKV_IMPORTANCE) * redundancy(prompt)


def redundancy(prompt: Prompt, alike: float = 0.5) -> Tensor:
    """Softmax over what is held of how much each key resembles the others, as `rkv` says: [B, G, n]."""
    wide, held = accumulation(prompt.keys), prompt.held()
    keys = prompt.keys.to(wide)
    unit = torch.where(held[..., None], keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-12), 0.0)
    batch, groups, slots, _ = keys.shape
    total, places = unit.new_zeros(batch, groups, slots), prompt.places
    piece = max(1, CELLS // (batch * groups * slots))
    for start in range(0, slots, piece):
        own = places[start : start + piece]
        cosine = unit[:, :, start : start + piece] @ unit.transpose(2, 3)
        cosine = cosine.masked_fill(places == own[:, None], 0.0)
        copies = (cosine > alike) & (places > own[:, None])
        newest = torch.where(copies, places, -1).amax(-1, keepdim=True)
        total += torch.where(places == newest, 0.0, cosine).sum(2)
    mean = total / prompt.length[:, None, None].to(wide)
    return mean.masked_fill(~held, -torch.inf).softmax(-1)


def scissorhands(prompt: Prompt) -> Tensor:
    """Minus how often an entry got less than an even share from the window's queries that met it, summed over the group
    (ScissorHands, arXiv 2305.17118)."""
    bounds = window_bounds(prompt) if prompt.bounds is None else prompt.bounds
    batch, groups, slots = prompt.keys.shape[:3]
    low = torch.zeros(batch, groups, slots, dtype=accumulation(prompt.keys), device=prompt.keys.device)
    for some, logits, meets in window_pieces(prompt):
        bound = bounds[:, :, some].view(*logits.shape[:-1], 1)
        asks = prompt.asks[:, None, None, some, None]
        low += ((logits < bound) & meets & asks).sum((2, 3))
    return -low


def last_query(prompt: Prompt) -> Tensor:
    """Attention of the prompt's last query, mean over all heads (TOVA, arXiv 2401.06104)."""
    newest = prompt._replace(queries=prompt.queries[:, :, -1:], asks=prompt.asks[:, -1:])
    return window_attention(newest)[:, :, :, 0].mean((1, 2))[:, None].expand(-1, prompt.keys.shape[1], -1)


def accumulated(prompt: Prompt) -> Tensor:
    """Attention of all the prompt's queries, summed over them, mean over the group (H2O, arXiv 2306.14048)."""
    return prompt.mass


def accumulated_vnorm(prompt: Prompt) -> Tensor:
    """The same times ||v||_1 (VATP, arXiv 2406.12335)."""
    return prompt.mass * prompt.values.to(prompt.mass.dtype).abs().sum(-1)


def of_scorer(name: str):
    """A decode scorer that needs no attention, at the end of the prompt: (prompt, seed) -> [B, G, n]."""
    scorer = scoring.scorer(name)

    def score(prompt: Prompt, seed: int = 0) -> Tensor:
        wide = accumulation(prompt.keys)
        nothing = torch.empty(0, dtype=wide, device=prompt.keys.device)
        places = prompt.places.expand(len(prompt.length), 1, -1)
        scene = scoring.Scene(nothing, prompt.keys, prompt.values, places, prompt.held(), "mean", seed)
        return scorer.score(scene).expand(prompt.keys.shape[:3])

    return score
