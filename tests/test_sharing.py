"""One reading of a prompt serves several generations, each as if it had read the prompt itself."""

import pytest
import torch
from factories import BUDGET, left_padded, patch, prompts, run, tiny

import kvpatch

KINDS = ["llama", "qwen3", "ministral"]
BATCHES = {"padded": (20, 9), "alone": (26,), "equal": (18, 18)}
POLICIES = {
    "full": {},
    "inertia": {"budget": BUDGET},
    "tova": {"budget": 6},
    "h2o-decode": {"budget": 8},
    "inertia-lazy": {"budget": 500},
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_says_what_a_reading_of_its_own_says(kind, batch):
    model, rows = tiny(kind), left_padded(prompts(batch))
    expected = {}
    for name, settings in POLICIES.items():
        with kvpatch.patched(model, name, compile=False, **settings) as handle:
            expected[name] = run(model, rows), handle.retained()
    with kvpatch.patched(model, "full", compile=False) as handle:
        source = handle.read(**rows)
        for name, settings in POLICIES.items():
            for _ in range(2):  # what it read is still whole
                cache = source.fork(name, **settings)
                assert torch.equal(run(model, rows, past_key_values=cache), expected[name][0]), name
                assert torch.equal(cache.retained(), expected[name][1]), name


def test_a_fork_reads_nothing_of_the_prompt_again(monkeypatch):
    model, rows = tiny("llama"), left_padded(prompts((20, 9)))
    with kvpatch.patched(model, "full", compile=False) as handle:
        source = handle.read(**rows)
        queries = []
        forward = model.model.layers[0].self_attn.q_proj.forward
        monkeypatch.setattr(
            model.model.layers[0].self_attn.q_proj, "forward", lambda x: queries.append(x.shape[1]) or forward(x)
        )
        run(model, rows, past_key_values=source.fork("inertia", budget=BUDGET))
    assert queries and set(queries) == {1}


def test_a_longer_prompt_goes_on_from_what_was_read():
    model = tiny("llama")
    ids = torch.tensor(prompts((24,)))
    whole = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with kvpatch.patched(model, "inertia", budget=BUDGET, compile=False) as handle:
        expected = run(model, whole)
        source = handle.read(ids[:, :15])
        assert torch.equal(run(model, whole, past_key_values=source.fork()), expected)


def test_what_can_not_be_forked_or_read_says_why():
    model, rows = tiny("llama"), left_padded(prompts((20, 9)))
    handle = patch(model, "inertia")
    try:
        with pytest.raises(RuntimeError, match="read"):
            kvpatch.SlotCache(model.config, "full").fork("inertia", budget=8)
        source = handle.read(**rows)
        cache = source.fork()
        run(model, rows, past_key_values=cache)
        with pytest.raises(RuntimeError, match="decoded nothing"):
            cache.fork("inertia", budget=8)
        with pytest.raises(ValueError, match="budget"):
            source.fork("tova")
        with pytest.raises(ValueError, match="right"):
            handle.read(rows["input_ids"], rows["attention_mask"].flip(-1))
        with pytest.raises(ValueError, match="attention_mask"):
            handle.read(rows["input_ids"], rows["attention_mask"][:, 1:])
        with pytest.raises(ValueError, match="input_ids"):
            handle.read(rows["input_ids"][0])
        with pytest.raises(ValueError, match="mask"):
            run(model, rows | {"attention_mask": torch.ones_like(rows["input_ids"])}, past_key_values=source.fork())
        with pytest.raises(ValueError, match="input_ids"):
            run(model, rows | {"input_ids": rows["input_ids"] + 1}, past_key_values=source.fork())
    finally:
        kvpatch.unpatch(model)
