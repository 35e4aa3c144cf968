"""Settings of the whole test run, and the small models that several files patch."""

import pytest
import torch
from factories import llama

import kvpatch


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
