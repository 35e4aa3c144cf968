"""Checks of single operators: torch's own, of schemas and tracing, and the numbers of two that no decode step runs."""

import importlib
from functools import partial

import torch
from torch import Tensor

from kvpatch import attention
from kvpatch.attention import flash
from kvpatch.profiling.kernel_checks import SCORES, relative
from kvpatch.profiling.models import Place
from kvpatch.profiling.parts import Part, Skipped, require


def operators(place: Place) -> dict[str, tuple]:
    """Arguments of every operator, by its name."""
    batch, groups, queries, width, n = 2, 2, 2, 16, 70
    heads, dtype = groups * queries, torch.float32
    generator = torch.Generator().manual_seed(4)

    def normal(*size):
        return torch.randn(*size, generator=generator).to(place.device, dtype)

    def whole(rows):
        return torch.tensor(rows, device=place.device)

    q, k, v = normal(batch, heads, 1, width), normal(batch, groups, 1, width), normal(batch, groups, 1, width)
    keys, values = normal(batch, groups, n, width), normal(batch, groups, n, width)
    utility = normal(1, batch, 1, n).abs()
    positions = torch.arange(n, device=place.device).expand(batch, 1, n).contiguous()
    free, length, newest = whole([[3], [30]]), whole([[n], [40]]), whole([n, n])
    active, lse = torch.ones(batch, dtype=torch.bool, device=place.device), normal(batch, heads, 1)
    places = (positions, free, length, newest, active)
    ledger = (positions[None], free[None], length[None], newest, active)
    rows = [whole([n - 2, n]), whole([1, 1]), whole([2, 2]), whole([3, 3]), whole([n, n])]
    scale, ema = width**-0.5, ("mean", "ema", 0.8)
    paged = (normal(batch, 6, 32, width), normal(batch, 6, 32, width), whole([[0, 2, 4], [1, 3, 5]]))
    window = (normal(batch, heads, 4, width), keys, length[:, 0].contiguous())
    found = {
        "attend": (q, k, v, keys, values, utility, *places, n, scale, 0, "attention", *ema),
        "attend_weights": (q, k, v, keys, values, *places, n, scale, 0),
        "attend_pages": (q, k, v, *paged, free, length, active, scale),
        "decode": (q, keys, values, length, n, scale, "attention", "mean"),
        "pooled": (q, keys, lse, length, active, utility, n, scale, *ema),
        "window_scores": (*window, None, scale, True, "mean"),
        "admit": (utility[None], *ledger, True, True),
        "choose": (utility[None], utility[None].clone(), *ledger, rows, True, True, 1, "ema", 0.8, 1e-6, 0),
    }
    half = attention.Site(place.device, torch.bfloat16, queries, 64)
    if not attention.why_not("flash", half):
        which = flash.version(torch.cuda.get_device_capability(place.device))
        halves = [normal(batch, count, size, 64).bfloat16() for count, size in ((heads, 1), (groups, n), (groups, n))]
        found["flash_decode"] = (*halves, length[:, 0].contiguous(), scale, which)
    return found


def operator(name: str, place: Place) -> str:
    """`torch.library.opcheck` of one of them."""
    reason = attention.why_not("triton", attention.Site(place.device, torch.float32, 2, 16))
    if reason:
        raise Skipped(reason)
    importlib.import_module("kvpatch.attention.triton")  # defines them
    given = operators(place)
    if name not in given:
        raise Skipped(attention.why_not("flash", attention.Site(place.device, torch.bfloat16, 2, 64)))
    found = torch.library.opcheck(getattr(torch.ops.kvpatch, name).default, given[name])
    failed = [test for test, outcome in found.items() if outcome != "SUCCESS"]
    require(not failed, f"kvpatch::{name} must pass torch.library.opcheck, and fails {failed}")
    return ", ".join(found)


OPERATORS = (
    "attend",
    "decode",
    "admit",
    "choose",
    "attend_weights",
    "attend_pages",
    "flash_decode",
    "window_scores",
    "pooled",
)


def scores_by_norm(place: Place) -> str:
    """Pooled scores from a log-sum-exp, of the newest query and of a row's last ones, against the formula."""
    batch, groups, queries, width, n, window = (2, 1, 3, 16, 90, 3) if place.small else (4, 4, 4, 128, 3000, 32)
    dtype = torch.float32 if place.small else torch.bfloat16
    reason = attention.why_not("triton", attention.Site(place.device, dtype, queries, width))
    if reason:
        raise Skipped(reason)
    from kvpatch.attention import triton

    generator, scale = torch.Generator().manual_seed(5), width**-0.5
    q = torch.randn(batch, groups * queries, window, width, generator=generator).to(place.device, dtype)
    keys = torch.randn(batch, groups, n, width, generator=generator).to(place.device, dtype)
    length = torch.randint(n // 2, n, (batch,), generator=generator).to(place.device)

    def wanted(place_of_query: int, per_head: bool) -> Tensor:
        one, seen = q[:, :, place_of_query, None].double(), length - window + 1 + place_of_query
        more = {"per_head": per_head, "backend": "reference"}
        return attention.decode(one, keys.double(), keys.double(), seen, **more)[1]

    newest = q[:, :, -1:]
    lse = triton.decode(newest, keys, keys, length[:, None], n, scale, "", "mean")[1]
    utility = torch.zeros(1, batch, 1, n, device=place.device)
    active = torch.ones(batch, dtype=torch.bool, device=place.device)
    triton.pooled(newest, keys, lse[..., None], length[:, None], active, utility, n, scale, "mean", "single", 0.0)
    windowed = triton.window_scores(q, keys, length, None, scale, True, "mean")
    errors = {
        "pooled": relative(utility[0, :, 0], wanted(window - 1, False)),
        "window_scores": relative(windowed, torch.stack([wanted(w, True) for w in range(window)]).mean(0)),
    }
    for name, error in errors.items():
        require(error <= SCORES, f"kvpatch::{name} must lie within {SCORES:.0e} of the formula, and lies {error:.2e}")
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def parts(place: Place) -> list[Part]:
    """One for each operator, and one of the numbers of those that no decode step of the fused back end runs."""
    found = [Part("scores by a log-sum-exp", partial(scores_by_norm, place), 20)]
    names = OPERATORS[::3] if place.small else OPERATORS
    return found + [Part(f"operator: kvpatch::{name}", partial(operator, name, place), 15) for name in names]
