"""The attention operators compute what a naive float64 oracle does, whatever the shapes, layouts and garbage.

Without a GPU they run in Triton's interpreter, where a program takes milliseconds: the cases are small.
"""

from types import SimpleNamespace

import kernel_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    DEVICE,
    DTYPES,
    GARBAGE,
    OUTPUT,
    POOLS,
    QUIET,
    RULES,
    SCORERS,
    UNTIMED,
    assert_close,
    assert_scores,
    bits,
    divided,
    drawn,
    make,
    scorings,
    shapes,
)

from kvpatch import attention
from kvpatch.attention import configs, triton
from kvpatch.errors import BackendError

pytestmark = [pytest.mark.usefixtures("poisoned"), QUIET]
SPLITS = pytest.mark.parametrize("split", [False, True], ids=["one split", "several splits"])


def attend(step, scorer="", head_pool="mean", rule="single", alpha=0.0):
    """Call the operator, with copies of what it mutates: (output, keys, values, utility)."""
    keys, values, utility = step.keys.clone(), step.values.clone(), step.utility.clone()
    places = (step.positions, step.free, step.length, step.newest, step.active)
    more = (step.n, step.scale, step.window, scorer, head_pool, rule, alpha)
    out = triton.attend(step.q, step.k, step.v, keys, values, utility, *places, *more)
    return out, keys, values, utility


def wanted(step, scorer="", head_pool="mean"):
    """The oracle's (output, log-sum-exp, weights, scores) of a step, the new token in its slot."""
    on_cpu = SimpleNamespace(**{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in vars(step).items()})
    keys, values = on_cpu.keys.double(), on_cpu.values.double()
    oracle.write(keys, values, on_cpu.k.double(), on_cpu.v.double(), on_cpu.free)
    valid = oracle.valid_slots(on_cpu.length, keys.shape[1], on_cpu.positions, on_cpu.newest, step.window)
    out, lse, weights = oracle.attention(on_cpu.q, keys, values, valid, step.scale, on_cpu.active)
    return out, lse, weights, oracle.scores(weights, values, valid, step.length.shape[1], scorer, head_pool)


def assert_utility(utility, expected, step, scored: bool = True) -> None:
    """As expected where active rows hold something; not a bit is changed elsewhere, or where nothing was scored."""
    touched = torch.arange(utility.shape[-1], device=DEVICE) < step.length[..., None]
    touched = touched & step.active[:, None, None] & scored
    assert_scores(utility[touched], expected[touched.cpu()])
    assert torch.equal(bits(utility[~touched]), bits(step.utility[0][~touched]))


def divisions(case: dict, step) -> int:
    """Into how many parts the first kernel divides a row."""
    config = configs.config_for(case["queries"], case["width"], case["dtype"].itemsize)
    return triton._splits(step.q, step.keys.shape[1], step.n, config)


@SPLITS
@settings(max_examples=15, **UNTIMED)
@given(case=shapes, how=scorings)
def test_a_step_attends_and_scores_as_the_formulas_say_and_leaves_the_rest_alone(split, case, how):
    check_step(split, case, how)


# Every combination, on a shape that takes few programs.
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("head_pool", POOLS)
@pytest.mark.parametrize("rule", RULES)
def test_every_scorer_pool_and_rule_is_its_formula_to_the_same_bits_each_time(scorer, head_pool, rule):
    seed = SCORERS.index(scorer) + RULES.index(rule)
    case = {"rows": (1, 2), "queries": 3, "width": 24, "capacity": 70, "dtype": DTYPES[seed % 3], "window": 60}
    case |= {"per_head": seed % 2, "ragged": True, "inactive": False, "sharpness": 2.0, "seed": seed}
    how = {"scorer": scorer, "head_pool": head_pool, "rule": rule, "alpha": 0.6}
    found = check_step(seed % 4 > 1, case, how)
    for one, other in zip(found, check_step(seed % 4 > 1, case, how), strict=True):
        assert torch.equal(bits(one), bits(other))


def check_step(split: bool, case: dict, how: dict):
    """Compare a step with the oracle's, and give what the operator wrote."""
    if how["scorer"] == "entropy":  # that of a layer whose KV heads share one ranking
        case = case | {"per_head": False}
    step = make(case)
    with divided(case, split, step.n):
        assert split == (divisions(case, step) > 1)
        out, keys, values, utility = attend(step, how["scorer"], how["head_pool"], how["rule"], how["alpha"])
    expected, _, _, scores = wanted(step, how["scorer"], how["head_pool"])

    assert out.dtype == step.q.dtype and out.shape == (step.q.shape[0], 1, step.q.shape[1], case["width"])
    assert_close(out, expected, *OUTPUT[case["dtype"]])

    updated = step.utility[0].cpu().double()
    if how["scorer"]:
        oracle.update(updated, scores, step.length.cpu(), step.active.cpu(), how["rule"], how["alpha"])
    assert_utility(utility[0], updated, step, bool(how["scorer"]))

    slot = torch.arange(case["capacity"], device=DEVICE)
    at = (slot == step.free[..., None]).expand(keys.shape[:3])
    for buffer, before, new in ((keys, step.keys, step.k), (values, step.values, step.v)):
        assert torch.equal(bits(buffer[~at]), bits(before[~at]))
        assert torch.equal(buffer[at].view(new.shape)[step.active], new[step.active])
    return out, keys, values, utility


# Query group and head size of Llama 3, Qwen 2.5, Mistral, Phi-3, and the widest there is.
@pytest.mark.parametrize("queries, width", [(4, 128), (3, 64), (7, 128), (1, 96), (16, 256)])
def test_the_configurations_as_shipped_attend_by_the_formula(queries, width):
    case = {"rows": (1, 1), "queries": queries, "width": width, "capacity": 150, "dtype": torch.bfloat16, "seed": 5}
    case |= {"per_head": False, "ragged": False, "inactive": False, "window": 0, "sharpness": 1.0}
    step = make(case)
    out, _, _, utility = attend(step, "attention")
    expected, _, _, scores = wanted(step, "attention")
    assert_close(out, expected, *OUTPUT[torch.bfloat16])
    held = int(step.length[0, 0])
    assert_scores(utility[0, ..., :held], scores[..., :held])


@SPLITS
@settings(max_examples=10, **UNTIMED)
@given(case=shapes)
def test_a_scorer_that_is_no_kernel_gets_the_weights_of_every_head(split, case):
    step = make(case)
    keys, values = step.keys.clone(), step.values.clone()
    places = (step.positions, step.free, step.length, step.newest, step.active)
    with divided(case, split, step.n):
        out, weights = triton.attend_weights(
            step.q, step.k, step.v, keys, values, *places, step.n, step.scale, step.window
        )
    expected, _, right, _ = wanted(step)
    assert_close(out, expected, *OUTPUT[case["dtype"]])
    assert weights.shape == (*keys.shape[:2], case["queries"], step.n) and weights.dtype == torch.float32
    assert_scores(weights.flatten(1, 2), right[..., : step.n])


def filled(step) -> None:
    """Put the new token into its slot, as another back end does before it attends."""
    oracle.write(step.keys, step.values, step.k, step.v, step.free)


@SPLITS
@settings(max_examples=10, **UNTIMED)
@given(case=shapes, how=scorings)
def test_decoding_plain_slots_gives_output_log_sum_exp_and_scores(split, case, how):
    case = case | {"inactive": False, "window": 0}
    if how["scorer"] == "entropy":
        case = case | {"per_head": False}
    step = make(case)
    filled(step)
    with divided(case, split, step.n):
        out, lse, scores = torch.ops.kvpatch.decode(
            step.q, step.keys, step.values, step.length, step.n, step.scale, how["scorer"], how["head_pool"]
        )
    expected, right_lse, _, right = wanted(step, how["scorer"], how["head_pool"])
    assert_close(out, expected, *OUTPUT[case["dtype"]])
    assert lse.dtype == torch.float32 and lse.shape == right_lse.shape
    assert ((lse.cpu() - right_lse).abs() <= 2e-6 * (1 + right_lse.abs())).all()
    if how["scorer"]:
        assert_scores(scores, right)
    else:
        assert scores.shape == (0,)


@pytest.mark.parametrize("backend", ["triton", "packed", "reference"])
@settings(max_examples=10, **UNTIMED)
@given(case=shapes, how=drawn(head_pool=POOLS, scores=(False, True, True), squeezed=(False, True)))
def test_decode_is_the_formula_on_every_backend(backend, case, how):
    head_pool, scores, squeezed = how["head_pool"], how["scores"], how["squeezed"]
    case = case | {"inactive": False, "window": 0, "ragged": False}
    if backend == "packed":
        case = case | {"dtype": torch.float32}  # its logits are as wide as the keys
    step = make(case)
    filled(step)
    more = {"scale": step.scale, "scores": scores, "head_pool": head_pool, "per_head": case["per_head"]}
    if case["sharpness"] == 1.0:
        del more["scale"]
    q, lengths = step.q[:, :, 0] if squeezed else step.q, step.length[:, 0].to(torch.int32)
    out, pooled = attention.decode(q, step.keys, step.values, lengths, backend=backend, **more)
    expected, _, _, right = wanted(step, "attention", head_pool)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert_close(out, expected, *OUTPUT[case["dtype"]])
    if scores:
        assert pooled.shape == (right.shape if case["per_head"] else right[:, 0].shape)
        assert_scores(pooled.reshape(right.shape), right)
    else:
        assert pooled is None


def plain(rows=2, heads=4, groups=2, slots=20, width=16, dtype=torch.float32):
    """q, k, v, lengths for `decode`."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(rows, heads, width, generator=generator).to(DEVICE, dtype)
    k, v = (torch.randn(rows, groups, slots, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    return q, k, v, torch.tensor([slots, 3], device=DEVICE)[:rows]


@pytest.mark.parametrize(
    "name, change, value",
    [
        ("q", "q", lambda q, k, v, lengths: q[:, :, None].expand(-1, -1, 2, -1)),
        ("k", "k", lambda q, k, v, lengths: k[:1]),
        ("k", "k", lambda q, k, v, lengths: k[:, [0, 1, 1]]),
        ("v", "v", lambda q, k, v, lengths: v[..., :8]),
        ("v", "v", lambda q, k, v, lengths: v[:, :, :5].contiguous()),
        ("v", "v", lambda q, k, v, lengths: v.double()),
        ("k", "k", lambda q, k, v, lengths: k.transpose(2, 3).contiguous().transpose(2, 3)),
        ("lengths", "lengths", lambda q, k, v, lengths: lengths[:1]),
        ("lengths", "lengths", lambda q, k, v, lengths: lengths.float()),
        ("head_pool", "head_pool", lambda q, k, v, lengths: "median"),
        ("backend", "backend", lambda q, k, v, lengths: "fused"),
        ("backend", "backend", lambda q, k, v, lengths: "flash"),
    ],
)
def test_decode_names_the_argument_that_does_not_fit(name, change, value):
    given = dict(zip(("q", "k", "v", "lengths"), plain(), strict=True))
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        attention.decode(**given | {change: value(**given)})


@pytest.mark.parametrize(
    "change, told", [({"heads": 34}, "17 queries"), ({"width": 20}, "20"), ({"dtype": torch.float64}, "float64")]
)
def test_decode_says_why_the_kernels_cannot_run_and_auto_runs_without_them(change, told):
    given = plain(**change)
    with pytest.raises(BackendError, match=f"(?s)triton.*{told}"):
        attention.decode(*given, backend="triton")
    out, _ = attention.decode(*given)
    assert out.isfinite().all()


@settings(max_examples=12, **UNTIMED)
@given(case=shapes, how=scorings)
def test_pooled_scores_from_a_log_sum_exp_are_those_of_the_attention(case, how):
    step = make(case | {"window": 0})
    filled(step)
    _, lse, _, scores = wanted(step, "attention", how["head_pool"])
    keys, utility = step.keys, step.utility.clone()
    if how["seed"] % 2:  # [B, C, G, D] in memory
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    lse = torch.where(step.active.cpu()[:, None], lse, torch.nan).float().to(DEVICE)[..., None]
    more = (step.n, step.scale, how["head_pool"], how["rule"], how["alpha"])
    triton.pooled(step.q, keys, lse, step.length, step.active, utility, *more)
    expected = step.utility[0].cpu().double()
    oracle.update(expected, scores, step.length.cpu(), step.active.cpu(), how["rule"], how["alpha"])
    assert_utility(utility[0], expected, step)


windows = drawn(
    rows=((1, 1), (2, 1), (1, 2), (2, 2)),
    queries=range(1, 6),
    width=(16, 40, 64, 80),
    n=range(64, 201),
    window=(1, 1, 2, 7, 16, 31),
    dtype=DTYPES,
    per_head=(False, True),
    given_lse=(False, True),
    head_pool=POOLS,
)


def make_window(case: dict):
    """q [B, H, W, D], keys [B, G, n, D], length [B] and head pool: as a projection leaves them, [B, n, heads, D]."""
    generator = torch.Generator().manual_seed(case["seed"])
    (batch, groups), width, n, window, dtype = (case[name] for name in ("rows", "width", "n", "window", "dtype"))
    q, keys = (
        torch.randn(batch, size, heads, width, generator=generator).to(dtype)
        for size, heads in ((window, groups * case["queries"]), (n, groups))
    )
    length = torch.randint(window, n + 1, (batch,), generator=generator)
    keys = torch.where((torch.arange(n) < length[:, None])[..., None, None], keys, GARBAGE[dtype])
    return q.transpose(1, 2), keys.transpose(1, 2), length, case["head_pool"] if window == 1 else "mean"


@SPLITS
@settings(max_examples=10, **UNTIMED)
@given(case=windows)
def test_window_scores_are_the_mean_causal_attention_of_the_last_queries(split, case):
    q, keys, length, head_pool = make_window(case)
    scale = 1.3 * case["width"] ** -0.5
    expected, lse = oracle.window_scores(q, keys, length, scale, case["per_head"], head_pool)
    q, keys, length, lse = (x.to(DEVICE) for x in (q, keys, length, lse.float()))
    more = (lse if case["given_lse"] else None, scale, case["per_head"], head_pool)
    with divided(case, split, case["n"]):
        found = triton.window_scores(q, keys, length, *more)
    assert found.shape == expected.shape and found.dtype == torch.float32
    assert_scores(found, expected)


@pytest.mark.parametrize("backend", ["triton", "packed", "reference"])
@settings(max_examples=6, **UNTIMED)
@given(case=windows)
def test_window_scores_are_the_same_on_every_backend(backend, case):
    q, keys, length, head_pool = make_window(case)
    expected, lse = oracle.window_scores(q, keys, length, case["width"] ** -0.5, case["per_head"], head_pool)
    q, keys, length, lse = (x.to(DEVICE) for x in (q, keys, length, lse.float()))
    more = {"head_pool": head_pool, "per_head": case["per_head"], "backend": backend}
    found = attention.window_scores(q, keys, length, lse=lse if case["given_lse"] else None, **more)
    assert found.shape == (expected.shape if case["per_head"] else expected[:, 0].shape)
    assert_scores(found.reshape(expected.shape), expected)


@pytest.mark.parametrize(
    "name, value",
    [
        ("q", torch.zeros(2, 4, 8)),
        ("k", torch.zeros(2, 3, 20, 8)),
        ("k", torch.zeros(1, 2, 20, 8)),
        ("lengths", torch.tensor([20.0, 9.0])),
        ("lengths", torch.tensor([20])),
        ("head_pool", "max"),
        ("lse", torch.zeros(2, 4)),
        ("backend", "flash"),
    ],
)
def test_window_scores_name_the_argument_that_does_not_fit(name, value):
    given = {"q": torch.zeros(2, 4, 3, 8), "k": torch.zeros(2, 2, 20, 8), "lengths": torch.tensor([20, 9])}
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        attention.window_scores(**given | {name: value})
