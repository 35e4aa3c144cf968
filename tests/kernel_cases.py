"""Random layers at one decode step, and the bounds that the operators of the kernels are held to."""

import contextlib
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from kvpatch.attention import configs, triton

UNTIMED = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": (Phase.explicit, Phase.generate),  # a case is small enough; a search for a smaller one takes minutes
}
# NumPy, under the interpreter, warns of infinities and NaN in lanes that a kernel masks afterwards.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Pointwise, beside the output's own rounding, and root mean square; both relative to a row's root mean square.
OUTPUT = {torch.float32: (1e-5, 2e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 6e-3)}
if triton.interpreted():
    OUTPUT[torch.bfloat16] = (1.6e-2, 1.2e-2)  # the interpreter cuts bfloat16 off where a GPU rounds
SCORES = 1e-5  # of every score and utility, relative, in whatever dtype keys and values are
GARBAGE = {torch.float32: 1e30, torch.float16: 1e4, torch.bfloat16: 1e30}


def drawn(**among) -> st.SearchStrategy[dict]:
    """Cases whose entries are drawn evenly and each on its own, and a seed. Hypothesis' own draws are often alike."""

    def draw(seed: int) -> dict:
        generator = random.Random(seed)
        return {name: generator.choice(choices) for name, choices in among.items()} | {"seed": seed}

    return st.integers(0, 2**32 - 1).map(draw)


SCORERS, POOLS, RULES = (
    ("attention", "vnorm", "entropy"),
    ("mean", "max", "rms"),
    ("single", "cumulative", "ema", "peak"),
)
shapes = drawn(
    rows=((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2)),  # and KV heads
    queries=range(1, 17),
    width=(64, 80, 96, 128, 256, 8, 24, 40, 200),
    capacity=(*range(64, 385, 64), *range(71, 401, 36)),
    dtype=DTYPES,
    per_head=(False, True),
    ragged=(False, True),
    inactive=(False, True),
    window=(0, 0, 0, 1, 9, 70, 300),
    sharpness=(0.5, 1.0, 2.0),
)
scorings = drawn(scorer=("", *SCORERS), head_pool=POOLS, rule=RULES, alpha=(0.0, 0.5, 0.8))


def make(case: dict) -> SimpleNamespace:
    """The tensors of one layer at one decode step; garbage in every slot that must not be read."""
    generator = torch.Generator().manual_seed(case["seed"])
    (batch, groups), width, capacity, dtype = (case[name] for name in ("rows", "width", "capacity", "dtype"))
    heads, own = groups * case["queries"], groups if case["per_head"] else 1

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    # As one projection for all three leaves it, and as rotary embeddings may: strides that no shape gives away.
    qkv = normal(batch, 1, heads + 2 * groups, width + 8 * (case["seed"] % 2))[..., :width].transpose(1, 2)
    length = torch.where(whole(0, 5, batch, own) > 0, whole(1, capacity + 1, batch, own), whole(0, 2, 1) * capacity)
    length = (length if case["ragged"] else length[:, :1].expand(batch, own)).clamp_min(1).contiguous()
    free = (torch.rand(batch, own, generator=generator) * length).long()
    newest = capacity + whole(0, 100, batch)
    positions = torch.stack([torch.randperm(capacity, generator=generator) for _ in range(batch * own)])
    slot = torch.arange(capacity)
    at, behind = slot == free[..., None], slot >= length[..., None]
    positions = torch.where(at, newest[:, None, None], positions.view(batch, own, capacity))
    utility = torch.rand(batch, own, capacity, generator=generator) / length[..., None]
    stale = (behind | at).expand(batch, groups, capacity)[..., None]
    sign = 1 - 2 * whole(0, 2, batch, groups, capacity, 1).to(dtype)
    keys, values = (torch.where(stale, GARBAGE[dtype] * sign, normal(batch, groups, capacity, width)) for _ in range(2))
    active = torch.ones(batch, dtype=torch.bool)
    active[whole(0, batch, 1)] = not case["inactive"]
    step = {
        "q": qkv[:, :heads],
        "k": qkv[:, heads : heads + groups],
        "v": qkv[:, heads + groups :],
        "keys": keys,
        "values": values,
        "utility": torch.where(behind, torch.nan, utility)[None],
        "positions": positions,
        "free": free,
        "length": length,
        "newest": newest,
        "active": active,
    }
    step = {name: tensor.to(DEVICE) for name, tensor in step.items()}
    n = int(whole(max(64, int(length.max())), capacity + 1, 1))
    return SimpleNamespace(**step, n=n, scale=case["sharpness"] * width**-0.5, window=case["window"])


@contextlib.contextmanager
def divided(case: dict, split: bool, slots: int):
    """Every row in one part, or in as many as its slots allow (two or more from 64 slots on)."""
    key = configs.Key(case["queries"], case["width"], case["dtype"].itemsize)
    pinned = configs.pinned(*key)
    block = pinned.block if DEVICE == "cuda" else max(pinned.block, 64)  # few steps of the interpreter
    if split:
        block = min(block, max(16, 1 << (slots // 4).bit_length() - 1))
    programs = mock.patch.object(triton, "_programs", lambda index: 1024 if split else 1)
    with programs, configs.replaced({key: configs.Config(block, pinned.warps, pinned.stages, 1)}):
        yield


def assert_close(got, expected, pointwise: float, relative: float) -> None:
    """Row by row, relative to the root mean square of the expected row."""
    rounding = torch.finfo(got.dtype).eps
    for found, right in zip(got.cpu().double().reshape(expected.shape), expected, strict=True):
        size, error = right.square().mean().sqrt(), (found - right).abs()
        assert (error <= pointwise * size + rounding * right.abs()).all(), (error.max() / size, pointwise)
        assert error.square().mean().sqrt() <= relative * size, (error.square().mean().sqrt() / size, relative)


def assert_scores(got, expected) -> None:
    """Each of them, so that the order of any two is known as far as the bound reaches."""
    got, expected = got.cpu().double(), expected.double()
    assert torch.equal(got == 0, expected == 0)
    assert ((got - expected).abs() <= SCORES * expected.abs()).all(), ((got - expected) / expected).abs().max()


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
