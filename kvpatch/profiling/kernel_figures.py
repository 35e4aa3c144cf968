"""Figures of single kernels: bytes a second beside those of a large copy, which is the ceiling that is measured."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch import attention
from kvpatch.linear import one_row
from kvpatch.profiling import timing
from kvpatch.profiling.models import LLAMA_8B, Place, shrunk
from kvpatch.profiling.parts import Figure, Part, Skipped

ROUNDS = 21
GB = 1e9


class Ceiling:
    """The rate of a large copy on the device, measured when it is first asked for."""

    def __init__(self, place: Place):
        self.place = place

    @cached_property
    def rounds(self) -> list[float]:
        """GB/s of each round, bytes read and bytes written."""
        place = self.place
        size = 2**20 if place.small else 2**32
        if place.cuda:
            size = min(size, torch.cuda.mem_get_info(place.device)[0] // 4)
        source = torch.randint(0, 2**15, (size // 2,), dtype=torch.int16, device=place.device)
        target = torch.empty_like(source)
        seconds = timing.rounds(place, lambda: target.copy_(source), 5 if place.small else ROUNDS)
        return [2 * source.nbytes / one / GB for one in seconds]

    @property
    def rate(self) -> float:
        """GB/s, the median."""
        return timing.spread(self.rounds)[1]

    def figures(self) -> Iterator[Figure]:
        """Its own figure."""
        yield Figure("copy bandwidth", self.rate, "GB/s", timing.told(self.rounds, "GB/s"))


class Layer(NamedTuple):
    """One layer's decode step: B rows, G KV heads, R queries each, head size D, slots held."""

    rows: int
    groups: int
    queries: int
    width: int
    slots: int

    def __str__(self) -> str:
        return f"batch {self.rows}, {self.slots} slots, G {self.groups}, R {self.queries}, D {self.width}"

    @property
    def usual(self) -> bool:
        """Llama 3's group and head size, which targets are strictest for."""
        return (self.queries, self.width) == (4, 128)


LAYERS = (
    Layer(32, 8, 4, 128, 8192),
    Layer(1, 8, 4, 128, 6554),
    Layer(1, 8, 4, 128, 65536),
    Layer(32, 4, 7, 128, 8192),
    Layer(32, 8, 4, 64, 8192),
)
TOY = (Layer(1, 1, 4, 32, 64), Layer(1, 1, 7, 16, 64))


def decode_kernel(layer: Layer, place: Place, ceiling: Ceiling) -> Iterator[Figure]:
    """Bytes a second of `kvpatch::attend`, without scores and with them."""
    dtype = torch.float32 if place.small else torch.bfloat16
    reason = attention.why_not("triton", attention.Site(place.device, dtype, layer.queries, layer.width))
    if reason:
        raise Skipped(reason)
    from kvpatch.attention import triton

    medians = {}
    for scorer in ("", "attention"):
        size = (layer.rows, layer.groups * layer.queries, layer.groups, layer.width, layer.slots, dtype.itemsize)
        moved = sum(triton.traffic(*size, scorer=scorer).values())
        seconds = _attend(layer, dtype, scorer, place, moved)
        rates = [moved / one / GB for one in seconds]
        medians[scorer] = timing.spread(seconds)[1]
        kind = "scoring" if scorer else "plain"
        rate = moved / medians[scorer] / GB
        yield Figure(f"{kind} decode kernel, {layer}", rate, "GB/s", timing.told(rates, "GB/s"), moved=moved)
        aimed = 0.8 if not scorer and layer.usual and layer.rows == 32 else None
        detail = f"of a copy's {ceiling.rate:.0f} GB/s; {1e6 * medians[scorer]:.1f} us"
        yield Figure(f"{kind} decode kernel over copy, {layer}", rate / ceiling.rate, "", detail, least=aimed)
    most = 1.10 if layer.usual else 1.15
    yield Figure(f"scoring over plain step, {layer}", medians["attention"] / medians[""], "", most=most)


def _attend(layer: Layer, dtype: torch.dtype, scorer: str, place: Place, moved: int) -> list[float]:
    """Seconds of one call, of several rounds of calls that take buffers in turn."""
    from kvpatch.attention import triton

    rows, groups, queries, width, n = layer
    count = timing.enough(place, moved)

    def normal(*size) -> Tensor:
        return torch.randn(*size, dtype=dtype, device=place.device)

    def each(value) -> Tensor:
        return torch.full((rows, 1), value, device=place.device)

    buffers = [(normal(rows, groups, n, width), normal(rows, groups, n, width)) for _ in range(count)]
    utilities = [torch.rand(1, rows, 1, n, device=place.device) for _ in range(count)]
    q, k, v = normal(rows, groups * queries, 1, width), normal(rows, groups, 1, width), normal(rows, groups, 1, width)
    positions = torch.zeros(rows, 1, n, dtype=torch.int64, device=place.device)
    places = (positions, each(n // 3), each(n), each(n)[:, 0], torch.ones(rows, dtype=torch.bool, device=place.device))
    more = (n, width**-0.5, 0, scorer, "mean", "ema", 0.8)

    turns = timing.passes(place, count * moved)

    def body() -> None:
        for _ in range(turns):
            for (keys, values), utility in zip(buffers, utilities, strict=True):
                triton.attend(q, k, v, keys, values, utility, *places, *more)

    seconds = timing.rounds(place, timing.captured(place, body), 2 if place.small else ROUNDS)
    return [one / (turns * count) for one in seconds]


def matrix_products(place: Place, ceiling: Ceiling) -> Iterator[Figure]:
    """One row against each of a layer's matrices: cuBLAS, and the compiled row sum."""
    shape = shrunk(LLAMA_8B) if place.small else LLAMA_8B
    wide, inner = shape["hidden_size"], shape["intermediate_size"]
    narrow = wide // shape["num_attention_heads"] * shape["num_key_value_heads"]
    dtype = torch.float32 if place.small else torch.bfloat16
    for outputs, inputs in ((wide, wide), (narrow, wide), (inner, wide), (wide, inner)):
        moved = outputs * inputs * dtype.itemsize
        count = timing.enough(place, moved, 48)
        turns = timing.passes(place, count * moved)
        weights = [torch.randn(outputs, inputs, dtype=dtype, device=place.device) for _ in range(count)]
        x = torch.randn(1, inputs, dtype=dtype, device=place.device)
        # Static: none of the shapes is the general case of the one before.
        summed = one_row if place.small else torch.compile(one_row, dynamic=False)
        products = {"linear": torch.nn.functional.linear, "compiled row sum": summed}
        for name, product in products.items():

            def body(product=product, x=x, weights=weights, turns=turns) -> None:
                for _ in range(turns):
                    for weight in weights:
                        product(x, weight)

            with torch.no_grad():
                replay = timing.captured(place, body)
                seconds = [one / (turns * count) for one in timing.rounds(place, replay, 3 if place.small else ROUNDS)]
            rate = moved / timing.spread(seconds)[1] / GB
            told = timing.told([moved / one / GB for one in seconds], "GB/s")
            detail = f"{rate / ceiling.rate:.2f} of a copy; {told}"
            yield Figure(f"{name}, {inputs} to {outputs}, one row", rate, "GB/s", detail, moved=moved)


def parts(place: Place, ceiling: Ceiling) -> list[Part]:
    """Figures that come first."""
    found = [Part("figures: copy bandwidth", ceiling.figures, 5)]
    for layer in TOY if place.small else LAYERS:

        def run(layer=layer) -> Iterator[Figure]:
            return decode_kernel(layer, place, ceiling)

        found.append(Part(f"figures: decode kernel, {layer}", run, 12))
    return found


def more_parts(place: Place, ceiling: Ceiling) -> list[Part]:
    """Figures that come when the models' are there."""
    return [Part("figures: matrix products of one row", lambda: matrix_products(place, ceiling), 40)]
