"""Settings of the whole test run."""

import torch


def pytest_configure(config):
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
