"""Llama 2, 3, 3.1 (scaled RoPE) and models of its layout, such as SmolLM."""

from kvpatch import patches

MODEL_TYPES = ("llama",)

find_parts = patches.standard_parts
project = patches.project


def check(config) -> None:
    """Every Llama config is supported."""
