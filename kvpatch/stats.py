"""What a patched model did: counters that say whether eviction, compilation and memory are what was promised."""

import dataclasses
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpatch.rows import held_after

STEP_TIMES_KEPT = 4096


@dataclass
class Stats:
    """Counters of the last generation, and of the handle's life: compiles, recompiles, compile_seconds.

    held: tokens that the fullest row holds now, in its fullest layer and head.   evicted: tokens dropped so far, over
    all rows, counted there too; both count rows that ended early as if they went on.   cut: those of them that went
    before anything was decoded.
    refreshes: scoring steps.   steps: decode steps.   peak_cache_bytes: largest sum of allocated cache buffers.
    compiles: graphs compiled.   recompiles: graphs compiled for a kind of call that had one already.
    graph_active: whether the last generation's steps ran as CUDA graphs.   replays: how often one was started in it.
    graphs: CUDA graphs captured so far, in capture_seconds.
    """

    held: int = 0
    evicted: int = 0
    cut: int = 0
    refreshes: int = 0
    steps: int = 0
    prompt: list[int] = field(default_factory=list)
    budget: list[int | None] = field(default_factory=list)
    peak_cache_bytes: int = 0
    cache_bytes: int = 0
    compiles: int = 0
    recompiles: int = 0
    compile_seconds: float = 0.0
    graph_active: bool = False
    replays: int = 0
    graphs: int = 0
    capture_seconds: float = 0.0
    prefill_seconds: float = 0.0
    step_seconds: deque = field(default_factory=lambda: deque(maxlen=STEP_TIMES_KEPT))

    def begin(self, live: int) -> None:
        """A new generation over buffers of `live` bytes: its counters start at zero."""
        self.held = self.evicted = self.cut = self.refreshes = self.steps = self.replays = 0
        self.graph_active = False
        self.prefill_seconds = 0.0
        self.peak_cache_bytes = self.cache_bytes = live
        self.step_seconds.clear()

    def snapshot(self) -> "Stats":
        """A copy that later generations leave alone."""
        return dataclasses.replace(
            self, prompt=list(self.prompt), budget=list(self.budget), step_seconds=self.step_seconds.copy()
        )

    def note_bytes(self, live: int) -> None:
        """Cache buffers now come to that many bytes."""
        self.cache_bytes = live
        self.peak_cache_bytes = max(self.peak_cache_bytes, live)

    def note_rows(self, prompt: list[int], entries: list[int], limits: list[int | None], cut: int = 0) -> None:
        """Rows of the generation that begins: tokens seen, held, the most that may be, and how many went already."""
        self.prompt, self.budget = list(prompt), list(limits)
        self.cut += cut
        self.evicted = self.cut
        self.held = max(entries)

    def note_step(self, scored: bool, step: int, rows: Sequence[tuple]) -> None:
        """Decode step `step` is done; every row held its entries before the first one and was given `step` more."""
        self.refreshes += scored
        self.note_rows_at(step, rows)

    def unnote_step(self, scored: bool) -> None:
        """A step that was counted is none."""
        self.refreshes -= scored

    def note_rows_at(self, step: int, rows: Sequence[tuple]) -> None:
        """What rows hold and have lost after that many steps; of each row what `held_after` asks for."""
        self.steps = step
        held = [held_after(step, *row) for row in rows]
        self.held, self.evicted = max(held), self.cut + sum(row[0] + step for row in rows) - sum(held)

    def to_dict(self) -> dict:
        """Plain numbers, with p20, p50 and p80 of the step times in seconds."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "step_seconds"}
        times = sorted(self.step_seconds)
        for share in (20, 50, 80):
            plain[f"step_seconds_p{share}"] = times[min(len(times) - 1, len(times) * share // 100)] if times else None
        return plain

    def __str__(self) -> str:
        times = list(self.step_seconds)
        speed = f"{1.0 / statistics.median(times):,.1f} steps/s (median)" if times else "no steps timed"
        budget = sorted({"none" if limit is None else str(limit) for limit in self.budget})
        return "\n".join(
            (
                f"held       {self.held:,} tokens a row (budget {', '.join(budget) or '-'})",
                f"evicted    {self.evicted:,} over {len(self.prompt)} row(s)",
                f"steps      {self.steps:,}, {self.refreshes:,} of them scored; {speed}",
                f"cache      {self.cache_bytes / 2**20:,.1f} MiB now, {self.peak_cache_bytes / 2**20:,.1f} MiB at peak",
                f"compiled   {self.compiles} graph(s) in {self.compile_seconds:.1f} s, {self.recompiles} recompiled",
                f"CUDA graph {self.graphs} captured in {self.capture_seconds:.1f} s, {self.replays:,} replays"
                if self.graphs
                else "CUDA graph none",
            )
        )
