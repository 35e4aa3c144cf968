"""A long document with one hidden fact, and the question that asks for it.

The text is prose that every Python installation carries: the language reference behind ``help()``. The fact is a
seven-digit number or a pair of words, so a right answer cannot be a guess, and where it lies is drawn from the seed.
The wording is close to the single-needle task of RULER.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADJECTIVES = (
    "amber", "brisk", "calm", "daring", "eager", "faint", "gentle", "hollow", "icy", "jolly",
    "keen", "lively", "mellow", "nimble", "odd", "proud", "quiet", "rusty", "silent", "tidy",
)  # fmt: skip
NOUNS = (
    "anchor", "basket", "candle", "dolphin", "engine", "falcon", "garden", "hammer", "island", "jacket",
    "kettle", "lantern", "mirror", "needle", "orchard", "pencil", "quarry", "river", "saddle", "tunnel",
)  # fmt: skip

INTRODUCTION = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
FACT = "The special magic {kind} for {key} is: {answer}."
QUESTION = "What is the special magic {kind} for {key} mentioned in the text?"
# Word for word the beginning of the fact: the model then copies on, also from the start of a long text.
ANSWER_PREFIX = "The special magic {kind} for {key} is:"
KINDS = ("number", "word")


@dataclass(frozen=True)
class Needle:
    """A prompt that hides one fact, and the answer that shows whether the fact was found.

    Attributes:
        prompt_ids: ``[length]`` int64, the whole prompt: document, question and the opening of the answer.
        question: what the prompt asks at its end.
        answer: seven different digits, or two words joined by a hyphen; the model found the fact if the decoded
            continuation contains it.
        prefix: the opening of the answer, with which the prompt ends.
        key: the name that the fact and the question share.
        depth: share of the document's tokens that stand before the fact, 0 to 1.
    """

    prompt_ids: torch.Tensor
    question: str
    answer: str
    key: str
    depth: float
    prefix: str


def document(
    length_in_tokens: int,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    depth: float | None = None,
    kind: str = "number",
) -> Needle:
    """A prompt of exactly ``length_in_tokens`` tokens with one fact hidden at a sentence's end.

    The document breaks off where the length is reached, if need be inside a sentence (never inside the fact).
    The same arguments give the same prompt on the same Python release; the text is that release's language
    reference, repeated if the length asks for more than it has.

    Args:
        length_in_tokens: length of ``prompt_ids``; at least about 140.
        tokenizer: must have a chat template.
        seed: chooses key, answer, depth and where the text starts.
        depth: share of the text before the fact, 0 to 1, moved to the nearest sentence end; None: drawn
            uniformly.
        kind: what the fact is, "number" or "word".

    Raises:
        ValueError: the depth is outside 0..1, the kind is unknown, the tokenizer has no chat template or the length
            leaves no room for a document.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    rng = random.Random(seed)
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    # Seven different digits: a small model that copies digit by digit loses its place at a repeated one.
    answer = "".join(rng.sample("123456789", 7))
    drawn, start = rng.random(), rng.random()
    depth = drawn if depth is None else depth
    if kind == "word":
        answer = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        while answer == key:
            answer = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"

    question, prefix = QUESTION.format(key=key, kind=kind), ANSWER_PREFIX.format(key=key, kind=kind)
    before, after = chat_frame(tokenizer, question, prefix, kind)
    fact = _ids(tokenizer, " " + FACT.format(key=key, answer=answer, kind=kind))
    room = length_in_tokens - len(before) - len(fact) - len(after)
    if room < 32:
        least = length_in_tokens - room + 32
        raise ValueError(f"length_in_tokens must be at least {least} here, got {length_in_tokens}")

    text, ends = passage(tokenizer, start, room)
    cut = min(ends, key=lambda end: abs(end - depth * room))
    ids = before + text[:cut] + fact + text[cut:room] + after
    return Needle(torch.tensor(ids), question, answer, key, cut / room, prefix)


def prose(length: int, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
    """[length] int64: consecutive sentences of the same prose; the seed draws where they begin."""
    return torch.tensor(passage(tokenizer, random.Random(seed).random(), length)[0][:length])


def passage(
    tokenizer: PreTrainedTokenizerBase, start: float, room: int, of: Sequence[str] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of consecutive sentences, round and round, up to `room` or a little more.

    Args:
        start: share of the sentences before the first one, 0 to 1.
        of: the sentences; the prose's by default.

    Returns:
        the ids, and the token counts up to `room` after which a sentence is complete, 0 among them.
    """
    of = of or sentences()
    ids: list[int] = []
    ends, at = [0], int(start * len(of))
    while len(ids) < room:
        ids += _ids(tokenizer, " " + of[at % len(of)])
        at += 1
        if len(ids) <= room:
            ends.append(len(ids))
    return ids, ends


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """Sentences of the language reference, without code, tables and markup."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(line.strip() for line in paragraph.splitlines())
            text = re.sub(r"\[\d+\]|[*`\"“”]", "", text)  # footnote marks, emphasis, literals
            text = re.sub(r"\s+", " ", text)
            # Split at a full stop before a capital, but not behind an abbreviation such as "e.g.".
            for sentence in re.split(r"(?<=[a-z)][.!?]) (?=[A-Z])", text):
                if re.fullmatch(r"[A-Z][a-z]*[ ,][^=<>{}|\\_@#$%^~\[\]]{30,300}\.", sentence):
                    found.append(sentence)
    return tuple(dict.fromkeys(found))


def chat_frame(
    tokenizer: PreTrainedTokenizerBase, question: str, answer_prefix: str, kind: str = "number"
) -> tuple[list[int], list[int]]:
    """Token ids before and after the document in a chat of one user turn and an opened answer."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template, so it can't put the question to the model")
    mark = "[document]"
    content = f"{INTRODUCTION.format(kind=kind)}{mark}\n{question}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    before, after = chat.split(mark)
    return _ids(tokenizer, before), _ids(tokenizer, after + answer_prefix)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids
