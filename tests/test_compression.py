"""Scores and allocations of prompt methods against the naive reference, over random shapes and ragged batches."""

import math

import prefill_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.compression import allocation, rule, scores
from kvpatch.compression.prompt import Law, Prompt, pooled
from kvpatch.compression.watch import Needs, Watch

DTYPE = torch.float64
FUTURE = 512


def factors(positions: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary factors of positions [n] in the half-split layout: cos, sin [n, D]."""
    frequencies = 10000.0 ** (-2 * torch.arange(width // 2, dtype=DTYPE) / width)
    angles = positions[:, None].to(DTYPE) * frequencies
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rope(states: torch.Tensor, position: int) -> torch.Tensor:
    cos, sin = factors(torch.tensor([position]), states.shape[-1])
    first, second = states.chunk(2, -1)
    return states * cos[0] + torch.cat((-second, first), -1) * sin[0]


class Case:
    """A random ragged batch: each row's layers for the reference, and the layers' prompts."""

    def __init__(self, seed: int, lengths: list[int], layers: int, kv_heads: int, group: int, window: int):
        generator = torch.Generator().manual_seed(seed)
        heads, width, hidden = kv_heads * group, 4, 6
        self.lengths, self.window, self.kv_heads = lengths, window, kv_heads
        self.rows: list[list[oracle.Layer]] = [[] for _ in lengths]
        self.prompts = []
        slots = max(lengths) + int(torch.randint(0, 3, (), generator=generator))
        for _ in range(layers):
            output = torch.randn(hidden, heads * width, dtype=DTYPE, generator=generator)
            found = [self._row(length, heads, width, output, generator) for length in lengths]
            for row, layer in zip(self.rows, found, strict=True):
                row.append(layer)
            self.prompts.append(self._prompt(found, slots, output))

    def _row(self, length, heads, width, output, generator) -> oracle.Layer:
        shapes = ((heads, length, width), (self.kv_heads, length, width), (self.kv_heads, length, width))
        q, k, v = (torch.randn(shape, dtype=DTYPE, generator=generator) for shape in shapes)
        turned = [torch.stack([rope(x[:, n], n) for n in range(length)], 1) for x in (q, k)]
        return oracle.Layer(*turned, v, q, output, rope, k)

    def _prompt(self, found: list[oracle.Layer], slots: int, output) -> Prompt:
        kv = torch.full((2, len(found), self.kv_heads, slots, found[0].head_size), 7.0, dtype=DTYPE)
        mass = torch.zeros(len(found), self.kv_heads, slots, dtype=DTYPE)
        laws = []
        for row, layer in enumerate(found):
            kv[0, row, :, : layer.length], kv[1, row, :, : layer.length] = layer.k, layer.v
            mass[row, :, : layer.length] = oracle.accumulated_attention(layer, layer.length) / layer.group
            queries = layer.q_raw[:, scores.SINKS :]
            apart = queries - queries.mean(1, keepdim=True)
            covariance = apart.transpose(1, 2) @ apart / queries.shape[1]
            ahead = factors(torch.arange(layer.length, layer.length + FUTURE), layer.head_size)
            laws.append((queries.mean(1), covariance, *(one.mean(0) for one in ahead)))
        queries = torch.stack([layer.q[:, layer.length - self.window :] for layer in found])
        law = Law(*(torch.stack(parts) for parts in zip(*laws, strict=True)))
        lengths = torch.tensor([layer.length for layer in found])
        asks, spared = torch.ones(len(found), self.window, dtype=torch.bool), torch.full_like(lengths, self.window)
        return Prompt(queries, *kv, lengths, 1 / math.sqrt(found[0].head_size), asks, spared, None, output, law, mass)


@st.composite
def cases(draw, layers=1):
    window = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(window + 1, 14), min_size=1, max_size=3))
    lengths = [max(length, scores.SINKS + 2) for length in lengths]
    heads = draw(st.sampled_from(((1, 1), (1, 3), (2, 1), (2, 2), (3, 2))))
    return Case(draw(st.integers(0, 2**30)), lengths, draw(st.integers(1, layers)), *heads, window)


# Method: its score, that of the reference for a layer (from which position on), and whether the window is left out.
SCORES = {
    "snapkv": (scores.snapkv, oracle.snapkv_scores, 0, True),
    "snapkv, max": (
        lambda prompt: scores.snapkv(prompt, 3, "max"),
        lambda layer, window: oracle.snapkv_scores(layer, window, 3, "max"),
        0,
        True,
    ),
    "cake": (scores.cake, oracle.cake_scores, 0, True),
    "restkv": (scores.restkv, oracle.restkv_scores, 0, True),
    "expected attention": (
        scores.expected_attention,
        lambda layer, window: oracle.expected_attention_scores(layer),
        scores.SINKS,
        False,
    ),
    "projected norm": (scores.projected_norm, lambda layer, window: oracle.projected_value_norm(layer), 0, False),
    "last query": (
        scores.last_query,
        lambda layer, window: oracle.attention(layer, [layer.length - 1])[:, 0].mean(0).expand(layer.kv_heads, -1),
        0,
        False,
    ),
    "vatp": (
        scores.accumulated_vnorm,
        lambda layer, window: oracle.accumulated_attention(layer, layer.length) / layer.group * layer.v.abs().sum(2),
        0,
        False,
    ),
    "keydiff": (
        scores.of_scorer("keydiff"),
        lambda layer, window: torch.stack([oracle.keydiff_scores(one) for one in layer.k]),
        0,
        False,
    ),
    "knorm": (
        scores.of_scorer("knorm"),
        lambda layer, window: torch.stack([oracle.knorm_scores(one) for one in layer.k]),
        0,
        False,
    ),
}


@pytest.mark.parametrize("name", SCORES)
@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_a_score_is_the_references(name, case):
    score, expected, first, outside = SCORES[name]
    found = score(case.prompts[0])
    for row, (layer,) in enumerate(case.rows):
        end = layer.length - (case.window if outside else 0)
        wanted = expected(layer, case.window)
        assert torch.allclose(found[row, :, first:end], wanted, rtol=1e-9, atol=1e-12)


@given(case=cases())
@settings(max_examples=25, deadline=None)
def test_cakes_preference_is_the_references(case):
    for taus in ((1.0, 1.0), (2.0, 0.5)):
        found = scores.cake_preference(case.prompts[0], *taus)
        for row, (layer,) in enumerate(case.rows):
            assert found[row].item() == pytest.approx(oracle.cake_preference(layer, case.window, *taus), rel=1e-9)


def test_pooling_leaves_out_what_does_not_count():
    values = torch.tensor([[1.0, 2.0, 100.0, 4.0]])
    counts = torch.tensor([[True, True, False, True]])
    assert pooled(values, counts, 3)[0, [0, 1, 3]].tolist() == [1.5, 1.5, 4.0]
    assert pooled(values, counts, 3, "max")[0, [0, 1, 3]].tolist() == [2.0, 2.0, 4.0]


# ---- which entries that leaves -----------------------------------------------------------------------------


@st.composite
def contests(draw):
    """Few different values, so that there are ties; rows of several lengths; protected entries at the end."""
    layers, heads, slots = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 9))
    rows = draw(st.integers(1, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    given = torch.randint(0, draw(st.integers(2, 5)), (layers, rows, heads, slots), generator=generator).double()
    lengths = torch.tensor([draw(st.integers(1, slots)) for _ in range(rows)])
    window = draw(st.integers(0, 2))
    budgets = torch.tensor([draw(st.integers(max(1, window), slots + 1)) for _ in range(rows)])
    return given, lengths, window, budgets


def masks(given, lengths, window):
    places = torch.arange(given.shape[-1])
    held = places < lengths[:, None, None]
    return held, held & (places >= lengths[:, None, None] - window)


def positions(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


@given(contests())
@settings(max_examples=150, deadline=None)
def test_the_best_of_a_head_are_the_references(contest):
    given, lengths, window, budgets = contest
    held, protected = masks(given, lengths, window)
    for layer in given:
        kept = allocation.best_of(layer, held, protected, budgets[:, None])
        for row, length in enumerate(lengths.tolist()):
            for head in range(layer.shape[1]):
                newest = list(range(max(0, length - window), length))
                wanted = oracle.keep_top(layer[row, head], range(length), min(budgets[row].item(), length), newest)
                assert positions(kept[row, head]) == wanted


@given(contests(), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
@settings(max_examples=150, deadline=None)
def test_heads_that_compete_keep_what_the_reference_keeps(contest, share):
    given, lengths, window, budgets = contest
    held, protected = masks(given, lengths, window)
    secured = torch.tensor([allocation.adaptive_floor(one, window, share) for one in budgets.tolist()])
    for layer in given:
        (kept,) = allocation.competing([layer], held, protected, budgets, secured)
        for row, length in enumerate(lengths.tolist()):
            budget = budgets[row].item()
            if budget >= length:
                assert torch.equal(kept[row], held[row].expand_as(kept[row]))
                continue
            q = torch.zeros(layer.shape[1], length, 2)
            of_row = oracle.Layer(q, q, q)
            newest = list(range(length - window, length))
            wanted = oracle.adaptive_heads(of_row, layer[row], budget, newest, share)
            assert [positions(kept[row, head]) for head in range(layer.shape[1])] == wanted


@given(contests())
@settings(max_examples=150, deadline=None)
def test_layers_that_compete_keep_what_the_reference_keeps(contest):
    given, lengths, _, budgets = contest
    held, _ = masks(given, lengths, 0)
    first = held & (torch.arange(given.shape[-1]) < 1)
    ones = torch.ones_like(budgets)
    kept = allocation.competing(list(given), held, first, budgets, ones)
    for row, length in enumerate(lengths.tolist()):
        repeat = [layer[row, :, None, :length] for layer in given]  # one repeat query a head
        wanted = oracle.kvzip(repeat, budgets[row].item(), given.shape[2], protected=1)
        found = [[positions(one[row, head]) for head in range(given.shape[2])] for one in kept]
        assert found == wanted


@given(st.integers(1, 40), st.data())
def test_a_pyramid_is_the_references_and_adds_up(layers, data):
    length = data.draw(st.integers(2, 400))
    budget = data.draw(st.integers(1, length - 1))
    window = data.draw(st.integers(0, min(32, budget)))
    found = allocation.pyramid(layers, length, budget, window)
    assert found == oracle.pyramidkv_budgets(layers, length, budget, window)
    assert sum(found) == layers * budget and window <= min(found) and max(found) <= length
    assert found == sorted(found, reverse=True)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=12), st.integers(0, 300), st.integers(1, 60))
def test_what_is_shared_out_is_the_references_and_adds_up(preference, total, ceiling):
    total = min(total, ceiling * len(preference))
    found = allocation.proportional(preference, total, ceiling)
    assert found == oracle.share_out(preference, total, ceiling)
    assert sum(found) == total and max(found) <= ceiling
    with pytest.raises(ValueError, match=f"at most {ceiling * len(preference)}"):
        allocation.proportional(preference, ceiling * len(preference) + 1, ceiling)


# ---- whole methods -----------------------------------------------------------------------------------------

WHOLE = {
    "snapkv": lambda layers, budget, window: oracle.snapkv(layers, budget, window),
    "pyramidkv": lambda layers, budget, window: oracle.pyramidkv(layers, budget, window),
    "adakv": lambda layers, budget, window: oracle.adakv(layers, budget, 0.2, window),
    "cake": lambda layers, budget, window: oracle.cake(layers, budget, window),
    "criticalkv": lambda layers, budget, window: oracle.criticalkv(layers, budget, window=window),
    "restkv": lambda layers, budget, window: oracle.restkv(layers, budget, window),
    "expected-attention": lambda layers, budget, window: oracle.expected_attention(layers, budget),
    "h2o": lambda layers, budget, window: oracle.h2o_prompt(layers, budget),
    "vatp": lambda layers, budget, window: oracle.vatp_prompt(layers, budget, sinks=1),
    "tova": lambda layers, budget, window: oracle.tova_prompt(layers, budget),
    "streaming-llm": lambda layers, budget, window: oracle.streaming_prompt(layers, budget),
    "keydiff": lambda layers, budget, window: oracle.keydiff(layers, budget),
    "knorm": lambda layers, budget, window: oracle.knorm(layers, budget),
}


def small(name: str, window: int) -> rule.Prefill:
    """The preset with a small window."""
    preset = rule.PRESETS[name]
    sinks = 1 if preset.sinks == 20 else preset.sinks
    return preset.replace(
        window=window, sinks=sinks, recent=window if preset.recent == preset.window else preset.recent
    )


@pytest.mark.parametrize("name", WHOLE)
@given(case=cases(layers=3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_method_keeps_what_the_reference_keeps(name, case, data):
    method = small(name, case.window)
    least = max(case.window, 4)  # what is protected fits
    budgets = [data.draw(st.integers(min(least, length), length + 1)) for length in case.lengths]
    found = rule.cut(method, case.prompts, budgets, len(case.prompts), case.kv_heads).keep
    for row, layers in enumerate(case.rows):
        wanted = WHOLE[name](layers, budgets[row], case.window)
        assert [[positions(one[row, head]) for head in range(case.kv_heads)] for one in found] == wanted


@given(case=cases(layers=3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_shared_set_is_that_of_the_mean(case, data):
    budgets = [data.draw(st.integers(case.window, length)) for length in case.lengths]
    shared = rule.cut(small("snapkv", case.window), case.prompts, budgets, 1, 1).keep
    by_layer = rule.cut(small("snapkv", case.window), case.prompts, budgets, len(case.prompts), 1).keep
    assert len(shared) == 1 and len(by_layer) == len(case.prompts)
    for row, layers in enumerate(case.rows):
        means = torch.stack([oracle.snapkv_scores(layer, case.window).mean(0) for layer in layers])
        length = layers[0].length
        newest = range(length - case.window, length)

        def kept(mean, length=length, newest=newest, budget=budgets[row]):
            return oracle.keep_top(dict(enumerate(mean)), range(length), budget, newest)

        assert positions(shared[0][row, 0]) == kept(means.mean(0))
        assert [positions(one[row, 0]) for one in by_layer] == [kept(mean) for mean in means]


@given(case=cases(layers=3), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_table_says_what_part_each_layer_or_head_has(case, data):
    part = st.floats(0.1, 10)
    by_head = data.draw(st.booleans())
    cells = len(case.prompts) * (case.kv_heads if by_head else 1)
    parts = data.draw(st.lists(part, min_size=cells, max_size=cells))
    heads = case.kv_heads if by_head else 1
    table = [parts[at : at + heads] for at in range(0, cells, heads)] if by_head else parts
    method = small("snapkv", case.window).replace(allocation="table", table=table)
    budgets = [data.draw(st.integers(case.window, length + 1)) for length in case.lengths]
    found = rule.cut(method, case.prompts, budgets, len(case.prompts), case.kv_heads).keep
    for row, layers in enumerate(case.rows):
        length, outside = layers[0].length, layers[0].length - case.window
        counts = [outside] * cells
        if budgets[row] < length:
            counts = oracle.share_out(parts, cells * (budgets[row] - case.window), outside)
        for number, layer in enumerate(layers):
            scored = oracle.snapkv_scores(layer, case.window)
            for head in range(case.kv_heads):
                count = case.window + (counts[number * heads + head] if by_head else counts[number])
                newest = range(outside, length)
                wanted = oracle.keep_top(dict(enumerate(scored[head].tolist())), range(length), count, newest)
                assert positions(found[number][row, head]) == wanted


@given(case=cases(layers=2), data=st.data(), size=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_runs_of_entries_stay_by_their_mean_score(case, data, size):
    method = small("snapkv", case.window).replace(chunk=size)
    budgets = [data.draw(st.integers(case.window, length)) for length in case.lengths]
    found = rule.cut(method, case.prompts, budgets, len(case.prompts), case.kv_heads).keep
    for row, layers in enumerate(case.rows):
        length, outside = layers[0].length, layers[0].length - case.window
        for number, layer in enumerate(layers):
            scored = oracle.snapkv_scores(layer, case.window)
            for head in range(case.kv_heads):
                mean = {}
                for first in range(0, outside, size):
                    run = range(first, min(first + size, outside))
                    mean |= dict.fromkeys(run, sum(scored[head, place].item() for place in run) / len(run))
                wanted = oracle.keep_top(mean, range(length), budgets[row], range(outside, length))
                kept = positions(found[number][row, head])
                # Equal means are told apart by rounding where two runs have one, and nowhere else.
                assert sorted(mean.get(place, 9.0) for place in kept) == pytest.approx(
                    sorted(mean.get(place, 9.0) for place in wanted), rel=1e-12
                )
                assert len(kept) == len(wanted) and set(kept) >= set(range(outside, length))
    raw = torch.randn(1, 1, 7, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    counts = torch.tensor([[[True, True, False, True, True, True, False]]])
    assert torch.equal(allocation.chunked(raw, counts, size)[~counts], raw[~counts])  # others keep their own


@pytest.mark.parametrize(
    "table", [[], "ab", [1, "2"], [1, -1], [0, 0], [[1], [1, 2]], [[1], 2], [[], []], [float("nan")], [float("inf")], 3]
)
def test_a_table_that_is_none_is_refused(table):
    with pytest.raises(ValueError, match="table must be a list of numbers >= 0"):
        rule.Prefill(allocation="table", table=table)


def test_bounds_are_those_of_a_window():
    with pytest.raises(ValueError, match="bounds=True with window=False"):
        rule.register_method("mine", lambda prompt, rule: None, bounds=True)


def test_a_table_and_the_allocation_by_it_need_each_other():
    for fields in ({"table": [1, 2]}, {"allocation": "table"}):
        with pytest.raises(ValueError, match="table=.* with allocation="):
            rule.Prefill(**fields)


def test_what_is_protected_must_fit():
    method = rule.PRESETS["snapkv"]
    assert method.protected(32) == (0, 32)
    with pytest.raises(ValueError, match="'snapkv' keeps the first 0 and the last 32 tokens.*budget of 31"):
        method.protected(31)
    assert rule.PRESETS["vatp"].protected(50) == oracle.vatp_protected(50)
    assert rule.PRESETS["h2o"].protected(7) == (0, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("score", "snapvk"), ("window", 0), ("width", 4), ("pool", "sum"), ("allocation", "even"), ("sinks", -1),
        ("recent", 1.5), ("floor", 2), ("critical", -0.1), ("chunk", 0), ("chunk", 1.5),
    ],
)  # fmt: skip
def test_a_rule_names_what_is_wrong(field, value):
    with pytest.raises(ValueError, match=f"{field} must be.*{value}"):
        rule.Prefill(**{field: value})


@given(case=cases(layers=2), data=st.data())
@settings(max_examples=25, deadline=None)
def test_where_heads_compete_critical_values_choose_within_each_heads_share(case, data):
    budgets = [data.draw(st.integers(case.window, length)) for length in case.lengths]
    method = small("adakv", case.window).replace(critical=0.5)
    found = rule.cut(method, case.prompts, budgets, len(case.prompts), case.kv_heads).keep
    for row, layers in enumerate(case.rows):
        shares = oracle.adakv(layers, budgets[row], 0.2, case.window)
        for number, layer in enumerate(layers):
            base, length = oracle.snapkv_scores(layer, case.window), layer.length
            product = (base + 1e-4) * oracle.projected_value_norm(layer)[:, : length - case.window]
            newest = list(range(length - case.window, length))
            for head, kept in enumerate(shares[number]):
                first = case.window + (len(kept) - case.window) // 2
                one = oracle.keep_top(dict(enumerate(base[head])), range(length), first, newest)
                both = oracle.keep_top(dict(enumerate(product[head])), range(length), len(kept), one)
                assert positions(found[number][row, head]) == both


@pytest.mark.parametrize("logit", [17.5, 40.0], ids=["nearly all", "all that single precision knows"])
def test_an_entry_that_has_nearly_all_attention_is_worth_most_in_single_precision_too(logit):
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.zeros(1, 1, 400, 8, dtype=DTYPE), torch.zeros(1, 1, 1, 8, dtype=DTYPE)
    keys[0, 0, 3, 0], queries[0, 0, 0, 0] = 1.0, logit
    values = 2 + torch.randn(1, 1, 400, 8, generator=generator, dtype=DTYPE)
    one = torch.ones(1, 1, dtype=torch.bool)
    exact = Prompt(queries, keys, values, torch.tensor([400]), 1.0, one, torch.tensor([1]))
    single = exact._replace(queries=queries.float(), keys=keys.float(), values=values.float())
    wanted, found = (scores.restkv(prompt, width=1)[0, 0, :399] for prompt in (exact, single))
    assert wanted.argmax() == 3 and found.isfinite().all()
    assert found.argmax() == 3 and found[3].item() == pytest.approx(wanted[3].item(), rel=1e-3)


# ---- what is noted while a prompt is read ------------------------------------------------------------------


@given(case=cases(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_noted_in_blocks_is_what_the_reference_sees(case, data):
    columns = max(case.lengths)
    cuts = sorted(data.draw(st.sets(st.integers(1, columns), max_size=3)) | {columns})
    watch = Watch(Needs(case.window, law=True, mass=True), 1)
    layers = [row[0] for row in case.rows]
    heads, width = layers[0].heads, layers[0].head_size

    def padded(name: str, lead: int) -> torch.Tensor:
        found = torch.full((len(layers), lead, columns, width), 3.0, dtype=DTYPE)
        for row, layer in enumerate(layers):
            found[row, :, columns - layer.length :] = getattr(layer, name)
        return found

    q, raw, k = padded("q", heads), padded("q_raw", heads), padded("k", case.kv_heads)
    lengths = torch.tensor(case.lengths)
    valid = torch.arange(columns) >= columns - lengths[:, None]
    start = 0
    for end in cuts:
        assert watch.columns(end - start) == end - start
        parts = (q[:, :, start:end], raw[:, :, start:end], k[:, :, :end], valid[:, :end], 1 / math.sqrt(width))
        watch.note(0, *parts)
        start = end
    prompt = case.prompts[0]
    assert torch.equal(watch.queries[0], prompt.queries)
    law = watch.law(0, prompt.law.cos, prompt.law.sin)
    assert torch.allclose(law.mean, prompt.law.mean) and torch.allclose(law.covariance, prompt.law.covariance)
    for row, length in enumerate(case.lengths):
        mass = watch.masses[0][row, :, columns - length :]
        assert torch.allclose(mass, prompt.mass[row, :, :length])


def test_only_the_last_columns_are_asked_for_where_they_do():
    assert Watch(Needs(window=8), 1).columns(100) == 8 and Watch(Needs(window=8), 1).columns(3) == 3
    assert Watch(Needs(window=8, mass=True), 1).columns(100) == 100
    assert not Needs().anything and Needs(output=True).anything
    assert Needs(8) | Needs(4, law=True) == Needs(8, True)
