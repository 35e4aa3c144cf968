"""The real model: precision, survival of generated tokens, processes that agree, compiled and padded."""

import subprocess
import sys

import pytest
import torch
from factories import Forced, Watcher, demo_prose, generate_on, retained_sets
from oracle import Axes, Row

import kvpatch
from kvpatch import demo


@pytest.fixture
def model(loaded):
    yield loaded[0]
    kvpatch.unpatch(loaded[0])


def padded(rows: list[list[int]]) -> dict:
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def same_or_near_tie(model, got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> bool:
    """Rows agree up to a first difference where the unpatched model's two best logits are within 1e-4."""
    for row in range(got.shape[0]):
        differing = (got[row] != expected[row]).nonzero()
        if not len(differing):
            continue
        at = differing[0].item()
        start = (mask[row] == 0).sum().item()
        with torch.no_grad():
            logits = model(expected[row : row + 1, start:at]).logits[0, -1]
        best = logits.topk(2).values
        if (best[0] - best[1]).item() > 1e-4:
            return False
    return True


def test_without_eviction_the_real_model_says_the_same(loaded, model):
    batch = padded([demo_prose(loaded[1], length, seed) for seed, length in enumerate((300, 180, 233))])
    expected = generate_on(model, batch, max_new_tokens=48)
    for compile in (False, True):
        with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=compile):
            got = generate_on(model, batch, max_new_tokens=48)
        assert same_or_near_tie(model, got, expected, batch["attention_mask"])


def test_compiled_and_padded_in_single_precision_it_holds_what_the_simulator_holds(loaded, model):
    steps = 24
    rows = [demo_prose(loaded[1], length, seed) for seed, length in enumerate((200, 161))]
    tokens = [demo_prose(loaded[1], 190, seed + 10)[-steps - 1 :] for seed in range(2)]
    batch = padded(rows)
    with kvpatch.patched(model, "inertia", budget=40) as handle:
        watcher = Watcher(handle.retained)
        generate_on(
            model,
            batch,
            max_new_tokens=steps + 1,
            logits_processor=[Forced(tokens, batch["input_ids"].shape[1])],
            streamer=watcher,
        )
        assert handle.stats.compiles == 2  # every step scores: one kind of layer, and the head
    double, adopted = demo.load(torch.float64)[0], 0
    for index, row in enumerate(rows):
        oracle = Row(double, Axes(), 40)
        oracle.prefill(row)
        for step, seen in enumerate(watcher.seen):
            oracle.step(tokens[index][step], observed=retained_sets(seen, index), tolerance=1e-3)
        adopted += oracle.adopted
    assert adopted <= 1


TWO_CALLS = """
import sys, torch, kvpatch
from kvpatch import demo
from kvpatch.needle import document
torch.set_num_threads(1)
model, tokenizer = demo.load()
kvpatch.patch(model, "inertia-lazy", budget=0.2, compile=False)
for seed in map(int, sys.argv[1:]):
    ids = document(200 + 40 * seed, tokenizer, seed).prompt_ids[None]
    print(model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)[0, -24:].tolist())
"""


def test_two_calls_in_a_row_are_two_fresh_processes():
    def lines(*seeds):
        done = subprocess.run([sys.executable, "-c", TWO_CALLS, *map(str, seeds)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert lines(0, 1) == lines(0) + lines(1)


@pytest.fixture(scope="module")
def retold(loaded):
    """The demo weights as other architectures, which compute the same."""
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
    names += "rms_norm_eps max_position_embeddings rope_parameters tie_word_embeddings head_dim eos_token_id".split()
    shared = {name: getattr(loaded[0].config, name) for name in names}
    models = {"llama": loaded[0]}
    models["mistral"] = MistralForCausalLM(MistralConfig(sliding_window=None, **shared)).eval()
    models["qwen2"] = Qwen2ForCausalLM(Qwen2Config(**shared)).eval()
    for name in ("mistral", "qwen2"):
        got = models[name].load_state_dict(loaded[0].state_dict(), strict=False)
        assert not got.unexpected_keys
        assert all(key.endswith("proj.bias") for key in got.missing_keys)
        for key in got.missing_keys:
            torch.nn.init.zeros_(models[name].get_parameter(key))
        models[name].generation_config = loaded[0].generation_config
    return models


@pytest.mark.parametrize(
    "policy", [name for name in kvpatch.list_policies() if name != "best"]
)  # a profile is one model's
def test_the_same_weights_say_the_same_as_llama_mistral_and_qwen(loaded, retold, policy):
    batch = padded([demo_prose(loaded[1], length, seed) for seed, length in enumerate((160, 140))])
    budget = {} if policy == "full" else {"budget": 48}
    said = {}
    for name, model in retold.items():
        with kvpatch.patched(model, policy, compile=False, **budget):
            said[name] = generate_on(model, batch, max_new_tokens=24)
    assert torch.equal(said["mistral"], said["llama"])
    assert torch.equal(said["qwen2"], said["llama"])
