"""FlashAttention behind our operator, by stand-ins that check what its three packages need and compute in float64."""

import contextlib
import importlib.metadata
import importlib.util
import sys
from unittest import mock

import flash_standin
import kernel_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    DEVICE,
    OUTPUT,
    POOLS,
    QUIET,
    UNTIMED,
    assert_close,
    assert_scores,
    divided,
    drawn,
    make,
    shapes,
)

from kvpatch import attention
from kvpatch.attention import flash, triton
from kvpatch.errors import BackendError

pytestmark = [pytest.mark.usefixtures("poisoned"), QUIET]
PACKAGES = {2: flash_standin.flash_attn_2, 3: flash_standin.flash_attn_3, 4: flash_standin.flash_attn_4}
DTYPES = (torch.float16, torch.bfloat16)
DISTRIBUTIONS = {2: "flash-attn", 4: "flash-attn-4"}  # version 3 is built, not installed by a name


RELEASES = {"flash-attn": "2.8.3.post2", "flash-attn-4": "4.0.0b36"}


@contextlib.contextmanager
def installed(*versions: int):
    """Of FlashAttention's packages exactly these, whatever the machine has."""
    modules = {}
    for which in versions:
        for name, module in PACKAGES[which]().items():
            if name in modules:  # versions 2 and 4 share a folder
                vars(modules[name]).update({k: v for k, v in vars(module).items() if not k.startswith("__")})
            else:
                modules[name] = module
    there = {DISTRIBUTIONS[which] for which in versions if which in DISTRIBUTIONS}
    find, version = importlib.util.find_spec, importlib.metadata.version

    def find_spec(name, package=None):
        if not name.startswith("flash_attn"):
            return find(name, package)
        return modules[name].__spec__ if name in modules else None

    def version_of(name):
        if name.startswith("flash") and name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return RELEASES[name] if name in there else version(name)

    hidden = {name: None for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface")}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (hidden | modules).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(importlib.util, "find_spec", find_spec)
        patch.setattr(importlib.metadata, "version", version_of)
        flash._function.cache_clear()
        yield
        flash._function.cache_clear()


@pytest.mark.parametrize("which", PACKAGES)
def test_the_package_that_is_there_is_found(which):
    with installed(which):
        assert flash.version(None) == which
    with installed():
        assert flash.version(None) is None


def test_a_release_without_the_log_sum_exp_is_as_good_as_none(monkeypatch):
    monkeypatch.setitem(RELEASES, "flash-attn", "2.5.9")
    with installed(2):
        assert flash.version(None) is None


@pytest.mark.parametrize(
    "there, capability, found",
    [
        ((2, 3, 4), (9, 0), 4),
        ((2, 3, 4), (10, 0), 4),
        ((2, 3, 4), (8, 0), 2),
        ((2, 3, 4), (12, 0), 2),
        ((2, 3), (9, 0), 3),
        ((2, 3), (10, 0), 2),
        ((4,), (8, 6), None),
        ((3,), (10, 0), None),
        ((2,), (7, 5), None),
    ],
)
def test_the_newest_package_that_knows_the_card_is_used(there, capability, found):
    with installed(*there):
        assert flash.version(capability) == found


@pytest.mark.parametrize("which", PACKAGES)
@settings(max_examples=6, **UNTIMED)
@given(case=shapes, how=drawn(dtype=DTYPES, head_pool=POOLS))
def test_output_log_sum_exp_and_the_scores_from_it_are_the_formulas(which, case, how):
    dtype, pool = how["dtype"], how["head_pool"]
    case = case | {"dtype": dtype, "window": 0, "ragged": False, "capacity": 64 + case["capacity"] // 4}
    step = make(case)
    oracle.write(step.keys, step.values, step.k, step.v, step.free)
    keys, length = step.keys.cpu(), step.length.cpu()
    valid = oracle.valid_slots(length, keys.shape[1])
    expected, right, weights = oracle.attention(step.q.cpu(), keys, step.values.cpu(), valid, step.scale)
    with installed(which):
        out, lse = flash.decode(step.q, step.keys, step.values, step.length[:, 0], step.scale, which)
    assert out.shape == expected[:, None].shape and out.dtype == dtype
    assert_close(out, expected, *OUTPUT[dtype])
    assert lse.shape == right[..., None].shape and lse.dtype == torch.float32
    assert ((lse[..., 0].cpu() - right).abs() <= 1e-6 * (1 + right.abs())).all()

    updated = step.utility[0].cpu().double()
    found = oracle.scores(weights, keys, valid, length.shape[1], "attention", pool)
    oracle.update(updated, found, length, step.active.cpu(), "ema", 0.6)
    held = torch.arange(case["capacity"]) < length[..., None]
    for one in (lse, right.float()[..., None].to(DEVICE)):
        utility = step.utility.clone()
        more = (step.n, step.scale, pool, "ema", 0.6)
        with divided(case, False, step.n):
            triton.pooled(step.q, step.keys, one, step.length, step.active, utility, *more)
        assert_scores(utility[0].cpu()[held], updated[held])


@pytest.mark.parametrize("which", PACKAGES)
def test_torch_finds_the_operator_to_be_what_its_schema_says(which):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 16, generator=generator).to(DEVICE, torch.float16)
    keys, values = torch.randn(2, 2, 2, 32, 16, generator=generator).to(DEVICE, torch.float16)
    with installed(which):
        torch.library.opcheck(flash.decode, (q, keys, values, torch.tensor([32, 5], device=DEVICE), 0.25, which))


def card(capability=(9, 0)):
    """As if there were a card of that compute capability."""
    return mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: capability)


SITE = attention.Site(torch.device("cuda"), torch.float16, 4, 128)


@pytest.mark.parametrize("there, capability", [((), (9, 0)), ((4,), (8, 0)), ((3,), (10, 0))])
def test_flash_without_a_package_for_the_card_is_refused_with_what_to_install(there, capability):
    with installed(*there), card(capability), pytest.raises(BackendError, match="flash") as caught:
        attention.choose("flash", SITE)
    for told in ("kvpatch[flash]", "kvpatch[flash4]", "packed"):
        assert told in str(caught.value)


@pytest.mark.parametrize("which", PACKAGES)
def test_flash_runs_where_a_package_for_the_card_is_there(which):
    with installed(which), card():
        assert attention.choose("flash", SITE) == ("flash", "asked for")


@pytest.mark.parametrize(
    "change, told",
    [
        ({"device": torch.device("cpu")}, "CUDA"),
        ({"dtype": torch.float32}, "float32"),
        ({"width": 36}, "36"),
        ({"width": 264}, "264"),
        ({"windowed": True}, "sliding window"),
        ({"queries": 17}, "17"),
    ],
)
def test_flash_says_what_it_cannot_serve(change, told):
    with installed(2, 3, 4), card():
        assert told in attention.why_not("flash", SITE._replace(**change))
        with pytest.raises(BackendError, match=told):
            attention.choose("flash", SITE._replace(**change))
