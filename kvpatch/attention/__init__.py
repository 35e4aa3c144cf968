"""Decode attention over slots: one query a row, output and attention weights."""

from kvpatch.attention import packed, reference
from kvpatch.errors import BackendError

_RUNNABLE = {"packed": packed.decode, "reference": reference.decode}
_REASONS = {
    "triton": "the fused Triton kernels are not part of this release",
    "flash": "the FlashAttention path is not part of this release",
}


def choose(backend: str) -> tuple[str, str]:
    """(name, why) of the back end that runs; BackendError if a named one can't, ValueError for an unknown name."""
    if backend == "auto":
        return "packed", "the only fused path of this release; it runs on any device"
    if backend in _RUNNABLE:
        return backend, "asked for"
    if backend in _REASONS:
        raise BackendError(f"backend={backend!r} can't run: {_REASONS[backend]}; use 'auto' or 'packed'")
    raise ValueError(f"backend must be one of auto, {', '.join([*_RUNNABLE, *_REASONS])}, got {backend!r}")


def available() -> dict[str, str]:
    """Every back end's name, and why it can't run here; an empty text if it can."""
    return {**dict.fromkeys(_RUNNABLE, ""), **_REASONS}


def decode_function(backend: str):
    """The function of a runnable back end: (q, keys, values, valid, scale) -> (output, weights)."""
    return _RUNNABLE[backend]
