"""Tokenizers, and samples read back as text, that the tests of benchmark tasks share."""

import re
from functools import cache
from types import SimpleNamespace

from transformers import AutoTokenizer

from kvpatch import demo
from kvpatch.evaluation.samples import Sources


class Words:
    """A tokenizer without a template: every word, mark and run of white space is a token, and decoding is exact."""

    chat_template = None

    def __init__(self):
        self.ids, self.parts = {}, []

    def __call__(self, text, add_special_tokens):
        ids = []
        for part in re.findall(r"\s+|\w+|[^\w\s]", text):
            if part not in self.ids:
                self.ids[part] = len(self.parts)
                self.parts.append(part)
            ids.append(self.ids[part])
        return SimpleNamespace(input_ids=ids)

    def decode(self, ids):
        return "".join(self.parts[one] for one in ids)


@cache
def tokenizer_of(name):
    """By its name: words, or demo."""
    return Words() if name == "words" else AutoTokenizer.from_pretrained(demo.path())


def made(task, length=1536, count=1, seed=42, tokenizer="words", sources=None):
    return task.samples(tokenizer_of(tokenizer), length, count, seed, sources or Sources())


def text_of(sample, tokenizer="words"):
    return tokenizer_of(tokenizer).decode(sample.prompt_ids)


def used(task, sample):
    """Tokens that count towards the length."""
    return len(sample.prompt_ids) + (0 if task.family == "later" else sample.new_tokens)
