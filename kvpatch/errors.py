"""Errors that kvpatch raises beside ValueError and TypeError."""


class KVPatchError(Exception):
    """Base of kvpatch's own errors."""


class UnsupportedModelError(KVPatchError, ValueError):
    """The model's architecture or state can't be patched; the message says which, why, and what is supported."""


class VerificationError(KVPatchError, RuntimeError):
    """The rewritten attention does not reproduce the model's own: the model has been left unpatched."""


class BackendError(KVPatchError, ValueError):
    """A named attention back end can't run here; the message says what it lacks."""


class CaptureError(KVPatchError, RuntimeError):
    """A run of decode steps can't be captured as a CUDA graph; the message names the operation."""
