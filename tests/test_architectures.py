"""Every supported architecture: nothing changes without eviction, and with it the simulator's sets are held."""

import pytest
import torch
from factories import ARCHITECTURES, Forced, Watcher, left_padded, prompts, retained_sets, run, tiny
from oracle import Axes, Row

import kvpatch

ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + index / 4 for index in range(8)],
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_without_eviction_every_architecture_says_the_same(kind, compile):
    model = tiny(kind, query_groups=2)
    batch = left_padded(prompts((37, 5, 30)))
    expected = run(model, batch)
    with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=compile) as handle:
        assert torch.equal(run(model, batch), expected)
        assert handle.stats.steps == 39
        assert handle.stats.recompiles == 0
    assert torch.equal(run(model, batch), expected)


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "qwen3_moe", "ministral", "windowed"])
@pytest.mark.parametrize("coupling", ["sequential", "per_head"])
def test_what_is_held_is_what_the_simulator_holds(kind, coupling):
    more = {"kind": "mistral", "sliding_window": 24} if kind == "windowed" else {"kind": kind}
    model, steps = tiny(query_groups=3, **more), 60
    policy = {"coupling": coupling, "refresh": 2, "sinks": 1, "recent": 3}
    rows = prompts((41, 29))
    tokens = [row * 2 for row in prompts((steps, steps), seed=5)]
    batch = left_padded(rows)
    with kvpatch.patched(model, kvpatch.Policy(**policy), budget=20, compile=False) as handle:
        watcher = Watcher(handle.retained)
        forced = [Forced(tokens, batch["input_ids"].shape[1])]
        run(model, batch, max_new_tokens=steps + 1, logits_processor=forced, streamer=watcher)
    adopted = 0
    for index, prompt in enumerate(rows):
        oracle = Row(model, Axes(**policy), 20)
        oracle.prefill(prompt)
        for step, seen in enumerate(watcher.seen):
            oracle.step(tokens[index][step], observed=retained_sets(seen, index))
        adopted += oracle.adopted
    assert adopted <= 1  # of 120 row steps


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_a_window_that_every_layer_has_costs_nothing_to_evict_beyond(compile):
    model = tiny("mistral", sliding_window=16)
    batch = left_padded(prompts((50, 9, 30)))
    expected = run(model, batch, max_new_tokens=60)
    assert not torch.equal(run(tiny("mistral"), batch, max_new_tokens=60), expected)  # the window matters
    # Whatever has left the window goes before anything that a layer still meets, sinks or not.
    with kvpatch.patched(model, "streaming-llm", budget=17, compile=compile) as handle:
        assert torch.equal(run(model, batch, max_new_tokens=60), expected)
        held = handle.retained()
    newest = torch.tensor([50, 9, 30]) + 59 - 1
    assert (held[0, :, 0].amin(-1) < 0).all()  # 17 slots, of which 15 are needed for the next token
    assert torch.equal(held[0, :, 0].amax(-1), newest)


@pytest.mark.parametrize("policy, budget", [("full", None), ("inertia", 64), ("inertia", 1.0)], ids=str)
def test_what_a_window_leaves_bounds_memory_and_is_what_is_counted(policy, budget):
    model = tiny("mistral", sliding_window=16)
    batch = left_padded(prompts((100,)))
    expected = run(model, batch, max_new_tokens=150)
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        assert torch.equal(run(model, batch, max_new_tokens=150), expected)
        assert handle.stats.held == (handle.retained()[0, 0, 0] >= 0).sum() == 15
        assert handle.stats.evicted == 249 - 15
        assert handle._cache.current.capacity == 64


def test_windows_of_some_layers_are_kept_beside_others():
    model = tiny("ministral")
    batch = left_padded(prompts((50, 9, 30)))
    unwindowed = tiny("ministral", layer_types=["full_attention"] * 3)
    assert not torch.equal(run(model, batch), run(unwindowed, batch))
    expected = run(model, batch)
    with kvpatch.patched(model, "tova", budget=200, compile=False):
        assert torch.equal(run(model, batch), expected)


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rope", ROPES)
def test_scaled_positions_go_on_past_the_original_length(rope, compile):
    parameters = {"rope_theta": 10000.0, **ROPES[rope]}
    length = {"max_position_embeddings": 32 if rope == "dynamic" else 128}
    model = tiny("llama", rope_parameters=parameters, **length)
    for lengths in ((40, 7), (20,)):  # beyond it at once, and growing beyond it
        batch = left_padded(prompts(lengths))
        expected = run(model, batch, max_new_tokens=30)
        with kvpatch.patched(model, "inertia", budget=1.0, compile=compile):
            assert torch.equal(run(model, batch, max_new_tokens=30), expected)


def test_wrappers_with_other_modalities_are_refused_by_name():
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Mistral3Config(
        text_config={"model_type": "mistral", "vocab_size": 32, "num_key_value_heads": 2, "head_dim": 8, **small},
        vision_config={"model_type": "pixtral", "image_size": 16, "patch_size": 8, **small},
    )
    with pytest.raises(kvpatch.UnsupportedModelError, match="mistral3.*vision"):
        kvpatch.patch(Mistral3ForConditionalGeneration(config).eval(), "full")


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_a_mixture_of_experts_decodes_compiled_however_its_experts_run(experts):
    model = tiny("qwen3_moe", dtype=torch.float32)
    model.set_experts_implementation(experts)
    batch = left_padded(prompts((30, 20)))
    expected = run(model, batch)
    with kvpatch.patched(model, "inertia", budget=1.0) as handle:
        assert torch.equal(run(model, batch), expected)
        assert handle.stats.compiles > 0
        assert handle.stats.recompiles == 0


def test_experts_that_run_on_the_host_are_not_compiled_and_it_says_so():
    model = tiny("qwen3_moe", dtype=torch.float32)
    model.set_experts_implementation("eager")
    batch = left_padded(prompts((30, 20)))
    expected = run(model, batch)
    with pytest.warns(UserWarning, match="set_experts_implementation"):
        handle = kvpatch.patch(model, "inertia", budget=1.0)
    assert torch.equal(run(model, batch), expected)
    assert handle.stats.compiles == 0 and "experts_implementation" in str(kvpatch.explain(model))
