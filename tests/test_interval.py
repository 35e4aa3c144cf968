"""Methods that cut again whenever a row is full: what is held after every step equals the reference."""

import decode_oracle as steps
import prefill_oracle as oracle
import pytest
import torch
from factories import EOS, VOCABULARY, Forced, Watcher, left_padded, llama, prompts, retained_sets, run, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefill import layers_of
from test_runs import Rehearsing, generated

import kvpatch
from kvpatch.compression import scores
from kvpatch.compression.prompt import Prompt
from kvpatch.policy import resolve
from kvpatch.rows import full_at, held_after, slots_read

INTERVAL, WINDOW, WIDE = 5, 3, 16


class WhenFull:
    """Mixed into a method of the reference: a cut comes as soon as the budget is full, at the prompt's end first."""

    def start(self, layers, prompt, budget):
        super().start(layers, prompt, budget)
        self.t = 0
        self.cut_full()

    def step(self):
        self.t += 1
        for held in (self.held[layer][head] for layer, head in self.cells()):
            held.append(self.prompt + self.t - 1)
        self.observe(self.prompt + self.t - 1)
        self.cut_full()
        return [[list(held) for held in heads] for heads in self.held]

    def cut_full(self):
        for layer, head in self.cells():
            held, target = self.held[layer][head], self.budget - self.interval
            if len(held) >= self.budget:
                self.held[layer][head] = oracle.keep_top(self.scores(layer, head), held, target, self.protected(held))


class RKV(WhenFull, steps.RKV):
    pass


class KeyDiff(WhenFull, steps.KeyDiff):
    pass


class SnapKV(WhenFull, steps.Method):
    def scores(self, l, g):
        layer, held = self.layers[l], self.held[l][g]
        group = list(oracle.heads_of(layer, g))
        part = oracle.Layer(layer.q[group][:, held], layer.k[[g]][:, held], layer.v[[g]][:, held])
        return dict(zip(held, oracle.snapkv_scores(part, WINDOW)[0].tolist(), strict=False))

    def protected(self, held):
        return steps.newest(held, WINDOW)


class ScissorHands(WhenFull, steps.ScissorHands):
    def start(self, layers, prompt, budget):
        self.interval = budget // 2
        super().start(layers, prompt, budget)


class SnapKVUnprotected(SnapKV):
    """Looks further back than it protects, and further than it may hold."""

    def scores(self, l, g):
        layer, held = self.layers[l], self.held[l][g]
        now = self.prompt + self.t - 1
        found = torch.zeros(layer.heads, len(held), dtype=torch.float64)
        asking = [u for u in range(max(0, now - WIDE + 1), now + 1)]
        for u in asking:
            met = [n for n, position in enumerate(held) if position <= u]
            for h in oracle.heads_of(layer, g):
                if met:
                    found[h, met] += steps.held_attention(layer, h, u, [held[n] for n in met]) / len(asking)
        pooled = torch.stack([oracle.pool_same(one, 5) for one in found[list(oracle.heads_of(layer, g))]])
        return dict(zip(held, pooled.mean(0).tolist(), strict=True))

    def protected(self, held):
        return []


CASES = {
    "snapkv, unprotected": (
        kvpatch.Policy(prefill=kvpatch.Prefill(window=16), grows=True, interval=INTERVAL, coupling="per_head"),
        SnapKVUnprotected(INTERVAL),
    ),
    "scissorhands": (
        resolve("scissorhands").replace(prefill=kvpatch.Prefill(score="scissorhands", window=7, recent=WINDOW)),
        ScissorHands(7, WINDOW),
    ),
    "rkv": (resolve("rkv", interval=INTERVAL), RKV(INTERVAL)),
    "keydiff": (
        kvpatch.Policy(prefill="keydiff", grows=True, interval=INTERVAL, coupling="per_head"),
        KeyDiff(INTERVAL),
    ),
    "snapkv": (
        kvpatch.Policy(
            prefill=kvpatch.Prefill(window=WINDOW, recent=WINDOW), grows=True, interval=INTERVAL, coupling="per_head"
        ),
        SnapKV(INTERVAL),
    ),
}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_cut_when_they_are_full(name, compile):
    """A long prompt, a short one that fills up later, and one that ends between two cuts, side by side."""
    policy, method = CASES[name]
    model, budget, count = llama(query_groups=2, kv_heads=2, layers=1), 14 if name == "rkv" else 11, 27
    lengths, generator = (30, 6, 21), torch.Generator().manual_seed(4)
    whole = [
        (torch.randperm(VOCABULARY - 2, generator=generator)[: length + count + 1] + 2).tolist() for length in lengths
    ]
    rows = [ids[:length] for ids, length in zip(whole, lengths, strict=True)]
    tokens = [ids[length:] for ids, length in zip(whole, lengths, strict=True)]
    ended = 12
    tokens[2] = tokens[2][:ended] + [EOS]
    batch = left_padded(rows)
    with kvpatch.patched(model, policy, budget=budget, compile=compile) as handle:
        watcher = Watcher(handle.retained)
        more = {"max_new_tokens": count + 1, "logits_processor": [Forced(tokens, batch["input_ids"].shape[1])]}
        run(model, batch, streamer=watcher, eos_token_id=EOS, **more)
        leaving = policy.leaving(budget)
        left = budget - leaving
        assert handle.stats.held == max(held_after(count, min(length, left), budget, leaving) for length in lengths)
        assert handle.stats.recompiles == 0
    for row, length in enumerate(lengths):
        ids = torch.tensor(rows[row] + tokens[row])
        taken = ended if row == 2 else count
        expected = steps.run(method, layers_of(model, ids), length, budget, taken)
        for step, seen in enumerate(watcher.seen):
            found = [[sorted(head) for head in layer] for layer in retained_sets(seen, row)]
            assert found == expected[min(step, taken - 1)], f"row {row} after step {step + 1}"
            assert all(len(head) < budget for head in found[0])


@given(st.integers(0, 30), st.integers(2, 12), st.data())
def test_a_row_fills_up_and_is_cut(length, limit, data):
    interval = data.draw(st.one_of(st.none(), st.integers(1, limit - 1)))
    held = length = min(length, limit if interval is None else limit - interval)
    for step in range(1, 40):
        assert slots_read(length, limit, step, interval) == held + 1
        held += 1
        if interval is None:
            held = min(held, limit)
        else:
            assert full_at(step, length, limit, interval) == (held == limit)
            held -= interval if held == limit else 0
        assert held_after(step, length, limit, interval) == held


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.data())
def test_scores_equal_the_reference(seed, data):
    """Rows of several lengths beside each other, keys of which some are nearly equal."""
    generator = torch.Generator().manual_seed(seed)
    groups, share, width, window = 2, data.draw(st.integers(1, 3)), 6, data.draw(st.integers(1, 8))
    lengths = data.draw(st.lists(st.integers(window + 1, 24), min_size=1, max_size=3))
    n = max(lengths)
    draw = {"generator": generator, "dtype": torch.float64}
    keys = torch.randn(len(lengths), groups, n, width, **draw)
    twins = torch.randint(n, (n,), generator=generator)
    keys = torch.where(torch.rand(n, 1, generator=generator) < 0.4, keys[:, :, twins], keys)
    keys = keys + 1e-3 * torch.randn(keys.shape, **draw)
    queries = torch.randn(len(lengths), groups * share, window, width, **draw)
    prompt = Prompt(
        queries,
        keys,
        torch.zeros_like(keys),
        torch.tensor(lengths),
        width**-0.5,
        torch.ones(len(lengths), window, dtype=torch.bool),
        torch.full((len(lengths),), window),
    )
    found = scores.rkv(prompt)
    for row, length in enumerate(lengths):
        q = torch.zeros(groups * share, length, width, dtype=torch.float64)
        q[:, length - window :] = queries[row]
        layer = oracle.Layer(q, keys[row][:, :length], keys[row][:, :length])
        for group in range(groups):
            importance = steps.rkv_importance(layer, group, list(range(length)), window)
            same = steps.rkv_redundancy(layer.k[group])[: length - window]
            expected = 0.07 * importance - 0.93 * same
            assert torch.allclose(found[row, group, : length - window], expected, rtol=1e-9, atol=1e-12)


def test_many_keys_are_compared_piece_by_piece(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 40, 8, generator=generator)
    nothing = torch.zeros(2, 4, 0, 8)
    prompt = Prompt(
        nothing, keys, keys, torch.tensor([40, 33]), 1.0, torch.zeros(2, 0, dtype=torch.bool), torch.zeros(2)
    )
    whole = scores.redundancy(prompt)
    monkeypatch.setattr(scores, "CELLS", 2 * 2 * 40 * 7)
    assert torch.allclose(scores.redundancy(prompt), whole, atol=1e-7)


def test_a_budget_that_holds_everything_changes_nothing():
    model, batch = llama(), left_padded(prompts((20, 13)))
    expected = run(model, batch, max_new_tokens=12)
    with kvpatch.patched(model, "rkv", budget=64, compile=False):
        assert torch.equal(run(model, batch, max_new_tokens=12), expected)


def test_a_later_turn_beams_and_forks_go_on():
    model, ids = llama(), torch.tensor(prompts((40,)))
    policy = resolve("rkv", interval=6)
    with kvpatch.patched(model, policy, budget=24, compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, policy, budget=24)
        said = model.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None, past_key_values=cache)
        longer = torch.cat((said, torch.tensor(prompts((9,)))), -1)
        model.generate(longer, max_new_tokens=20, do_sample=False, eos_token_id=None, past_key_values=cache)
        assert 18 <= cache.stats.held < 24
        whole = model.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None)
        assert torch.equal(whole, said)
        fork = handle.read(ids).fork()
        again = model.generate(ids, max_new_tokens=15, do_sample=False, eos_token_id=None, past_key_values=fork)
        assert torch.equal(again, said)
        beams = model.generate(ids, max_new_tokens=15, num_beams=2, do_sample=False, eos_token_id=None)
        assert beams.shape == said.shape


def test_a_row_whose_end_comes_with_a_full_step_is_cut_in_runs_too():
    model, batch = llama(), left_padded(prompts((40, 9)))
    policy = resolve("snapkv", interval=11).replace(prefill=kvpatch.Prefill(window=4, recent=4))
    plain = generated(model, policy, None, batch, {"budget": 30}, max_new_tokens=40)["tokens"]
    # The first row holds 19 after its prompt and is full after 11 steps; its 12th token is chosen then.
    ends = plain[0][batch["input_ids"].shape[1] + 11]
    for capturer in (Rehearsing(), None):
        found = generated(model, policy, capturer, batch, {"budget": 30}, max_new_tokens=40, eos_token_id=[ends])
        held = [position for position in found["retained"][0][0][0] if position >= 0]
        assert len(held) == 19


def test_runs_captured_amid_a_conversation_leave_its_queries_alone():
    """A later turn that needs larger buffers is captured anew, when its queries are noted already."""
    model, (first, second) = llama(), prompts((30, 150))
    policy = kvpatch.Policy("again", prefill=kvpatch.Prefill(window=8), grows=True, interval=4, coupling="per_head")
    found = []
    for capturer in (Rehearsing(), None):
        handle = kvpatch.patch(model, policy, budget=40, compile=False)
        handle._capturer = capturer
        try:
            cache, ids, held = kvpatch.SlotCache(model.config, policy, budget=40), torch.tensor([first]), []
            for turn in ([], second):
                ids = torch.cat((ids, torch.tensor([turn], dtype=torch.int64)), -1)
                more = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
                ids = model.generate(ids, **more, **{handle.keyword: cache})
                held.append(cache.retained().tolist())
            found.append((ids.tolist(), held))
        finally:
            kvpatch.unpatch(model)
    assert found[0] == found[1]


def test_a_row_that_ended_keeps_what_it_held_when_others_are_cut():
    model, rows = llama(), prompts((60, 30))
    # It ends with 29 of 30; by the host's count it is cut to 15 at the next step, and has 21 when the other one is cut.
    fed = 14
    tokens = [[5 + place for place in range(fed)] + [EOS], list(range(2, 60))]
    batch = left_padded(rows)
    policy = resolve("knorm").replace(prefill="knorm", grows=True, interval=0.5)
    budget = kvpatch.Budget(0.5, min_budget=1)
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        watcher = Watcher(handle.retained)
        more = {"max_new_tokens": 40, "logits_processor": [Forced(tokens, batch["input_ids"].shape[1])]}
        run(model, batch, streamer=watcher, eos_token_id=EOS, **more)
    ended = retained_sets(watcher.seen[fed], 0)
    assert all(retained_sets(later, 0) == ended for later in watcher.seen[fed:])
    assert len(ended[0][0]) == 15 + fed


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": list(range(2, 12))}], ids=["greedy", "eos"])
def test_runs_of_several_steps_end_where_a_row_is_full(settings):
    model, batch = llama(), left_padded(prompts((40, 9)))
    policy = resolve("snapkv", interval=11).replace(prefill=kvpatch.Prefill(window=4, recent=4))
    for new_tokens in (2, 12, 47):
        more = settings | {"max_new_tokens": new_tokens}
        runs, single = (
            generated(model, policy, capturer, batch, {"budget": 30}, **more) for capturer in (Rehearsing(), None)
        )
        assert runs == single


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"interval": 0}, ("interval", "0")),
        ({"interval": 1.0}, ("interval", "1.0")),
        ({"interval": True}, ("interval", "True")),
        ({"interval": 4, "grows": False}, ("interval=4", "grows=False")),
        ({"interval": 4, "prefill": "adakv"}, ("interval=4", "adakv", "uniform")),
        ({"interval": 4, "prefill": "h2o"}, ("interval=4", "h2o", "all queries")),
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused(given, words):
    with pytest.raises(ValueError) as caught:
        resolve("rkv", **given)
    assert all(word in str(caught.value) for word in words)


def test_what_is_protected_must_fit_what_a_cut_leaves():
    assert [resolve("rkv").leaving(budget) for budget in (20, 256, 300)] == [10, 128, 128]
    assert resolve("rkv", interval=0.25).leaving(20) == 5
    resolve("rkv").check_budget(16, 10)
    with pytest.raises(ValueError, match="rkv.*budget of 7"):
        resolve("rkv").check_budget(14, 10)


def test_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match="'kvzip' on a model with a sliding window of 24"):
        kvpatch.patch(tiny("ministral"), "kvzip", budget=32)
    kvpatch.unpatch(kvpatch.patch(tiny("ministral"), "rkv", budget="full", compile=False).model)
    with pytest.raises(ValueError, match="interval=128 on a model with a sliding window of 24"):
        kvpatch.patch(tiny("ministral"), "rkv", budget=32)
