"""`generate` of a patched model: same tokens without eviction, rows that don't meet, calls that don't meet."""

import threading
import warnings

import pytest
import torch
from factories import EOS, Forced, left_padded, llama, prompts, retained_sets, run
from transformers import DynamicCache, TextIteratorStreamer

import kvpatch
from kvpatch import loops, prefill


@pytest.fixture(scope="module")
def model():
    return llama(query_groups=3)


@pytest.fixture
def restored(model):
    yield model
    kvpatch.unpatch(model)


BATCHES = {"one row": (37,), "padded rows": (37, 5, 21)}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
def test_full_budget_changes_no_token(restored, lengths, compile, sampling):
    batch = left_padded(prompts(lengths))
    more = {"do_sample": sampling} | ({"temperature": 0.8, "top_p": 0.9} if sampling else {})
    torch.manual_seed(3)
    expected = run(restored, batch, **more)
    handle = kvpatch.patch(restored, "inertia", budget=1.0, compile=compile)
    torch.manual_seed(3)
    assert torch.equal(run(restored, batch, **more), expected)
    assert handle.stats.evicted == 0
    assert (handle.stats.compiles > 0) == compile


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "scaled RoPE of Llama 3.1": {"rope_parameters": LLAMA3},
    "linear RoPE scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "heads wider than the model": {"head_dim": 40},
    "tied embeddings": {"tie_word_embeddings": True},
    "eager attention": {"attn_implementation": "eager"},
    "a query head per KV head": {"num_key_value_heads": 6},
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_full_budget_changes_no_token_of_any_llama(config):
    model, batch = llama(query_groups=3, **config), left_padded(prompts((70, 21)))
    expected = run(model, batch)
    kvpatch.patch(model, "inertia", budget=1.0, compile=False)
    assert torch.equal(run(model, batch), expected)


def test_a_budget_that_is_never_reached_changes_no_token(restored):
    batch = left_padded(prompts((37, 5)))
    expected = run(restored, batch)
    kvpatch.patch(restored, "inertia-lazy", budget=500, compile=False)
    assert torch.equal(run(restored, batch), expected)


def test_rows_that_end_early_are_padded_as_transformers_does(restored):
    batch = left_padded(prompts((37, 5, 21)))
    forced = [[5] * 9 + [EOS], [6] * 40, [7, EOS]]

    def ended():
        return run(
            restored,
            batch,
            eos_token_id=EOS,
            logits_processor=[Forced(forced, batch["input_ids"].shape[1])],
        )

    expected = ended()
    kvpatch.patch(restored, "inertia", budget="full", compile=False)
    assert torch.equal(ended(), expected)


def test_a_mask_of_ones_does_not_make_a_prompt_a_padded_one(model, monkeypatch):
    masks, decode = [], loops._decode

    def with_a_mask(handle, cache, call, given):  # as releases of transformers before 5.24 do where none is needed
        return decode(handle, cache, call, {"attention_mask": torch.ones_like(call.ids)} | given)

    monkeypatch.setattr(loops, "_decode", with_a_mask)
    monkeypatch.setattr(loops, "read_prompt", lambda *given: masks.append(given[5]) or prefill.read_prompt(*given))
    with kvpatch.patched(model, "inertia", budget=8, compile=False):
        for batch in (left_padded(prompts((20,))), left_padded(prompts((20, 9)))):
            run(model, batch, max_new_tokens=2)
    assert masks[0] is None and masks[1].shape == (2, 20)


def test_own_loop_with_another_cache_is_bit_identical(restored):
    tokens = left_padded(prompts((30,)))["input_ids"]

    @torch.no_grad()
    def own_loop():
        cache, block, logits = DynamicCache(config=restored.config), tokens, []
        for _ in range(6):
            output = restored(input_ids=block, past_key_values=cache, use_cache=True)
            logits.append(output.logits[:, -1])
            block = logits[-1].argmax(-1, keepdim=True)
        return torch.stack(logits)

    expected = own_loop()
    kvpatch.patch(restored, "inertia", budget=8, compile=False)
    assert torch.equal(own_loop(), expected)


def test_own_loop_over_a_slot_cache_evicts_as_generate_does(restored):
    rows = prompts((30, 17))
    batch = left_padded(rows)
    handle = kvpatch.patch(restored, "inertia", budget=8, compile=False)
    tokens = run(restored, batch, max_new_tokens=20)
    expected = handle.retained()
    cache = kvpatch.SlotCache(restored.config, "inertia", 8)
    mask, block = batch["attention_mask"], batch["input_ids"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    got = []
    with torch.no_grad():
        for _ in range(20):
            output = restored(
                input_ids=block, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            )
            block = output.logits[:, -1].argmax(-1, keepdim=True)
            got.append(block)
            mask = torch.cat((mask, torch.ones_like(block)), -1)
            positions = positions[:, -1:] + 1
            if len(got) == 20:
                break
    assert torch.equal(torch.cat(got, -1), tokens[:, -20:])
    for row in range(2):
        assert retained_sets(cache.retained(), row) == retained_sets(expected, row)


@pytest.mark.parametrize("policy", ["inertia-lazy", "tova", "h2o-decode", "streaming-llm"])
def test_a_row_in_a_batch_is_the_row_alone(restored, policy):
    rows = prompts((60, 19, 33))
    handle = kvpatch.patch(restored, policy, budget=12, compile=False)
    together = run(restored, left_padded(rows))
    retained = handle.retained()
    for index, row in enumerate(rows):
        alone = run(restored, left_padded([row]))
        assert torch.equal(alone[0, len(row) :], together[index, 60:])
        assert retained_sets(handle.retained(), 0) == retained_sets(retained, index)


def test_calls_do_not_meet(restored):
    first, second = left_padded(prompts((60, 19))), left_padded(prompts((23,), seed=4))
    kvpatch.patch(restored, "inertia-lazy", budget=0.2, compile=False)
    expected = [run(restored, batch) for batch in (first, second)]
    kvpatch.patch(restored, "inertia-lazy", budget=0.2, compile=False, replace=True)
    for _ in range(2):
        for batch, tokens in zip((second, first), reversed(expected), strict=True):
            assert torch.equal(run(restored, batch), tokens)


@pytest.mark.parametrize(("length", "budget"), [(1, 1), (1, 5), (30, 1), (3, 40)])
def test_the_smallest_prompts_and_budgets(restored, length, budget):
    handle = kvpatch.patch(restored, "inertia", budget=budget, compile=False)
    tokens = run(restored, left_padded(prompts((length,))), max_new_tokens=60)
    assert tokens.shape == (1, length + 60)
    assert handle.stats.held == budget
    assert handle.stats.evicted == length + 59 - budget


def test_the_prompt_is_read_in_blocks_when_it_is_long(restored, monkeypatch):
    from kvpatch import prefill

    batch = left_padded(prompts((90, 61)))
    expected = run(restored, batch)
    monkeypatch.setattr(prefill, "MASKED_BLOCK", 16)
    kvpatch.patch(restored, "inertia", budget=1.0, compile=False)
    assert torch.equal(run(restored, batch), expected)


def test_held_never_exceeds_the_budget(restored):
    seen = []

    class Look:
        def put(self, value):
            if handle.stats.steps:
                seen.append((handle.retained() >= 0).sum(-1).max().item())

        def end(self):
            pass

    handle = kvpatch.patch(restored, "inertia-lazy", budget=10, compile=False)
    run(restored, left_padded(prompts((37,))), streamer=Look())
    assert seen and set(seen) == {10}


def test_everything_a_call_returns_is_there(restored):
    batch = left_padded(prompts((37, 5)))
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = run(restored, batch, **asked)
    kvpatch.patch(restored, "full", compile=False)
    got = run(restored, batch, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == len(expected.scores) == len(got.logits) == 40
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)
    cache = getattr(got, "cache", None) or got.past_key_values
    assert isinstance(cache, kvpatch.SlotCache)
    held = cache.retained()
    run(restored, batch)  # the handle must not touch what it has given away
    assert torch.equal(cache.retained(), held)


def test_hidden_states_come_from_the_host_loop(restored):
    batch = left_padded(prompts((37, 5)))
    asked = {"return_dict_in_generate": True, "output_hidden_states": True}
    expected = run(restored, batch, **asked)
    kvpatch.patch(restored, "full", compile=False)
    got = run(restored, batch, **asked)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(got.hidden_states[-1][-1], expected.hidden_states[-1][-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 2])
def test_hooks_that_an_earlier_call_made_transformers_install_do_not_disturb_compiled_steps(beams):
    model, batch = llama(layers=2, dtype=torch.float32), left_padded(prompts((37, 5)))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(**batch, output_attentions=True, output_hidden_states=True)
    hooks = [list(module._forward_hooks) for module in model.modules()]
    assert any(hooks)
    expected = run(model, batch, num_beams=beams)
    with kvpatch.patched(model, "full") as handle:
        for _ in range(2):
            assert torch.equal(run(model, batch, num_beams=beams), expected)
        assert handle.stats.compiles == 2 and handle.stats.recompiles == 0
        asked = run(model, batch, return_dict_in_generate=True, output_hidden_states=True, max_new_tokens=3)
        assert len(asked.hidden_states) == 3 and len(asked.hidden_states[0]) == 3
    assert [list(module._forward_hooks) for module in model.modules()] == hooks


def test_embeddings_as_input_take_the_host_loop(restored):
    tokens = left_padded(prompts((37,)))["input_ids"]
    embedded = restored.get_input_embeddings()(tokens).detach()
    expected = restored.generate(inputs_embeds=embedded, max_new_tokens=12, do_sample=False, eos_token_id=None)
    handle = kvpatch.patch(restored, "inertia", budget=60, compile=False)
    got = restored.generate(inputs_embeds=embedded, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert torch.equal(got, expected)
    assert handle.stats.steps == 11


def test_minimum_and_maximum_lengths_are_kept(restored):
    batch = left_padded(prompts((20,)))
    always_end = [Forced([[EOS]], 20)]
    kvpatch.patch(restored, "inertia", budget=8, compile=False)
    assert run(restored, batch, eos_token_id=EOS, logits_processor=always_end).shape[1] == 21
    longer = run(restored, batch, eos_token_id=list(range(1, 50)), min_new_tokens=7, max_new_tokens=9)
    assert 27 <= longer.shape[1] <= 29


class Words:
    """The least of a tokenizer that streamers need."""

    def decode(self, tokens, **_):
        return "".join(f"{token} " for token in tokens)


def test_a_streamer_in_a_thread_gets_every_token(restored):
    batch = left_padded(prompts((20,)))
    kvpatch.patch(restored, "inertia", budget=8, compile=False)
    expected = run(restored, batch)
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=60)
    thread = threading.Thread(target=run, args=(restored, batch), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == [str(token) for token in expected[0, 20:].tolist()]


def test_another_cache_runs_unpatched_with_one_warning(restored):
    batch = left_padded(prompts((20,)))
    expected = run(restored, batch)
    kvpatch.patch(restored, "inertia", budget=4, compile=False)
    with pytest.warns(UserWarning, match="DynamicCache is not a SlotCache"):
        got = run(restored, batch, past_key_values=DynamicCache(config=restored.config))
    assert torch.equal(got, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run(restored, batch, past_key_values=DynamicCache(config=restored.config))


class Breaks:
    def __init__(self, error):
        self.error, self.left = error, 5

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise self.error
        return scores


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt(), MemoryError("planted")], ids=repr)
def test_the_call_after_an_exception_is_right(restored, error):
    batch = left_padded(prompts((37, 5)))
    kvpatch.patch(restored, "inertia", budget=8, compile=False)
    expected = run(restored, batch)
    with pytest.raises(type(error)):
        run(restored, batch, logits_processor=[Breaks(error)])
    assert torch.equal(run(restored, batch), expected)


def test_an_allocation_that_fails_leaves_the_model_usable(restored, monkeypatch):
    from kvpatch import slots

    batch = left_padded(prompts((37, 5)))
    kvpatch.patch(restored, "inertia", budget=8, compile=False)
    expected = run(restored, batch)
    restored.__dict__["_kvpatch"].free()
    original, calls = slots.Buffers.add_layer, []

    def fails(self, layer):
        calls.append(layer)
        if len(calls) == 5:
            raise MemoryError("planted")
        original(self, layer)

    with monkeypatch.context() as patching:
        patching.setattr(slots.Buffers, "add_layer", fails)
        with pytest.raises(MemoryError):
            run(restored, batch)
    assert torch.equal(run(restored, batch), expected)


def test_two_threads_on_one_model_are_told_apart(restored):
    batch = left_padded(prompts((20,)))
    kvpatch.patch(restored, "inertia", budget=4, compile=False)
    errors = []

    class Second:
        def __call__(self, input_ids, scores):
            if not errors:
                thread = threading.Thread(target=self.generate)
                thread.start()
                thread.join()
            return scores

        def generate(self):
            try:
                run(restored, batch)
            except RuntimeError as error:
                errors.append(str(error))

    run(restored, batch, logits_processor=[Second()])
    assert "generating already" in errors[0]


def test_room_for_many_tokens_is_made_as_they_come(restored, monkeypatch):
    from kvpatch import cache

    monkeypatch.setattr(cache, "HEADROOM", 16)
    batch = left_padded(prompts((20, 7)))
    expected = run(restored, batch, max_new_tokens=150)
    handle = kvpatch.patch(restored, "full", compile=False)
    assert torch.equal(run(restored, batch, max_new_tokens=150), expected)
    assert handle._cache.current.capacity < 2 * 170
    monkeypatch.undo()
    ended = run(restored, batch, max_new_tokens=10**9, eos_token_id=list(range(1, 60)))  # ends long before
    assert ended.shape[1] < 10**4


def test_positions_that_the_steps_would_not_continue_are_refused(restored):
    batch = left_padded(prompts((20, 7)))
    kvpatch.patch(restored, "full", compile=False)
    with pytest.raises(ValueError, match="position_ids row 0 must count"):
        run(restored, batch, position_ids=torch.arange(5, 25).repeat(2, 1))
    counted = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    assert run(restored, batch, position_ids=counted).shape == (2, 60)


def test_the_prompt_is_read_in_blocks_of_the_asked_length(restored):
    batch = left_padded(prompts((50, 31)))
    expected = run(restored, batch)
    blocks = []
    kvpatch.patch(restored, "full", compile=False)
    hook = restored.model.register_forward_pre_hook(
        lambda module, args, kwargs: blocks.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert torch.equal(run(restored, batch, prefill_chunk_size=17), expected)
    hook.remove()
    assert blocks == [17, 17, 16]
