"""Run the commands that the README shows, and write what they print between its marks.

    python profiles/transcripts.py            # all of them
    python profiles/transcripts.py list       # one

`report` reads what `eval` wrote. A transcript stands between `<!-- transcript: NAME -->` and `<!-- end -->`. Run it in
an environment of the README's first command and the extra `eval` alone: some packages print lines of their own when
transformers finds them.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path(tempfile.gettempdir()) / "kvpatch-transcripts"
README = Path(__file__).parent.parent / "README.md"
COMMANDS = {
    "generate": 'kvpatch generate --prompt "Name three rivers of Europe." --budget 24 --max-new-tokens 48',
    "chat": "printf 'Name a river.\\nWhere is it?\\n/stats\\n' | kvpatch chat --budget 256 --max-new-tokens 32",
    "list": "kvpatch list",
    "explain": "kvpatch explain --policy inertia-lazy --budget 512",
    "doctor": "kvpatch doctor",
    "eval": "kvpatch eval --task niah --policies full,inertia,best --budgets 5% --lengths 512 --samples 11 "
    "--out runs/first",
    "report": "kvpatch report runs/first",
    "calibrate": "kvpatch calibrate --length 512 --prompts 12 --tries 8 --texts 1 --out demo.best.toml",
    "bench": "kvpatch bench --batches 1 --prompt-lengths 512 --new-tokens 32 --policies inertia-lazy",
}


def said(command: str, errors: int = subprocess.STDOUT) -> str:
    """What a command prints, both streams together, as on a terminal of 110 columns without colours.

    Args:
        errors: where standard error goes; subprocess.DEVNULL leaves it out.
    """
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}
    environment.pop("TRITON_INTERPRET", None)  # it makes a back end run that does not run for others
    environment["PATH"] = folder + os.pathsep + environment["PATH"]
    FOLDER.mkdir(exist_ok=True)  # what one command writes the next one may read
    how = {"stdout": subprocess.PIPE, "stderr": errors, "text": True, "env": environment, "cwd": FOLDER}
    done = subprocess.run(["bash", "-c", command], **how)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stdout}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines).strip("\n")


def written(text: str, name: str, transcript: str) -> str:
    """The text with one transcript made anew."""
    block = f"<!-- transcript: {name} -->\n\n```console\n$ {COMMANDS[name]}\n{transcript}\n```\n\n<!-- end -->"
    found = re.compile(rf"<!-- transcript: {name} -->.*?<!-- end -->", re.DOTALL)
    if not found.search(text):
        raise ValueError(f"{README} has no mark for {name}")
    return found.sub(lambda _: block, text)


def main(names: Annotated[list[str] | None, typer.Argument(help="All if left out.")] = None) -> None:
    """Write the README's transcripts."""
    for name in names or COMMANDS:
        README.write_text(written(README.read_text(), name, said(COMMANDS[name])))
        typer.echo(f"{name} written")


if __name__ == "__main__":
    typer.run(main)
