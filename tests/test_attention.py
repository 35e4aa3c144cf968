"""Packed decode attention equals the float64 formula, whatever the shapes, masks, layouts and garbage."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpatch import attention
from kvpatch.attention import packed, reference
from kvpatch.errors import BackendError, KVPatchError

# A busy machine must not fail a test, and every run draws the same cases.
UNTIMED = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Garbage outside `valid` is finite, but so large that a logit made of it may overflow; it must not matter.
GARBAGE = {torch.float64: 1e308, torch.float32: 1e38, torch.bfloat16: 1e38}

shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "groups": st.integers(1, 4),
        "queries": st.integers(1, 8),
        "width": st.integers(8, 80),
        "slots": st.integers(1, 70),
        "per_head": st.booleans(),
        "sliced": st.booleans(),
        "seed": st.integers(0, 2**16),
    }
)


def make(case: dict, dtype, garbage: bool = True):
    """q, keys, values, valid and scale of a drawn case."""
    generator = torch.Generator().manual_seed(case["seed"])
    batch, groups, queries, width, n = (case[name] for name in ("batch", "groups", "queries", "width", "slots"))

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    # As a projection leaves it: [B, 1, H, D], transposed.
    q = normal(batch, 1, groups * queries, width).transpose(1, 2)
    extra = 5 if case["sliced"] else 0
    keys, values = normal(batch, groups, n + extra, width), normal(batch, groups, n + extra, width)
    heads = groups if case["per_head"] else 1
    lengths = torch.randint(1, n + 1, (batch, heads, 1), generator=generator)
    valid = torch.arange(n) < lengths
    if garbage:
        outside = torch.ones(batch, groups, n + extra, dtype=torch.bool)
        outside[..., :n] = ~valid.expand(batch, groups, n)
        sign = torch.where(torch.rand(batch, groups, n + extra, generator=generator) < 0.5, -1.0, 1.0)
        huge = (GARBAGE[dtype] * sign.double()).to(dtype)[..., None]
        keys, values = (torch.where(outside[..., None], huge, tensor) for tensor in (keys, values))
    return q, keys[:, :, :n], values[:, :, :n], valid, width**-0.5


SITE = attention.Site(torch.device("cpu"), torch.float32, 4, 64)


def rms(tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=40, **UNTIMED)
@given(case=shapes)
def test_packed_attention_is_the_formula_to_rounding(dtype, case):
    q, keys, values, valid, scale = make(case, dtype)
    batch, heads, _, width = q.shape
    groups, n = keys.shape[1:3]
    output, weights = packed.decode(q, keys, values, valid, scale)
    expected, expected_weights = reference.decode(q, keys, values, valid, scale)
    accumulated = torch.promote_types(dtype, torch.float32)
    assert output.dtype == dtype and output.shape == (batch, 1, heads, width)
    assert weights.dtype == accumulated and weights.shape == (batch, groups, heads // groups, n)

    # Logits: a sum of D products in `accumulated`, rounded once to the storage dtype. Every bound below is at
    # least twice what the analysis of rounding asks for (finfo.eps is two unit roundoffs).
    stored, fine = torch.finfo(dtype).eps, torch.finfo(accumulated).eps
    used = valid.expand(batch, groups, n)
    kept_keys, kept_values = (torch.where(used[..., None], tensor.double(), 0.0) for tensor in (keys, values))
    grouped = q.double().reshape(batch, groups, -1, width)
    logits = grouped @ kept_keys.transpose(-1, -2) * scale
    mass = grouped.abs() @ kept_keys.abs().transpose(-1, -2) * scale
    wrong = (stored * logits.abs() + width * fine * mass).amax((-1), keepdim=True)
    of_weights = torch.expm1(2 * wrong) + (n + 8) * fine  # each side of the softmax may be off by `wrong`
    assert ((weights - expected_weights).abs() <= of_weights * expected_weights.double()).all()
    of_output = of_weights + stored + n * fine  # weights rounded to the values' dtype, then n products summed
    bound = of_output * (expected_weights.double() @ kept_values.abs()) + stored * expected.double().abs().reshape(
        batch, groups, -1, width
    )
    difference = (output.double() - expected.double()).reshape(bound.shape)
    assert (difference.abs() <= bound).all()
    # Over a whole tensor roundings average out: a few units in the last place of logits that are N(0, 1).
    magnitude = rms(expected_weights.double() @ kept_values.abs())
    assert rms(difference) <= 4 * max(stored, 4 * fine) * magnitude


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=40, **UNTIMED)
@given(case=shapes)
def test_weights_outside_valid_are_exactly_zero_and_the_others_sum_to_one(dtype, case):
    q, keys, values, valid, scale = make(case, dtype)
    _, weights = packed.decode(q, keys, values, valid, scale)
    outside = ~valid[:, :, None].expand(weights.shape)
    assert torch.equal(weights[outside], torch.zeros_like(weights[outside]))
    ones = torch.ones_like(weights[..., 0])
    torch.testing.assert_close(weights.sum(-1), ones, rtol=0, atol=80 * torch.finfo(weights.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=25, **UNTIMED)
@given(case=shapes)
def test_garbage_outside_valid_changes_no_bit(dtype, case):
    clean = packed.decode(*make(case, dtype, garbage=False))
    dirty = packed.decode(*make(case, dtype, garbage=True))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("decode", [packed.decode, reference.decode], ids=["packed", "reference"])
@settings(max_examples=25, **UNTIMED)
@given(case=shapes)
def test_attention_equals_loops_over_rows_heads_and_slots(decode, case):
    case = case | {"width": 8 + case["width"] % 5, "slots": 1 + case["slots"] % 9}
    q, keys, values, valid, scale = make(case, torch.float64)
    output, weights = decode(q, keys, values, valid, scale)
    per_group = q.shape[1] // keys.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // per_group
            held = [i for i in range(keys.shape[2]) if valid[b, min(g, valid.shape[1] - 1), i]]
            logits = torch.stack([(q[b, h, 0] * keys[b, g, i]).sum() * scale for i in held])
            shares = logits.exp() / logits.exp().sum()
            mixed = sum(share * values[b, g, i] for share, i in zip(shares, held, strict=True))
            torch.testing.assert_close(output[b, 0, h], mixed, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(weights[b, g, h % per_group, held], shares, rtol=1e-10, atol=1e-12)


def test_keys_in_a_larger_buffer_are_read_where_they_lie():
    case = {
        "batch": 2,
        "groups": 3,
        "queries": 2,
        "width": 16,
        "slots": 11,
        "per_head": True,
        "sliced": True,
        "seed": 1,
    }
    q, keys, values, valid, scale = make(case, torch.float32)
    assert not keys.is_contiguous()
    before = keys.clone(), values.clone()
    sliced = packed.decode(q, keys, values, valid, scale)
    copied = packed.decode(q, keys.contiguous(), values.contiguous(), valid, scale)
    torch.testing.assert_close(sliced, copied)
    assert torch.equal(keys, before[0]) and torch.equal(values, before[1])


def test_an_unknown_backend_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="'fused'") as caught:
        attention.choose("fused", SITE)
    for name in ("backend", "auto", "packed", "reference", "triton", "flash"):
        assert name in str(caught.value)
    assert not isinstance(caught.value, BackendError)


@pytest.mark.parametrize(
    ("backend", "change", "reason"),
    [
        ("flash", {}, "GPU"),
        ("triton", {"dtype": torch.float64}, "float64"),
        ("triton", {"queries": 17}, "17 queries"),
        ("triton", {"width": 264}, "head size is 264"),
        ("triton", {"width": 20}, "head size is 20"),
        ("triton", {"device": torch.device("meta")}, "'meta'"),
    ],
)
def test_a_backend_that_cannot_run_says_why_and_what_can(backend, change, reason):
    with pytest.raises(BackendError, match=f"backend='{backend}'") as caught:
        attention.choose(backend, SITE._replace(**change))
    assert reason in str(caught.value) and "packed" in str(caught.value)
    assert isinstance(caught.value, KVPatchError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize("backend", ["auto", "packed", "reference"])
def test_a_backend_that_runs_is_named_with_its_reason(backend):
    name, why = attention.choose(backend, SITE)
    assert name == ("packed" if backend == "auto" else backend) and why
    assert callable(attention.PLAIN[name])
