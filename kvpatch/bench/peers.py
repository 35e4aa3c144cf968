"""Peers, measured in the same rounds: each runs its own released code in a virtual environment of its own."""

import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from kvpatch.bench.disturbance import Others
from kvpatch.bench.variants import Call, Workload
from kvpatch.demo import cache_folder
from kvpatch.errors import KVPatchError

# Peer: what pip installs, and the script beside this file that drives it.
PEERS = {"kvpress": (["kvpress", "sentencepiece"], "peer_kvpress.py")}


class PeerError(KVPatchError):
    """A peer could not be installed, or it stopped."""


def environment(name: str, tell) -> Path:
    """The Python of a peer's own environment below kvpatch's cache folder, made on first use.

    Args:
        name: of `PEERS`.
        tell: called with a line of text before something slow.

    Raises:
        PeerError: with pip's last lines.
    """
    folder = cache_folder() / "peers" / name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    done = folder / "installed"
    if not done.is_file():
        tell(f"installing {name} into an environment of its own, once")
        venv.create(folder, with_pip=True, clear=True)
        # The very torch of this process, so that kernels and threads are the same.
        torch_of_ours = f"torch=={torch.__version__.split('+')[0]}"
        command = [str(python), "-m", "pip", "install", "-q", torch_of_ours, *PEERS[name][0]]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode:
            raise PeerError(f"peer {name!r} can't be installed:\n{made.stderr[-1000:]}")
        done.write_text("")
    return python


@dataclass
class Guest:
    """One setting of a peer, in a process of its own that waits for calls; looks like a `Variant` to the runner."""

    name: str
    process: subprocess.Popen
    calls: list[Call] = field(default_factory=list)
    tokens: int = 0
    held_tokens: int = 0
    cache_bytes: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    timed_compiles: int = 0
    peak_bytes: int | None = None
    budget: None = None
    handle: None = None
    others: Others = field(default_factory=Others)

    def ask(self, **what) -> dict:
        """One request and its answer, both a line of JSON."""
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerError(
                f"peer {self.name} stopped with exit code {self.process.wait()}; KVPATCH_TRACEBACK=1 shows what it said"
            )
        return json.loads(line)

    def call(self, tokens: int) -> Call:
        """Generate that many tokens."""
        answer = self.ask(do="generate", tokens=tokens)
        self.held_tokens, self.cache_bytes = answer["held"], answer["cache_bytes"]
        self.peak_bytes = max(self.peak_bytes or 0, answer["peak_process_bytes"])
        return Call(answer["first"], answer["steps"], answer["whole"])

    def warm_up(self, prompts: Tensor, work: Workload) -> None:
        """The first call; see whether the peer is slow enough to be measured over fewer steps."""
        self.ask(do="prompts", ids=prompts.tolist())
        self.tokens = work.tokens_for(self.call(min(work.warmup, work.steps)))

    def measure(self, prompts: Tensor, work: Workload) -> None:
        """One round."""
        with self.others:
            self.calls.append(self.call(self.tokens))

    def steps(self, skip: int) -> list[list[float]]:
        """Seconds of the measured steps, round by round."""
        return [call.steps[skip:] for call in self.calls]

    def held(self, work: Workload) -> float:
        """Tokens a row that the last step met."""
        return self.held_tokens

    def cache_peak(self, batch: int, work: Workload) -> int:
        """Bytes of its cache at the end of a call."""
        return self.cache_bytes

    def fresh(self) -> "Guest":
        """Itself, for another cell; its peak of memory is that of its whole life."""
        self.calls, self.others = [], Others(self.process.pid)
        return self

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def start(name: str, setting: str, model_folder: str, dtype: str, threads: int, share: float, tell) -> Guest:
    """Start one setting of a peer.

    Args:
        name: of `PEERS`.   setting: what the peer's script knows, such as "tova".
        model_folder: checkpoint that the peer loads itself.
        share: of the prompt that it is told to hold.

    Raises:
        PeerError: as `environment`.
    """
    python, script = environment(name, tell), Path(__file__).with_name(PEERS[name][1])
    arguments = {"model": model_folder, "dtype": dtype, "threads": threads, "setting": setting, "share": share}
    process = subprocess.Popen(
        [str(python), str(script), json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if os.environ.get("KVPATCH_TRACEBACK") else subprocess.DEVNULL,
        text=True,
        # The peer must not meet this process's packages.
        env={key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")},
        cwd=Path(sys.prefix),
    )
    return Guest(f"{name} {setting}", process, others=Others(process.pid))
