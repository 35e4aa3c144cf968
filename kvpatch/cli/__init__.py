"""The `kvpatch` command. Modules here import torch and transformers inside their commands, so that --help is quick."""

import os
import signal
import sys
import threading

import typer

from kvpatch.cli import bench, calibrate, chat, demo, evaluate, generate, inspect, report

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    help="Decode with a KV cache of fixed size, compiled, on an unmodified transformers model.",
)
app.command()(demo.demo)
app.command()(generate.generate)
app.command()(chat.chat)
app.command("list")(inspect.list_all)
app.command()(inspect.explain)
app.command()(inspect.doctor)
app.command()(bench.bench)
app.command("eval")(evaluate.evaluate)
app.command()(report.report)
app.command()(calibrate.calibrate)


def main() -> None:
    """Entry point of the `kvpatch` command: exit code 0, 1 for a failure, 2 for bad usage, 130 for Ctrl-C."""
    interrupted = []

    def note(signum, frame):
        interrupted.append(signum)
        raise KeyboardInterrupt

    def dropped(found):
        # Raised where Python can only drop it, such as in the callback of a weak reference: raise it again elsewhere.
        if interrupted and isinstance(found.exc_value, KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            sys.__unraisablehook__(found)

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = dropped
    try:
        app()
    except BaseException:
        # Libraries make other errors of an interrupt, for instance while they are imported.
        if interrupted:
            sys.exit(130)
        raise
