"""What every evaluation task makes: prompts with references, and how an answer is scored."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np


class CellError(ValueError):
    """A task that can't be made at a length, with this tokenizer or from these files; the message says why."""


@dataclass(frozen=True)
class Sample:
    """One prompt and what counts as its answer.

    Attributes:
        id: the same for the same task, length, seed and index.
        task: name of its task.
        length: length class in tokens, prompt and new tokens together; 0 where the data decide.
        prompt_ids: the whole prompt, chat template and opening of the answer included.
        references: texts that an answer is held against.
        new_tokens: most tokens of the answer.
        facts: more that plots and scores need (depth, keys, classes); JSON types only.
        free: tokens that the model says of its own before `then` is fed and the answer is scored.
        then: tokens fed after those.
    """

    id: str
    task: str
    length: int
    prompt_ids: tuple[int, ...]
    references: tuple[str, ...]
    new_tokens: int
    facts: dict = field(default_factory=dict)
    free: int = 0
    then: tuple[int, ...] = ()

    @property
    def prompt_id(self) -> str:
        """Twelve hexadecimal digits that follow from the tokens that are fed."""
        fed = np.array((*self.prompt_ids, -1, self.free, *self.then), dtype=np.int64)
        return hashlib.sha256(fed.tobytes()).hexdigest()[:12]


@dataclass(frozen=True)
class Sources:
    """Where tasks find what they don't make themselves.

    data: folder of datasets in their published layout, or None.
    haystack: text file that replaces the built-in prose, or None.
    template: whether the tokenizer's chat template is put around prompts ("auto": where it has one).
    """

    data: Path | None = None
    haystack: Path | None = None
    template: bool | str = "auto"


class Task(Protocol):
    """One kind of prompt.

    name: unique.   family: "ruler", "niah", ... as `--task` takes it.   new_tokens: most tokens of an answer.
    sized: whether prompts are made to a length; others take what the data hold, up to the length asked for.
    """

    name: str
    family: str
    new_tokens: int
    sized: bool

    def samples(self, tokenizer, length: int, count: int, seed: int, sources: Sources) -> list[Sample]:
        """The first `count` samples; fewer where the data end.

        Raises:
            CellError: if the task does not fit the length or its files are missing or malformed.
        """

    def score(self, prediction: str, sample: Sample) -> float:
        """0 (wrong) to 1 (right)."""


def rng_of(task: str, length: int, seed: int, index: int) -> random.Random:
    """Random numbers of one sample; every sample has its own, so that a longer run begins with a shorter one's."""
    return random.Random(f"{task}/{length}/{seed}/{index}")


def tokens_of(tokenizer, text: str) -> list[int]:
    """Ids without special tokens."""
    return tokenizer(text, add_special_tokens=False).input_ids


def framed(tokenizer, question: str, opening: str, template: bool | str = "auto") -> str:
    """The whole prompt as text: the user's turn in the chat template, and the opening of the answer behind it.

    Without a template the tokenizer's own first token, if it has one, stands before the text.
    """
    if template == "auto":
        template = bool(getattr(tokenizer, "chat_template", None))
    if not template:
        start = tokenizer.bos_token or "" if getattr(tokenizer, "add_bos_token", False) else ""
        return f"{start}{question}{' ' if opening else ''}{opening}"
    if not getattr(tokenizer, "chat_template", None):
        raise CellError("template=True, but the tokenizer has no chat template")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return chat + opening


def largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest size in least..most that fits, by binary search; fits(least) must hold."""
    while least < most:
        middle = (least + most + 1) // 2
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least


def by_name(tasks: Sequence[Task]) -> dict[str, Task]:
    """Tasks under their names."""
    return {task.name: task for task in tasks}
