"""What else the machine did while something was measured, and how fast it reads memory."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Stream:
    """The highest rate at which this process reads memory, by the best of a few kernels.

    Args:
        gib: size of the tensor that is read, in GiB.
        device: where it lies.
    """

    def __init__(self, gib: float, device="cpu"):
        self.data = torch.ones(max(int(gib * 2**16), 1) * 4096, device=device)
        wide = self.data.view(-1, 4096)
        vector = torch.ones(4096, device=device)
        self.kernels: list[Callable] = [
            self.data.sum,
            self.data.amax,
            lambda: torch.mv(wide, vector),
            lambda: torch.dot(self.data, self.data),
        ]
        self.rounds: list[float] = []

    def measure(self) -> None:
        """One round: GB/s of the best kernel, each run three times."""
        best = 0.0
        for kernel in self.kernels:
            for _ in range(3):
                synchronize(self.data.device)
                started = time.perf_counter()
                kernel()
                synchronize(self.data.device)
                best = max(best, self.data.nbytes / (time.perf_counter() - started) / 1e9)
        self.rounds.append(best)


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Others:
    """Shares of the CPUs that other processes, and other machines on the same host, took meanwhile (Linux).

    Args:
        measured: process that is measured; its own use does not count.
    """

    def __init__(self, measured: int | str = "self"):
        self.measured = measured
        self.foreign = self.stolen = self.total = 0.0

    def __enter__(self) -> "Others":
        self._before = _cpu_seconds(self.measured)
        return self

    def __exit__(self, *_) -> None:
        after = _cpu_seconds(self.measured)
        if self._before is not None and after is not None:
            total, busy, stolen, own = (late - early for early, late in zip(self._before, after, strict=True))
            self.total += total
            self.stolen += stolen
            self.foreign += max(busy - own, 0.0)

    def told(self, stream_rounds: list[float]) -> str:
        """In words, what may have widened the spread."""
        causes = []
        if self.total and self.foreign / self.total > 0.02:
            causes.append(f"other processes took {self.foreign / self.total:.0%} of the CPUs")
        if self.total and self.stolen / self.total > 0.02:
            causes.append(f"{self.stolen / self.total:.0%} of the CPUs' time went to other machines on this host")
        if min(stream_rounds) < 0.9 * max(stream_rounds):
            causes.append(f"memory was read at {min(stream_rounds):.1f} to {max(stream_rounds):.1f} GB/s")
        return "; ".join(causes) or "nothing seen from here: the machine changed its speed by itself"


def _cpu_seconds(process: int | str) -> tuple[float, float, float, float] | None:
    """Seconds of all CPUs: all, busy without stolen, stolen, and of one process with its ended children."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        # Behind the name, which may hold blanks: state is the first field, user time the twelfth.
        own = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, idle, waiting, irq, soft, stolen = (field / tick for field in fields)
    busy = user + nice + system + irq + soft
    return busy + idle + waiting + stolen, busy, stolen, sum(map(int, own)) / tick


class Peak:
    """Largest resident memory of this process, or of the GPU's allocations, while a block ran; None where unknown."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, None

    def __enter__(self) -> "Peak":
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            try:
                Path("/proc/self/clear_refs").write_text("5")  # begins the high-water mark anew
            except OSError:
                pass
        return self

    def __exit__(self, *_) -> None:
        if self.device.type == "cuda":
            self.bytes = max(self.bytes or 0, torch.cuda.max_memory_allocated(self.device))
            return
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return
        kib = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        self.bytes = max(self.bytes or 0, 1024 * kib)
