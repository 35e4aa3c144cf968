"""Deletion and the behaviour-preserving search equal a reference that masks the softmax and scores every mask anew."""

import itertools

import behavior_oracle as oracle
import pytest
import torch
from factories import left_padded, llama, prompts, run
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpatch
from kvpatch import deletion, progress
from kvpatch.compression import behavior
from kvpatch.compression.behavior import Behavior, Search
from kvpatch.compression.prompt import Exit

EXACT = Behavior(support=6, rounds=0.0)
DRAWS = settings(deadline=None, derandomize=True, max_examples=20)


def drawn(
    seed: int, layers=2, groups=2, queries=2, width=3, n=7, window=2, hidden=5, vocabulary=9, support=6, sharp=1.0
):
    """A random model's inside as the reference takes it."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    heads = groups * queries
    inside = [
        oracle.Layer(
            sharp * normal(heads, n, width),
            normal(groups, n, width),
            normal(groups, n, width),
            normal(hidden, heads * width),
            0.7,
        )
        for _ in range(layers)
    ]
    return oracle.ModelData(
        inside, normal(n, hidden), normal(hidden), 1e-5, normal(vocabulary, hidden), list(range(n - window, n)), support
    )


def searching(data, how=EXACT, dtype=torch.float64) -> Search:
    """The search over what the reference's data say, in some precision."""
    n, layers = data.layers[0].k.shape[1], data.layers
    weights = []
    for layer in layers:
        rows = [
            torch.stack(
                [
                    torch.nn.functional.pad(
                        oracle.attention_weights(layer.q[head, u], layer.k[head // layer.group, : u + 1], layer.scale),
                        (0, n - u - 1),
                    )
                    for u in data.positions
                ]
            )
            for head in range(layer.heads)
        ]
        weights.append(torch.stack(rows).unflatten(0, (layer.kv_heads, layer.group)).to(dtype))
    states, gain, head = (one.to(dtype) for one in (data.x[data.positions][None], data.gamma, data.unembedding))
    values, outputs = ([getattr(one, name).to(dtype) for one in layers] for name in ("v", "wo"))
    return Search(weights, values, outputs, Exit(states, gain, data.eps, head), how)


def eligible_of(data, spared: int = 2) -> tuple[torch.Tensor, list]:
    """All entries before the last ones, as a mask and as triples."""
    layers, groups, n = len(data.layers), data.layers[0].k.shape[0], data.layers[0].k.shape[1]
    mask = (torch.arange(n) < n - spared).expand(layers, groups, n)
    return mask, [tuple(one) for one in mask.nonzero().tolist()]


@DRAWS
@given(st.integers(0, 9999), st.integers(1, 3), st.integers(1, 2), st.booleans(), st.sampled_from([4, 40, 2**24]))
def test_the_closed_form_is_what_a_masked_softmax_changes(seed, groups, batch, sharp, cells):
    generator = torch.Generator().manual_seed(seed)
    heads, n, width, window = 2 * groups, 9, 4, 3
    queries = torch.randn(batch, heads, window, width, generator=generator, dtype=torch.float64) * (30 if sharp else 1)
    keys, values = torch.randn(2, batch, groups, n, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(window + 1, n + 1, (batch,), generator=generator)
    evicted = torch.rand(batch, groups, n, generator=generator) < torch.rand((), generator=generator)
    evicted[..., 0] = False  # the reference knows no head without anything
    found = kvpatch.deletion_effect(queries, keys, values, evicted, lengths=lengths, cells=cells)
    output = torch.randn(5, heads * width, generator=generator, dtype=torch.float64)
    residual = deletion.to_residual(found.change, output)
    for row, length in enumerate(lengths.tolist()):
        layer = oracle.Layer(
            torch.zeros(heads, length, width), keys[row, :, :length], values[row, :, :length], output, width**-0.5
        )
        layer.q[:, length - window :] = queries[row]
        sets = [set(one[:length].nonzero()[:, 0].tolist()) for one in evicted[row]]
        for column, position in enumerate(range(length - window, length)):
            for head in range(heads):
                right = oracle.deletion_at(layer, head, position, sets[head // 2])
                close = {"rtol": 1e-10, "atol": 1e-10}
                torch.testing.assert_close(found.mass[row, head, column].item(), right.mass, **close)
                torch.testing.assert_close(found.contribution[row, head, column], right.contribution, **close)
                torch.testing.assert_close(found.output[row, head, column], right.before, **close)
                torch.testing.assert_close(found.change[row, head, column], right.after - right.before, **close)
        shift = oracle.residual_shift(layer, sets, list(range(length - window, length)))
        torch.testing.assert_close(residual[row], shift, rtol=1e-10, atol=1e-10)


def test_what_is_nearly_alone_loses_no_digits():
    """1 - m is 1e-17 here: the output without the evicted is what the others say, to the last digits."""
    q = torch.tensor([[[[40.0]]]], dtype=torch.float64)
    keys = torch.tensor([[[[1.0], [0.0], [0.0]]]], dtype=torch.float64)
    values = torch.tensor([[[[5.0], [1.0], [2.0]]]], dtype=torch.float64)
    found = kvpatch.deletion_effect(q, keys, values, torch.tensor([[[True, False, False]]]), scale=1.0)
    assert found.change.item() == pytest.approx(1.5 - 5.0, rel=1e-14)


def test_a_query_that_meets_nothing_loses_nothing():
    q, keys = torch.randn(1, 2, 3, 4), torch.randn(1, 1, 5, 4)
    found = kvpatch.deletion_effect(q, keys, keys, torch.ones(1, 1, 5, dtype=torch.bool), lengths=torch.tensor([2]))
    assert all((one[:, :, 0] == 0).all() for one in found)  # the first of three queries stands before both entries
    assert torch.allclose(found.change[:, :, 1:], -found.output[:, :, 1:])  # all that there is goes


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"queries": torch.zeros(2, 4, 3)}, ("queries must be", "[2, 4, 3]")),
        ({"keys": torch.zeros(2, 3, 7, 5)}, ("keys must be", "divide 4", "[2, 3, 7, 5]")),
        ({"values": torch.zeros(2, 2, 6, 5)}, ("values", "[2, 2, 7, 5]", "[2, 2, 6, 5]")),
        ({"evicted": torch.zeros(2, 2, 6, dtype=torch.bool)}, ("evicted", "[2, 2, 7]", "[2, 2, 6]")),
        ({"evicted": torch.zeros(2, 2, 7)}, ("evicted must be bool", "float32")),
        ({"lengths": torch.tensor([7])}, ("lengths must be [2] integers", "[1]")),
        ({"at": torch.zeros(2, 3)}, ("at must be [2, 3] integers", "float32")),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changed, words):
    keys = torch.zeros(2, 2, 7, 5)
    given = {"queries": torch.zeros(2, 4, 3, 5), "keys": keys, "values": keys, "evicted": keys[..., 0] > 0} | changed
    with pytest.raises(ValueError) as error:
        kvpatch.deletion_effect(**given)
    assert all(word in str(error.value) for word in words)


@DRAWS
@given(st.integers(0, 9999), st.sampled_from([2, 6, 9]))
def test_the_logits_move_as_the_models_own_derivative_says(seed, support):
    data = drawn(seed)
    states = data.x[data.positions]
    change = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    tokens, logp = behavior.support_of(states, Exit(states[None], data.gamma, data.eps, data.unembedding), support)
    rows = behavior.jacobian(states, data.gamma, data.eps, data.unembedding[tokens])
    shift = torch.einsum("uke,ue->uk", rows, change)
    _, right = oracle.logit_shift_jvp(states, change, data.gamma, data.eps, data.unembedding, tokens)
    torch.testing.assert_close(shift, right, rtol=1e-8, atol=1e-8)
    logits = oracle.full_logits(data)
    assert torch.equal(tokens, oracle.top_support(logits, support))
    torch.testing.assert_close(logp.exp().sum(-1), torch.ones(len(states), dtype=torch.float64))
    found = behavior.divergence(logp[..., None], shift[..., None])
    assert found.mean().item() == pytest.approx(oracle.divergence(logits, right, tokens), rel=1e-9, abs=1e-12)
    assert (found >= 0).all()
    if support == 9:  # all of the vocabulary: the divergence of the whole distribution
        moved = (logits + torch.zeros_like(logits).scatter(-1, tokens, right)).log_softmax(-1)
        whole = (logits.softmax(-1) * (logits.log_softmax(-1) - moved)).sum(-1)
        torch.testing.assert_close(found[:, 0], whole, rtol=1e-9, atol=1e-12)


@DRAWS
@given(st.integers(0, 9999), st.integers(0, 6))
def test_a_mask_costs_what_it_does_scored_from_scratch(seed, count):
    """Also what it would cost with one entry more, after any number of removals."""
    data, generator = drawn(seed), torch.Generator().manual_seed(seed)
    search, (_, entries) = searching(data), eligible_of(data)
    gone = [entries[one] for one in torch.randperm(len(entries), generator=generator)[:count].tolist()]
    for layer, group in {one[:2] for one in gone}:
        search.remove(layer, group, torch.tensor([entry for *head, entry in gone if head == [layer, group]]))
    assert search.divergence == pytest.approx(oracle.mask_divergence(data, set(gone)), rel=1e-8, abs=1e-12)
    for layer, group in itertools.product(range(2), range(2)):
        others = [one for one in entries if one[:2] == (layer, group) and one not in gone]
        if not others:
            continue
        costs = search.costs(layer, group, torch.tensor([one[2] for one in others])).tolist()
        right = [oracle.mask_divergence(data, {*gone, one}) for one in others]
        assert costs == pytest.approx(right, rel=1e-8, abs=1e-12)


@settings(DRAWS, max_examples=15)
@given(st.integers(0, 9999), st.integers(1, 12), st.sampled_from([0.05, 0.3, 0.9]), st.booleans(), st.booleans())
def test_each_step_removes_what_costs_least_of_all_that_may_go(seed, count, epsilon, sharp, by_layer):
    data, pool = drawn(seed, sharp=3.0 if sharp else 1.0), 1.5
    mask, entries = eligible_of(data)
    count -= count % 2 if by_layer else 0
    right = oracle.greedy(data, entries, count, pool, epsilon, by_layer)
    search = searching(data, Behavior(support=6, rounds=0.0, epsilon=epsilon, pool=pool))
    quotas = [count // 2] * 2 if by_layer else [count]
    found = search.run(mask, quotas)
    assert [tuple(one) for one in found.order.tolist()] == right.order
    assert found.divergence == pytest.approx(right.divergences, rel=1e-8, abs=1e-12)
    assert found.halved == right.halvings


@pytest.mark.parametrize("quotas", [[20], [10, 10], [3, 4, 5, 2]])
@pytest.mark.parametrize("epsilon", [0.05, 0.6])
def test_rounds_remove_as_many_and_leave_the_mass_that_they_must(quotas, epsilon):
    data = drawn(3, n=12, sharp=2.0)
    mask, _ = eligible_of(data)
    how = Behavior(support=6, rounds=0.2, again=0.5, epsilon=epsilon)
    units = []
    found = searching(data, how).run(mask, quotas, units.append)
    order = [tuple(one) for one in found.order.tolist()]
    assert len(set(order)) == len(order) == sum(quotas) and all(mask[one] for one in order)
    for number, quota in enumerate(quotas):
        heads = 4 // len(quotas)
        assert (
            sum(2 * layer + group in range(number * heads, (number + 1) * heads) for layer, group, _ in order) == quota
        )
    for layer, group in itertools.product(range(2), range(2)):
        left = oracle.lowest_retained_mass(data, set(order), layer, group)
        assert left >= epsilon / 2**found.halved - 1e-12
    assert found.divergence[-1] == pytest.approx(oracle.mask_divergence(data, set(order)), rel=1e-8)
    if not found.halved:
        among = mask.sum().item() // len(quotas)
        assert sum(units) <= sum(behavior.weighings(how, among, quota) for quota in quotas) * 2


def removed_in_rounds(data, entries, quota: int, how: Behavior, every: int) -> tuple[list, int]:
    """The rounds as `Behavior` describes them, masks scored from scratch: the order, and how often epsilon halved."""
    costs = {one: oracle.mask_divergence(data, {one}) for one in entries}
    alive = sorted(entries, key=lambda one: (costs[one], one))[: min(len(entries), how.pooled(quota))]
    order, now, number, epsilon, halved = [], 0.0, 0, how.epsilon, 0
    while len(order) < quota:
        may = [one for one in alive if oracle.lowest_retained_mass(data, {*order, one}, *one[:2]) >= epsilon]
        most = min(quota - len(order), len(may), max(1, int(how.rounds * len(may))))
        taken, full = [], set()
        for one in sorted(may, key=lambda one: (costs[one], one))[:most]:
            if one[:2] not in full and oracle.lowest_retained_mass(data, {*order, *taken, one}, *one[:2]) >= epsilon:
                taken.append(one)
            else:
                full.add(one[:2])  # what comes after it in this head waits for the next round
        if not taken:
            epsilon, halved = epsilon / 2, halved + 1
            continue
        order, alive, before, number = order + taken, [one for one in alive if one not in taken], now, number + 1
        now = oracle.mask_divergence(data, set(order))
        costs = {one: costs[one] + now - before for one in alive}
        light = sorted(alive, key=lambda one: (costs[one], one))
        for one in light if number % every == 0 else light[: max(1, int(how.again * len(alive)))]:
            costs[one] = oracle.mask_divergence(data, {*order, one})
    return order, halved


@pytest.mark.parametrize("seed", range(6))
def test_rounds_go_as_they_are_described(seed, monkeypatch):
    monkeypatch.setattr(behavior, "EVERY", 3)
    data = drawn(seed, n=9, sharp=2.0)
    mask, entries = eligible_of(data)
    how = Behavior(support=6, rounds=0.25, again=0.4, epsilon=(0.05, 0.3, 0.6)[seed % 3])
    order, halved = removed_in_rounds(data, entries, 20, how, 3)
    found = searching(data, how).run(mask, [20])
    assert [tuple(one) for one in found.order.tolist()] == order and found.halved == halved


def test_the_search_is_told_of_all_that_it_weighs():
    data = drawn(5, n=30)
    mask, _ = eligible_of(data)
    how = Behavior(support=6, rounds=0.05, again=0.2, epsilon=1e-9)
    units = []
    searching(data, how).run(mask, [70], units.append)
    assert sum(units) == behavior.weighings(how, int(mask.sum()), 70)


def test_more_than_is_eligible_is_refused():
    data = drawn(1)
    mask, entries = eligible_of(data)
    with pytest.raises(ValueError, match=rf"quotas must be at most \[{len(entries)}\].*got \[{len(entries) + 1}\]"):
        searching(data).run(mask, [len(entries) + 1])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"support": 1}, ("support", ">= 2", "1")),
        ({"pool": 0.5}, ("pool", ">= 1", "0.5")),
        ({"epsilon": 0}, ("epsilon", "(0, 1)")),
        ({"rounds": 1.0}, ("rounds", "[0, 1)", "1.0")),
        ({"again": 0.01}, ("again", "0.02", "0.01")),
    ],
)
def test_what_the_search_can_not_do_is_refused(given, words):
    with pytest.raises(ValueError) as error:
        Behavior(**given)
    assert all(word in str(error.value) for word in words)


# ---- in a model --------------------------------------------------------------------------------------------


def inside(model, ids: list[int], window: int, support: int) -> oracle.ModelData:
    """What the model computes for a prompt, for the reference."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    seen, hooks, last = [], [], []
    for layer in model.model.layers:

        def look(module, args, kwargs):
            hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            heads = [
                one(hidden).view(*hidden.shape[:-1], -1, module.head_dim).transpose(1, 2)
                for one in (module.q_proj, module.k_proj, module.v_proj)
            ]
            q, k = apply_rotary_pos_emb(*heads[:2], cos, sin)
            seen.append(oracle.Layer(q[0], k[0], heads[2][0], module.o_proj.weight, module.scaling))

        hooks.append(layer.self_attn.register_forward_pre_hook(look, with_kwargs=True))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0][0])))
    try:
        with torch.no_grad():
            model(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    norm, n = model.model.norm, len(ids)
    places = list(range(n - window, n))
    return oracle.ModelData(
        seen, last[0], norm.weight.detach(), norm.variance_epsilon, model.lm_head.weight.detach(), places, support
    )


def cutting(allocation: str, window: int = 3, **how) -> kvpatch.Policy:
    rule = kvpatch.Prefill(
        "behavior",
        score="behavior",
        window=window,
        recent=window,
        sinks=1,
        allocation=allocation,
        behavior=Behavior(**how),
    )
    return kvpatch.Policy("mine", prefill=rule, grows=True, coupling="per_head")


@pytest.mark.parametrize("allocation", ["global", "adaptive", "uniform"])
def test_a_models_prompt_loses_what_the_reference_removes(allocation):
    model, rows, budget, window = llama(layers=2), prompts((9, 7)), 5, 3
    policy = cutting(allocation, window, support=20, rounds=0.0)
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        run(model, left_padded(rows), max_new_tokens=2)
        held = handle.retained()
    for row, ids in enumerate(rows):
        data = inside(model, ids, window, 20)
        n = len(ids)
        entries = [(layer, group, i) for layer in range(2) for group in range(2) for i in range(1, n - window)]
        if allocation == "uniform":
            order = removed_by_head(data, entries, n - budget)
        else:
            order = oracle.greedy(data, entries, 4 * (n - budget), uniform=allocation == "adaptive").order
        for layer, group in itertools.product(range(2), range(2)):
            kept = {one for one in held[layer, row, group].tolist() if 0 <= one < n}
            assert kept == set(range(n)) - {i for a, b, i in order if (a, b) == (layer, group)}


def removed_by_head(data, entries, quota: int, pool: float = 1.5) -> list:
    """The reference's greedy with a quota for each head."""
    alone = {one: oracle.mask_divergence(data, {one}) for one in entries}
    pools = {}
    for head in sorted({one[:2] for one in entries}):
        own = sorted((one for one in entries if one[:2] == head), key=lambda one: (alone[one], one))
        pools[head] = own[: min(len(own), -int(-pool * quota // 1))]
    order = []
    while len(order) < quota * len(pools):
        open_ = [
            one for head, own in pools.items() for one in own if one not in order
            and sum(gone[:2] == head for gone in order) < quota
        ]  # fmt: skip
        left = {one: oracle.lowest_retained_mass(data, {*order, one}, *one[:2]) for one in open_}
        order.append(min((oracle.mask_divergence(data, {*order, one}), one) for one in open_ if left[one] >= 0.05)[1])
    return order


def test_chunks_sharing_and_padding_leave_what_a_prompt_alone_does():
    model, rows, budget = llama(layers=2), prompts((40, 33)), 12
    policy = cutting("global", rounds=0.1)
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        together = run(model, left_padded(rows), max_new_tokens=6)
        for row, ids in enumerate(rows):
            alone = run(model, left_padded([ids]), max_new_tokens=6)
            assert torch.equal(alone[0, -6:], together[row, -6:])
        for chunk in (2, 7):
            assert torch.equal(run(model, left_padded(rows), max_new_tokens=6, prefill_chunk_size=chunk), together)
    with kvpatch.patched(model, "full", compile=False) as handle:
        for beside in ((), ("snapkv",)):  # another policy's window is longer
            source = handle.read(**left_padded(rows), policies=[policy, *beside])
            fork = source.fork(policy, budget=budget)
            assert torch.equal(run(model, left_padded(rows), max_new_tokens=6, **{handle.keyword: fork}), together)
        with pytest.raises(RuntimeError, match="queries were not noted"):
            handle.read(**left_padded(rows)).fork(policy, budget=budget)


def test_what_holds_nearly_all_attention_goes_if_nothing_else_may():
    """In single precision a sink leaves nothing: the search must end, and remove what it was told to."""
    data = drawn(0, groups=1, queries=1, n=6, width=3)
    for layer in data.layers:
        layer.k[:, 0], layer.q[:] = 60.0, 1.0
    search = searching(data, Behavior(support=6), torch.float32)
    assert search.weights[0][..., 0].min() == 1.0
    mask, entries = eligible_of(data)
    found = search.run(mask, [len(entries)])
    assert {tuple(one) for one in found.order.tolist()} == set(entries) and found.halved > 0


def test_a_budget_of_nothing_but_what_is_protected_is_met():
    model, ids = llama(dtype=torch.float32), torch.tensor(prompts((44,)))
    with kvpatch.patched(model, cutting("global", window=16), budget=17, compile=False) as handle:
        model.generate(ids, max_new_tokens=1, do_sample=False)
        assert ((handle.retained() >= 0).sum(-1) == 17).all()


def test_a_head_that_was_replaced_is_the_one_that_counts():
    model, batch = llama(layers=2), left_padded(prompts((40,)))
    policy = cutting("global", rounds=0.1)
    with kvpatch.patched(model, policy, budget=9, compile=False) as handle:
        run(model, batch, max_new_tokens=1)
        before = handle.retained()
        model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True).double()
        run(model, batch, max_new_tokens=1)
        after = handle.retained()
    with kvpatch.patched(model, policy, budget=9, compile=False) as handle:
        run(model, batch, max_new_tokens=1)
        assert torch.equal(handle.retained(), after) and not torch.equal(after, before)


def test_a_head_that_is_more_than_a_weight_is_refused_and_the_model_goes_on():
    model, batch = llama(layers=2), left_padded(prompts((40,)))

    class Scaled(torch.nn.Linear):
        pass

    head, expected = model.lm_head, run(model, batch, max_new_tokens=3)
    model.lm_head = Scaled(1, 1)
    model.lm_head.weight = head.weight
    model.lm_head.bias = None
    with kvpatch.patched(model, cutting("global"), budget=9, compile=False):
        with pytest.raises(ValueError, match="weight of the model's head, and Scaled"):
            run(model, batch)
        assert not model.model.norm._forward_pre_hooks
    model.lm_head = head
    assert torch.equal(run(model, batch, max_new_tokens=3), expected)


def test_a_budget_that_holds_all_changes_nothing():
    model, batch = llama(), left_padded(prompts((20, 9)))
    expected = run(model, batch)
    with kvpatch.patched(model, cutting("global"), budget=64, compile=False):
        assert torch.equal(run(model, batch), expected)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allocation": "cake"}, ("'behavior'", "'cake'", "global")),
        ({"critical": 0.5}, ("critical=0.5", "'behavior'")),
        ({"chunk": 4}, ("chunk=4",)),
        ({"score": "snapkv", "behavior": Behavior()}, ("behavior=", "'snapkv'")),
        ({"behavior": 3}, ("kvpatch.Behavior", "3")),
        ({"behavior": {"foo": 1}}, ("behavior={'foo': 1}", "kvpatch.Behavior", "foo")),
    ],
)
def test_rules_that_make_no_sense_are_refused(given, words):
    with pytest.raises(ValueError) as error:
        kvpatch.Prefill(**{"score": "behavior"} | given)
    assert all(word in str(error.value) for word in words)


def test_entries_of_single_heads_need_sets_of_their_own():
    with pytest.raises(ValueError, match="'behavior' removes entries of single heads.*'per_layer'"):
        kvpatch.Policy(prefill=kvpatch.Prefill("behavior", score="behavior"), grows=True, coupling="per_layer")


def test_a_search_that_a_file_describes_is_one():
    rule = kvpatch.Prefill(score="behavior", behavior={"rounds": 0.0, "support": 8})
    assert rule.search == Behavior(support=8, rounds=0.0) and kvpatch.Prefill(score="behavior").search == Behavior()
    assert kvpatch.Prefill("behavior", score="behavior").replace(score="snapkv").search is None


def test_cutting_again_has_no_states_to_go_by():
    rule = kvpatch.Prefill("behavior", score="behavior")
    with pytest.raises(ValueError, match="interval=8.*'behavior'.*last layer's states"):
        kvpatch.Policy(prefill=rule, grows=True, coupling="per_head", interval=8)


def test_long_work_shows_a_bar_on_a_terminal_and_nothing_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    for terminal in (False, True):
        monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
        with progress.shown("weighing", 4) as tick:
            tick(1)
            tick(3)
        shown = capsys.readouterr()
        assert ("weighing" in shown.err) == terminal and not shown.out
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    with progress.shown("weighing", 4) as tick:
        tick(4)
    assert not capsys.readouterr().err
