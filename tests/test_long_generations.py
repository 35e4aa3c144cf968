"""The real model over hundreds of steps: precision, and what survives a thousand evictions."""

import pytest
import torch
from factories import Forced, demo_prose, generate_on

import kvpatch
from kvpatch import demo


@pytest.fixture
def model(loaded):
    yield loaded[0]
    kvpatch.unpatch(loaded[0])


def test_in_bfloat16_the_error_is_that_of_the_unpatched_model(loaded, model):
    half = demo.load(torch.bfloat16)[0]
    steps, errors = 256, {}
    rows = [demo_prose(loaded[1], 128 + steps, seed) for seed in range(4)]
    batch = {"input_ids": torch.tensor(rows)[:, :128], "attention_mask": torch.ones(4, 128, dtype=torch.int64)}
    with torch.no_grad():
        exact = model(torch.tensor(rows)).logits[:, 127:-1]
    forced = {
        "max_new_tokens": steps,
        "logits_processor": [Forced([row[128:] for row in rows], 128)],
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    for name in ("unpatched", "patched"):
        if name == "patched":
            kvpatch.patch(half, "full")
        logits = torch.stack(generate_on(half, batch, **forced).logits, 1)
        errors[name] = (logits - exact).square().mean().item()
        kvpatch.unpatch(half)
    assert errors["patched"] ** 0.5 <= 1.1 * errors["unpatched"] ** 0.5


# Share of what is held that was generated, after 1,000 steps at 128 tokens; 0.96 and 0.97 were measured. A
# method whose new tokens start at zero would hold none.
GENERATED_SHARE = {"inertia": 0.9, "inertia-lazy": 0.9}


@pytest.mark.parametrize("policy", GENERATED_SHARE)
def test_generated_tokens_survive(loaded, model, policy):
    ids = demo_prose(loaded[1], 400, 0)
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 400, dtype=torch.int64)}
    with kvpatch.patched(model, policy, budget=128) as handle:
        generate_on(model, batch, max_new_tokens=1001)
        held = handle.retained()[0, 0, 0]
    share = (held >= 400).sum().item() / 128
    print(f"{policy}: {share:.3f} of the held tokens are generated")
    assert share >= GENERATED_SHARE[policy]


def test_sinks_and_recent_tokens_survive_a_thousand_evictions(loaded, model):
    ids = demo_prose(loaded[1], 300, 0)
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, 300, dtype=torch.int64)}
    with kvpatch.patched(model, "inertia-lazy", budget=96, sinks=4, recent=16) as handle:
        generate_on(model, batch, max_new_tokens=1001)
        held = set(handle.retained()[0, 0, 0].tolist())
    newest = 300 + 1000 - 1
    assert {0, 1, 2, 3} <= held
    assert set(range(newest - 15, newest + 1)) <= held
