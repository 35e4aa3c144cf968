"""kvpatch: decode with a KV cache of fixed size, compiled, on an unmodified transformers model."""

from kvpatch.budget import Budget
from kvpatch.cache import SlotCache
from kvpatch.errors import BackendError, KVPatchError, UnsupportedModelError, VerificationError
from kvpatch.patching import Patch, explain, patch, patched, unpatch
from kvpatch.policy import Policy, list_policies
from kvpatch.scoring import Scene, list_scorers, register_scorer

__all__ = [
    "BackendError",
    "Budget",
    "KVPatchError",
    "Patch",
    "Policy",
    "Scene",
    "SlotCache",
    "UnsupportedModelError",
    "VerificationError",
    "explain",
    "list_policies",
    "list_scorers",
    "patch",
    "patched",
    "register_scorer",
    "unpatch",
]
__version__ = "0.1.0"
