"""kvpatch: decode with a KV cache of fixed size, compiled, on an unmodified transformers model."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpatch.budget import Budget
    from kvpatch.cache import SlotCache
    from kvpatch.compression.behavior import Behavior
    from kvpatch.compression.prompt import Prompt
    from kvpatch.compression.rule import Prefill, list_methods, register_method
    from kvpatch.deletion import Deletion, deletion_effect
    from kvpatch.errors import BackendError, CaptureError, KVPatchError, UnsupportedModelError, VerificationError
    from kvpatch.patching import Patch, explain, patch, patched, unpatch
    from kvpatch.policy import Policy, list_policies, list_prefill
    from kvpatch.ranking import Blend
    from kvpatch.scoring import Scene, list_scorers, register_scorer

__version__ = "0.1.0"
_HOMES = {
    "kvpatch.budget": ("Budget",),
    "kvpatch.cache": ("SlotCache",),
    "kvpatch.compression.behavior": ("Behavior",),
    "kvpatch.compression.prompt": ("Prompt",),
    "kvpatch.compression.rule": ("Prefill", "list_methods", "register_method"),
    "kvpatch.deletion": ("Deletion", "deletion_effect"),
    "kvpatch.errors": ("BackendError", "CaptureError", "KVPatchError", "UnsupportedModelError", "VerificationError"),
    "kvpatch.patching": ("Patch", "explain", "patch", "patched", "unpatch"),
    "kvpatch.policy": ("Policy", "list_policies", "list_prefill"),
    "kvpatch.ranking": ("Blend",),
    "kvpatch.scoring": ("Scene", "list_scorers", "register_scorer"),
}
_MODULES = ("compat",)
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "BackendError",
    "Behavior",
    "Blend",
    "Budget",
    "CaptureError",
    "Deletion",
    "KVPatchError",
    "Patch",
    "Policy",
    "Prefill",
    "Prompt",
    "Scene",
    "SlotCache",
    "UnsupportedModelError",
    "VerificationError",
    "deletion_effect",
    "explain",
    "list_methods",
    "list_policies",
    "list_prefill",
    "list_scorers",
    "patch",
    "patched",
    "register_method",
    "register_scorer",
    "unpatch",
]


def __getattr__(name: str):
    # torch and transformers are imported with the first name that needs them: `kvpatch --help` needs none.
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
