"""Parts of a check that run one after the other within a time limit; each result is on disk before the next begins.

Nothing here knows of torch: what a part does, and what is to be tidied between two of them, comes from outside.
"""

import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvpatch.bench.record import PROVENANCE, append_rows, read_columns

CHECK_COLUMNS = (*PROVENANCE, "name", "status", "detail", "seconds")
FIGURE_COLUMNS = (*PROVENANCE, "name", "value", "unit", "target", "met", "bytes", "detail")
NO_TIME = "no time left"


class Skipped(Exception):
    """A part can't run here; the message says why."""


class CheckFailed(AssertionError):
    """What was checked does not hold; the message is a sentence."""


def require(holds: bool, sentence: str) -> None:
    """CheckFailed with that sentence unless something holds. Not `assert`, which python -O leaves out."""
    if not holds:
        raise CheckFailed(sentence)


class Deadline:
    """Seconds that are left of so many, by a clock.

    Args:
        seconds: from now on.   clock: gives seconds that only grow.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        """Seconds; negative when the time is over."""
        return self._end - self._clock()

    def fits(self, seconds: float) -> bool:
        """Whether something that takes that long still ends in time."""
        return seconds <= self.left


class Figure(NamedTuple):
    """One number.

    value: None where there is none, and `detail` says why.   least, most: its target, where it has one.
    moved: bytes that a step must move, where the value is a rate in GB/s.
    """

    name: str
    value: float | None
    unit: str
    detail: str = ""
    least: float | None = None
    most: float | None = None
    moved: int | None = None

    @property
    def target(self) -> str:
        """The target in words, empty without one."""
        bounds = ((">=", self.least), ("<=", self.most))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def met(self) -> str:
        """Either "yes" or "no"; empty without a target or a value."""
        if not self.target or self.value is None:
            return ""
        above = self.least is None or self.value >= self.least
        return "yes" if above and (self.most is None or self.value <= self.most) else "no"


class Part(NamedTuple):
    """One part.

    run: () -> what was seen, in words; or an iterator of figures. Raises `Skipped` where it can't run, and anything
        else where something is wrong.
    seconds: it takes at most, of a card that does its job.
    """

    name: str
    run: Callable[[], str | Iterator[Figure]]
    seconds: float


def forget(error: BaseException | None) -> None:
    """Let go of what the frames of an error and of its causes hold: tensors would stay in the device's memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Record:
    """The two files of a folder, which rows are added to.

    Args:
        folder: made if it isn't there.   provenance: columns that every row begins with.

    Raises:
        ValueError: if one of them is there already with other columns.
    """

    def __init__(self, folder: Path, provenance: dict):
        self.provenance = provenance
        self.checks, self.figures = folder / "checks.csv", folder / "figures.csv"
        for path, columns in ((self.checks, CHECK_COLUMNS), (self.figures, FIGURE_COLUMNS)):
            if read_columns(path) not in (None, list(columns)):
                raise ValueError(f"{path} has other columns: give another folder")

    def check(self, name: str, status: str, detail: str, seconds: float) -> None:
        """Add a part's outcome."""
        self._add(self.checks, CHECK_COLUMNS, (name, status, detail, seconds))

    def figure(self, one: Figure) -> None:
        """Add a number."""
        row = (one.name, one.value, one.unit, one.target, one.met, one.moved, one.detail)
        self._add(self.figures, FIGURE_COLUMNS, row)

    def _add(self, path: Path, columns: tuple[str, ...], values: tuple) -> None:
        # Opened, written and closed for each row: what is on disk survives whatever ends this process.
        append_rows(path, [dict(zip(columns, (*self.provenance.values(), *values), strict=True))])


class Runner:
    """Runs parts, writes what they give, and tells it.

    Args:
        say: (name, status, detail, seconds) of each part that ended.   tell: (figure) of each number.
        healthy: whether the device still works, asked after a failure.   tidy: called between parts.
        targets: whether figures have any; those of toy sizes have none, and are named so.

    Attributes:
        failures: parts that failed so far.
    """

    def __init__(
        self,
        record: Record,
        deadline: Deadline,
        say: Callable[[str, str, str, float], None] = lambda *_: None,
        tell: Callable[[Figure], None] = lambda _: None,
        healthy: Callable[[], bool] = lambda: True,
        tidy: Callable[[], None] = lambda: None,
        targets: bool = True,
    ):
        self.record, self.deadline, self.say, self.tell = record, deadline, say, tell
        self.healthy, self.tidy, self.targets = healthy, tidy, targets
        self.failures = 0

    def run(self, parts: list[Part]) -> list[Part]:
        """Run them in order. Returns those that are left when the device no longer works, else none."""
        for place, part in enumerate(parts):
            if not self.deadline.fits(part.seconds):
                self._end(part, "skipped", NO_TIME, 0.0)
                continue
            if not self._one(part) and not self.healthy():
                return parts[place + 1 :]
            self.tidy()
        return []

    def _one(self, part: Part) -> bool:
        started = time.perf_counter()
        try:
            status, detail = "ok", self._taken(part.run())
        except Skipped as reason:
            status, detail = "skipped", str(reason)
        except Exception as error:
            self.failures += 1
            status, detail = "failed", "".join(traceback.format_exception(error)).strip()
            forget(error)
        self._end(part, status, detail, time.perf_counter() - started)
        return status != "failed"

    def _taken(self, found: str | Iterator[Figure]) -> str:
        if isinstance(found, str):
            return found
        count = 0
        for figure in found:
            if not self.targets:
                figure = figure._replace(name=f"toy {figure.name}", least=None, most=None)
            self.record.figure(figure)
            self.tell(figure)
            count += 1
        return f"{count} figure(s)"

    def _end(self, part: Part, status: str, detail: str, seconds: float) -> None:
        self.record.check(part.name, status, detail, seconds)
        self.say(part.name, status, detail, seconds)
