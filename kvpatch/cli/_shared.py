"""What the commands share: options, loading a model, errors as the user should see them, progress."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Model = Annotated[str, typer.Option(help='Folder or hub name of a checkpoint, or "demo" (SmolLM2-135M).')]
PolicyName = Annotated[str, typer.Option(help="Eviction policy: see `kvpatch list`.")]
BudgetText = Annotated[str, typer.Option(help='Tokens held a row: "1024", "10%" of the prompt, or "full".')]
Threads = Annotated[int | None, typer.Option(help="CPU threads; torch's own choice if left out.", min=1)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto (the checkpoint's).")]
DTYPES = ("auto", "float32", "bfloat16", "float16")


def notes() -> Console:
    """Where everything goes that is not the answer itself."""
    return Console(stderr=True)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Errors that the user can mend, in one line and with exit code 1; others keep their traceback."""
    from kvpatch.errors import KVPatchError

    try:
        yield
    except (KVPatchError, ValueError, TypeError, OSError, ModuleNotFoundError) as error:
        if os.environ.get("KVPATCH_TRACEBACK"):
            raise
        notes().print(f"[red]error[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def budget_of(text: str, policy: str) -> dict:
    """The budget argument of `kvpatch.patch`; none for a policy that evicts nothing."""
    from kvpatch.budget import Budget

    try:
        budget = Budget.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--budget") from error
    return {} if policy == "full" else {"budget": budget}


def load(name: str, dtype: str, threads: int | None):
    """The model in eval mode and its tokenizer."""
    if dtype not in DTYPES:
        raise typer.BadParameter(f"must be one of {', '.join(DTYPES)}, got {dtype!r}", param_hint="--dtype")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # compiling forks, and the tokenizer would warn
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    kind = "auto" if dtype == "auto" else getattr(torch, dtype)
    if name == "demo":
        from kvpatch import demo

        return demo.load(torch.float32 if kind == "auto" else kind)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=kind)
    return model.eval(), AutoTokenizer.from_pretrained(name)


def pad_of(tokenizer) -> int | None:
    """The token that rows are padded with."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id


def read_text(text: str | None, file: str | None) -> str:
    """The prompt from --prompt, a file, or standard input for "-"."""
    if (text is None) == (file is None):
        raise typer.BadParameter("give exactly one of --prompt and --prompt-file", param_hint="--prompt")
    if file is not None:
        try:
            data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
            text = data.decode("utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="--prompt-file") from error
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"{file} is not UTF-8 text ({error})", param_hint="--prompt-file") from error
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return text


class Reading:
    """Shows on the terminal how far a prompt has been read, and that the first steps compile, until text comes.

    Args:
        model: patched or not.   tokens: of the prompt.   console: where it is drawn.
    """

    def __init__(self, model, tokens: int, console: Console):
        self._base, self._tokens = model.get_decoder() if hasattr(model, "get_decoder") else model.model, tokens
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress, self._shown = Progress(*columns, console=console, transient=True), False

    def __enter__(self) -> Callable[[], None]:
        if self._progress.console.is_terminal:
            self._progress.start()
            self._shown = True
        self._task = self._progress.add_task(f"reading {self._tokens:,} tokens", total=self._tokens)
        self._hook = self._base.register_forward_hook(self._block, with_kwargs=True)
        return self.stop

    def _block(self, module, args, kwargs, output) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        self._progress.advance(self._task, ids.shape[1] if ids is not None else 0)
        if self._progress.tasks[self._task].finished:
            self._progress.update(self._task, description="first steps (compiled once)", total=None)

    def stop(self) -> None:
        """Text comes: leave the line to it."""
        if self._shown:
            self._progress.stop()
            self._shown = False
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __exit__(self, *_) -> None:
        self.stop()
