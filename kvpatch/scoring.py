"""Scorers: how much a held entry matters to one layer at one decode step (methods: InertiaKV, arXiv 2609.03515).

A scorer is a pure function of one layer's tensors. It gives a score per KV head; `pool` makes one ranking of them where
the coupling shares it. Nothing here knows of transformers.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch import deletion


class Scene(NamedTuple):
    """What a scorer sees of one layer at one decode step; B rows, G KV heads, R queries a group, n slots.

    weights: [B, G, R, n] attention of the newest query, in the accumulation dtype; exactly 0 outside `valid`.
    keys: [B, G, n, D], after RoPE.   values: [B, G, n, D].
    positions: [B, 1 or G, n] int64, original positions in the row, pads not counted.
    valid: [B, 1 or G, n] bool.
    head_pool: "mean", "max" or "rms".   seed: of the policy.
    """

    weights: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    valid: Tensor
    head_pool: str
    seed: int


class Scorer(NamedTuple):
    """A registered scorer: `score(scene)` gives [B, G, n] (or broadcastable to it)."""

    name: str
    score: Callable[[Scene], Tensor]
    uses_attention: bool


def pool(scores: Tensor, head_pool: str, dim: int) -> Tensor:
    """Reduce the head dimension `dim`, kept as size 1: mean, max, or root of the mean square."""
    if head_pool == "mean":
        return scores.mean(dim, keepdim=True)
    if head_pool == "max":
        return scores.amax(dim, keepdim=True)
    return scores.square().mean(dim, keepdim=True).sqrt()


def attention(scene: Scene) -> Tensor:
    """s_g(i) = pool over the group's query heads of a_h(i)."""
    return pool(scene.weights, scene.head_pool, 2).squeeze(2)


def vnorm(scene: Scene) -> Tensor:
    """a_h(i) ||v_i|| / mean_j ||v_j||, pooled over the group."""
    norms = scene.values.to(scene.weights.dtype).square().sum(-1).sqrt()
    mean = torch.where(scene.valid, norms, 0.0).sum(-1, keepdim=True) / scene.valid.sum(-1, keepdim=True)
    return pool(scene.weights * (norms / mean).unsqueeze(2), scene.head_pool, 2).squeeze(2)


def value_mass(scene: Scene) -> Tensor:
    """a_h(i) ||v_i||_1, pooled over the group (VATP, arXiv 2406.12335)."""
    norms = scene.values.to(scene.weights.dtype).abs().sum(-1)
    return pool(scene.weights * norms.unsqueeze(2), scene.head_pool, 2).squeeze(2)


def output_change(scene: Scene) -> Tensor:
    """How far the head's output moves if an entry alone is deleted (`deletion.alone`), pooled over the group."""
    return pool(deletion.alone(scene.weights, scene.values.to(scene.weights.dtype)), scene.head_pool, 2).squeeze(2)


def entropy(scene: Scene) -> Tensor:
    """The attention score times the layer's entropy: that of the head-mean attention, over log(number held)."""
    mean = scene.weights.mean((1, 2))
    total = -torch.special.xlogy(mean, mean).sum(-1)
    held = scene.valid[:, 0].sum(-1).clamp_min(2).to(total.dtype)  # one alone has entropy 0 over anything
    return attention(scene) * (total / held.log())[:, None, None]


def keydiff(scene: Scene) -> Tensor:
    """-cos(k_i, mean_j k_j / ||k_j||) over the held keys."""
    keys = scene.keys.to(scene.weights.dtype)
    unit = keys / keys.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
    valid = scene.valid.unsqueeze(-1)
    anchor = torch.where(valid, unit, 0.0).sum(2, keepdim=True) / valid.sum(2, keepdim=True)
    anchor = anchor / anchor.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return -(unit * anchor).sum(-1)


def knorm(scene: Scene) -> Tensor:
    """-||k_i||: small keys are kept."""
    return -scene.keys.to(scene.weights.dtype).square().sum(-1).sqrt()


def recency(scene: Scene) -> Tensor:
    """The original position itself."""
    return scene.positions.to(scene.weights.dtype)


def random(scene: Scene) -> Tensor:
    """A hash of seed and position in [0, 1), so that a row does not depend on its neighbours."""
    low = 0xFFFFFFFF
    x = (scene.positions * 2654435761 + (scene.seed * 40503 + 12345)) & low
    x = x ^ (x >> 16)
    x = _times_mod_2_32(x, 2246822519)
    x = x ^ (x >> 13)
    x = _times_mod_2_32(x, 3266489917)
    x = x ^ (x >> 16)
    return x.to(scene.weights.dtype) / 2**32


def _times_mod_2_32(x: Tensor, factor: int) -> Tensor:
    # A product of two 32-bit numbers overflows int64, so multiply by the factor's halves.
    high = ((x * (factor >> 16)) & 0xFFFF) << 16
    return (high + x * (factor & 0xFFFF)) & 0xFFFFFFFF


_SCORERS: dict[str, Scorer] = {}


def register_scorer(name: str, score: Callable[[Scene], Tensor], *, uses_attention: bool, replace: bool = False):
    """Make `score` usable as `Policy(scorer=name)`.

    Args:
        name: a new name; an existing one raises ValueError unless `replace`.
        score: a function of a `Scene` that gives [B, G, n] floating, without NaN; pure tensor code that torch.compile
            can trace whole. It is tried on a small scene here.
        uses_attention: whether it reads `scene.weights`; head_pool other than "mean" needs that.
    """
    check_new("scorer", name, score, "a Scene", () if replace else _SCORERS)
    _check(name, score)
    _SCORERS[name] = Scorer(name, score, bool(uses_attention))


def check_new(kind: str, name: str, score: Callable, takes: str, known: Collection[str]) -> None:
    """Whether a function of what it `takes` can be registered under a name that is not `known`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"name must be a non-empty str, got {name!r}")
    if not callable(score):
        raise TypeError(f"score must be a function of {takes}, got {score!r}")
    if name in known:
        raise ValueError(f"{kind} {name!r} is registered already; pass replace=True to replace it")


def _check(name: str, score: Callable[[Scene], Tensor]) -> None:
    rows, heads, slots = 2, 3, 5
    values = torch.arange(rows * heads * slots * 4, dtype=torch.float32).view(rows, heads, slots, 4).sin()
    scene = Scene(
        weights=torch.full((rows, heads, 2, slots), 1.0 / slots),
        keys=values.cos(),
        values=values,
        positions=torch.arange(slots).expand(rows, 1, slots),
        valid=torch.ones(rows, 1, slots, dtype=torch.bool),
        head_pool="mean",
        seed=0,
    )
    got = score(scene)
    if not isinstance(got, Tensor) or not got.is_floating_point() or got.ndim != 3:
        what = f"{got.dtype} {list(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
        raise ValueError(f"scorer {name!r} must give a floating tensor [rows, KV heads, slots], got {what}")
    try:
        got.expand(rows, heads, slots)
    except RuntimeError:
        raise ValueError(
            f"scorer {name!r} must give [rows, KV heads, slots] = {[rows, heads, slots]}, got {list(got.shape)}"
        ) from None


def list_scorers() -> list[str]:
    """Names of the registered scorers."""
    return sorted(_SCORERS)


def scorer(name: str) -> Scorer:
    """The registered scorer of that name; ValueError otherwise."""
    if not isinstance(name, str) or name not in _SCORERS:
        raise ValueError(f"scorer must be one of {', '.join(list_scorers())}, got {name!r}")
    return _SCORERS[name]


for _function, _uses_attention in (
    (attention, True),
    (vnorm, True),
    (value_mass, True),
    (output_change, True),
    (entropy, True),
    (keydiff, False),
    (knorm, False),
    (recency, False),
    (random, False),
):
    register_scorer(_function.__name__.replace("_", "-"), _function, uses_attention=_uses_attention)
