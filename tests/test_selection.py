"""Victims, protection and the first cut equal plain loops, ties included."""

import math

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpatch import selection

# A busy machine must not fail a test, and every run draws the same cases.
UNTIMED = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
DRAWS = settings(max_examples=80, **UNTIMED)
# Few values, so that ties are common; some pairs closer than the tie tolerance, some just outside it.
UTILITIES = (
    0.0,
    0.25,
    0.25 * (1 + 4e-7),
    0.25 * (1 + 5e-6),
    1.0,
    -0.5,
    -0.5 * (1 - 4e-7),
    -0.5 * (1 - 5e-6),
    3.0,
)


@st.composite
def ledgers(draw, most_slots: int = 40):
    """Utilities [Lc, B, Gc, n], row lengths and a random generator."""
    layers, batch, heads, n = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, most_slots)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    distinct = draw(st.integers(1, len(UTILITIES)))
    values = torch.tensor(UTILITIES, dtype=torch.float64)[torch.randperm(len(UTILITIES), generator=generator)]
    utility = values[torch.randint(distinct, (layers, batch, heads, n), generator=generator)]
    return utility, generator


def lists(tensor) -> list[tuple[tuple[int, ...], list]]:
    """(leading index, last dimension) of a tensor."""
    leads = torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape[:-1])).tolist()
    return [(tuple(lead), tensor[tuple(lead)].tolist()) for lead in leads]


@DRAWS
@given(ledgers())
def test_the_victim_has_the_lowest_utility_then_the_lowest_position(drawn):
    utility, generator = drawn
    n = utility.shape[-1]
    positions = torch.rand(utility.shape, generator=generator).argsort(-1) * 3
    eligible = torch.rand(utility.shape, generator=generator) < 0.7
    eligible.scatter_(-1, torch.randint(n, (*utility.shape[:-1], 1), generator=generator), True)
    chosen = selection.victims(utility, positions, eligible)
    assert chosen.shape == utility.shape[:-1] and chosen.dtype == torch.int64
    for lead, row in lists(utility):
        candidates = [i for i in range(n) if eligible[lead][i]]
        least = min(row[i] for i in candidates)
        equal = [i for i in candidates if row[i] - least <= selection.TIE * abs(least)]
        assert chosen[lead] == min(equal, key=lambda i: positions[lead][i])


def test_utilities_that_differ_by_rounding_alone_are_a_tie():
    positions = torch.tensor([7, 2, 5])[None, None, None]
    everything = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    for least in (0.25, -0.25, 1e-20, 1e20):
        within = least + abs(least) * selection.TIE / 2
        beyond = least + abs(least) * selection.TIE * 2
        for dtype in (torch.float64,) if abs(least) != 0.25 else (torch.float64, torch.float32):
            tied = torch.tensor([least, within, beyond], dtype=dtype)[None, None, None]
            assert selection.victims(tied, positions, everything).item() == 1
            apart = torch.tensor([least, beyond, beyond], dtype=dtype)[None, None, None]
            assert selection.victims(apart, positions, everything).item() == 0


@DRAWS
@given(ledgers(most_slots=60))
def test_focus_is_what_the_best_behind_the_first_token_have(drawn):
    utility, generator = drawn
    utility = utility.abs()
    positions = torch.rand(utility.shape, generator=generator).argsort(-1) * 2
    held = torch.rand(utility.shape, generator=generator) < 0.8
    found = selection.focus(utility, positions, held)
    assert found.shape == (*utility.shape[:-1], 1)
    for lead, row in lists(utility):
        counted = sorted((row[i] for i in range(len(row)) if held[lead][i] and positions[lead][i] != 0), reverse=True)
        whole = sum(row[i] for i in range(len(row)) if held[lead][i])
        expected = sum(counted[:30]) / whole if whole else 0.0
        assert math.isclose(found[lead].item(), expected, rel_tol=1e-12)


def test_no_tolerance_at_zero():
    utility = torch.tensor([1e-30, 0.0])[None, None, None]
    everything = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    assert selection.victims(utility, torch.tensor([0, 1])[None, None, None], everything).item() == 1


@DRAWS
@given(st.integers(1, 60), st.integers(0, 70))
def test_reserved_positions_are_spread_evenly_over_the_prompt(prompt, count):
    expected = {math.floor(j * prompt / count) for j in range(count)}
    got = selection.reserved(torch.arange(prompt + 20), torch.tensor(prompt), torch.tensor(count))
    assert set(got.nonzero().flatten().tolist()) == expected


@DRAWS
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 30), st.integers(0, 2**16))
def test_protected_are_the_first_the_last_and_the_reserved(batch, heads, n, seed):
    generator = torch.Generator().manual_seed(seed)

    def counts(low, high):
        return torch.randint(low, high, (batch,), generator=generator)

    prompt = counts(1, 40)
    newest = prompt - 1 + counts(0, 20)
    rows = selection.Rows(counts(1, 50), counts(0, 6), counts(0, 6), counts(0, 6), prompt, counts(0, 6))
    positions = (torch.rand(2, batch, heads, n, generator=generator) * (newest + 1)[None, :, None, None]).long()
    got = selection.protected(positions, newest, rows)
    for (layer, b, g), row in lists(positions):
        last, sinks, recent, spread = (int(x[b]) for x in (newest, rows.sinks, rows.recent, rows.reserve))
        kept = set(range(sinks)) | set(range(last - recent + 1, last + 1))
        kept |= {j * int(prompt[b]) // spread for j in range(spread)}
        assert got[layer, b, g].tolist() == [position in kept for position in row]


def spread(shape, generator) -> torch.Tensor:
    """Positions that rise with the slot and leave gaps, as those do that are left of earlier turns."""
    return torch.randint(1, 5, shape, generator=generator).cumsum(-1) - 1


def naive_best(row: list[float], valid: list[bool], positions: list[int]) -> set[int]:
    best = set()
    for block in {position // selection.RESCUE_BLOCK for position in positions}:
        held = [i for i in range(len(row)) if valid[i] and positions[i] // selection.RESCUE_BLOCK == block]
        if held:
            best.add(max(held, key=lambda i: (row[i], i)))
    return best


@DRAWS
@given(ledgers(70))
def test_each_block_has_one_best_entry_the_latest_of_equals(drawn):
    utility, generator = drawn
    n = utility.shape[-1]
    lengths = torch.randint(1, n + 1, (utility.shape[1],), generator=generator)
    valid = (torch.arange(n) < lengths[None, :, None, None]).expand(utility.shape)
    positions = spread(utility.shape, generator)
    got = selection.block_best(utility, valid, positions)
    assert got.shape == utility.shape
    for lead, row in lists(utility):
        marked = {i for i in range(n) if got[lead][i]}
        assert marked == naive_best(row, valid[lead].tolist(), positions[lead].tolist())


def naive_cut(row, valid, shielded, positions, budget, rescue) -> set[int]:
    """Shielded entries, then (with rescue) the blocks' best, then the rest; by utility, then position."""
    held = [i for i in range(len(row)) if valid[i]]
    best = naive_best(row, valid, positions) if rescue and len(held) - min(len(held), budget) > 1 else set()
    wanted = sorted(held, key=lambda i: (shielded[i], i in best, row[i], i), reverse=True)
    return set(wanted[:budget])


@DRAWS
@given(ledgers(70), st.booleans())
def test_the_first_cut_keeps_the_protected_then_the_rescued_then_the_best(drawn, rescue):
    utility, generator = drawn
    _, batch, _, n = utility.shape
    lengths = torch.randint(1, n + 1, (batch,), generator=generator)
    valid = (torch.arange(n) < lengths[None, :, None, None]).expand(utility.shape)
    # Slots beyond a row's length hold what an earlier, longer call left.
    utility = torch.where(valid, utility, 100.0)
    shielded = (torch.rand(utility.shape, generator=generator) < 0.15) & valid
    near = (lengths + torch.randint(-2, 3, (batch,), generator=generator)).clamp_min(1)
    budget = torch.where(
        torch.rand(batch, generator=generator) < 0.3,
        near,
        torch.randint(1, n + 3, (batch,), generator=generator),
    )
    positions = spread(utility.shape, generator)
    keep = selection.first_cut(utility, valid, shielded, positions, budget, rescue)
    assert keep.dtype == torch.bool and keep.shape == utility.shape
    for lead, row in lists(utility):
        flags, places = (valid[lead].tolist(), shielded[lead].tolist()), positions[lead].tolist()
        expected = naive_cut(row, *flags, places, int(budget[lead[1]]), rescue)
        assert {i for i in range(n) if keep[lead][i]} == expected
        assert len(expected) == min(int(lengths[lead[1]]), int(budget[lead[1]]))


def slots_in_order(utility: torch.Tensor) -> torch.Tensor:
    """The positions of a first turn."""
    return torch.arange(utility.shape[-1]).expand(utility.shape)


def test_a_row_that_loses_a_single_entry_rescues_nothing():
    # Two blocks; the second holds the two lowest utilities, so that its best is the one a rescue would save.
    utility = torch.cat((torch.linspace(2, 3, 16), torch.tensor([0.5, 0.4])))[None, None, None]
    valid, nothing = torch.ones(1, 1, 1, 18, dtype=torch.bool), torch.zeros(1, 1, 1, 18, dtype=torch.bool)
    one = selection.first_cut(utility, valid, nothing, slots_in_order(utility), torch.tensor([17]), True)
    assert one.flatten().tolist() == [True] * 17 + [False]
    many = selection.first_cut(utility, valid, nothing, slots_in_order(utility), torch.tensor([4]), True)
    assert many.flatten().nonzero().flatten().tolist() == [13, 14, 15, 16]
    plain = selection.first_cut(utility, valid, nothing, slots_in_order(utility), torch.tensor([4]), False)
    assert plain.flatten().nonzero().flatten().tolist() == [12, 13, 14, 15]


def test_an_unlimited_row_keeps_everything_beside_a_limited_one():
    utility = torch.rand(1, 2, 1, 9, generator=torch.Generator().manual_seed(0))
    valid, nothing = torch.ones(1, 2, 1, 9, dtype=torch.bool), torch.zeros(1, 2, 1, 9, dtype=torch.bool)
    keep = selection.first_cut(utility, valid, nothing, slots_in_order(utility), torch.tensor([2**61, 3]), True)
    assert keep[0, 0].all() and keep[0, 1].sum() == 3


@DRAWS
@given(st.integers(1, 40), st.integers(0, 2**16))
def test_kept_slots_come_first_in_order_of_position(n, seed):
    generator = torch.Generator().manual_seed(seed)
    keep = torch.rand(2, 3, 2, n, generator=generator) < 0.4
    size = int(torch.randint(1, n + 1, (), generator=generator))
    order = selection.kept_order(keep, size)
    assert order.shape == (2, 3, 2, size)
    for lead, row in lists(keep):
        kept = [i for i in range(n) if row[i]]
        others = [i for i in range(n) if not row[i]]
        assert order[lead].tolist() == (kept + others)[:size]
