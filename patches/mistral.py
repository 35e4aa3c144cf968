"""Mistral, Ministral (some layers with a sliding window) and Ministral 3 (queries scaled by their position)."""

import torch
from torch import Tensor, nn

from kvpatch import patches

MODEL_TYPES = ("ministral", "ministral3", "mistral")

find_parts = patches.standard_parts


def check(config) -> None:
    """Every config is supported: a sliding window is kept by the slots."""


def project(attention: nn.Module, hidden: Tensor, position_embeddings, position_ids: Tensor | None):
    """q [B, H, q, D], k and v [B, G, q, D] of hidden [B, q, E], rotated."""
    q, k, v = patches.project(attention, hidden, position_embeddings)
    rope = getattr(attention.config, "rope_parameters", None) or {}
    if attention.config.model_type == "ministral3":
        # Llama 4's temperature: queries far behind the original context are made sharper.
        turns = torch.floor(position_ids / rope["original_max_position_embeddings"])
        scale = 1 + rope["llama_4_scaling_beta"] * torch.log(1 + turns)
        q = q * scale[:, None, :, None].to(q.dtype)
    return q, k, v
