"""Checks of a machine's attention back ends and operators against the formula in float64 and the packed path."""

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch import attention, backends, scoring, slots
from kvpatch.attention import flash
from kvpatch.policy import Policy, resolve
from kvpatch.profiling.models import Place
from kvpatch.profiling.parts import Part, Skipped, require
from kvpatch.ranking import Blend
from kvpatch.selection import Rows
from kvpatch.state import State

# Relative root mean square of outputs: sums in float32, rounded to the dtype. Scores are float32 throughout.
OUTPUT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SCORES = 2e-5
PACKED = 3e-2  # packed products of float16 and bfloat16 round the logits to that
POOLS = ("mean", "max", "rms")


class Shape(NamedTuple):
    """R queries a KV head, head size D, dtype."""

    queries: int
    width: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"R {self.queries}, D {self.width}, {str(self.dtype).removeprefix('torch.')}"


# Llama 3, Qwen 2.5, and the two that small models have most.
COMMON = (
    Shape(4, 128, torch.bfloat16),
    Shape(7, 128, torch.bfloat16),
    Shape(4, 64, torch.float16),
    Shape(1, 96, torch.float32),
)
# Every pair of two of R, D and dtype.
COVERING = tuple(
    Shape(queries, width, (torch.bfloat16, torch.float16, torch.float32)[(i + j + 2) % 3])
    for (i, queries), (j, width) in itertools.product(enumerate((1, 4, 7, 16)), enumerate((64, 80, 96, 128, 256)))
)
TOY = (
    Shape(4, 64, torch.float32),
    Shape(7, 80, torch.bfloat16),
    Shape(16, 96, torch.float16),
    Shape(1, 256, torch.bfloat16),
)


def relative_rows(got: Tensor, wanted: Tensor) -> Tensor:
    """Root mean square of the difference over that of what is wanted, per row (first dimension); NaN as in `got`."""
    wanted = wanted.double().flatten(1)
    error = (got.double().flatten(1) - wanted).square().mean(1).sqrt()
    return error / wanted.square().mean(1).sqrt()


def relative(got: Tensor, wanted: Tensor) -> float:
    """`relative_rows` of the worst row."""
    return relative_rows(got, wanted).max().item()


def back_ends(shape: Shape, place: Place, pool: str = "mean", per_head: bool = False) -> str:
    """Every back end's output and pooled scores against the formula in float64."""
    batch, groups, n = (2, 2, 150) if place.small else (4, 4, 4500)
    generator = torch.Generator().manual_seed(shape.queries * 1000 + shape.width)
    heads = groups * shape.queries

    def normal(*size):
        return torch.randn(*size, generator=generator).to(place.device, shape.dtype)

    q = normal(batch, heads, 1, shape.width)
    k, v = normal(batch, groups, n, shape.width), normal(batch, groups, n, shape.width)
    lengths = torch.randint(n // 3, n, (batch,), generator=generator)
    lengths[0], lengths[-1] = n, 1
    lengths = lengths.to(place.device)
    behind = (torch.arange(n, device=place.device) >= lengths[:, None])[:, None, :, None]
    k, v = (tensor.masked_fill(behind, 100.0) for tensor in (k, v))
    more = {"head_pool": pool, "per_head": per_head}
    wanted = attention.decode(q.double(), k.double(), v.double(), lengths, backend="reference", **more)
    site = attention.Site(place.device, shape.dtype, shape.queries, shape.width)
    told = []
    for name, reason in attention.available(site).items():
        if reason:
            told.append(f"{name}: {reason}")
            continue
        if name == "flash":
            if pool != "mean" or per_head:
                continue
            out, pooled = _flash(q, k, v, lengths, site)
        else:
            out, pooled = attention.decode(q, k, v, lengths, backend=name, **more)
        errors = relative(out, wanted[0]), relative(pooled, wanted[1])
        rounds = name in attention.PLAIN and shape.dtype != torch.float32
        allowed = (PACKED, PACKED) if rounds else (OUTPUT[shape.dtype], SCORES)
        if name == "flash":
            allowed = (OUTPUT[shape.dtype], 1e-3)  # its own log-sum-exp is what its kernel's exponentials come to
        for what, error, most in zip(("output", "pooled scores"), errors, allowed, strict=True):
            require(
                error <= most,
                f"the {what} of {name} for {shape}, pool {pool}, must lie within {most:.0e} of the formula in "
                f"float64 (relative root mean square), and lies {error:.2e} from it",
            )
        told.append(f"{name}: {errors[0]:.1e}, {errors[1]:.1e}{_parts(name, q, k, n, shape)}")
    return "; ".join(told)


def _parts(name: str, q: Tensor, k: Tensor, n: int, shape: Shape) -> str:
    """In how many parts the kernels divide a row."""
    if name != "triton":
        return ""
    from kvpatch.attention import configs, triton

    config = configs.config_for(shape.queries, shape.width, q.element_size())
    return f" in {triton._splits(q, k.shape[1], n, config)} part(s)"


def _flash(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, site: attention.Site) -> tuple[Tensor, Tensor]:
    from kvpatch.attention import triton

    scale, batch = q.shape[-1] ** -0.5, q.shape[0]
    which = flash.version(torch.cuda.get_device_capability(site.device))
    out, lse = flash.decode(q, k, v, lengths, scale, which)
    utility = torch.zeros(1, batch, 1, k.shape[2], device=q.device)
    active = torch.ones(batch, dtype=torch.bool, device=q.device)
    triton.pooled(q, k, lse, lengths[:, None], active, utility, k.shape[2], scale, "mean", "single", 0.0)
    return out.view(q.shape), utility[0, :, 0]


# What of a policy changes the code of a step.
STEPS = {
    "inertia": resolve("inertia"),
    "tova": resolve("tova"),
    "one update a step": Policy(coupling="uniform", sinks=2, reserve=5),
    "h2o-decode": resolve("h2o-decode"),
    "value norms, rms": Policy(scorer="vnorm", head_pool="rms", aggregation="cumulative", new_token="zero"),
    "entropy, max": Policy(scorer="entropy", head_pool="max", recent=3),
    "two rankings": Policy(blend=Blend(score_heads=[(0, 1), (0, 2), (1, 3)], share=0.6, least=0.001)),
    "a sliding window": Policy(),
    "a scorer without a kernel": Policy(scorer="keydiff"),
}


def whole_steps(name: str, place: Place) -> str:
    """Decode steps of two layers by the kernels and, in float64, by the packed path: what each leaves behind."""
    queries, width, dtype = (2, 32, torch.float32) if place.small else (4, 128, torch.bfloat16)
    site = attention.Site(place.device, dtype, queries, width)
    reason = attention.why_not("triton", site)
    if reason:
        raise Skipped(reason)
    policy = STEPS[name]
    window = 160 if name == "a sliding window" else None
    fused = _Side("triton", policy, dtype, dtype, queries, width, window, place)
    plain = _Side("packed", policy, torch.float64, dtype, queries, width, window, place)
    generator = torch.Generator().manual_seed(3)
    worst = {"output": 0.0, "utility": 0.0}
    for step in range(1, 3 if place.small else 4):
        for side in (fused, plain):
            side.by.begin(side.state.ledger, policy)
        for layer in range(LAYERS):
            sizes = ((ROWS, 2 * queries, 1, width), *[(ROWS, 2, 1, width)] * 2)
            given = [torch.randn(*size, generator=generator).to(place.device, dtype) for size in sizes]
            outputs = [side.attend(layer, given) for side in (fused, plain)]
            active = fused.state.active
            worst["output"] = max(worst["output"], relative(*(output[active] for output in outputs)))
        for side in (fused, plain):
            side.by.finish(side.state.ledger, policy, tuple(len(one.scoring_layers(LAYERS)) for one in policy.rankings))
        for what in ("free", "length", "newest"):
            one, other = (getattr(side.state, what) for side in (fused, plain))
            require(
                torch.equal(one, other),
                f"step {step} of {name!r}: `{what}` must be what the packed path leaves, {other.tolist()}, and is "
                f"{one.tolist()}",
            )
        held = fused.state.held(CAPACITY) & fused.state.active[None, :, None, None]
        one, other = (side.buffers.positions[held] for side in (fused, plain))
        require(torch.equal(one, other), f"step {step} of {name!r}: both must hold the same positions")
        for ranking in range(len(policy.rankings)):
            one, other = (side.buffers.utility[ranking][held][None] for side in (fused, plain))
            worst["utility"] = max(worst["utility"], relative(one, other))
    worst["keys"] = max(
        (fused.buffers.keys[layer][active].double() - plain.buffers.keys[layer][active]).abs().max().item()
        for layer in range(LAYERS)
    )
    for what, allowed in (("output", OUTPUT[dtype]), ("utility", SCORES), ("keys", 0.0)):
        require(
            worst[what] <= allowed,
            f"the {what} of {name!r} must lie within {allowed:.0e} of the packed path's in float64, and lies "
            f"{worst[what]:.2e} from it",
        )
    return f"output {worst['output']:.1e}, utility {worst['utility']:.1e}, the same slots"


LAYERS, ROWS, CAPACITY, BUDGET = 2, 3, 256, 200


class _Side:
    """One back end over rows that hold their budget, or nearly, or have ended; the same content for every dtype.

    Args:
        by: the back end's name.   dtype: that it computes in.   drawn: that keys, values and inputs are rounded to.
    """

    def __init__(self, by: str, policy: Policy, dtype, drawn, queries: int, width: int, window, place: Place):
        generator = torch.Generator().manual_seed(2)
        shape = slots.Shape.at(policy, LAYERS, 2, width, dtype, place.device)
        self.buffers = slots.Buffers(shape, ROWS, CAPACITY)
        for layer in range(LAYERS):
            self.buffers.add_layer(layer)
            for tensor in (self.buffers.keys[layer], self.buffers.values[layer]):
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(drawn))
        utility, positions = self.buffers.utility, self.buffers.positions
        utility.copy_(torch.rand(utility.shape, generator=generator) + 0.1)
        positions.copy_(torch.rand(positions.shape, generator=generator).argsort(-1) + CAPACITY // 4)
        counted = [[BUDGET] * ROWS, *([count] * ROWS for count in policy.protected(BUDGET)), [CAPACITY + 64] * ROWS]
        counted.append([policy.blended(BUDGET)] * ROWS)
        rows = Rows(*(torch.tensor(column, device=place.device) for column in counted))
        entries = torch.tensor([BUDGET, BUDGET - 2, BUDGET // 2], device=place.device)
        self.state = State(self.buffers, rows, entries, window)
        self.state.active[-1] = False
        self.state.read(CAPACITY)
        self.by = backends.backend(by, attention.Site(place.device, dtype, queries, width))
        scorers = tuple(scoring.scorer(ranking.scorer) for ranking in policy.rankings)
        heads = [[one.head_weights(layer, 2 * queries) for one in policy.rankings] for layer in range(LAYERS)]
        self._attends = []
        for layer in range(LAYERS):
            scored = tuple(n for n, one in enumerate(policy.rankings) if layer in one.scoring_layers(LAYERS))
            every = [one or [1.0] * 2 * queries for one in heads[layer]]
            factors = torch.tensor(every, device=place.device, dtype=torch.promote_types(dtype, torch.float32))
            attend = self.by.attend(policy, scorers, scored, window)
            self._attends.append((factors.view(len(every), 2, queries), attend))
        self._dtype, self._scale = dtype, width**-0.5

    def attend(self, layer: int, given: list[Tensor]) -> Tensor:
        """The layer's attention to q, k and v."""
        heads, attend = self._attends[layer]
        of_layer = slots.LayerSlots(*self.state.views[layer], self.state.ledger.index, heads, attend)
        return attend(of_layer, *(tensor.to(self._dtype) for tensor in given), self._scale)


def parts(place: Place) -> list[Part]:
    """Checks that come first."""
    shapes = TOY if place.small else COMMON
    found = [Part(f"back ends: {shape}", partial(back_ends, shape, place), 20) for shape in shapes]
    names = list(STEPS)[::3] if place.small else list(STEPS)[:4]
    return found + [_steps(name, place) for name in names]


def more_parts(place: Place) -> list[Part]:
    """The other policies, and every pair of group, head size and dtype."""
    if place.small:
        return []
    found = [_steps(name, place) for name in list(STEPS)[4:]]
    for index, shape in enumerate(COVERING):
        pool, per_head = POOLS[index % 3], index % 2 == 1
        name = f"back ends: {shape}, {pool}{' per KV head' if per_head else ''}"
        found.append(Part(name, partial(back_ends, shape, place, pool, per_head), 15))
    return found


def _steps(name: str, place: Place) -> Part:
    return Part(f"whole steps: {name}", partial(whole_steps, name, place), 15)
