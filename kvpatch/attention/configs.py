"""Kernel configurations: pinned per query group, head size and element size, and replaceable by a tuned profile.

Nothing is searched at run time: a search inside a CUDA-graph capture is fatal, and one outside would make the first
call slow and two runs differ.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BLOCK_ROWS = 16  # fewest rows that a tensor-core product takes


class Config(NamedTuple):
    """How a kernel reads a row.

    block: slots a step of the loop.   warps: of a program.   stages: steps of the loop in flight.
    resident: programs that a multiprocessor holds at once; what the number of splits is made for.
    """

    block: int
    warps: int
    stages: int
    resident: int


class Key(NamedTuple):
    """What a configuration is pinned for: queries a group R, head size D, bytes of an element."""

    queries: int
    width: int
    itemsize: int


_REPLACED: dict[Key, Config] = {}


def config_for(queries: int, width: int, itemsize: int) -> Config:
    """The configuration for that shape: a replaced one, else the pinned one."""
    replaced = _REPLACED.get(Key(queries, width, itemsize))
    return replaced or pinned(queries, width, itemsize)


def pinned(queries: int, width: int, itemsize: int) -> Config:
    """The configuration shipped for that shape.

    A block holds 16 KiB of keys, so that three stages of keys and values leave a multiprocessor of 160 KiB or more of
    shared memory two programs. float32 is multiplied without tensor cores, which spills registers with fewer warps.
    """
    columns = max(16, 1 << (width - 1).bit_length())
    block = max(16, min(128, 16384 // (columns * itemsize)))
    return Config(block, 8 if itemsize == 4 else 4, 3, 2)


def window_rows(rows: int, itemsize: int) -> int:
    """Rows a program of the observation-window kernels takes of R * W; more would spill registers."""
    return 16 if itemsize == 4 else min(32, max(BLOCK_ROWS, 1 << (rows - 1).bit_length()))


def window_block(block: int, itemsize: int) -> int:
    """Slots a step of those kernels' loop, where a configuration has so many; the same holds in float32."""
    return min(block, 16) if itemsize == 4 else block


@contextlib.contextmanager
def replaced(table: Mapping[Key, Config]) -> Iterator[None]:
    """Use these configurations inside a with block.

    Raises:
        ValueError: for a block that is no power of two of at least 16, warps that are no power of two, or stages or
            resident below 1.
    """
    for key, config in table.items():
        check(key, config)
    before = dict(_REPLACED)
    _REPLACED.update(table)
    try:
        yield
    finally:
        _REPLACED.clear()
        _REPLACED.update(before)


def check(key: Key, config: Config) -> None:
    """Whether a configuration can run; ValueError naming the field otherwise."""

    def refuse(field: str, allowed: str):
        raise ValueError(f"{field} of the configuration for {key} must be {allowed}, got {getattr(config, field)!r}")

    if config.block < 16 or config.block & (config.block - 1):
        refuse("block", "a power of two of at least 16")
    if config.warps not in (1, 2, 4, 8, 16):
        refuse("warps", "1, 2, 4, 8 or 16")
    if config.stages < 1:
        refuse("stages", "at least 1")
    if config.resident < 1:
        refuse("resident", "at least 1")


def splits_for(pairs: int, slots: int, block: int, programs: int) -> int:
    """Into how many parts each row's slots are split.

    Args:
        pairs: rows times KV heads.   slots: the longest row's.   block: slots a step of the loop.
        programs: that run at once on the device.

    Returns:
        the fewest splits that keep the device at least nine tenths as busy as the best number would: the last wave of
        programs is what is lost.
    """
    most = max(1, min(64, slots // (2 * block)))

    def busy(splits: int) -> float:
        waves = pairs * splits / programs
        return waves / -(-pairs * splits // programs)

    best = max(busy(splits) for splits in range(1, most + 1))
    return next(splits for splits in range(1, most + 1) if busy(splits) >= 0.9 * best)
