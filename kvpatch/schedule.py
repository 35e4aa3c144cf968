"""What runs when: the steps of a generation, grouped into runs that the host starts at once.

Pure host code: which device executes a run, and whether it was captured as a CUDA graph, is not known here. A step is
of one of two kinds, scoring or plain (methods: InertiaKV-Lazy, arXiv 2609.03515). Step 1 reads the whole prompt and
runs alone; from step 2 on a cycle of `refresh - 1` plain steps and one scoring step repeats. Whatever does not fill a
group, such as the end of a generation, runs as single steps.
"""

from collections.abc import Callable
from typing import NamedTuple

GROUP = 8  # steps of a group where all are of one kind
LONGEST = 16  # longest cycle that is one group: the host looks at nothing in between


class Run(NamedTuple):
    """Steps that are started at once: for each whether it scores."""

    kinds: tuple[bool, ...]


PLAIN, SCORING = Run((False,)), Run((True,))


class Schedule:
    """Runs of one policy.

    Args:
        scores_at: whether decode step t = 1, 2, ... scores.
        refresh: the policy's; None where nothing is ever scored.
        grouped: False for single steps only, as where the host decides after every token.
    """

    def __init__(self, scores_at: Callable[[int], bool], refresh: int | str | None, grouped: bool = True):
        self._scores_at = scores_at
        if not grouped:
            self.group = None
        elif refresh == 1:
            self.group = Run((True,) * GROUP)
        elif refresh in (None, "once") or refresh > LONGEST:
            self.group = Run((False,) * GROUP)
        else:
            self.group = Run((False,) * (refresh - 1) + (True,))
        self._refresh = refresh

    @classmethod
    def of(cls, policy, evicts: bool, grouped: bool = True) -> "Schedule":
        """The schedule of a policy; without eviction no step scores."""
        if evicts and policy.trims:
            return cls(policy.scores_at, policy.refresh, grouped)
        return cls(lambda step: False, None, grouped)

    def run_at(self, step: int, left: int) -> Run:
        """The run that begins at decode step `step` when `left` steps, at least one, may still be taken."""
        if step < 1 or left < 1:
            raise ValueError(f"step and left must be at least 1, got step={step}, left={left}")
        group = self.group
        if step > 1 and group is not None and len(group.kinds) <= left:
            if group.kinds == tuple(self._scores_at(step + ahead) for ahead in range(len(group.kinds))):
                return group
        return SCORING if self._scores_at(step) else PLAIN

    def runs(self) -> list[Run]:
        """Every run that can come after step 1, longest first."""
        single = [PLAIN] if self._refresh in (None, "once") else [SCORING] if self._refresh == 1 else [PLAIN, SCORING]
        return single if self.group is None else [self.group, *single]
