"""Llama 2, 3, 3.1 (scaled RoPE) and models of its layout, such as SmolLM."""

from torch import Tensor, nn

from kvpatch import patches

MODEL_TYPES = ("llama",)

find_parts = patches.standard_parts


def check(config) -> None:
    """Every Llama config is supported."""


def project(attention: nn.Module, hidden: Tensor, position_embeddings) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, q, D], k and v [B, G, q, D] of hidden [B, q, E], rotated."""
    q = patches.split_heads(attention.q_proj(hidden), attention.head_dim)
    k = patches.split_heads(attention.k_proj(hidden), attention.head_dim)
    v = patches.split_heads(attention.v_proj(hidden), attention.head_dim)
    return *patches.rotate(q, k, position_embeddings), v
