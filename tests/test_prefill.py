"""Prompts that are cut before anything is decoded, in models: what stays, and what is then decoded over it."""

import decode_oracle as steps
import prefill_oracle as oracle
import pytest
import torch
from factories import ARCHITECTURES, VOCABULARY, Forced, Watcher, left_padded, llama, prompts, retained_sets, run, tiny
from transformers import AttentionInterface

import kvpatch
from kvpatch import repeating
from kvpatch.compression import rule
from kvpatch.patches import output_weight
from kvpatch.policy import resolve

WINDOW = 4
METHODS = {
    "snapkv": lambda layers, budget: oracle.snapkv(layers, budget, WINDOW),
    "pyramidkv": lambda layers, budget: oracle.pyramidkv(layers, budget, WINDOW),
    "adakv": lambda layers, budget: oracle.adakv(layers, budget, 0.2, WINDOW),
    "cake": lambda layers, budget: oracle.cake(layers, budget, WINDOW),
    "criticalkv": lambda layers, budget: oracle.criticalkv(layers, budget, window=WINDOW),
    "restkv": lambda layers, budget: oracle.restkv(layers, budget, WINDOW),
    "expected-attention": oracle.expected_attention,
    "h2o": oracle.h2o_prompt,
    "vatp": lambda layers, budget: oracle.vatp_prompt(layers, budget, sinks=5),
    "tova": oracle.tova_prompt,
    "streaming-llm": oracle.streaming_prompt,
    "keydiff": oracle.keydiff,
    "knorm": oracle.knorm,
}


def policy_of(name: str, **fields) -> kvpatch.Policy:
    """Prompts are cut by that method, and all that is generated is kept; windows are small."""
    method = rule.PRESETS[name]
    method = method.replace(window=WINDOW, recent=WINDOW if method.recent == method.window else method.recent)
    method = method.replace(sinks=min(method.sinks, 5))
    return kvpatch.Policy(name, prefill=method, grows=True, coupling="per_head", **fields)


def met(model, ids: torch.Tensor, hidden_from: list | None = None) -> tuple[list[dict], torch.Tensor]:
    """What every layer's attention met in a plain forward over one row, and the logits [T, V].

    Args:
        ids: [T].
        hidden_from: for each layer and KV head the prompt positions that queries behind the prompt meet, and the
            prompt's length; None: all.
    """
    found = []

    def attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        found.append({"q": query[0], "k": key[0], "v": value[0]})
        group, length = query.shape[1] // key.shape[1], query.shape[2]
        keys, values = (one.repeat_interleave(group, 1) for one in (key, value))
        logits = query @ keys.transpose(2, 3) * scaling
        places = torch.arange(length)
        meets = (places <= places[:, None]).expand(query.shape[1], -1, -1).clone()
        window = kwargs.get("sliding_window")
        if window is not None:
            meets &= places > places[:, None] - window
        if hidden_from is not None:
            kept, prompt = hidden_from
            for head in range(query.shape[1]):
                gone = [place for place in range(prompt) if place not in kept[len(found) - 1][head // group]]
                meets[head, prompt:, gone] = False
        weights = logits.masked_fill(~meets, -torch.inf).softmax(-1)
        found[-1]["weights"] = weights[0]
        return (weights @ values).transpose(1, 2), weights

    AttentionInterface.register("looked_at", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "looked_at"
    try:
        logits = model(ids[None]).logits[0]
    finally:
        model.config._attn_implementation = before
    return found, logits


def layers_of(model, ids: torch.Tensor) -> list[oracle.Layer]:
    """The reference's layers of one row's prompt."""
    rotary = model.model.rotary_emb

    def factors(position, like):
        cos, sin = rotary(like, position_ids=torch.as_tensor(position).reshape(1, -1))
        return cos[0].double(), sin[0].double()

    def half(x):
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)

    def rope(x, position):
        cos, sin = factors(position, x)
        return x * cos[0] + half(x) * sin[0]

    found, _ = met(model, ids)
    layers = []
    for one, layer in zip(found, model.model.layers, strict=True):
        cos, sin = factors(range(len(ids)), one["q"])
        square = (cos**2 + sin**2)[..., :1]  # of scaled embeddings it is not 1
        raw = (one["q"] * cos - half(one["q"]) * sin) / square
        layers.append(oracle.Layer(one["q"], one["k"], one["v"], raw, layer.self_attn.o_proj.weight, rope))
    return layers


def kept_by(handle, row: int, prompt: int) -> list[list[list[int]]]:
    """Prompt positions that a row holds, by layer and KV head."""
    held = handle.retained()[:, row]
    return [[sorted(x for x in head.tolist() if 0 <= x < prompt) for head in layer] for layer in held]


def decoded(model, rows: list[list[int]], tokens: int = 5):
    """Greedy tokens [B, tokens] and the logits of each, [tokens, B, V]."""
    inputs = left_padded(rows)
    more = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    model.generation_config.eos_token_id = None
    output = model.generate(**inputs, max_new_tokens=tokens, **more)
    return output.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(output.logits)


@pytest.mark.parametrize("name", METHODS)
def test_the_prompt_is_cut_to_what_the_reference_keeps(name):
    model, rows, budget = llama(query_groups=2, kv_heads=2, layers=3), prompts((33, 21, 10), seed=3), 12
    handle = kvpatch.patch(model, policy_of(name), budget=budget, compile=False)
    tokens, logits = decoded(model, rows)
    held = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
    kvpatch.unpatch(model)
    for row, ids in enumerate(rows):
        wanted = METHODS[name](layers_of(model, torch.tensor(ids)), budget)
        assert held[row] == wanted
        # Steps meet what is kept, head by head, and all that was generated.
        whole = torch.tensor(ids + tokens[row, :-1].tolist())
        _, expected = met(model, whole, (wanted, len(ids)))
        assert torch.allclose(logits[:, row].double(), expected[len(ids) - 1 :], atol=1e-5)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("name", ["snapkv", "expected-attention"])
def test_every_architecture_shows_its_queries(kind, name):
    model, rows, budget = tiny(kind), prompts((22, 17), seed=5), 9
    handle = kvpatch.patch(model, policy_of(name), budget=budget, compile=False)
    decoded(model, rows, 2)
    held = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
    kvpatch.unpatch(model)
    for row, ids in enumerate(rows):
        assert held[row] == METHODS[name](layers_of(model, torch.tensor(ids)), budget)


def test_what_a_layer_with_a_sliding_window_no_longer_meets_goes_first():
    model, (ids,), budget = tiny("ministral"), prompts((40,), seed=5), 12  # the outer layers reach 24 tokens back
    handle = kvpatch.patch(model, policy_of("snapkv"), budget=budget, compile=False)
    tokens, logits = decoded(model, [ids])
    held = kept_by(handle, 0, len(ids))
    kvpatch.unpatch(model)
    assert [min(min(head) for head in layer) >= 16 for layer in held] == [True, False, True]
    assert all(len(head) == budget for layer in held for head in layer)
    _, expected = met(model, torch.tensor(ids + tokens[0, :-1].tolist()), (held, len(ids)))
    assert torch.allclose(logits[:, 0].double(), expected[len(ids) - 1 :], atol=1e-5)


@pytest.mark.parametrize("name", [name for name in kvpatch.list_policies() if name not in ("full", "best")])
def test_a_budget_that_holds_everything_changes_nothing(name):
    model, rows = llama(), prompts((50, 31))
    expected, _ = decoded(model, rows, 6)
    for budget in (60, 1.0):
        with kvpatch.patched(model, name, budget=budget, compile=False):
            assert torch.equal(decoded(model, rows, 6)[0], expected)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_on_every_architecture_a_budget_that_holds_everything_changes_nothing(kind):
    model, rows = tiny(kind), prompts((50, 31))
    expected, _ = decoded(model, rows, 6)
    for name in ("snapkv", "adakv", "expected-attention", "h2o"):
        with kvpatch.patched(model, name, budget=60, compile=False):
            assert torch.equal(decoded(model, rows, 6)[0], expected), name


@pytest.mark.parametrize("name", [name for name in kvpatch.list_policies() if name != "best"])
def test_compiled_steps_say_the_same_are_compiled_once_and_hold_what_the_policy_says(name):
    # Float32: float64 has another product on the compiled path.
    model, new, policy = llama(dtype=torch.float32, layers=2), 8, resolve(name)
    budget = 48  # with room for what vatp protects
    limit = {"budget": budget} if policy.evicts else {}
    # No token comes twice: keys of one token are equally long, and rounding alone would tell them apart.
    generator = torch.Generator().manual_seed(1)
    order = [(torch.randperm(VOCABULARY - 2, generator=generator) + 2).tolist() for _ in range(6)]
    lengths = ((54, 60), (70, 51), (62, 80))
    batches = [[order.pop()[:one], order.pop()[:other]] for one, other in lengths]
    with kvpatch.patched(model, policy, compile=False, **limit):
        expected = [decoded(model, rows, new)[0] for rows in batches]
    with kvpatch.patched(model, policy, **limit) as handle:
        for rows, tokens in zip(batches, expected, strict=True):
            assert torch.equal(decoded(model, rows, new)[0], tokens)
            most = max(map(len, rows)) + new - 1
            if policy.evicts:
                # Where heads compete, one may hold more than the budget.
                most = budget if policy.bounded else most if policy.prefill.by_head else budget + new - 1
            assert handle.stats.held <= most or not (policy.bounded or policy.prefill is None or policy.prefill.even)
        assert handle.stats.recompiles == 0


def test_kvzip_keeps_what_repeating_the_prompt_looks_at(monkeypatch):
    model, rows, chunk = llama(), prompts((50, 31)), 16
    monkeypatch.setattr(repeating, "CHUNK", chunk)
    batch = left_padded(rows)
    with kvpatch.patched(model, "kvzip", budget=12, compile=False) as handle:
        tokens, _ = decoded(model, rows)
        held = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
        plain = handle.read(**batch, policies=["kvzip"]).fork()
        with pytest.raises(RuntimeError, match="'kvzip' has the model repeat its prompt"):
            cache = kvpatch.SlotCache(model.config, "kvzip", budget=12)
            with torch.no_grad():
                model(torch.tensor(rows[:1]), **{handle.keyword: cache})
                cache.retained()
        again = model.generate(**batch, max_new_tokens=5, do_sample=False, eos_token_id=None, **{handle.keyword: plain})
        assert torch.equal(again[:, -5:], tokens)
        with pytest.raises(ValueError, match="'kvzip' has the model repeat its prompt"):
            model.generate(
                torch.cat((again, again[:, :3]), -1),
                max_new_tokens=2,
                attention_mask=torch.cat((batch["attention_mask"], torch.ones(2, 8, dtype=torch.int64)), -1),
                **{handle.keyword: plain},
            )
        with pytest.raises(ValueError, match="'kvzip' has the model repeat its prompt.*num_beams=2"):
            model.generate(**batch, max_new_tokens=2, num_beams=2)
        ids = torch.tensor(rows[:1])
        fork = handle.read(ids[:, :40], policies=["kvzip"]).fork()
        longer = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, **{handle.keyword: fork})
        assert torch.equal(longer, model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None))
    columns = batch["input_ids"].shape[1]
    for row, ids in enumerate(rows):
        ids, pads = torch.tensor(ids), columns - len(ids)
        pieces = []
        for start in range(0, columns, chunk):  # of columns: a padded row's first chunk is shorter
            part = ids[max(start - pads, 0) : max(start + chunk - pads, 0)]
            if len(part):
                found, _ = met(model, torch.cat((ids, part)))
                pieces.append([one["weights"][:, len(ids) :, : len(ids)] for one in found])
        attention = [torch.cat(of_layer, 1) for of_layer in zip(*pieces, strict=True)]
        wanted = oracle.kvzip(attention, 12, model.config.num_key_value_heads)
        assert held[row] == wanted


def test_a_prompt_read_in_blocks_is_cut_as_one_read_whole():
    model, rows = llama(), prompts((50, 31))
    for name in ("snapkv", "expected-attention", "h2o"):
        with kvpatch.patched(model, policy_of(name), budget=12, compile=False) as handle:
            whole, _ = decoded(model, rows)
            held = handle.retained()
            model.generation_config.prefill_chunk_size = 3  # shorter than the window
            try:
                again, _ = decoded(model, rows)
            finally:
                model.generation_config.prefill_chunk_size = None
            assert torch.equal(again, whole) and torch.equal(handle.retained(), held)


def test_what_is_generated_is_kept_or_evicted_as_the_policy_says():
    model, rows = llama(), prompts((50, 31))
    with kvpatch.patched(model, policy_of("snapkv"), budget=12, compile=False) as handle:
        decoded(model, rows, 9)
        assert handle.stats.held == 12 + 8 and handle.stats.cut == 50 - 12 + 31 - 12
        assert handle.stats.evicted == handle.stats.cut and handle.stats.budget == [None, None]
    bounded = resolve("h2o-decode", prefill=policy_of("snapkv").prefill)
    with kvpatch.patched(model, bounded, budget=12, compile=False) as handle:
        decoded(model, rows, 2)  # one step: one in, one out
        first = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
        decoded(model, rows, 9)
        assert handle.stats.held == 12 and handle.stats.evicted == handle.stats.cut + 2 * 8
    for row, ids in enumerate(rows):
        wanted = METHODS["snapkv"](layers_of(model, torch.tensor(ids)), 12)
        for layer, heads in enumerate(wanted):
            for head, kept in enumerate(heads):
                assert set(first[row][layer][head]) < set(kept) and len(first[row][layer][head]) == 11


class CutFirst:
    """Mixed into a decode method of the reference: its scores cut the prompt before anything is decoded."""

    def start(self, layers, prompt, budget):
        super().start(layers, prompt, budget)
        for layer, head in self.cells():
            held = self.held[layer][head]
            if len(held) > budget:
                self.held[layer][head] = oracle.keep_top(self.scores(layer, head), held, budget, self.protected(held))


class H2O(CutFirst, steps.H2O):
    pass


class VATP(CutFirst, steps.VATP):
    pass


DECODING = {
    "h2o": H2O(),
    "vatp": VATP(sinks=3),
    "gkv": steps.GKV(),
    "keydiff": steps.KeyDiff(),
    "knorm": steps.KNorm(),
}


@pytest.mark.parametrize("name", DECODING)
def test_every_step_keeps_what_the_reference_keeps(name):
    # In a single layer keys, values and queries do not depend on what was evicted before. No token comes twice: equal
    # keys would be told apart by rounding alone.
    model, budget, prompt, count = llama(query_groups=2, kv_heads=2, layers=1), 14, 30, 20
    ids = torch.randperm(VOCABULARY - 2, generator=torch.Generator().manual_seed(4))[: prompt + count] + 2
    policy = resolve(name)
    if name == "vatp":
        policy = policy.replace(sinks=3, prefill=policy.prefill.replace(sinks=3))
    batch = {"input_ids": ids[None, :prompt], "attention_mask": torch.ones(1, prompt, dtype=torch.int64)}
    forced = Forced([ids[prompt:].tolist()], prompt)
    with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
        watcher = Watcher(handle.retained)
        run(model, batch, max_new_tokens=count + 1, logits_processor=[forced], streamer=watcher)
    held = [[[sorted(head) for head in layer] for layer in retained_sets(one, 0)] for one in watcher.seen]
    assert held == steps.run(DECODING[name], layers_of(model, ids), prompt, budget, count)


def test_several_policies_cut_one_reading():
    model, rows = llama(), prompts((50, 31))
    inputs = left_padded(rows)
    more = {"max_new_tokens": 5, "do_sample": False}
    model.generation_config.eos_token_id = None
    policies = [policy_of(name) for name in ("snapkv", "expected-attention", "h2o", "criticalkv", "keydiff")]
    expected = []
    for policy in policies:
        with kvpatch.patched(model, policy, budget=12, compile=False) as handle:
            expected.append((model.generate(**inputs, **more), handle.retained()))
    with kvpatch.patched(model, "full", compile=False) as handle:
        source = handle.read(**inputs, policies=policies)
        for policy, (tokens, held) in zip(policies, expected, strict=True):
            cache = source.fork(policy, budget=12)
            assert torch.equal(model.generate(**inputs, **more, **{handle.keyword: cache}), tokens)
            assert torch.equal(cache.retained(), held)
        plain = handle.read(**inputs)
        with pytest.raises(RuntimeError, match="'snapkv'.*policies="):
            plain.fork(policies[0], budget=12)
        assert plain.fork(policies[0], budget=1.0).needs == rule.Needs()  # nothing will be cut


@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_a_layer_with_a_sliding_window_is_scored_by_what_it_met(name):
    model, (ids,), budget = tiny("ministral"), prompts((40,), seed=5), 12
    windows = [24 if kind == "sliding_attention" else None for kind in model.config.layer_types]
    assert set(windows) == {24, None}
    handle = kvpatch.patch(model, policy_of(name), budget=budget, compile=False)
    decoded(model, [ids], 2)
    held = kept_by(handle, 0, len(ids))
    kvpatch.unpatch(model)
    newest = range(len(ids) - (WINDOW if name == "snapkv" else budget // 2), len(ids))
    for layer, (one, window) in enumerate(zip(met(model, torch.tensor(ids))[0], windows, strict=True)):
        group = one["q"].shape[0] // one["k"].shape[0]
        for head in range(one["k"].shape[0]):
            rows = one["weights"][head * group : (head + 1) * group]
            if name == "snapkv":
                means = rows[:, -WINDOW:, :-WINDOW].mean(1)
                score = torch.stack([oracle.pool_same(mean, 5) for mean in means]).mean(0)
            else:
                score = rows.sum((0, 1))
            first = 0 if window is None else len(ids) - window + 1  # met by the token that comes next
            assert held[layer][head] == oracle.keep_top(score, range(first, len(ids)), budget, newest)


def test_where_every_layer_has_a_window_nothing_is_held_that_none_meets():
    model, rows = tiny("mistral", sliding_window=24), prompts((60, 41), seed=5)
    plain, _ = decoded(model, rows, 6)
    for coupling in ("sequential", "per_layer", "per_head"):
        for budget in (8, 16, 40, 100):
            method = policy_of("snapkv").prefill
            policy = kvpatch.Policy("windowed", prefill=method, grows=True, coupling=coupling)
            with kvpatch.patched(model, policy, budget=budget, compile=False) as handle:
                tokens, logits = decoded(model, rows, 6)
                held = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
            for row, ids in enumerate(rows):
                # After five steps the newest token is the fifth behind the prompt, and the next one meets 23 before it.
                assert all(min(head, default=99) >= len(ids) + 5 - 23 for layer in held[row] for head in layer)
    with kvpatch.patched(model, "snapkv", budget=100, compile=False):
        assert torch.equal(decoded(model, rows, 6)[0], plain)
    shared = kvpatch.Policy("shared", prefill="knorm", grows=True)  # its scores know nothing of windows
    with kvpatch.patched(model, shared, budget=16, compile=False) as handle:
        decoded(model, rows, 1)
        for row, ids in enumerate(rows):
            (positions,) = {tuple(head) for layer in kept_by(handle, row, len(ids)) for head in layer}
            assert len(positions) == 16 and min(positions) > len(ids) - 24
    wider = tiny("mistral", sliding_window=70)
    with kvpatch.patched(wider, policy_of("snapkv"), budget=150, compile=False) as handle:
        decoded(wider, prompts((200,)), 3)
        assert handle.stats.held == 69


def test_rotations_that_follow_the_longest_position_are_left_as_they_are():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, rows = tiny("llama", rope_parameters=rope, max_position_embeddings=64), prompts((100,))
    expected, _ = decoded(model, rows)
    with kvpatch.patched(model, "expected-attention", budget=200, compile=False):
        assert torch.equal(decoded(model, rows)[0], expected)
    with kvpatch.patched(model, "expected-attention", budget=60, compile=False):
        decoded(model, rows)
    assert torch.equal(decoded(model, rows)[0], expected)


def test_forks_that_read_on_leave_their_source_and_each_other_alone():
    model, (ids, more) = llama(), prompts((40, 9), seed=7)
    model.generation_config.eos_token_id = None
    given, longer = torch.tensor([ids]), torch.tensor([ids + more])

    def said(cache, ids):
        settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        return model.generate(ids, **settings, **{handle.keyword: cache}).tolist(), cache.retained().tolist()

    for name in ("snapkv", "h2o", "expected-attention"):
        with kvpatch.patched(model, "full", compile=False) as handle:
            policy = policy_of(name)
            source = handle.read(given, policies=[policy])
            first = said(source.fork(policy, budget=12), given)
            said(source.fork(policy, budget=12), longer)
            said(source.fork("full"), longer)
            assert said(source.fork(policy, budget=12), given) == first
            again = source.fork("full").fork(policy, budget=12)
            assert said(again, given) == first


@pytest.mark.parametrize("name", ["snapkv", "cake", "restkv", "expected-attention"])
def test_in_a_later_turn_too_a_row_does_not_depend_on_the_others(name):
    model, rows, later = llama(), prompts((30, 22), seed=7), prompts((14, 3), seed=8)
    model.generation_config.eos_token_id = None
    # One layer's budget would be another's where they compete: all alike here.
    method = policy_of(name).prefill.replace(window=8, allocation="uniform")
    policy = kvpatch.Policy(name, prefill=method, grows=True, coupling="per_head")

    def held(numbers):
        cache = kvpatch.SlotCache(model.config, policy, budget=12)
        batch = left_padded([rows[n] for n in numbers])
        with kvpatch.patched(model, "full", compile=False) as handle:
            made = model.generate(**batch, max_new_tokens=3, do_sample=False, **{handle.keyword: cache})
            new = left_padded([later[n] for n in numbers])
            ids = torch.cat((made, new["input_ids"]), 1)
            mask = torch.cat((batch["attention_mask"], torch.ones(len(numbers), 3).long(), new["attention_mask"]), 1)
            model.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False, **{handle.keyword: cache})
            return cache.retained()

    both = held([0, 1])
    for row in (0, 1):
        assert torch.equal(both[:, row], held([row])[:, 0])


def test_what_earlier_queries_paid_counts_in_a_later_turn():
    model, (ids, more) = llama(), prompts((40, 2), seed=7)
    model.generation_config.eos_token_id = None
    cache = kvpatch.SlotCache(model.config, "h2o", budget=20)
    with kvpatch.patched(model, "full", compile=False) as handle:
        turn = torch.tensor([ids])
        turn = model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{handle.keyword: cache})
        positions, utility = cache.current.positions[..., :20], cache.current.utility[0, ..., :20]
        best = positions.gather(-1, utility.argmax(-1, keepdim=True))[:, 0, :, 0]
        turn = torch.cat((turn, torch.tensor([more])), 1)
        model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=2, **{handle.keyword: cache})
        assert (cache.retained()[:, 0] == best[..., None]).any(-1).all()
        assert cache.current.utility[0, ..., :20].sum(-1).min() > utility.sum(-1).min() * 0.5


def test_a_rule_of_ones_own_treats_rows_alone():
    model, rows = llama(), prompts((80, 30, 6), seed=3)
    share = kvpatch.Budget(0.4, min_budget=1)
    for method in (
        rule.Prefill(score="snapkv", window=8, recent=0.5),  # protected: another number in each row
        rule.Prefill(score="snapkv", window=20, recent=1),  # the last row is shorter than the window
        rule.Prefill(score="expected-attention"),
    ):
        policy = kvpatch.Policy("mine", prefill=method, grows=True, coupling="per_head")
        with kvpatch.patched(model, policy, budget=share, compile=False) as handle:
            decoded(model, rows, 3)
            together = [kept_by(handle, row, len(ids)) for row, ids in enumerate(rows)]
            for row, ids in enumerate(rows):
                decoded(model, [ids], 3)
                assert kept_by(handle, 0, len(ids)) == together[row]


def test_adapters_of_the_output_projection_count():
    peft = pytest.importorskip("peft", reason="adapters need peft")
    base = llama()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False))
    model.eval()
    attention = base.model.layers[1].self_attn
    before = output_weight(attention)
    merged = attention.o_proj.weight + attention.o_proj.get_delta_weight("default")
    assert torch.allclose(before, merged, atol=1e-12) and not torch.allclose(before, attention.o_proj.weight)


def test_rows_that_change_places_before_the_first_step_take_their_queries_along():
    model, rows = llama(), prompts((40, 40), seed=7)
    with kvpatch.patched(model, policy_of("snapkv"), budget=12, compile=False) as handle:
        decoded(model, rows, 2)
        expected = handle.retained()[..., :12]
        cache = kvpatch.SlotCache(model.config, policy_of("snapkv"), budget=12)
        with torch.no_grad():
            model(torch.tensor(rows[::-1]), **{handle.keyword: cache})
            cache.reorder_cache(torch.tensor([1, 0]))
        assert torch.equal(cache.retained()[..., :12], expected)


def test_a_loop_of_ones_own_goes_on_from_a_cut_prompt():
    model, rows = llama(), prompts((50,))
    for name in ("snapkv", "expected-attention"):
        with kvpatch.patched(model, policy_of(name), budget=12, compile=False) as handle:
            expected, _ = decoded(model, rows)
            held = handle.retained()
            cache = kvpatch.SlotCache(model.config, policy_of(name), budget=12)
            with torch.no_grad():
                logits, made = model(torch.tensor(rows), **{handle.keyword: cache}).logits, []
                for _ in range(expected.shape[1]):
                    made.append(logits[:, -1].argmax(-1))
                    logits = model(made[-1][:, None], **{handle.keyword: cache}).logits
            assert torch.stack(made, 1).tolist() == expected.tolist()
            # The last token was fed too; what is held of the prompt is the same.
            assert torch.equal(cache.retained()[..., :12], held[..., :12])


def test_a_later_turn_is_cut_again():
    model, (ids, more) = llama(), prompts((40, 13), seed=7)
    model.generation_config.eos_token_id = None
    handle = kvpatch.patch(model, "full", compile=False)
    cache = kvpatch.SlotCache(model.config, policy_of("snapkv"), budget=12)
    turn = torch.tensor([ids])
    for extra in (more, more[:2]):
        turn = model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{handle.keyword: cache})
        assert int((cache.retained()[0, 0, 0] >= 0).sum()) == 12 + 3
        turn = torch.cat((turn, torch.tensor([extra])), 1)
    uneven = kvpatch.SlotCache(model.config, policy_of("adakv"), budget=12)
    made = model.generate(turn, attention_mask=torch.ones_like(turn), max_new_tokens=4, **{handle.keyword: uneven})
    with pytest.raises(ValueError, match="'adakv'.*no later turn"):
        made = torch.cat((made, torch.tensor([more])), 1)
        model.generate(made, attention_mask=torch.ones_like(made), max_new_tokens=4, **{handle.keyword: uneven})
    kvpatch.unpatch(model)


def test_beams_go_on_from_a_cut_prompt():
    model, rows = llama(), prompts((50, 31))
    inputs = left_padded(rows)
    more = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    model.generation_config.eos_token_id = None
    expected = model.generate(**inputs, **more)
    with kvpatch.patched(model, "snapkv", budget=60, compile=False):
        assert torch.equal(model.generate(**inputs, **more), expected)
    with kvpatch.patched(model, policy_of("snapkv"), budget=12, compile=False) as handle:
        model.generate(**inputs, **more)
        assert handle.stats.held == 12 + 4 and handle.stats.cut == 3 * (50 - 12 + 31 - 12)


def table(parts):
    return kvpatch.Prefill("by table", window=4, recent=4, allocation="table", table=parts)


@pytest.mark.parametrize("parts", [[3, 1, 2], [[3, 1], [1, 1], [0.5, 2]]], ids=["layers", "heads"])
def test_a_table_of_budgets_holds_in_a_model(parts):
    model, batch = llama(), left_padded(prompts((50, 31)))
    with kvpatch.patched(model, "snapkv", prefill=table(parts), budget=12, compile=False) as handle:
        model.generate(**batch, max_new_tokens=3, do_sample=False, eos_token_id=None)
        held = (handle.retained() >= 0).sum(-1)  # [layers, rows, heads], two new tokens among them
    cells = [part for one in parts for part in (one if isinstance(one, list) else [one, one])]
    for row in range(2):
        counts = [count - 2 - 4 for count in held[:, row].flatten().tolist()]
        assert sum(counts) == 6 * (12 - 4)
        assert all(abs(count - part / sum(cells) * 48) <= 1 for count, part in zip(counts, cells, strict=True))


def test_a_reading_for_methods_of_several_windows_serves_each():
    model, ids = llama(), torch.tensor(prompts((50,)))
    more = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    methods = [
        kvpatch.Prefill(score=score, window=w, recent=3)
        for score, w in (("scissorhands", 4), ("rkv", 6), ("snapkv", 16))
    ]
    policies = [kvpatch.Policy(prefill=one, grows=True, interval=4, coupling="per_head") for one in methods]
    with kvpatch.patched(model, "full", compile=False) as handle:
        source = handle.read(ids, policies=policies[1:])  # of bounds nothing is noted
        forks = [source.fork(one, budget=14) for one in policies]
        said = [model.generate(ids, **more, **{handle.keyword: fork}) for fork in forks]
    for one, fork, tokens in zip(policies, forks, said, strict=True):
        with kvpatch.patched(model, one, budget=14, compile=False) as handle:
            assert torch.equal(model.generate(ids, **more), tokens)
            assert torch.equal(handle.retained(), fork.retained())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"policy": "inertia", "prefill": "snapvk"}, ("unknown prefill", "'snapvk'", "snapkv")),
        ({"policy": "inertia", "prefill": 3}, ("prefill", "3")),
        ({"policy": "inertia", "prefill": "adakv"}, ("'adakv'", "per_head", "'sequential'")),
        ({"policy": "h2o-decode", "prefill": "pyramidkv"}, ("'pyramidkv'", "grows=True")),
        ({"policy": "inertia", "grows": True}, ("grows=True needs prefill",)),
        ({"policy": "snapkv", "prefill": table([1, 2])}, ("table has 2 layers", "has 3")),
        ({"policy": "snapkv", "prefill": table([[1, 2, 3]] * 3)}, ("table has 3 KV heads", "has 2")),
        ({"policy": "tova", "grows": True, "prefill": table([[1, 2]] * 3)}, ("per_head", "'per_layer'")),
        ({"policy": "snapkv", "budget": 31}, ("'snapkv'", "last 32", "budget of 31")),
    ],
)
def test_what_makes_no_sense_is_refused_and_the_model_left_alone(given, words):
    model = llama()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises((ValueError, TypeError)) as error:
        kvpatch.patch(model, **{"budget": 40, "compile": False} | given)
    assert all(word in str(error.value) for word in words)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def test_what_does_not_fit_leaves_a_cache_of_ones_own_empty():
    model = llama()
    with kvpatch.patched(model, "full", compile=False) as handle:
        cache = kvpatch.SlotCache(model.config, "snapkv", budget=kvpatch.Budget(0.5, min_budget=1))
        with torch.no_grad():
            model(torch.tensor(prompts((50,))), **{handle.keyword: cache})
            with pytest.raises(ValueError, match="budget of 25"):
                cache.retained()
            assert cache.phase == "empty" and cache.watch is None
            model(torch.tensor(prompts((80,))), **{handle.keyword: cache})
        assert cache.retained().shape[-1] == 40


def test_one_length_a_row_is_not_enough_for_heads_that_compete():
    with pytest.raises(ValueError, match="backend='flash'.*'adakv'"):
        kvpatch.patch(llama(), "adakv", budget=40, backend="flash")
    with pytest.raises(ValueError, match="backend='flash'.*'adakv'"):
        kvpatch.SlotCache(llama().config, "adakv", budget=40, backend="flash")


def test_nothing_is_uneven_where_nothing_is_cut():
    model, (ids, more) = llama(), prompts((40, 5), seed=7)
    cache = kvpatch.SlotCache(model.config, "adakv", budget="full")
    with kvpatch.patched(model, "full", compile=False) as handle:
        for turn in (ids, ids + more):
            given = torch.tensor([turn])
            made = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=1, do_sample=False,
                                  **{handle.keyword: cache})  # fmt: skip
            ids = made[0].tolist()


def test_a_share_that_holds_less_than_the_window_is_refused_when_the_prompt_is_there():
    model, rows = llama(), prompts((50, 31))
    with kvpatch.patched(model, "snapkv", budget=kvpatch.Budget(0.5, min_budget=1), compile=False) as handle:
        with pytest.raises(ValueError, match="last 32 tokens.*budget of 25"):
            decoded(model, rows)
        longer = prompts((90, 80))
        decoded(model, longer)  # the next call starts anew
        assert handle.stats.held == 45 + 4
