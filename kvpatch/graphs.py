"""Runs of decode steps captured as CUDA graphs, and the same runs made step by step where there is no GPU.

What is captured reads and writes only tensors that outlive it: a generation's buffers with their books, and a desk.
Integers are baked into a graph, so everything that is one stands in the key.
"""

import functools
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from kvpatch.ending import Desk, Ending
from kvpatch.errors import CaptureError
from kvpatch.schedule import Run
from kvpatch.slots import Buffers

MOST = 8  # graphs that a runner keeps
_ONE_AT_A_TIME = threading.Lock()  # torch captures one graph at a time
WARM_UPS = 3  # runs on the capture's own stream before it; fewer leave lazily made state inside the graph


class StepByStep:
    """Captures nothing: a run's operations are issued one by one, on any device."""

    graphs = False

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        return body


class CudaGraphs:
    """Captures into one memory pool, on one stream, of one device."""

    graphs = True

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator still knows them

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Warm up, capture, and return the replay.

        Raises:
            Exception: what the operation raised that can't be captured. Streams are as before; torch's own random
                numbers on the device may refuse to be drawn until a capture has succeeded.
        """
        current = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    body()
            torch.cuda.synchronize(self.device)
            with torch.compiler.set_stance("fail_on_recompile"):
                # Only this thread's calls are watched: another may pin memory meanwhile.
                how = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
                with torch.cuda.graph(graph, **how):
                    body()
            current.wait_stream(self.stream)
        except Exception:
            # torch leaves the capture's stream current, and the pool in use by the graph that came to nothing.
            torch.cuda.set_stream(current)
            current.wait_stream(self.stream)
            self._failed.append(graph)
            self.pool, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            raise
        return graph.replay


def _operation(error: BaseException) -> str:
    """Where an error came from: the innermost line outside of torch, which holds the operation."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    frame = own[-1] if own else traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{frame.line!r} in {frame.name} ({frame.filename.rpartition('/')[2]}:{frame.lineno}): {first}"


class Captured(NamedTuple):
    """One run's replay, and what must live as long as it: all that the capture has met."""

    replay: Callable[[], None]
    buffers: Buffers
    desk: Desk
    ending: Ending | None


class Runner:
    """The captured runs of one decoder.

    Args:
        decoder: whose steps are captured (`kvpatch.decoder.Decoder`).
        capturer: `CudaGraphs` or `StepByStep`.
    """

    def __init__(self, decoder, capturer):
        self.decoder, self.capturer = decoder, capturer
        self._captured: dict[Hashable, Captured] = {}
        self._desks: dict[Hashable, Desk] = {}

    def clear(self) -> None:
        """Drop all graphs, together: they share a pool. Do so before their buffers are to be freed."""
        self._captured.clear()
        self._desks.clear()

    def desk(self, site, batch: int, longest: int) -> Desk:
        """The desk for that many rows and steps a run, where a `kvpatch.attention.Site` says."""
        head = self.decoder.parts.head
        vocabulary = head.out_features if hasattr(head, "out_features") else head.weight.shape[0]
        key = (site, batch, longest, vocabulary)
        if key not in self._desks:
            if len(self._desks) >= MOST:
                self.clear()
            self._desks[key] = Desk(batch, longest, vocabulary, site.dtype, site.device)
        return self._desks[key]

    def ready(self, cache, runs: list[Run], ending: Ending | None, desk: Desk) -> None:
        """Capture what is missing of these runs, longest first, over the buffers that the cache decodes in.

        The rows stand still meanwhile (`SlotCache.rehearsal`), so that nothing held is changed.

        Raises:
            CaptureError: naming the operation that can't be captured.
        """
        missing = [run for run in runs if self._find(cache, run, ending, desk) is None]
        if not missing:
            return
        if len(self._captured) + len(missing) > MOST:
            self._captured.clear()
            missing = runs
        started = time.perf_counter()
        with cache.rehearsal():
            kept = [tensor.clone() for tensor in desk.mutable()]
            desk.unfinished.fill_(False)  # a step's end would wake the rows that go on
            device = cache.site.device
            # What a warm-up draws must not move the caller's random numbers.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                for run in missing:
                    replay = self._capture(cache, run, ending, desk)
                    self._captured[self._key(cache, run, ending)] = Captured(replay, cache.decoded_in, desk, ending)
            for tensor, before in zip(desk.mutable(), kept, strict=True):
                tensor.copy_(before)
        stats = self.decoder.stats
        stats.graphs += len(missing) if self.capturer.graphs else 0
        stats.capture_seconds += time.perf_counter() - started

    def _capture(self, cache, run: Run, ending: Ending | None, desk: Desk) -> Callable[[], None]:
        try:
            with _ONE_AT_A_TIME:
                return self.capturer.capture(functools.partial(self._steps, cache, run, ending, desk))
        except Exception as error:
            name = f"a run of {len(run.kinds)} step(s), {sum(run.kinds)} of them scoring,"
            raise CaptureError(f"{name} can't be captured as a CUDA graph: {_operation(error)}") from error

    def replay(self, cache, run: Run, ending: Ending | None, desk: Desk) -> None:
        """Take the run's steps: tokens from the desk, and onto it. The host has counted nothing yet."""
        found = self._find(cache, run, ending, desk)
        if found is None:
            self.ready(cache, [run], ending, desk)
            found = self._find(cache, run, ending, desk)
        cache.read_all()
        found.replay()
        self.decoder.stats.graph_active = self.capturer.graphs
        self.decoder.stats.replays += self.capturer.graphs

    def _find(self, cache, run, ending, desk) -> Captured | None:
        found = self._captured.get(self._key(cache, run, ending))
        # Memory may be had again at the same address: only the very same objects are what was captured.
        return found if found is not None and found.buffers is cache.decoded_in and found.desk is desk else None

    def _key(self, cache, run, ending) -> Hashable:
        # The decoder's are the integers that follow from policy and model, such as a window.
        buffers = cache.decoded_in
        return run, buffers.batch, buffers.layout, None if ending is None else ending.key

    def _steps(self, cache, run: Run, ending: Ending | None, desk: Desk) -> None:
        """The run's steps, on the device alone: what is captured."""
        for place, scores in enumerate(run.kinds):
            logits = self.decoder.device_step(cache, desk.tokens, scores)
            if ending is None:
                desk.logits.copy_(logits)
            else:
                ending.take(logits, desk, place, cache.state.active)
