"""Running a step's compiled code again without asking which code that is.

torch.compile looks a call's code up by its arguments, layer after layer, and fetches every parameter anew: on a CPU
about a tenth of a small model's step. Between two steps of one kind that read the same number of slots nothing of that
changes but three tensors. So the calls of the first such step are written down, and later ones repeat them.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from torch import Tensor


class Call(NamedTuple):
    """One call of compiled code: its arguments, and where among them those stand that change."""

    code: Callable
    arguments: list
    changing: dict[int, int]  # place among the arguments -> place among (hidden, cos, sin)


class Tape:
    """The calls of the last step of each kind, in order.

    What is written down holds on to the buffers among the arguments: `clear` before they are to be freed.
    """

    def __init__(self):
        self._steps: dict[Hashable, tuple[object, list[Call]]] = {}
        self._recording: list[Call] | None = None
        self._ran: tuple | None = None

    def wrap(self, code: Callable) -> Callable:
        """Compiled code that says what it was called with while a step is recorded."""

        def noting(*arguments):
            outputs = code(*arguments)
            if self._recording is not None:
                self._ran = (code, arguments, outputs)
            return outputs

        return noting

    def clear(self) -> None:
        """Forget all steps."""
        self._steps.clear()

    def holds(self, kind: Hashable, owner: object) -> bool:
        """Whether a step of that kind was recorded for that very owner, which is replaced when a shape changes."""
        return kind in self._steps and self._steps[kind][0] is owner

    def record(self, kind: Hashable, owner: object, step: Callable[[Callable], Tensor]) -> Tensor:
        """Run `step(call)`, which makes its calls as ``call(function, changing, *arguments)``, and write them down.

        `changing` are those of the arguments that will differ when the step is repeated.
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
        code, given, _ = ran
        places = {at: index for at, value in enumerate(given) for index, one in enumerate(changing) if value is one}
        self._recording.append(Call(code, list(given), places))
        return result

    def play(self, kind: Hashable, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Repeat the step: each call gets the result of the one before it. Returns the last one's."""
        for code, arguments, changing in self._steps[kind][1]:
            given = (hidden, cos, sin)
            for at, index in changing.items():
                arguments[at] = given[index]
            hidden = code(*arguments)[0]
        return hidden
