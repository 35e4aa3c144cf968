"""Seconds that a device takes: CUDA events around CUDA-graph replays; on a CPU a plain clock around plain calls."""

import time
from collections.abc import Callable

import numpy as np
import torch

from kvpatch.graphs import WARM_UPS, CudaGraphs
from kvpatch.profiling.models import Place


def captured(place: Place, body: Callable[[], None]) -> Callable[[], None]:
    """One function that starts all that `body` does: a CUDA graph where there are any, so that launches cost nothing.

    Everything that is compiled must be so when this returns: `body` runs a few times first.
    """
    if not place.cuda:
        body()
        return body
    return CudaGraphs(place.device).capture(body)


def rounds(place: Place, function: Callable[[], None], count: int, warm_ups: int = WARM_UPS) -> list[float]:
    """Seconds of each of so many calls."""
    for _ in range(warm_ups):
        function()
    place.synchronize()
    found = []
    for _ in range(count):
        if not place.cuda:
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        function()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return found


def spread(values: list[float]) -> tuple[float, float, float]:
    """The 20th percentile, the median and the 80th."""
    return tuple(np.percentile(values, (20, 50, 80)).tolist())


def told(values: list[float], unit: str) -> str:
    """The percentiles around the median in words."""
    low, _, high = spread(values)
    return f"p20 {low:.4g}, p80 {high:.4g} {unit} of {len(values)}"


def enough(place: Place, size: int, most: int = 24) -> int:
    """How many buffers of that many bytes are taken in turn so that a cache holds none of them when it comes again."""
    if not place.cuda:
        return 2
    cached = torch.cuda.get_device_properties(place.device).L2_cache_size
    return max(2, min(most, -(-4 * cached // size)))


def passes(place: Place, size: int) -> int:
    """How often so many bytes are moved in a replay, so that it lasts milliseconds and its start counts for nothing."""
    return max(1, int(1e10) // size) if place.cuda else 1


def busy(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Time that intervals (start, end) cover together, and from the first start to the last end."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    if not intervals:
        return 0.0, 0.0
    return covered, reached - min(start for start, _ in intervals)


def kernel_intervals(place: Place, function: Callable[[], None]) -> list[tuple[float, float]]:
    """When the device was at work while a function ran, by torch.profiler: (start, end) in seconds, per kernel or copy.

    The function is profiled twice: what starts the profiler up falls into the first time.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            function()
            place.synchronize()
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return [(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]
