"""A task whose question comes late: after many tokens of the model's own, and so after many evictions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvpatch.evaluation.filling import Draft, Plan, Sized
from kvpatch.evaluation.needles import TASK, next_turn
from kvpatch.evaluation.ruler import Needles
from kvpatch.evaluation.samples import Sample, Sources, Task, framed, tokens_of


@dataclass(frozen=True)
class Later(Sized):
    """The document of another task with a request to summarise it; that task's question follows `free` tokens later.

    `length` counts the first prompt alone: the free tokens, the question's turn and the answer come on top of it.

    Attributes:
        of: the task that makes the document and scores the answer.
        free: greedy tokens between the prompt and the question.
    """

    name: str
    of: Sized
    free: int = 512

    family = "later"

    @property
    def new_tokens(self) -> int:
        return self.of.new_tokens

    @property
    def skips(self) -> bool:
        return self.of.skips

    def plan(self, index: int, length: int, rng: Random, sources: Sources) -> Plan | None:
        return self.of.plan(index, length, rng, sources)

    def text(self, tokenizer, draft: Draft, template: bool | str) -> str:
        return framed(tokenizer, f"{draft.document}\n\n{TASK}", "", template)

    def reserved(self) -> int:
        return 0

    def afterwards(self, tokenizer, draft: Draft, template: bool | str) -> dict:
        question = draft.question.strip()
        if template is False or not getattr(tokenizer, "chat_template", None):
            turn = f"\n\n{question} {draft.opening}".rstrip(" ")
        else:
            turn = next_turn(tokenizer, question, draft.opening)
        return {"free": self.free, "then": tuple(tokens_of(tokenizer, turn))}

    def score(self, prediction: str, sample: Sample) -> float:
        return self.of.score(prediction, sample)


TASKS: tuple[Task, ...] = (Later("needle_later", Needles("niah_single_2", "essay")),)
