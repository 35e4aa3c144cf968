"""Errors that kvpatch raises beside ValueError and TypeError."""


class KVPatchError(Exception):
    """Base of kvpatch's own errors."""


class UnsupportedModelError(KVPatchError, ValueError):
    """The model's architecture or state can't be patched; the message says which, why, and what is supported."""


class VerificationError(KVPatchError, RuntimeError):
    """The rewritten attention does not reproduce the model's own: the model has been left unpatched."""


class BackendError(KVPatchError, ValueError):
    """A named attention back end can't run here; the message says what it lacks."""
