"""Whole decode loops on models of real shapes with random weights: kvpatch's, and transformers' compiled one."""

import gc
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpatch
from kvpatch.bench.disturbance import Peak
from kvpatch.bench.record import Clock
from kvpatch.cachelayer import heads_of
from kvpatch.errors import CaptureError
from kvpatch.patches import cache_keyword
from kvpatch.profiling import models, timing
from kvpatch.profiling.kernel_figures import Ceiling
from kvpatch.profiling.models import Place
from kvpatch.profiling.parts import Deadline, Skipped
from kvpatch.schedule import Schedule

BUDGET = 0.1
SKIP = 2  # blocks of eight steps before the measured ones


class Decoded(NamedTuple):
    """One generation.

    steps: seconds of a step, several.   first: seconds until the first token.   peak: bytes, None where unknown.
    held: tokens a row.   rows: of the batch.
    busy: share of the time of warm replays that kernels cover; None where none were profiled.   kernels: their seconds
        in a step.
    """

    steps: list[float]
    first: float | None
    peak: int | None
    held: int
    rows: int
    busy: float | None = None
    kernels: float = 0.0
    detail: str = ""

    @property
    def step(self) -> float:
        """Seconds, the median."""
        return timing.spread(self.steps)[1]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.rows / self.step


class Bench:
    """What the parts share: a place, a ceiling, the time that is left, and one large model at a time."""

    def __init__(self, place: Place, ceiling: Ceiling, deadline: Deadline):
        self.place, self.ceiling, self.deadline = place, ceiling, deadline
        self._name, self._model = "", None

    def model(self, name: str) -> torch.nn.Module:
        """The model of that shape, unpatched; the one before it is given up."""
        if name != self._name:
            self._name, self._model = "", None
            self.place.tidy()
            self._need(name)
            self._model, self._name = models.large(name, self.place), name
        kvpatch.unpatch(self._model)
        return self._model

    def _need(self, name: str) -> None:
        if not self.place.cuda:
            return
        free, needed = torch.cuda.mem_get_info(self.place.device)[0], 20 * 2**30
        if free < needed and not self.place.small:
            raise Skipped(f"{name} needs {needed / 2**30:.0f} GiB, {free / 2**30:.1f} GiB of the device are free")

    def prompts(self, model, rows: int, length: int) -> dict[str, Tensor]:
        """Random prompts without pads."""
        return models.prompts([length] * rows, model.config.vocab_size, self.place)


def decode(bench: Bench, model, policy: str, rows: int, prompt: int, steps: int, budget=BUDGET, **how) -> Decoded:
    """Generate once with a patched model: everything that is made once is made before the steps that count."""
    place, clock = bench.place, Clock()
    if place.small and not place.cuda:
        how = how | {"compile": False}  # for a CPU it takes longer than all the rest
    batch = bench.prompts(model, rows, prompt)
    # Not verified: in float32 the same is checked on small models, and rounding adds up over many random layers.
    with kvpatch.patched(model, policy, budget=budget, verify=False, **how) as handle:
        with Peak(place.device) as peak:
            place.synchronize()
            started = time.perf_counter()
            models.generate(model, batch, models.whole_runs(steps), streamer=clock)
        stats, told = (
            handle.stats,
            f"{handle.backend}, {handle.stats.graphs} graph(s), {handle.stats.compiles} compiled",
        )
        share, kernels = None, 0.0
        if place.cuda and handle.graphs:
            if not stats.graph_active:
                raise RuntimeError(f"the steps of {handle!r} did not run as CUDA graphs: {handle.uncaptured_because}")
            try:
                share, kernels = _busy(handle, place)
            except RuntimeError as error:  # no access to the profiler: the other numbers are none the worse
                told += f"; not profiled: {error}"
        first, seconds = clock.first_token_seconds(started), models.step_seconds(clock, SKIP)
        return Decoded(seconds, first, peak.bytes, stats.held, rows, share, kernels, told)


def _busy(handle, place: Place) -> tuple[float, float]:
    """Share of the time of some replays of the last generation's group of steps in which a kernel ran, and a step's."""
    group, again = Schedule.of(handle.policy, handle.budget.evicts).group, 8
    captured = handle.runner_for(handle._cache)._captured
    replay = next((one.replay for key, one in captured.items() if key[0] == group), None)
    if replay is None:
        raise RuntimeError(f"no group of {len(group.kinds)} steps was captured")
    with torch.no_grad():
        intervals = timing.kernel_intervals(place, lambda: [replay() for _ in range(again)])
    covered, whole = timing.busy(intervals)
    if not whole:
        raise RuntimeError("the profiler saw no kernel")
    return covered / whole, covered / (again * len(group.kinds))


def static(bench: Bench, model, rows: int, prompt: int, steps: int, read: bool = True) -> Decoded:
    """transformers' StaticCache with its compiled forward.

    Args:
        read: whether the prompt is read, a row at a time, so that no row waits for the memory of all; otherwise the
            cache is filled with random numbers, on which no step's time depends.
    """
    place, clock, config = bench.place, Clock(), model.config
    new_tokens = models.whole_runs(steps)
    batch = bench.prompts(model, rows, prompt)
    keyword = cache_keyword(model.model.layers[0].self_attn)
    with Peak(place.device) as peak, torch.no_grad():
        cache = StaticCache(config=config, max_cache_len=prompt + new_tokens)
        cache.early_initialization(rows, *heads_of(config)[1:], model.dtype, place.device)
        _fill(cache, model, batch["input_ids"][:, :-1], keyword, read)
        more = {} if place.cuda else {"disable_compile": True}
        models.generate(model, batch, new_tokens, streamer=clock, **{keyword: cache}, **more)
    if place.cuda and "_compiled_call" not in vars(model):
        raise RuntimeError("transformers made no compiled call for the static cache")
    skips = torch._dynamo.utils.counters["inductor"].get("cudagraph_skips", 0)
    told = f"compiled, {skips} CUDA graph(s) skipped" if place.cuda else "not compiled on a CPU"
    told += ", prompts read a row at a time" if read else ", filled with random numbers"
    return Decoded(models.step_seconds(clock, SKIP), None, peak.bytes, prompt, rows, detail=told)


def _fill(cache, model, ids: Tensor, keyword: str, read: bool) -> None:
    """Let a static cache hold these tokens [B, L] of every row."""
    length = ids.shape[1]
    for row in range(len(ids) if read else 0):
        one = DynamicCache(config=model.config)
        model.model(input_ids=ids[row : row + 1], use_cache=True, **{keyword: one})
        for layer, own in zip(cache.layers, one.layers, strict=True):
            layer.keys[row, :, :length] = own.keys[0]
            layer.values[row, :, :length] = own.values[0]
        del one
    for layer in cache.layers:
        if not read:
            layer.keys[:, :, :length].normal_()
            layer.values[:, :, :length].normal_()
        layer.cumulative_length.fill_(length)


def forget(model) -> None:
    """Give back what transformers compiled, with its CUDA graphs and their memory."""
    for name in ("_compiled_call", "_last_compile_config", "_cache"):
        vars(model).pop(name, None)
    torch._dynamo.reset()


def unless_too_large(function: Callable[[], Decoded], place: Place) -> Decoded | None:
    """What the function gives; None where the device's memory does not suffice, which is free again then."""
    try:
        return function()
    except (torch.OutOfMemoryError, CaptureError) as error:
        if not out_of_memory(error):
            raise
    # Behind the except block, where nothing holds the frames, and with them the tensors, any more.
    gc.collect()
    place.tidy()
    return None


def out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what an error, or one that it came from, says. A capture that it ended ends in another error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
