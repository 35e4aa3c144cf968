"""What every record shares: where a row came from, the CSV files, and clocks."""

import csv
import os
import platform
import subprocess
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # compiling forks, and the tokenizer would warn

import torch
import transformers
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters

import kvpatch

ROOT = Path(__file__).resolve().parents[2]
PROVENANCE = ("device", "torch", "transformers", "kvpatch", "commit", "threads")


def provenance() -> dict[str, str | int]:
    """The columns that every row begins with. Call it after the number of threads is set."""
    versions = (torch.__version__, transformers.__version__, kvpatch.__version__)
    return dict(zip(PROVENANCE, (cpu_name(), *versions, commit(), torch.get_num_threads()), strict=True))


def cpu_name() -> str:
    """The CPU's model as Linux names it, with its number of cores; elsewhere what Python knows."""
    cores = os.cpu_count()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.processor() or platform.machine()} ({cores} cores)"


def commit() -> str:
    """Short id of the commit, with a + if kvpatch or the patches differ from it; empty outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    if not (ROOT / "pyproject.toml").is_file():  # installed somewhere, perhaps inside another project's checkout
        return ""
    try:
        changed = git("status", "--porcelain", "--", "kvpatch", "patches")
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a record; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_columns(path: Path) -> list[str] | None:
    """The header of a record; None if there is none yet."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    with path.open(newline="") as file:
        return next(csv.reader(file))


def append_rows(path: Path, rows: list[dict]) -> None:
    """Add rows to a record, with a header if the file is new.

    Raises:
        ValueError: if the file has other columns.
    """
    columns = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    found = read_columns(path)
    new = found is None
    if found not in (None, columns):
        differ = sorted(set(found) ^ set(columns))
        raise ValueError(f"{path} has other columns, give another file; they differ in {differ}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows({name: _plain(value) for name, value in row.items()} for row in rows)


def _plain(value):
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


class Clock:
    """A streamer that notes when each token came: the prompt, the first token, then one a decode step."""

    def __init__(self, tick=lambda tokens: None):
        self.tick, self.times = tick, []

    def put(self, value) -> None:
        """Called by generate for the prompt and for every token."""
        self.times.append(time.perf_counter())
        self.tick(len(self.times) - 1)

    def end(self) -> None:
        """Called by generate at the end."""

    def first_token_seconds(self, started: float) -> float:
        """From `started` until the first token came."""
        return self.times[1] - started

    def step_seconds(self) -> list[float]:
        """Seconds of each decode step. The first token comes from the prompt's own logits, without a step."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]


class CompileWatch:
    """Graphs that torch.compile makes from here on, and the seconds that takes, whoever asks for it."""

    def __init__(self):
        self._graphs, self.seconds, self._started = counters["stats"]["unique_graphs"], 0.0, 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def _start(self, _) -> None:
        self._started = time.perf_counter()

    def _end(self, _) -> None:
        self.seconds += time.perf_counter() - self._started

    @property
    def graphs(self) -> int:
        """Graphs made since this watch began."""
        return counters["stats"]["unique_graphs"] - self._graphs

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        callback_handler.remove_start_callback(self._start)
        callback_handler.remove_end_callback(self._end)
