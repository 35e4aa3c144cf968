"""Settings of the whole test run, and the small models that several files patch."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides on its first import whether kernels are compiled for a GPU or run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from factories import llama

import kvpatch
from kvpatch import demo


def pytest_configure(config):
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.fixture
def model():
    return llama(layers=2)


@pytest.fixture(scope="module")
def shared():
    """For tests that only read, or are refused."""
    return llama(layers=2)


@pytest.fixture
def restored(shared):
    yield shared
    kvpatch.unpatch(shared)
    shared.eval()


@pytest.fixture(scope="module")
def loaded():
    """The demo model and its tokenizer."""
    return demo.load()


@pytest.fixture(scope="module")
def poisoned():
    """What torch hands out without writing to it is NaN, so that an element that nothing has written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(8).isnan().all() and torch.zeros(1).new_empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def played(monkeypatch):
    """Kinds of the steps that were repeated."""
    from kvpatch.replay import Tape

    kinds = []
    original = Tape.play

    def play(self, kind, *tensors):
        kinds.append(kind)
        return original(self, kind, *tensors)

    monkeypatch.setattr(Tape, "play", play)
    return kinds
