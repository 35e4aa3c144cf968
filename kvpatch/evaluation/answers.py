"""Prompts of one batch under several policies: the prompt is read once, each policy cuts a copy and answers."""

from collections.abc import Callable, Iterator

from torch import Tensor

from kvpatch.evaluation.forcing import Script
from kvpatch.evaluation.reading import Clock, Reading, Way
from kvpatch.evaluation.runs import Line
from kvpatch.evaluation.samples import Sample, Task


def answers(
    handle, tokenizer, task: Task, batch: list[Sample], ways: list[Way], clock: Clock
) -> Iterator[tuple[Way, list[Line]]]:
    """What each policy makes of one batch.

    Args:
        handle: of the patched model.
        batch: samples of the task, of one length and number of new tokens.
        clock: seconds are added to it.
    """
    with Reading.of(handle, tokenizer, batch, ways) as reading:
        clock.note_reading(reading.seconds, len(ways))
        eos, columns = ends_of(handle.model), reading.ids.shape[1]
        for way in ways:

            def generate(tokens: int, script: Script | None, ends: bool, way=way) -> Tensor:
                return reading.generate(way.policy, way.budget, tokens, script, ends=ends)

            with clock.decoding():
                new = answered(generate, batch, columns, eos)
            yield way, [line_of(task, one, way, tokenizer, row) for one, row in zip(batch, new, strict=True)]


def answered(
    generate: Callable[[int, Script | None, bool], Tensor], batch: list[Sample], columns: int, eos: set[int]
) -> list[list[int]]:
    """The scored tokens of each row, up to and with its end.

    Args:
        generate: (most new tokens, script, whether a row may end) to new tokens [B, T].
        columns: of the prompts.
        eos: tokens that end an answer.
    """
    new_tokens = max(one.new_tokens for one in batch)
    if not batch[0].then:
        made, starts = generate(new_tokens, None, True), [0] * len(batch)
    else:
        free, scripts = batch[0].free, [list(one.then) for one in batch]
        script = Script(columns, free, scripts, banned=min(eos, default=None))
        made = generate(free + max(map(len, scripts)) + new_tokens, script, False)
        starts = [free + len(one) for one in scripts]
    found = []
    for one, row, start in zip(batch, made.tolist(), starts, strict=True):
        row = row[start : start + one.new_tokens]
        end = next((place + 1 for place, token in enumerate(row) if token in eos), len(row))
        found.append(row[:end])
    return found


def ends_of(model) -> set[int]:
    """Tokens that end a row."""
    eos = model.generation_config.eos_token_id
    return set() if eos is None else set(eos) if isinstance(eos, (list, tuple)) else {eos}


def line_of(task: Task, sample: Sample, way: Way, tokenizer, tokens: list[int]) -> Line:
    """The record of one answer."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return way.line(
        sample,
        references=sample.references,
        prediction=text,
        tokens=len(tokens),
        score=task.score(text, sample),
        measures=task.measures(text, sample) if hasattr(task, "measures") else {},
        facts=sample.facts,
    )
