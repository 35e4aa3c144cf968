"""Figures of whole decode loops on models of real shapes: one long row, a large batch, the largest that fits."""

from collections.abc import Callable, Iterator

import torch

from kvpatch.bench.variants import cache_bytes, parameter_bytes
from kvpatch.profiling import timing
from kvpatch.profiling.kernel_figures import GB
from kvpatch.profiling.model_runs import BUDGET, Bench, Decoded, decode, forget, static, unless_too_large
from kvpatch.profiling.parts import NO_TIME, Figure, Part, Skipped

LLAMA, QWEN = "Llama-3.1-8B", "Qwen2.5-7B"
EAGER = {"compile": False, "graphs": False, "backend": "packed"}
GIB = 2**30
KVPATCH, STATIC, EVICTION = "kvpatch inertia-lazy", "StaticCache compiled", "eager eviction"
NEEDED = {KVPATCH: 60, STATIC: 90, EVICTION: 30}  # seconds of a large batch: its prompts, and compiling a whole model


def figures_of(found: Decoded, bench: Bench, model, label: str, least: float | None = None) -> Iterator[Figure]:
    """Speed, achieved rate, time to the first token and peak memory of one generation."""
    weights, cache = parameter_bytes(model), found.rows * cache_bytes(model, found.held)
    moved, rate = int(weights + cache), bench.ceiling.rate
    limit = f"at {rate:.0f} GB/s at most {found.rows * rate * GB / moved:.1f}"
    of = f"{weights / GB:.2f} GB of weights and {cache / GB:.2f} GB of {found.held} tokens a row"
    speeds = [found.rows / one for one in found.steps]
    told = timing.told(speeds, "tok/s")
    yield Figure(f"{label}: decoded tokens", found.speed, "tok/s", f"{told}; {limit}: {of}; {found.detail}", least)
    achieved = moved / found.step / GB
    yield Figure(f"{label}: rate", achieved, "GB/s", f"{achieved / rate:.2f} of a copy", moved=moved)
    if found.first is not None:
        yield Figure(f"{label}: first token", found.first, "s", "with what is compiled and captured before it")
    if found.peak is not None:
        yield Figure(f"{label}: peak memory", found.peak / GIB, "GiB")


def one_row(bench: Bench, name: str, prompt: int, policies: dict[str, int], least: float | None) -> Iterator[Figure]:
    """A long prompt alone.

    Args:
        policies: steps of each; the first one's speed has the target.   least: tokens a second.
    """
    model, steps = bench.model(name), {}
    for place, (policy, count) in enumerate(policies.items()):
        label = f"{name}, batch 1, prompt {prompt}, {policy}"
        if place and not bench.deadline.fits(25):
            yield Figure(f"{label}: decoded tokens", None, "tok/s", NO_TIME)
            continue
        found = decode(bench, model, policy, 1, prompt, count)
        steps[policy] = found.step
        yield from figures_of(found, bench, model, label, least if place == 0 else None)
        if found.busy is not None:
            told = (
                f"kernels of eight replays, {1e3 * found.kernels:.3f} ms a step, of {1e3 * found.step:.3f} in the loop"
            )
            yield Figure(f"{label}: the GPU is busy", found.busy, "of the time", told, least=0.95)
    if {"inertia", "score-free"} <= set(steps):
        ratio = steps["inertia"] / steps["score-free"]
        told = f"{1e3 * steps['inertia']:.3f} and {1e3 * steps['score-free']:.3f} ms a step"
        yield Figure(f"{name}, batch 1, prompt {prompt}: scores every step over none", ratio, "", told, most=1.05)


def ways(bench: Bench, model, prompt: int, steps: int) -> dict[str, Callable[[int], Decoded]]:
    """Ways to decode a batch, by name: (rows) -> what came out."""

    def eager(rows: int) -> Decoded:
        # A step's work follows from what is held: where time is short the same is held of a shorter prompt.
        short = prompt // 8
        length, budget = (prompt, BUDGET) if bench.deadline.fits(100) else (short, int(prompt * BUDGET))
        found = decode(bench, model, "inertia-lazy", rows, length, steps, budget, **EAGER)
        return found._replace(detail=f"{found.detail}, prompt {length}")

    return {
        KVPATCH: lambda rows: decode(bench, model, "inertia-lazy", rows, prompt, steps),
        STATIC: lambda rows: static(bench, model, rows, prompt, steps),
        EVICTION: eager,
    }


def tried(bench: Bench, model, way: Callable[[], Decoded]) -> Decoded | None:
    """One generation, None where memory does not suffice; nothing that was compiled for it stays."""
    try:
        return unless_too_large(way, bench.place)
    finally:
        forget(model)
        bench.place.tidy()


def large_batch(bench: Bench, rows: int, prompt: int, steps: int) -> Iterator[Figure]:
    """Three ways at one batch, and how much faster kvpatch is; at half the batch where one way does not fit."""
    model = bench.model(LLAMA)
    while rows:
        found: dict[str, Decoded | None] = {}
        where = f"{LLAMA}, batch {rows}, prompt {prompt}"
        for name, way in ways(bench, model, prompt, steps).items():
            if not bench.deadline.fits(NEEDED[name]):
                yield Figure(f"{where}, {name}: decoded tokens", None, "tok/s", NO_TIME)
                continue
            found[name] = tried(bench, model, lambda way=way, rows=rows: way(rows))
            if found[name] is None:
                yield Figure(f"{where}, {name}: decoded tokens", None, "tok/s", "out of memory")
            else:
                yield from figures_of(found[name], bench, model, f"{where}, {name}")
        ours = found.get(KVPATCH)
        for name, least in ((STATIC, 6.0), (EVICTION, None)):
            other = found.get(name)
            if ours is not None and other is not None:
                yield Figure(f"{where}: kvpatch over {name}", ours.speed / other.speed, "times", least=least)
        if (found.get(KVPATCH) and found.get(STATIC)) or not bench.deadline.fits(120):
            return
        rows //= 2


def largest_batch(bench: Bench, way: str, prompt: int, steps: int) -> Iterator[Figure]:
    """The largest batch that fits, found by trying from what the shapes allow downward in steps of four rows."""
    if not bench.place.cuda:
        raise Skipped("how many rows fit is asked of CUDA's allocator only")
    model = bench.model(LLAMA)
    free = torch.cuda.mem_get_info(bench.place.device)[0]
    most = int(0.97 * free / cache_bytes(model, prompt + (prompt * BUDGET if way == KVPATCH else 0)))
    refused = []
    for rows in range(max(1, most // 4 * 4), 0, -4):
        if refused and not bench.deadline.fits(60):
            break
        if way == STATIC:
            found = tried(bench, model, lambda rows=rows: static(bench, model, rows, prompt, steps, read=False))
        else:
            found = tried(bench, model, lambda rows=rows: ways(bench, model, prompt, steps)[way](rows))
        if found is None:
            refused.append(rows)
            continue
        told = f"out of memory with {', '.join(map(str, refused))}" if refused else "the first that was tried"
        yield Figure(f"{LLAMA}, prompt {prompt}, {way}: largest batch", rows, "rows", told)
        yield from figures_of(found, bench, model, f"{LLAMA}, batch {rows}, prompt {prompt}, {way}")
        return
    told = f"out of memory with {', '.join(map(str, refused))}; {NO_TIME}"
    yield Figure(f"{LLAMA}, prompt {prompt}, {way}: largest batch", None, "rows", told)


def parts(bench: Bench) -> list[Part]:
    """Figures that come first."""
    small = bench.place.small
    long, short = (96, 80) if small else (65536, 16384)
    counts = (40, 40, 40) if small else (320, 160, 160)
    policies = dict(zip(("inertia-lazy", "inertia", "score-free"), counts, strict=True))
    rows, steps = (2, 40) if small else (32, 48)
    return [
        Part(f"figures: {LLAMA}, batch 1", lambda: one_row(bench, LLAMA, long, policies, None if small else 200.0), 60),
        Part(f"figures: {LLAMA}, batch {rows}", lambda: large_batch(bench, rows, short, steps), 70),
    ]


def more_parts(bench: Bench) -> list[Part]:
    """Figures that come when there is time left."""
    small = bench.place.small
    short = 80 if small else 16384
    policies = {"inertia-lazy": 40 if small else 160}
    found = [Part(f"figures: {QWEN}, batch 1", lambda: one_row(bench, QWEN, short, policies, None), 45)]
    for way, seconds in ((STATIC, 90), (KVPATCH, 120)):

        def run(way=way) -> Iterator[Figure]:
            return largest_batch(bench, way, short, 48)

        found.append(Part(f"figures: largest batch, {way}", run, seconds))
    return found
