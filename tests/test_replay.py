"""Repeating compiled steps from the tape: what is repeated, what is not, and what it holds on to."""

import gc
import weakref

import pytest
import torch
from factories import left_padded, llama, prompts
from factories import run as run_batch

import kvpatch


def run(model, lengths, **more):
    return run_batch(model, left_padded(prompts(lengths)), **more)


@pytest.fixture(scope="module")
def patched():
    model = llama(query_groups=3, dtype=torch.float32)
    return model, kvpatch.patch(model, "inertia-lazy", budget=12)


def test_steps_of_an_unchanged_shape_are_repeated_and_give_the_same_tokens(patched, played):
    model, handle = patched
    expected = {}
    with kvpatch.patched(llama(query_groups=3, dtype=torch.float32), "inertia-lazy", budget=12, compile=False) as eager:
        for lengths in ((50,), (50, 9, 31)):
            expected[lengths] = run(eager.model, lengths)
    for lengths, tokens in expected.items():
        for _ in range(2):
            played.clear()
            assert torch.equal(run(model, lengths), tokens)
            # Of 39 steps the first is at full length, and one of each kind is recorded.
            assert len(played) == 36
            assert set(played) == {(False, True), (True, True)}  # (scores, with logits)


@pytest.mark.parametrize("lengths", [(20,), (20, 9)])
def test_steps_of_a_growing_cache_are_repeated_with_the_length_of_each(patched, played, lengths):
    model, handle = patched
    kvpatch.unpatch(model)
    expected = run(model, lengths)
    handle.install()
    run(model, lengths)
    played.clear()
    cache = kvpatch.SlotCache(model.config, "inertia-lazy", 1.0)
    assert torch.equal(run(model, lengths, **{handle.keyword: cache}), expected)
    assert len(played) == 38  # all but the recorded one


def test_a_cache_that_grows_into_larger_buffers_goes_on_right(patched, monkeypatch):
    from kvpatch import cache

    model, handle = patched
    kvpatch.unpatch(model)
    expected = run(model, (20, 9), max_new_tokens=200)
    handle.install()
    monkeypatch.setattr(cache, "HEADROOM", 4)
    full = kvpatch.SlotCache(model.config, "inertia-lazy", 1.0)
    assert torch.equal(run(model, (20, 9), max_new_tokens=200, **{handle.keyword: full}), expected)
    assert full.current.capacity >= 219


def test_new_weights_are_met_by_the_next_call(patched):
    model, handle = patched
    before = run(model, (50,))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    changed = {name: value * 1.3 for name, value in state.items()}
    model.load_state_dict(changed, assign=True)
    different = run(model, (50,))
    model.load_state_dict(state, assign=True)
    assert torch.equal(run(model, (50,)), before)
    assert not torch.equal(different, before)


def test_freed_buffers_are_gone(patched):
    model, handle = patched
    run(model, (50,))
    buffers = weakref.ref(handle._cache.current.keys[0])
    assert buffers() is not None
    handle.free()
    gc.collect()
    assert buffers() is None


def test_a_prompt_that_needs_more_room_does_not_keep_the_old_buffers(patched):
    model, handle = patched
    run(model, (30,), max_new_tokens=30)
    old = weakref.ref(handle._cache.current.keys[0])
    seen = []

    class Look:
        def put(self, value):
            gc.collect()
            seen.append(old() is None)

        def end(self):
            pass

    kept = handle.budget
    try:
        handle._cache.budget = kvpatch.Budget(300)
        run(model, (200,), streamer=Look())
    finally:
        handle._cache.budget = kept
    assert seen[-1]


def test_kernels_that_are_given_the_length_alone_get_that_of_each_step(monkeypatch):
    """The fused back end does not read the slots' index, so its length alone is an argument of the compiled code."""
    from kvpatch.attention import triton

    model, settings = llama(dtype=torch.float32, layers=2), {"budget": 40, "graphs": False}
    monkeypatch.setattr(triton, "_BLOCK_SCORES", 16)  # slots are scored up to that length in blocks
    utility = []
    for backend in ("packed", "triton"):
        with kvpatch.patched(model, "inertia", backend=backend, **settings) as handle:
            run(model, (14,), max_new_tokens=24)
            utility.append(handle._cache.current.utility[..., :36].clone())
    torch.testing.assert_close(*utility)
