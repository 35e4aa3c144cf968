"""The README does what it says: its Python runs, its tables are the records', its test command is the one CI runs."""

import importlib.util
import re
import subprocess
from pathlib import Path

import torch
from factories import PAD, left_padded, llama, prompts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_its_python_runs_in_order():
    model = llama(dtype=torch.float32)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    names = {"model": model, "inputs": left_padded(prompts((300,))), "torch": torch}
    for block in blocks:
        exec(block, names)  # noqa: S102
    assert "_kvpatch" not in model.__dict__


def script(name: str):
    """A module of profiles/ that is run, not imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "profiles" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_tables_are_those_of_the_records():
    tables = script("tables")
    assert set(re.findall(r"<!-- table: (\w+) -->", README)) == set(tables.TABLES)
    assert tables.written(README) == README


def test_it_has_two_set_up_commands_and_ci_runs_the_second():
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert len(commands) == 2  # transcripts are blocks of another kind
    assert "kvpatch demo" in commands[0]
    ci = (ROOT / ".ci" / "run").read_text()
    for part in commands[1].strip().split(" && "):
        assert part in ci.splitlines()


def test_it_shows_every_command_as_it_runs():
    from kvpatch.cli import app

    transcripts = script("transcripts")
    shown = re.findall(r"<!-- transcript: (\w+) -->\n\n```console\n\$ (.*?)\n(.*?)\n```", README, re.DOTALL)
    assert {name: command for name, command, _ in shown} == transcripts.COMMANDS
    commands = {one.name or one.callback.__name__ for one in app.registered_commands}
    assert set(transcripts.COMMANDS) | {"demo"} == commands  # the demo is the first set-up command
    for name, command, transcript in shown:
        if name in ("list", "explain"):  # the others hold times
            assert transcripts.said(command, subprocess.DEVNULL) == transcript
