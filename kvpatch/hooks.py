"""Forward hooks that must not see some of our calls."""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn


def of_transformers(hook: Callable) -> bool:
    """Whether transformers made this hook to collect outputs that a call asked for.

    It leaves them in the modules for good after the first call with output_attentions or output_hidden_states; they do
    nothing in other calls, but can't be compiled.
    """
    return (getattr(hook, "__module__", None) or "").startswith("transformers.")


@contextlib.contextmanager
def silenced(model: nn.Module, which: Callable[[Callable], bool] = lambda hook: True) -> Iterator[None]:
    """Without the model's forward hooks for which `which(hook)` holds; they are put back as they were."""
    put_away = []
    try:
        for module in model.modules():
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                hooks = module.__dict__[name]
                if any(map(which, hooks.values())):
                    put_away.append((module, name, hooks))
                    left = ((key, hook) for key, hook in hooks.items() if not which(hook))
                    module.__dict__[name] = type(hooks)(left)
        yield
    finally:
        for module, name, hooks in put_away:
            module.__dict__[name] = hooks
