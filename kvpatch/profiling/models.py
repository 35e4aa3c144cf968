"""Models with random weights for the check of a GPU: tiny ones whose tokens are compared, and the shapes of real ones.

Nothing is downloaded, and nothing is made in float32 that is not kept in it.
"""

import gc
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kvpatch.bench.record import Clock

VOCABULARY = 97
PAD = 0


class Place(NamedTuple):
    """Where something is checked.

    device: of models and tensors.   small: sizes that a CPU, and Triton's interpreter there, get through.
    """

    device: torch.device
    small: bool

    @property
    def cuda(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for what a GPU was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def tidy(self) -> None:
        """Give memory back that nothing holds any more."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()


LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
NAMES = {"Llama-3.1-8B": LLAMA_8B, "Qwen2.5-7B": QWEN_7B}


def shrunk(shape: dict) -> dict:
    """The same architecture at toy size, with as many query heads a KV head."""
    groups = shape["num_attention_heads"] // shape["num_key_value_heads"]
    small = {
        "hidden_size": 16 * groups,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": groups,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
    }
    return shape | small


def large(name: str, place: Place) -> torch.nn.Module:
    """A model of that shape in bfloat16, or float32 where it is small, made on the device itself."""
    shape = shrunk(NAMES[name]) if place.small else NAMES[name]
    return _made(shape | {"tie_word_embeddings": False}, torch.float32 if place.small else torch.bfloat16, place)


def tiny(kind: str, place: Place, seed: int = 0, layers: int = 2) -> torch.nn.Module:
    """A float32 model of that type with two query heads for each of two KV heads, and far from uniform attention."""
    shape = {
        "model_type": kind,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
    }
    if kind == "mistral":
        shape["sliding_window"] = 24
    return _made(shape, torch.float32, place, seed)


def _made(shape: dict, dtype: torch.dtype, place: Place, seed: int = 0) -> torch.nn.Module:
    settings = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None} | shape
    kind = settings.pop("model_type")
    torch.manual_seed(seed)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    model.generation_config.eos_token_id = None
    if dtype == torch.float32:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # made of ones or zeros, which would hide that they are left out
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def prompts(lengths: list[int], vocabulary: int, place: Place, seed: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask [B, longest] of random rows, padded on the left; no row holds the pad token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((len(lengths), max(lengths)), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(PAD + 1, vocabulary, (length,), generator=generator)
        mask[row, -length:] = 1
    return {"input_ids": ids.to(place.device), "attention_mask": mask.to(place.device)}


def generate(model, batch: dict[str, Tensor], new_tokens: int, **more):
    """Greedy, and never ended by a token, unless `more` says otherwise."""
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    return model.generate(**batch, **settings | more)


GROUPS = 8  # a whole number of runs of every policy that is measured: of 1, 4 or 8 steps


def whole_runs(steps: int) -> int:
    """New tokens whose steps, after the one that reads the prompt, are that many and fill whole runs."""
    return 2 + -(-steps // GROUPS) * GROUPS


def step_seconds(clock: Clock, skip: int) -> list[float]:
    """Seconds a step, each the mean over eight steps: tokens that the host sees in blocks come by whole blocks.

    The last eight are left out: where nothing runs beside the host, they come together with those before them.

    Args:
        clock: was the streamer of a call of `whole_runs` tokens.   skip: blocks of eight that are left out first.
    """
    # Place 0 is the prompt, 1 the token that the prompt gives, 2 that of the first step.
    ends = clock.times[2 + skip * GROUPS :: GROUPS][:-1]
    return [(after - before) / GROUPS for before, after in zip(ends, ends[1:], strict=False)]
