"""A bar for work inside a call that takes long enough to be wondered about."""

import contextlib
import time
from collections.abc import Callable, Iterator

PATIENCE = 3.0  # seconds of work that show no bar


@contextlib.contextmanager
def shown(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """While work of so many units is done: what it gives is told of every unit, and draws a bar with the time left.

    Nothing is drawn where standard error is no terminal, and none before `PATIENCE` is over.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task, started = bar.add_task(label, total=total), time.perf_counter()

    def tick(units: int) -> None:
        bar.advance(task, units)
        if not bar.live.is_started and time.perf_counter() - started > PATIENCE:
            bar.start()

    try:
        yield tick
    finally:
        if bar.live.is_started:
            bar.stop()
