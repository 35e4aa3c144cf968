"""What needles are hidden in, and the words that they are made of."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from random import Random

from kvpatch import needle
from kvpatch.evaluation.samples import CellError, Sources

# RULER's noise: one line of five sentences, repeated.
NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

# Words of essay without which no needle is in a haystack.
LEAST_WORDS = 100

# A sentence ends at a stop before white space, a closing quote or bracket between them, or at an empty line;
# Chinese and Japanese stops need no space behind them.
_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"'”’)\]])\s+|(?<=[。！？])\s*|\n\s*\n")


def sentences(sources: Sources) -> tuple[str, ...]:
    """Sentences of the user's haystack file, or of the built-in prose; no white space but single spaces.

    Raises:
        CellError: the file can't be read as UTF-8 text or has no text.
    """
    if sources.haystack is None:
        return needle.sentences()
    path = Path(sources.haystack)
    try:
        state = path.stat()
        return _split(path, state.st_mtime_ns, state.st_size)
    except (OSError, UnicodeDecodeError) as error:
        raise CellError(f"haystack {path} can't be read as UTF-8 text: {error}") from error


@lru_cache(maxsize=4)
def _split(path: Path, changed: int, size: int) -> tuple[str, ...]:
    parts = [" ".join(part.split()) for part in _END.split(path.read_text(encoding="utf-8"))]
    if not any(parts):
        raise CellError(f"haystack {path} has no text")
    return tuple(part for part in parts if part)


def essay(prose: Sequence[str], start: int, words: int) -> list[str]:
    """The first `words` words from sentence `start` on, round and round; the last sentence may break off.

    Cut at words, as in RULER, a text can fill a length to a few tokens.
    """
    taken: list[str] = []
    while words > 0:
        sentence = prose[(start + len(taken)) % len(prose)].split(" ")
        taken.append(" ".join(sentence[:words]))
        words -= len(sentence)
    return taken


def noise(count: int) -> list[str]:
    """Lines of noise, `count` sentences in all; the last line may have fewer than the others."""
    return [" ".join(NOISE[: count - at]) for at in range(0, count, len(NOISE))]


def hidden(pieces: Sequence[str], needles: Sequence[str], spots: Sequence[int], joint: str) -> tuple[str, list[float]]:
    """The joined text with every needle before the piece at its spot, and the depth of each.

    Args:
        spots: 0..len(pieces), one a needle; needles of one spot keep their order.

    Returns:
        The text, and for each needle the share (0 to 1) of the pieces' characters that stand before it.
    """
    before = [0]
    for piece in pieces:
        before.append(before[-1] + len(piece))
    mixed, done = [], 0
    for spot, one in sorted(zip(spots, needles, strict=True), key=lambda pair: pair[0]):
        mixed += [*pieces[done:spot], one]
        done = spot
    return joint.join([*mixed, *pieces[done:]]), [before[spot] / before[-1] for spot in spots]


def nearest(pieces: Sequence[str], depth: float) -> int:
    """The spot whose share of characters before it comes nearest to `depth` (0 to 1)."""
    wanted, best, passed = depth * sum(map(len, pieces)), 0, 0
    error = wanted
    for spot, piece in enumerate(pieces, 1):
        passed += len(piece)
        if abs(passed - wanted) < error:
            best, error = spot, abs(passed - wanted)
    return best


def in_essay(
    prose: Sequence[str], start: int, words: int, needles: Sequence[str], depths: Sequence[float]
) -> tuple[str, list[float]]:
    """`hidden` in an essay, with every needle at the sentence end nearest to its depth (0 to 1)."""
    pieces = essay(prose, start, words)
    return hidden(pieces, needles, [nearest(pieces, depth) for depth in depths], " ")


@lru_cache(maxsize=4)
def words(kind: str) -> tuple[str, ...]:
    """English words of wonderwords' list "noun", "adjective" or "verb", in its order.

    Raises:
        ModuleNotFoundError: wonderwords is not installed.
    """
    try:
        folder = resources.files("wonderwords")
    except ModuleNotFoundError:
        advice = 'the words come from the package wonderwords: pip install "kvpatch[eval]"'
        raise ModuleNotFoundError(advice, name="wonderwords") from None
    listed = (folder / "assets" / f"{kind}list.txt").read_text(encoding="utf-8").splitlines()
    return tuple(dict.fromkeys(word.strip() for word in listed if word.strip()))


def drawn(kind: str, rng: Random, used: set[str]) -> str:
    """A key or value that is not used yet: "words" (adjective-noun), "numbers" (seven digits) or "uuids"."""
    while True:
        if kind == "words":
            value = f"{rng.choice(words('adjective'))}-{rng.choice(words('noun'))}"
        elif kind == "numbers":
            value = str(rng.randint(1_000_000, 9_999_999))
        else:
            value = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if value not in used:
            used.add(value)
            return value
