"""Several turns over one SlotCache: without eviction one long conversation, with it a bounded one."""

import itertools

import pytest
import torch
from factories import ARCHITECTURES, Forced, Watcher, left_padded, llama, prompts, retained_sets, run, tiny
from oracle import Axes, Row

import kvpatch
from kvpatch import moving
from kvpatch.policy import resolve


def whole(ids: torch.Tensor) -> dict:
    """A batch without pads."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def converse(model, cache, turns: list[list[int]], new_tokens: int = 12) -> torch.Tensor:
    """The whole conversation after each turn has been answered; `cache` None: every turn is read from the start."""
    ids = torch.empty(1, 0, dtype=torch.int64)
    keyword = {} if cache is None else {model.__dict__["_kvpatch"].keyword: cache}
    for turn in turns:
        ids = torch.cat((ids, torch.tensor([turn])), 1)
        ids = run(model, whole(ids), max_new_tokens=new_tokens, **keyword)
    return ids


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "ministral"])
def test_without_eviction_turns_are_one_conversation(kind, compile):
    model = tiny(kind)
    turns = prompts((30, 1, 17, 5))
    expected = converse(model, None, turns)
    with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=compile):
        cache = kvpatch.SlotCache(model.config, "inertia-lazy", 1.0)
        assert torch.equal(converse(model, cache, turns), expected)
        assert cache.retained().shape[-1] == expected.shape[1] - 1


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_batch_of_conversations_with_padded_turns(implementation):
    # In float64 eager attention itself makes NaN of a padded row.
    model = llama(dtype=torch.float32 if implementation == "eager" else torch.float64)
    model.set_attn_implementation(implementation)
    first, second = prompts((23, 9)), prompts((4, 11), seed=3)
    batch = left_padded(first)
    answered = run(model, batch, max_new_tokens=8)
    more = left_padded(second)
    ids = torch.cat((answered, more["input_ids"]), 1)
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 8, dtype=torch.int64), more["attention_mask"]), 1)
    alone = []
    for row in range(2):
        alone.append(run(model, whole(ids[row][mask[row].bool()][None]), max_new_tokens=9)[0, -9:])
    with kvpatch.patched(model, "full", compile=False) as handle:
        keyword = {handle.keyword: kvpatch.SlotCache(model.config, "full")}
        assert torch.equal(run(model, batch, max_new_tokens=8, **keyword), answered)
        got = run(model, {"input_ids": ids, "attention_mask": mask}, max_new_tokens=9, **keyword)
    assert torch.equal(got[:, -9:], torch.stack(alone))


@pytest.mark.parametrize("policy", ["inertia-lazy", "tova", "h2o-decode", resolve("streaming-llm", compact=False)])
def test_a_turn_over_an_evicted_cache_meets_what_was_kept_and_its_own_block(policy):
    """The block's logits and the next step equal a forward over exactly the kept tokens and the block."""
    model = llama(layers=1)  # with one layer keys and values do not depend on what was evicted
    turns = prompts((40, 14), seed=2)
    with kvpatch.patched(model, policy, budget=12, compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, policy, 12)
        answered = converse(model, cache, turns[:1], new_tokens=10)
        kept = [sorted(set(head.tolist()) - {-1}) for head in cache.retained()[0, 0]]
        assert all(len(head) == 12 for head in kept)
        ids = torch.cat((answered, torch.tensor([turns[1]])), 1)
        more = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 1, handle.keyword: cache}
        got = run(model, whole(ids), **more).logits[0]
    block = list(range(answered.shape[1] - 1, ids.shape[1]))  # the last answered token was not fed before
    heads, columns = model.config.num_attention_heads, ids.shape[1]
    full = torch.ones(1, heads, columns, columns, dtype=torch.bool).tril()
    for head in range(heads):  # only the last token's logits are looked at, so only its row matters
        full[0, head, -1] = False
        full[0, head, -1, kept[head // (heads // len(kept))] + block] = True
    full = torch.where(full, 0.0, -torch.inf).double()
    with torch.no_grad():
        expected = model(ids, attention_mask=full).logits[0, -1]
    torch.testing.assert_close(got[0].double(), expected.double(), rtol=1e-5, atol=1e-5)


POLICIES = {
    "inertia": {},
    "lazy": {"refresh": 3, "sinks": 1, "recent": 2, "reserve": 1},
    "cumulative": {"aggregation": "cumulative", "new_token": "zero"},
    "per layer": {"coupling": "per_layer", "scorer": "vnorm"},
    "per head": {"coupling": "per_head", "aggregation": "cumulative"},
    "uniform": {"coupling": "uniform", "rescue": True},
    "random": {"scorer": "random", "aggregation": "single", "rescue": True},
}


@pytest.mark.parametrize("budget", [12, 0.3])
@pytest.mark.parametrize("name", POLICIES)
def test_after_every_step_of_every_turn_the_simulators_sets_are_held(name, budget):
    """Two rows, padded in every turn, so that what a row holds does not depend on its neighbour."""
    model, policy, steps, adopted = llama(query_groups=3), kvpatch.Policy(**POLICIES[name]), 20, 0
    turns = [prompts(lengths, seed=seed) for seed, lengths in enumerate(((37, 21), (9, 30), (25, 3)))]
    with kvpatch.patched(model, policy, budget=kvpatch.Budget(budget, min_budget=1), compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, policy, kvpatch.Budget(budget, min_budget=1))
        oracles = [Row(model, Axes(**POLICIES[name]), budget, min_budget=1) for _ in range(2)]
        ids = mask = torch.empty(2, 0, dtype=torch.int64)
        fed = [[], []]  # of each row: the last answered token, which the next turn reads first
        for turn, rows in enumerate(turns):
            block = left_padded(rows)
            ids = torch.cat((ids, block["input_ids"]), 1)
            mask = torch.cat((mask, block["attention_mask"]), 1)
            tokens = [row[: steps + 1] for row in prompts((steps + 1, steps + 1), seed=turn + 10)]
            watcher = Watcher(cache.retained)
            forced = [Forced(tokens, ids.shape[1])]
            batch, more = {"input_ids": ids, "attention_mask": mask}, {handle.keyword: cache}
            ids = run(model, batch, max_new_tokens=steps + 1, logits_processor=forced, streamer=watcher, **more)
            mask = torch.cat((mask, torch.ones(2, steps + 1, dtype=torch.int64)), 1)
            for index, oracle in enumerate(oracles):
                (oracle.turn if turn else oracle.prefill)(fed[index] + rows[index])
                for step, seen in enumerate(watcher.seen):
                    oracle.step(tokens[index][step], observed=retained_sets(seen, index))
                fed[index] = tokens[index][-1:]
        adopted = sum(oracle.adopted for oracle in oracles)
    assert adopted <= 1  # of 120 row steps


def test_a_long_conversation_stays_within_its_budget():
    model = llama(dtype=torch.float32)
    turns = prompts((60, 30, 90, 8, 45), seed=4)
    with kvpatch.patched(model, "inertia-lazy", budget=16) as handle:
        cache = kvpatch.SlotCache(model.config, "inertia-lazy", 16)
        ids, sizes = torch.empty(1, 0, dtype=torch.int64), []
        for turn in turns:
            ids = torch.cat((ids, torch.tensor([turn])), 1)
            batch = whole(ids)
            ids = run(model, batch, max_new_tokens=20, **{handle.keyword: cache})
            held = cache.retained()[0, 0, 0].tolist()
            assert len(set(held) - {-1}) == 16
            assert max(held) == ids.shape[1] - 2
            sizes.append(cache.nbytes)
        assert sizes[-1] == sizes[0]
        assert handle.stats.recompiles == 0


def test_a_share_is_of_all_tokens_seen():
    model = llama()
    with kvpatch.patched(model, "inertia", budget=0.5, compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "inertia", kvpatch.Budget(0.5, min_budget=1))
        ids = converse(model, cache, prompts((40, 20)), new_tokens=10)
    assert handle.stats.prompt == [70]
    assert (cache.retained()[0, 0, 0] >= 0).sum() == 35
    assert ids.shape[1] == 80


def test_a_prompt_read_by_the_caller_is_gone_on_from():
    model = llama()
    batch = left_padded(prompts((30,)))
    expected = run(model, batch)
    with kvpatch.patched(model, "full", compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "full")
        model(batch["input_ids"][:, :21], **{handle.keyword: cache})
        assert torch.equal(run(model, batch, **{handle.keyword: cache}), expected)


REFUSED = {
    "too short": ({"ids": lambda ids: ids[:, :20]}, "whole conversation of as many rows"),
    "another number of rows": ({"ids": lambda ids: ids[:1]}, "whole conversation of as many rows"),
    "another beginning": ({"ids": lambda ids: ids.roll(1, -1)}, "must begin with the"),
    "rows in another order": ({"ids": lambda ids: ids.flip(0)}, "must begin with the"),
    "beams": ({"num_beams": 2}, "num_beams=2"),
    "right padding": ({"mask": lambda mask: mask.index_fill(1, torch.tensor([-1]), 0)}, "row 0 is padded on the right"),
    "another mask before": (
        {"mask": lambda mask: mask.index_fill(1, torch.tensor([0]), 0)},
        "marks .* but .* were read",
    ),
    "positions": ({"position_ids": torch.arange(66).repeat(2, 1) + 3}, "position_ids row 0 must count"),
}


@pytest.mark.parametrize("more, named", REFUSED.values(), ids=REFUSED)
def test_a_turn_that_can_not_be_honoured_is_refused_and_the_conversation_goes_on(more, named):
    model = llama()
    ids, more = torch.tensor(prompts((30, 30))), dict(more)
    with kvpatch.patched(model, "inertia", budget=12, compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "inertia", 12)
        keyword = {handle.keyword: cache}
        answered = run(model, whole(ids), max_new_tokens=6, **keyword)
        conversation, held = torch.cat((answered, ids), 1), cache.retained()
        batch = whole(more.pop("ids", lambda same: same)(conversation))
        batch["attention_mask"] = more.pop("mask", lambda same: same)(batch["attention_mask"])
        with pytest.raises(ValueError, match=named):
            run(model, batch, **more, **keyword)
        if "position_ids" not in more:  # found out when everything else was read
            assert torch.equal(cache.retained(), held)
            run(model, whole(conversation), max_new_tokens=3, **keyword)
            assert not torch.equal(cache.retained(), held)


def test_the_rows_of_beams_are_not_taken_for_what_was_returned():
    model = llama()
    with kvpatch.patched(model, "full", compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "full")
        keyword, batch = {handle.keyword: cache}, left_padded(prompts((20,)))
        returned = run(model, batch, num_beams=3, num_return_sequences=3, max_new_tokens=9, **keyword)
        assert cache.fed.shape == (3, cache.columns) and cache.fed[:, :20].equal(batch["input_ids"].expand(3, -1))
        again = torch.cat((returned, torch.full((3, 4), 7)), 1)
        if torch.equal(returned[:, : cache.columns], cache.fed):
            pytest.fail("these beams happen to be those that were returned: take another seed")
        with pytest.raises(ValueError, match="must begin with the"):
            run(model, whole(again), **keyword)


def test_rows_that_ended_apart_can_not_go_on():
    model = llama()
    batch = left_padded(prompts((20, 20)))
    with kvpatch.patched(model, "full", compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "full")
        forced = [Forced([[5, 1], [6, 7, 8]], 20)]
        more = {"eos_token_id": 1, "logits_processor": forced, "max_new_tokens": 5, handle.keyword: cache}
        ids = torch.cat((run(model, batch, **more), batch["input_ids"]), 1)
        with pytest.raises(ValueError, match="ended at different steps"):
            run(model, whole(ids), **{handle.keyword: cache})
        assert cache.phase == "decode"


def test_a_cache_made_for_another_model_is_refused():
    model = llama()
    with kvpatch.patched(model, "inertia", budget=12, compile=False) as handle:
        for other in (llama(layers=2), llama(layers=4), tiny("mistral", sliding_window=9)):
            cache = kvpatch.SlotCache(other.config, "inertia", 12)
            with pytest.raises(ValueError, match="made for another model"):
                run(model, **{handle.keyword: cache})


def test_a_turn_in_a_loop_of_ones_own_gives_the_memory_of_its_prompt_back():
    model = llama()
    with kvpatch.patched(model, "inertia", budget=16, compile=False) as handle, torch.no_grad():
        cache = kvpatch.SlotCache(model.config, "inertia", 16)
        small, block = torch.tensor(prompts((20,))), torch.tensor(prompts((500,)))
        for ids in (small, block, block[:, :100], block[:, 100:400]):
            model(ids, **{handle.keyword: cache})
            for token in range(4):
                model(torch.tensor([[token + 5]]), **{handle.keyword: cache})
            assert cache.current.capacity == 64
            assert (cache.retained()[0, 0, 0] >= 0).sum() == 16
        cache.free()
        assert cache.nbytes == 0 and cache.stats.cache_bytes == 0


def test_a_window_shorter_than_the_conversation_is_refused():
    model = tiny("mistral", sliding_window=40)
    with kvpatch.patched(model, "inertia", budget=12, compile=False):
        cache = kvpatch.SlotCache(model.config, "inertia", 12)
        with pytest.raises(ValueError, match="sliding window"):
            converse(model, cache, prompts((20, 20)))
        assert cache.phase == "decode"


def test_what_is_held_is_put_in_order_of_position():
    """Equal utilities go by position, for which the first cut takes the order of slots."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.stack([torch.randperm(40, generator=generator) for _ in range(6)]).view(2, 3, 1, 40)
    held = torch.rand(2, 3, 1, 40, generator=generator) < 0.6
    order = moving.by_position(held, positions)
    for lead in itertools.product(range(2), range(3), range(1)):
        expected = sorted(positions[lead][held[lead]].tolist())
        assert positions[lead][order[lead]].tolist()[: len(expected)] == expected
        assert sorted(order[lead].tolist()) == list(range(40))
