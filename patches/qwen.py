"""Qwen 2 and 2.5 (biases), Qwen 3 (norms of queries and keys) and its mixture of experts."""

from torch import Tensor, nn

from kvpatch import patches

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")

find_parts = patches.standard_parts


def check(config) -> None:
    """Every config is supported: a sliding window is kept by the slots."""


def uncompilable(config) -> str | None:
    """Experts that run one after the other, as the router says, have no fixed shapes."""
    if config.model_type == "qwen3_moe" and config._experts_implementation == "eager":
        return 'experts_implementation="eager" asks the host: use model.set_experts_implementation("grouped_mm")'
    return None


def project(attention: nn.Module, hidden: Tensor, position_embeddings, position_ids: Tensor | None):
    """q [B, H, q, D], k and v [B, G, q, D] of hidden [B, q, E], normed where the model does, rotated."""
    if not hasattr(attention, "q_norm"):
        return patches.project(attention, hidden, position_embeddings)
    width = attention.head_dim
    q = attention.q_norm(attention.q_proj(hidden).unflatten(-1, (-1, width))).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(hidden).unflatten(-1, (-1, width))).transpose(1, 2)
    v = patches.split_heads(attention.v_proj(hidden), width)
    return *patches.rotate(q, k, position_embeddings), v
