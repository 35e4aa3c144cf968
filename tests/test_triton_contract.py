"""What the operators promise beside their numbers: schemas, compilation, bytes, and how rows are divided."""

import collections
import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, QUIET, UNTIMED, bits, divided, make

from kvpatch import attention
from kvpatch.attention import configs, triton

pytestmark = [pytest.mark.usefixtures("poisoned"), QUIET]
CASE = {"rows": (2, 2), "queries": 2, "width": 16, "capacity": 64, "dtype": torch.float32, "per_head": False}
CASE |= {"ragged": False, "inactive": False, "window": 0, "sharpness": 1.0, "seed": 4}


def arguments() -> dict[str, tuple]:
    """A small call of every operator."""
    step = make(CASE)
    step.utility = step.utility.nan_to_num(0.5)  # the checks compare with ==
    places = (step.positions, step.free, step.length, step.newest, step.active)
    layer = (step.q, step.k, step.v, step.keys, step.values)
    ledger = [tensor[None] for tensor in (step.utility, *places[:3])]
    rows = [torch.full((2,), count, device=DEVICE) for count in (5, 1, 1, 1, 9)]
    scoring = ("mean", "ema", 0.5)
    lse, pending = torch.zeros(2, 4, 1, device=DEVICE), torch.rand(1, 1, 2, 1, 64, device=DEVICE)
    return {
        "attend": (*layer, step.utility, *places, step.n, step.scale, 30, "attention", *scoring),
        "attend_weights": (*layer, *places, step.n, step.scale, 30),
        "decode": (step.q, step.keys, step.values, step.length, step.n, step.scale, "vnorm", "max"),
        "pooled": (step.q, step.keys, lse, step.length, step.active, step.utility, step.n, step.scale, *scoring),
        "window_scores": (step.q, step.keys, step.length[:, 0], None, step.scale, True, "mean"),
        "admit": (*ledger, *places[3:], True, True),
        "choose": (ledger[0], pending, *ledger[1:], *places[3:], rows, True, True, 2, "ema", 0.5, 1e-6, 0),
    }


@pytest.mark.parametrize("name", arguments())
def test_torch_finds_each_operator_to_be_what_its_schema_says(name):
    torch.library.opcheck(getattr(triton, name), arguments()[name])


def test_an_operator_without_scores_has_the_shapes_its_schema_says():
    *given, _, head_pool = arguments()["decode"]
    torch.library.opcheck(triton.decode, (*given, "", head_pool), test_utils=("test_schema", "test_faketensor"))


def test_decode_compiles_whole_and_gives_the_bits_of_the_eager_call():
    step = make(CASE)
    given = (step.q, step.keys, step.values, step.length[:, 0])

    def call(q, k, v, lengths):
        return attention.decode(q * 2.0, k, v, lengths, backend="triton", per_head=True)

    torch._dynamo.reset()
    for one, other in zip(call(*given), torch.compile(call, fullgraph=True)(*given), strict=True):
        assert torch.equal(bits(one), bits(other))


def test_a_compiled_step_writes_into_the_callers_own_buffers_and_copies_none():
    from torch._inductor.utils import run_and_get_code

    def call(q, k, v, keys, values, utility, positions, free, length, newest, active, index):
        # The layer's utility is a part of the ledger's, and the slots that a step reads are a size that varies.
        more = (index.shape[0], 0.25, 30, "attention", "mean", "ema", 0.5)
        places = (positions, free, length, newest, active)
        return torch.ops.kvpatch.attend(q * 2.0, k, v, keys, values, utility[:, 1], *places, *more) + 1.0

    step = make(CASE)
    names = ("q", "k", "v", "keys", "values", "utility", "positions", "free", "length", "newest", "active")
    eager, compiled = ([getattr(step, name).clone() for name in names] for _ in range(2))
    for tensors in (eager, compiled):
        tensors[5] = torch.stack((tensors[5], tensors[5]), 1).clone()
    index = torch.arange(64, device=DEVICE)
    torch._dynamo.mark_dynamic(index, 0)
    before, places = compiled[5].clone(), [tensor.data_ptr() for tensor in compiled]
    torch._dynamo.reset()
    out, (code, *_) = run_and_get_code(torch.compile(call, fullgraph=True), *compiled, index)
    assert torch.equal(out, call(*eager, index))
    assert [tensor.data_ptr() for tensor in compiled] == places
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert torch.equal(bits(compiled[5][:, 0]), bits(before[:, 0]))
    assert not torch.equal(bits(compiled[5][:, 1]), bits(before[:, 1]))
    allocated = re.findall(r"empty_strided_\w+\(\(([\d, ]*)\)", code)
    assert allocated and "copy_" not in code
    assert all(torch.Size(map(int, re.findall(r"\d+", size))).numel() < step.utility.numel() * 2 for size in allocated)


traffics = pytest.mark.parametrize("scorer", ["", *triton.SCORERS])


def per_slot(heads, groups, width, itemsize, own_heads, scorer, window) -> dict[str, int]:
    """Bytes of one slot of each tensor that a kernel must touch."""
    keys = values = groups * width * itemsize
    logits, norms, positions = heads * 4, groups * 4, groups * 8  # a KV head's program reads its ranking's positions
    utility = scores = own_heads * 4
    attend = [keys, values] + [logits] * bool(scorer) + [norms] * (scorer == "vnorm") + [positions] * window
    if not scorer:
        return {"attend": sum(attend), "settle": 0}
    if scorer == "entropy":
        return {"attend": sum(attend), "settle": logits + scores, "apply": scores + utility + utility}
    settle = [logits, utility, utility] + [norms] * (scorer == "vnorm")
    return {"attend": sum(attend), "settle": sum(settle)}


@traffics
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("shape", [(1, 32, 8, 128, 4096, 2), (8, 28, 4, 128, 65536, 2), (3, 9, 3, 64, 77, 4)])
def test_traffic_is_the_bytes_of_the_tensors_that_must_be_touched(shape, scorer, window):
    batch, heads, groups, width, held, itemsize = shape
    for own_heads in (1, groups) if scorer != "entropy" else (1,):
        expected = per_slot(heads, groups, width, itemsize, own_heads, scorer, window)
        found = triton.traffic(*shape, own_heads=own_heads, scorer=scorer, window=window)
        assert found == {kernel: size * batch * held for kernel, size in expected.items()}


class Counter:
    """Counts bytes that kernels load and store, by kernel, in Triton's interpreter."""

    def __init__(self):
        from triton.runtime import interpreter

        self.found, self.kernel = collections.Counter(), ""
        self.real, self.interpreter = interpreter._interpreter, interpreter

    def __getattr__(self, name):
        return getattr(self.real, name)

    def load(self, pointers, mask, other, dtype):
        self.found[self.kernel] += int(mask.sum()) * dtype.itemsize
        return self.real.load(pointers, mask, other, dtype)

    def store(self, pointers, value, mask):
        self.found[self.kernel] += int(mask.sum()) * value.dtype.itemsize
        return self.real.store(pointers, value, mask)

    def __enter__(self):
        launch = self.interpreter.GridExecutor.__call__

        def named(executor, *args, **kwargs):
            self.kernel = executor.fn.__name__
            return launch(executor, *args, **kwargs)

        self.patches = [
            mock.patch.object(self.interpreter, "_interpreter", self),
            mock.patch.object(self.interpreter.GridExecutor, "__call__", named),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_):
        for patch in self.patches:
            patch.stop()


@pytest.mark.skipif(not triton.interpreted(), reason="bytes are counted in Triton's interpreter")
@traffics
@pytest.mark.parametrize("per_head, window, split", [(False, 0, False), (True, 900, True), (False, 900, True)])
def test_each_slot_costs_the_kernels_the_bytes_that_traffic_says(scorer, per_head, window, split):
    if scorer == "entropy" and per_head:
        pytest.skip("no policy ranks heads by it")
    case = CASE | {"per_head": per_head, "dtype": torch.bfloat16, "window": window}
    counts = []
    for held in (90, 150):
        step = make(case | {"capacity": held})
        step.length[:], step.free[:] = held, 7
        with divided(case, split, held), Counter() as counter:
            places = (step.positions, step.free, step.length, step.newest, step.active)
            layer = (step.q, step.k, step.v, step.keys, step.values, step.utility)
            triton.attend(*layer, *places, held, step.scale, window, scorer, "mean", "ema", 0.5)
        counts.append(counter.found)
    more = {"own_heads": 2 if per_head else 1, "scorer": scorer, "window": bool(window)}
    expected = triton.traffic(2, 4, 2, 16, 60, 2, **more)
    if scorer == "entropy":
        expected["settle"] += 2 * 60 * 4  # one head's logits again, at once, to count the valid ones
    grown = {kernel: counts[1][kernel] - counts[0][kernel] for kernel in expected}
    assert grown == expected


@settings(max_examples=300, **UNTIMED)
@given(
    pairs=st.integers(1, 600),
    slots=st.integers(1, 200_000),
    block=st.sampled_from((16, 32, 64, 128)),
    programs=st.integers(1, 600),
)
def test_rows_are_split_as_little_as_keeps_the_device_busy(pairs, slots, block, programs):
    found = configs.splits_for(pairs, slots, block, programs)
    assert 1 <= found <= 64
    assert found == 1 or found * 2 * block <= slots  # two steps of the loop at least

    def busy(splits: int) -> float:
        started = waves = 0
        while started < pairs * splits:
            started, waves = started + programs, waves + 1
        return pairs * splits / (waves * programs)

    allowed = [busy(splits) for splits in range(1, max(1, min(64, slots // (2 * block))) + 1)]
    assert allowed[found - 1] >= 0.9 * max(allowed) - 1e-12
    assert all(one < 0.9 * max(allowed) + 1e-12 for one in allowed[: found - 1])


def test_a_card_that_is_full_without_splits_gets_none_and_an_empty_one_many():
    assert configs.splits_for(256, 100_000, 128, 2 * 132) == 1
    assert configs.splits_for(8, 100_000, 128, 2 * 132) > 16
    assert 32 < configs.splits_for(1, 10**9, 16, 10**6) <= 64
    assert configs.splits_for(1, 100, 128, 2 * 132) == 1


@pytest.mark.parametrize("field, value", [("block", 8), ("block", 48), ("warps", 3), ("stages", 0), ("resident", 0)])
def test_a_configuration_that_cannot_run_is_refused_by_its_field_and_changes_nothing(field, value):
    key = configs.Key(4, 128, 2)
    before = configs.config_for(*key)
    with (
        pytest.raises(ValueError, match=f"^{field} .*{value}"),
        configs.replaced({key: before._replace(**{field: value})}),
    ):
        pass
    assert configs.config_for(*key) == before


def test_a_replaced_configuration_holds_inside_its_block_only():
    key, other = configs.Key(4, 128, 2), configs.Config(32, 8, 2, 1)
    before = configs.config_for(*key)
    with pytest.raises(KeyError), configs.replaced({key: other}):
        assert configs.config_for(*key) == other
        assert configs.config_for(4, 64, 2) == configs.pinned(4, 64, 2)
        raise KeyError
    assert configs.config_for(*key) == before
