"""Running a step's compiled code again without asking which code that is.

torch.compile looks a call's code up by its arguments, layer after layer, and fetches every parameter anew: on a CPU
about a tenth of a small model's step. Between two steps of one kind over the same buffers nothing of that changes but
four tensors, and the number of slots that a growing cache reads. So the calls of the first such step are written down,
and later ones repeat them.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

LENGTH = 4  # place of the number of slots read among what changes


class Call(NamedTuple):
    """One call of compiled code: its arguments, and where among them those stand that change."""

    code: Callable
    arguments: list
    changing: dict[int, int]  # place among the arguments -> place among (hidden, cos, sin, index, n)


def lengths_of(graph: fx.GraphModule) -> list[bool]:
    """For each argument of a graph whether it is the number of slots that are read: the length of the slots' index.

    The index itself may be no argument: code that asks for nothing but its length is given that alone.
    """
    found = []
    for node in graph.graph.find_nodes(op="placeholder"):
        one = node.meta["example_value"]
        sources = one.node.shape_env.var_to_sources.get(one.node.expr, ()) if isinstance(one, torch.SymInt) else ()
        names = [source.name if isinstance(source.name, str) else source.name() for source in sources]
        found.append(any(name.endswith(".index.size()[0]") for name in names))
    return found


class Tape:
    """The calls of the last step of each kind, in order.

    What is written down holds on to the buffers among the arguments: `clear` before they are to be freed.
    """

    def __init__(self):
        self._steps: dict[Hashable, tuple[object, list[Call]]] = {}
        self._recording: list[Call] | None = None
        self._ran: tuple | None = None

    def wrap(self, code: Callable, lengths: Sequence[bool]) -> Callable:
        """Compiled code that says what it was called with while a step is recorded; lengths as `lengths_of`."""

        def noting(*arguments):
            outputs = code(*arguments)
            if self._recording is not None:
                self._ran = (code, arguments, outputs, lengths)
            return outputs

        return noting

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def holds(self, kind: Hashable, owner: object) -> bool:
        """Whether a step of that kind was recorded for that very owner, which is replaced when a buffer changes."""
        return kind in self._steps and self._steps[kind][0] is owner

    def record(self, kind: Hashable, owner: object, step: Callable[[Callable], Tensor]) -> Tensor:
        """Run `step(call)`, which makes its calls as ``call(function, changing, *arguments)``, and write them down.

        `changing` are hidden, cos, sin and index: those arguments, or parts of them, that differ from step to step.
        """
        self._recording = calls = []
        try:
            result = step(self._call)
        finally:
            self._recording = self._ran = None
        if None not in calls:
            self._steps[kind] = (owner, calls)
        return result

    def _call(self, function: Callable, changing: tuple[Tensor, ...], *arguments) -> Tensor:
        self._ran = None
        result = function(*arguments)
        ran = self._ran
        if ran is None or not isinstance(ran[2], (tuple, list)) or result is not ran[2][0]:
            self._recording.append(None)  # not one piece of code with one result: such a step is not repeated
            return result
        code, given, _, lengths = ran
        places = {at: index for at, value in enumerate(given) for index, one in enumerate(changing) if value is one}
        places |= {at: LENGTH for at, is_length in enumerate(lengths) if is_length}
        self._recording.append(Call(code, list(given), places))
        return result

    def play(self, kind: Hashable, hidden: Tensor, cos: Tensor, sin: Tensor, indexes: Sequence[Tensor]) -> Tensor:
        """Repeat the step: each call gets the result of the one before, and its own index. Returns the last one's."""
        for (code, arguments, changing), index in zip(self._steps[kind][1], indexes, strict=True):
            given = (hidden, cos, sin, index, index.shape[0])
            for at, which in changing.items():
                arguments[at] = given[which]
            hidden = code(*arguments)[0]
        return hidden
