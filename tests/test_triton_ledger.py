"""The ledger's operators, admit and choose, decide as the naive oracle does, and so do whole runs of steps."""

import kernel_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from kernel_cases import DEVICE, QUIET, RULES, UNTIMED, assert_close, assert_scores, bits, drawn

from kvpatch.attention import triton

pytestmark = [pytest.mark.usefixtures("poisoned"), QUIET]

ledgers = drawn(
    lead=((1, 1), (3, 1), (2, 3), (1, 2)),  # layers and KV heads with a ranking of their own
    batch=(1, 2, 3),
    capacity=(*range(8, 300, 24), 1024, 1025, 1500, 2200),  # the kernels rank 1024 at a time
    inactive=(False, True),
    kind=("random", "tied", "nearly tied", "signed", "infinite"),
)


class Ledger:
    """Random rankings; utility that no entry has is NaN. `grows`: whether free slots may lie behind the last entry."""

    def __init__(self, case: dict, grows: bool):
        self.generator = generator = torch.Generator().manual_seed(case["seed"])
        (layers, heads), batch, capacity = case["lead"], case["batch"], case["capacity"]
        lead = (layers, batch, heads)
        self.length = self.whole(1, capacity + (not grows), *lead)
        self.free = (torch.rand(lead, generator=generator) * (self.length + grows)).long()
        self.newest = 3 * capacity + self.whole(0, 50, batch)
        order = [torch.randperm(3 * capacity, generator=generator)[:capacity] for _ in range(self.length.numel())]
        self.positions = torch.stack(order).view(*lead, capacity)
        if not grows:
            self.positions.scatter_(-1, self.free[..., None], self.newest[None, :, None, None].expand(*lead, 1))
        utility = torch.rand(*lead, capacity, generator=generator) / capacity
        if case["kind"] == "tied":
            utility = self.whole(1, 4, *lead, capacity) / 7.0
        elif case["kind"] == "nearly tied":
            utility = (1.0 + 2.5e-7 * self.whole(0, 16, *lead, capacity)) / 7.0
        elif case["kind"] == "signed":
            utility = utility - 0.5 / capacity
        elif case["kind"] == "infinite":
            utility = torch.where(utility < 0.3 / capacity, -torch.inf, utility)
        behind = torch.arange(capacity) >= self.length[..., None]
        self.utility = torch.where(behind, torch.nan, utility)[None]
        self.active = torch.ones(batch, dtype=torch.bool)
        self.active[self.whole(0, batch, 1)] = not case["inactive"]

    def whole(self, low, high, *shape):
        return torch.randint(low, high, shape, generator=self.generator)

    def copies(self, *names, device=DEVICE, wide=False):
        tensors = [getattr(self, name).clone().to(device) for name in names]
        return [tensor.double() if wide and tensor.is_floating_point() else tensor for tensor in tensors]

    def rows(self) -> list:
        """Budget, sinks, recent, reserve and prompt of each row, at least one entry of which is open to eviction."""
        batch = len(self.newest)
        protected = [self.whole(0, 5, batch) * self.whole(0, 2, 1) for _ in range(3)]
        least = sum(protected) + 1
        budget = least + (torch.rand(batch, generator=self.generator) * self.length.amin((0, 2))).long()
        return [budget, *protected, self.whole(1, int(self.newest.max()), batch)]


ADMITTED = ("utility", "positions", "free", "length", "newest", "active")


@settings(max_examples=40, **UNTIMED)
@given(case=ledgers, how=drawn(evicts=(False, True, True), mean=(False, True, True)))
def test_a_new_token_starts_with_its_position_and_the_mean_of_the_others_or_zero(case, how):
    evicts, mean = how["evicts"], how["mean"]
    kind = "signed" if case["kind"] == "infinite" else case["kind"]
    ledger = Ledger(case | {"kind": kind}, grows=True)
    found, expected = ledger.copies(*ADMITTED), ledger.copies(*ADMITTED, device="cpu", wide=True)
    triton.admit(*found, evicts, mean)
    oracle.admit(*expected, evicts, mean)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one.cpu(), other)
    utility, before = found[0].cpu(), ledger.utility
    at = torch.arange(case["capacity"]) == ledger.free[..., None]
    at = (at & ledger.active[:, None, None] & evicts)[None]
    assert torch.equal(bits(utility[~at]), bits(before[~at]))
    size = before.nan_to_num().abs().max()  # means of numbers of both signs may be small beside them
    assert ((utility[at] - expected[0][at]).abs() <= 1e-6 * size).all()


def check_choice(ledger, rows, scored, rule, alpha, window, evicts=True):
    """Call `choose`, compare it with the oracle's, and give the next free slots."""
    held = torch.arange(ledger.positions.shape[-1]) < ledger.length[..., None]
    pending = torch.zeros(1, 1, len(ledger.newest), 1, held.shape[-1] if scored else 0)
    if scored:
        pending[0] = torch.where(held, torch.rand(pending.shape[1:], generator=ledger.generator), 0.0)
    names = ("positions", "free", "length", "newest", "active")
    (utility,), others, wide = ledger.copies("utility"), ledger.copies(*names), ledger.copies("utility", wide=True)
    expected, right = pending.double(), ledger.copies(*names, device="cpu")
    late, protects = pending.clone().to(DEVICE), bool(sum(rows[1:4]).any())
    more = (scored, rule, alpha, oracle.TIE, window)
    triton.choose(utility, late, *others, [row.to(DEVICE) for row in rows], evicts, protects, *more)
    wide = wide[0].cpu()
    oracle.choose(wide, expected, *right, rows, evicts, scored, rule, alpha, window)

    for name, one in zip(names, others, strict=True):
        if name != "free":
            assert torch.equal(one.cpu(), getattr(ledger, name)), name
    utility, touched = utility.cpu(), (held & ledger.active[:, None, None] & bool(scored))[None]
    assert torch.equal(bits(utility[~touched]), bits(ledger.utility[~touched]))
    if scored:
        assert_scores(utility[touched], wide[touched])
        assert torch.equal(late.cpu()[0, 0, :, 0] == 0, (pending[0, 0, :, 0] == 0) | ledger.active[:, None])
        assert torch.equal(late.cpu()[0, 0][~ledger.active], pending[0, 0][~ledger.active])
    chosen, free = others[1].cpu(), right[1]

    def edge(tie: float):
        state = [right[0], free.clone(), *right[2:]]
        oracle.choose(wide, expected, *state, rows, evicts, 0, rule, alpha, window, tie)
        return state[1]

    for l, b, g in (chosen != free).nonzero().tolist():
        assert oracle.may_differ(wide[0, l, b, g], int(chosen[l, b, g]), int(free[l, b, g]))
        # Only where something was summed, or a utility lies at the very edge of a tie.
        assert scored or chosen[l, b, g] in (edge(0.9 * oracle.TIE)[l, b, g], edge(1.1 * oracle.TIE)[l, b, g])
    return chosen


@settings(max_examples=60, **UNTIMED)
@given(case=ledgers, how=drawn(window=(0, 0, 0, 1, 50, 900, 2000), evicts=(False, True, True, True)))
def test_the_next_free_slot_is_the_lowest_unprotected_utility_once_over_budget(case, how):
    ledger = Ledger(case, grows=False)
    check_choice(ledger, ledger.rows(), 0, "ema", 0.8, how["window"], how["evicts"])


@settings(max_examples=20, **UNTIMED)
@given(case=ledgers, how=drawn(rule=RULES, scored=range(1, 6)))
def test_one_update_a_step_by_the_mean_over_layers_comes_before_the_choice(case, how):
    kind = case["kind"] if case["kind"] in ("random", "tied") else "random"
    case = case | {"lead": (1, 1), "kind": kind}
    ledger = Ledger(case, grows=False)
    check_choice(ledger, ledger.rows(), how["scored"], how["rule"], 0.6, 0)


def test_of_equal_utilities_the_oldest_goes_wherever_it_lies():
    case = {"lead": (1, 1), "batch": 1, "capacity": 1500, "inactive": False, "kind": "tied", "seed": 3}
    ledger = Ledger(case, grows=False)
    ledger.utility[:] = 0.25
    ledger.length[:] = 1400
    rows = [torch.tensor([count]) for count in (1300, 0, 0, 0, 9)]
    chosen = check_choice(ledger, rows, 0, "ema", 0.8, 0)
    assert chosen == ledger.positions[0, 0, 0, :1400].argmin()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_utilities_that_are_no_numbers_still_give_a_slot_that_is_held(share):
    case = {"lead": (1, 1), "batch": 1, "capacity": 64, "inactive": False, "kind": "random", "seed": 3}
    ledger = Ledger(case, grows=False)
    ledger.length[:] = 40
    ledger.utility[..., : int(40 * share)] = torch.nan
    utility, positions, free, length, newest, active = ledger.copies(*ADMITTED)
    rows = [torch.tensor([count], device=DEVICE) for count in (30, 0, 0, 0, 9)]
    nothing = torch.empty(0, device=DEVICE)
    places = (positions, free, length, newest, active)
    triton.choose(utility, nothing, *places, rows, True, False, 0, "ema", 0.8, oracle.TIE, 0)
    assert 0 <= int(free) < 40


RUNS = {
    "as the paper's": {"coupling": "sequential", "scorer": "attention", "rule": "ema", "head_pool": "mean"},
    "with one update a step": {"coupling": "uniform", "scorer": "vnorm", "rule": "ema", "head_pool": "rms"},
    "with a ranking a layer": {"coupling": "per_layer", "scorer": "entropy", "rule": "single", "head_pool": "max"},
    "with a ranking a head": {"coupling": "per_head", "scorer": "attention", "rule": "cumulative", "head_pool": "mean"},
    "through a sliding window": {"coupling": "sequential", "scorer": "attention", "rule": "ema", "window": 14},
    "with few scoring steps": {"coupling": "sequential", "scorer": "attention", "rule": "ema", "refresh": 4},
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_run_of_steps_keeps_what_the_oracle_keeps(run):
    layers, batch, groups, queries, width, capacity, alpha = 2, 2, 2, 2, 16, 64, 0.6
    coupling, scorer, rule, window = run["coupling"], run["scorer"], run["rule"], run.get("window", 0)
    head_pool, uniform = run.get("head_pool", "mean"), coupling == "uniform"
    own_layers, own = layers if coupling.startswith("per_") else 1, groups if coupling == "per_head" else 1
    generator = torch.Generator().manual_seed(11)
    limits = [torch.tensor(row) for row in ([18, 11], [2, 0], [3, 2], [2, 0], [17, 9])]  # budget to prompt
    lead = (own_layers, batch, own)
    started = limits[4][None, :, None].expand(lead)
    mine = {
        "keys": torch.randn(layers, batch, groups, capacity, width, generator=generator),
        "values": torch.randn(layers, batch, groups, capacity, width, generator=generator),
        "utility": torch.zeros(1, *lead, capacity),
        "pending": torch.zeros(1, 1, batch, 1, capacity if uniform else 0),
        "positions": torch.arange(capacity).expand(*lead, capacity).contiguous(),
        "free": started.clone(),
        "length": started.clone(),
        "newest": limits[4] - 1,
        "active": torch.ones(batch, dtype=torch.bool),
    }
    theirs = {name: tensor.clone() for name, tensor in mine.items()}
    theirs |= {name: theirs[name].double() for name in ("keys", "values", "utility", "pending")}
    mine = {name: tensor.to(DEVICE) for name, tensor in mine.items()}
    rows = [row.to(DEVICE) for row in limits]
    names = ("utility", "positions", "free", "length", "newest", "active")
    for step in range(10):
        if step == 8:
            mine["active"][1] = theirs["active"][1] = False
        for ledger, admit in ((mine, triton.admit), (theirs, oracle.admit)):
            ledger["newest"] += ledger["active"]
            admit(*(ledger[name] for name in names), True, True)
        scores = step % run.get("refresh", 1) == 0
        for l in range(layers):
            q, k, v = (torch.randn(batch, n, 1, width, generator=generator) for n in (groups * queries, groups, groups))
            at = l if own_layers > 1 else 0
            target, how = ("pending", "cumulative") if uniform else ("utility", rule)
            places = [mine[name][at] for name in ("positions", "free", "length")] + [mine["newest"], mine["active"]]
            out = triton.attend(
                *(x.to(DEVICE) for x in (q, k, v)), mine["keys"][l], mine["values"][l], mine[target][:, at], *places,
                capacity, width**-0.5, window, scorer if scores else "", head_pool, how, alpha,
            )  # fmt: skip
            keys, values, length = theirs["keys"][l], theirs["values"][l], theirs["length"][at]
            oracle.write(keys, values, k.double(), v.double(), theirs["free"][at])
            valid = oracle.valid_slots(length, groups, theirs["positions"][at], theirs["newest"], window)
            expected, _, weights = oracle.attention(q, keys, values, valid, width**-0.5, theirs["active"])
            assert_close(out, expected, 1e-5, 2e-6)
            if scores:
                found = oracle.scores(weights, values, valid, own, scorer, head_pool)
                oracle.update(theirs[target][0, at], found, length, theirs["active"], how, alpha)
        scored = layers if uniform and scores else 0
        places = [[ledger[name] for name in ("utility", "pending", *names[1:])] for ledger in (mine, theirs)]
        triton.choose(*places[0], rows, True, True, scored, rule, alpha, oracle.TIE, window)
        oracle.choose(*places[1], limits, True, scored, rule, alpha, window)
        for l, b, g in (mine["free"].cpu() != theirs["free"]).nonzero().tolist():
            one, other = int(mine["free"][l, b, g]), int(theirs["free"][l, b, g])
            assert oracle.may_differ(theirs["utility"][0, l, b, g], one, other)
            theirs["free"][l, b, g] = one
        for name in ("positions", "length", "newest"):
            assert torch.equal(mine[name].cpu(), theirs[name]), name
        assert (theirs["length"] <= limits[0][:, None] + 1).all()
    assert (theirs["newest"][:, None] >= theirs["length"]).all()  # entries were evicted
