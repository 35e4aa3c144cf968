"""Prompts of calibration: facts hidden in prose, of which one is asked for.

The other facts look like it, so that an answer must be copied from the right place; digits may repeat.
"""

import random

import torch

from kvpatch import needle
from kvpatch.evaluation.samples import framed, tokens_of

OTHERS = 3
_MARK = "[document]"


def document(length: int, tokenizer, seed: int, others: int = OTHERS) -> needle.Needle:
    """A prompt of exactly `length` tokens.

    Args:
        tokenizer: with or without a chat template.
        seed: chooses everything; odd seeds hide words, even ones numbers.
        others: facts beside the one that is asked for.

    Raises:
        ValueError: if the length leaves no room.
    """
    rng, kind = random.Random(seed), needle.KINDS[seed % 2]
    pairs = [f"{one}-{other}" for one in needle.ADJECTIVES for other in needle.NOUNS]
    keys = rng.sample(pairs, others + 1)
    answers = rng.sample(pairs, others + 1) if kind == "word" else [str(rng.randrange(10**6, 10**7)) for _ in keys]
    question = needle.QUESTION.format(key=keys[0], kind=kind)
    opening = needle.ANSWER_PREFIX.format(key=keys[0], kind=kind)
    turn = f"{needle.INTRODUCTION.format(kind=kind)}{_MARK}\n{question}"
    before, after = (tokens_of(tokenizer, part) for part in framed(tokenizer, turn, opening).split(_MARK))
    facts = [
        tokens_of(tokenizer, " " + needle.FACT.format(key=key, answer=answer, kind=kind))
        for key, answer in zip(keys, answers, strict=True)
    ]
    room = length - len(before) - len(after) - sum(map(len, facts))
    if room < 32 * len(facts):
        raise ValueError(f"length must be at least {length - room + 32 * len(facts)} here, got {length}")
    text, ends = needle.passage(tokenizer, rng.random(), room)
    # Each fact in a stretch of its own, which one in which is drawn.
    wanted = [(n + rng.random()) / len(facts) * room for n in range(len(facts))]
    places = [min(ends, key=lambda end, at=at: abs(end - at)) for at in wanted]
    order = rng.sample(range(len(facts)), len(facts))
    ids, start = list(before), 0
    for place, number in zip(places, order, strict=True):
        ids += text[start:place] + facts[number]
        start = place
    ids += text[start:room] + after
    depth = places[order.index(0)] / room
    return needle.Needle(torch.tensor(ids), question, answers[0], keys[0], depth, opening)
