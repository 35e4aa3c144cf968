"""Prompts that are read a block at a time and cut in between."""

import prefill_oracle as oracle
import pytest
import torch
from factories import VOCABULARY, left_padded, llama, prompts, run, tiny
from test_prefill import WINDOW, decoded, kept_by, layers_of, policy_of

import kvpatch
from kvpatch.compression import rule


def blockwise(name: str, block: int, **fields) -> kvpatch.Policy:
    """The method of `policy_of` a block at a time."""
    policy = policy_of(name, **fields)
    return policy.replace(prefill=policy.prefill.replace(block=block))


def snapkv_in_blocks(layer: oracle.Layer, budget: int, block: int) -> list[list[int]]:
    """Of one layer: after each block what SnapKV keeps of what is held, its window the block's last queries."""
    held = [[] for _ in range(layer.kv_heads)]
    for start in range(0, layer.length, block):
        for head in range(layer.kv_heads):
            held[head] += range(start, min(start + block, layer.length))
            if len(held[head]) <= budget:
                continue
            # Of the other heads only the shapes matter.
            own = held[head]
            seen = oracle.Layer(layer.q[:, own], layer.k[:, own], layer.v[:, own])
            window = min(WINDOW, block, layer.length - start)
            kept = oracle.keep_top(
                dict(enumerate(oracle.snapkv_scores(seen, window)[head])),
                range(len(own)),
                budget,
                range(len(own) - WINDOW, len(own)),
            )
            held[head] = [own[place] for place in kept]
    return held


@pytest.mark.parametrize("block", [5, 16, 64])
@pytest.mark.parametrize("name", ["keydiff", "knorm", "snapkv"])
def test_what_is_kept_is_what_the_reference_keeps_block_by_block(name, block):
    # In a single layer keys and queries do not depend on what was cut before. No token comes twice.
    model, budget = llama(query_groups=2, kv_heads=2, layers=1), 14
    order = torch.randperm(VOCABULARY - 2, generator=torch.Generator().manual_seed(4)) + 2
    ids = order[:60].tolist()
    with kvpatch.patched(model, blockwise(name, block), budget=budget, compile=False) as handle:
        decoded(model, [ids], 2)
        (held,) = kept_by(handle, 0, len(ids))
        assert handle.stats.cut == 60 - budget and handle.stats.held == budget + 1
    (layer,) = layers_of(model, torch.tensor(ids))
    if name == "snapkv":
        wanted = snapkv_in_blocks(layer, budget, block)
    else:
        (wanted,) = getattr(oracle, name)([layer], budget, block)
    assert held == wanted


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_budget_that_holds_everything_changes_nothing(kind):
    model, rows = tiny(kind), left_padded(prompts((50, 31)))
    expected = run(model, rows)
    for block in (7, 30, 200):
        with kvpatch.patched(model, blockwise("snapkv", block), budget=80, compile=False):
            assert torch.equal(run(model, rows), expected)


def test_rows_of_other_lengths_change_nothing_for_a_row():
    model, budget = llama(), 12
    model.generation_config.eos_token_id = None
    one, other = prompts((50, 31))
    policy = blockwise("snapkv", 19)  # pads are read with the first block: it ends at 19 behind them
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        together, _ = decoded(model, [one, other])
        held = handle.retained()[:, 1]
        alone, _ = decoded(model, [other])
        assert torch.equal(alone[0], together[1])
        assert torch.equal(handle.retained()[:, 0], held)


def test_a_share_of_the_prompt_is_of_the_whole_prompt():
    model, rows = llama(), prompts((64, 48))
    share = kvpatch.Budget(0.25, min_budget=1)
    with kvpatch.patched(model, blockwise("knorm", 10), budget=share, compile=False) as handle:
        decoded(model, rows, 2)
        assert [len(kept_by(handle, row, len(ids))[0][0]) for row, ids in enumerate(rows)] == [16, 12]
        assert handle.stats.budget == [None, None]
    kept = []
    for budget in (share, 16):  # a smaller share of what was read so far would keep others
        with kvpatch.patched(model, blockwise("knorm", 10), budget=budget, compile=False) as handle:
            decoded(model, rows[:1], 2)
            kept.append(handle.retained())
    assert torch.equal(*kept)
    bounded = kvpatch.Policy("bounded", coupling="per_head", scorer="knorm", aggregation="single")
    bounded = bounded.replace(prefill=rule.Prefill(score="knorm", block=10))
    with kvpatch.patched(model, bounded, budget=share, compile=False) as handle:
        decoded(model, rows, 30)
        assert handle.stats.held == 16 and handle.stats.budget == [16, 12]


def test_no_more_than_the_budget_and_a_block_is_ever_held():
    model, budget, block = llama(layers=6, kv_heads=4), 200, 128
    model.generation_config.eos_token_id = None
    ids = prompts((4000,))
    with kvpatch.patched(model, blockwise("snapkv", block), budget=budget, compile=False) as handle:
        decoded(model, ids, 2)
        bytes_a_slot = handle.stats.cache_bytes / 256
        # While a layer moves into the 256 slots to decode in, whose utility and positions wait, it is there twice.
        assert handle.stats.peak_cache_bytes < (budget + block + 1 + 256 / 6 + 0.05 * 256) * bytes_a_slot
        whole = handle.stats.peak_cache_bytes
    with kvpatch.patched(model, policy_of("snapkv"), budget=budget, compile=False) as handle:
        decoded(model, ids, 2)
        assert handle.stats.peak_cache_bytes > 8 * whole


def test_shorter_forwards_inside_a_block_change_nothing():
    model, batch = llama(), left_padded(prompts((50, 31)))
    with kvpatch.patched(model, blockwise("snapkv", 16), budget=12, compile=False) as handle:
        lengths = []
        hook = model.get_input_embeddings().register_forward_hook(
            lambda _, given, __: lengths.append(given[0].shape[1])
        )
        try:
            whole, held = run(model, batch, max_new_tokens=5), handle.retained()
            assert max(lengths) == 16 + 50 - 31  # the pads are read with the first block
            lengths.clear()
            assert torch.equal(run(model, batch, max_new_tokens=5, prefill_chunk_size=6), whole)
        finally:
            hook.remove()
        assert max(lengths) == 6 and torch.equal(handle.retained(), held)


def test_a_later_turn_is_read_in_blocks_too():
    model, (ids, more) = llama(), prompts((40, 33), seed=7)
    model.generation_config.eos_token_id = None
    handle = kvpatch.patch(model, "full", compile=False)
    cache = kvpatch.SlotCache(model.config, blockwise("snapkv", 10), budget=12)
    turn = torch.tensor([ids])
    turn = model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{handle.keyword: cache})
    turn = torch.cat((turn, torch.tensor([more])), 1)
    model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{handle.keyword: cache})
    held = cache.retained()[0, 0, 0]
    assert int((held >= 0).sum()) == 12 + 3 and cache.columns == turn.shape[1] + 3
    kvpatch.unpatch(model)


def test_it_can_not_share_a_reading_but_is_evaluated_beside_policies_that_do(loaded):
    from kvpatch.evaluation.reading import Reading

    model, tokenizer = loaded
    ids = torch.tensor(prompts((90,)))
    policies = [policy_of("snapkv"), blockwise("snapkv", 40)]
    with kvpatch.patched(model, "full", compile=False) as handle:
        with pytest.raises(RuntimeError, match="blocks of 40"):
            handle.read(ids, policies=policies).fork(policies[1], budget=12)
        with Reading(handle, tokenizer, ids, policies=policies) as reading:
            found = [reading.generate(policy, 12, 4) for policy in policies]
    for policy, tokens in zip(policies, found, strict=True):
        with kvpatch.patched(model, policy, budget=12, compile=False):
            assert torch.equal(
                run(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, max_new_tokens=4)[:, 90:], tokens
            )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"block": 0}, ("block", "0")),
        ({"block": 8, "score": "accumulated"}, ("block=8", "'accumulated'", "block=None")),
        ({"block": 8, "allocation": "adaptive"}, ("block=8", "'adaptive'", "uniform")),
    ],
)
def test_what_needs_the_whole_prompt_is_refused(fields, words):
    with pytest.raises(ValueError) as error:
        rule.Prefill(**fields)
    assert all(word in str(error.value) for word in words)
