"""What runs when is decided on the host alone, and every grouping takes the same steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch.policy import resolve
from kvpatch.schedule import GROUP, LONGEST, PLAIN, SCORING, Schedule

REFRESHES = [1, 2, 3, 4, 7, LONGEST, LONGEST + 1, 64, "once"]


def taken(schedule: Schedule, steps: int) -> tuple[list[bool], list[int]]:
    """Kinds of all steps in order, and how many steps each run had."""
    kinds, lengths = [], []
    while len(kinds) < steps:
        run = schedule.run_at(len(kinds) + 1, steps - len(kinds))
        kinds += run.kinds
        lengths.append(len(run.kinds))
    return kinds, lengths


def scores(refresh, step: int) -> bool:
    """The paper's own rule: scores are taken where (t - 1) mod r = 0; for "once" at the first step."""
    return step == 1 if refresh == "once" else (step - 1) % refresh == 0


@settings(deadline=None, derandomize=True, max_examples=200)
@given(refresh=st.sampled_from(REFRESHES), steps=st.integers(1, 150))
def test_runs_take_exactly_the_steps_of_the_policy(refresh, steps):
    kinds, _ = taken(Schedule.of(resolve("inertia", refresh=refresh), True), steps)
    assert kinds == [scores(refresh, step) for step in range(1, steps + 1)]


def test_a_lazy_cycle_is_plain_steps_and_one_that_scores():
    schedule = Schedule.of(resolve("inertia-lazy"), True)
    assert schedule.group.kinds == (False, False, False, True)
    assert taken(schedule, 1 + 4 * 3)[1] == [1, 4, 4, 4]


@pytest.mark.parametrize("steps", range(1, 13))
def test_what_does_not_fill_a_cycle_runs_as_single_steps(steps):
    _, lengths = taken(Schedule.of(resolve("inertia-lazy"), True), steps)
    assert lengths == [1] + [4] * ((steps - 1) // 4) + [1] * ((steps - 1) % 4)


@pytest.mark.parametrize(("refresh", "kinds"), [(1, (True,) * GROUP), ("once", (False,) * GROUP)])
def test_steps_of_one_kind_come_in_groups_of_eight(refresh, kinds):
    schedule = Schedule.of(resolve("inertia", refresh=refresh), True)
    assert schedule.group.kinds == kinds
    assert taken(schedule, 1 + GROUP * 2 + 3)[1] == [1, GROUP, GROUP, 1, 1, 1]


def test_a_long_cycle_is_no_single_group():
    # Nobody would look at the tokens for that long; the plain steps in between still come in groups.
    schedule = Schedule.of(resolve("inertia", refresh=64), True)
    assert set(taken(schedule, 130)[1]) == {1, GROUP}


def test_without_eviction_no_step_scores():
    for policy, evicts in (("inertia", False), ("full", True)):
        kinds, lengths = taken(Schedule.of(resolve(policy), evicts), 1 + GROUP)
        assert not any(kinds) and lengths == [1, GROUP]


def test_an_ungrouped_schedule_has_single_steps_of_the_same_kinds():
    kinds, lengths = taken(Schedule.of(resolve("inertia-lazy"), True, grouped=False), 14)
    assert kinds == [scores(4, step) for step in range(1, 15)] and set(lengths) == {1}


@pytest.mark.parametrize("refresh", REFRESHES)
def test_the_runs_to_capture_are_those_that_come_longest_first(refresh):
    schedule = Schedule.of(resolve("inertia", refresh=refresh), True)
    come, step = set(), 2
    while step < 300:
        come.add(schedule.run_at(step, 300 - step))
        step += len(schedule.run_at(step, 300 - step).kinds)
    come |= {schedule.run_at(step, 1) for step in range(2, 200)}
    runs = schedule.runs()
    assert come == set(runs) and runs == sorted(runs, key=lambda run: -len(run.kinds))
    assert set(runs) <= {schedule.group, PLAIN, SCORING}


@pytest.mark.parametrize(("step", "left"), [(0, 1), (1, 0)])
def test_a_step_or_rest_that_is_none_is_refused(step, left):
    with pytest.raises(ValueError, match=f"step={step}, left={left}"):
        Schedule.of(resolve("inertia"), True).run_at(step, left)
