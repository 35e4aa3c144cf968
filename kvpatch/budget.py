"""How many tokens a row may hold between decode steps."""

import math
import numbers
from dataclasses import dataclass

UNSET = object()  # "no budget given", which differs from None ("no eviction")
ALLOWED = (
    'an int >= 1 (tokens), a float in (0, 1) (share of each row\'s own prompt), or 1.0, None or "full" (no eviction)'
)


@dataclass(frozen=True)
class Budget:
    """Tokens held between steps; the kind is decided by the value's type, never by its size.

    Args:
        value: an int is a number of tokens; a float x in (0, 1) is a share of the row's own prompt,
            ``max(floor(x * prompt + 1e-9), min_budget)``; 1.0, None and "full" mean that nothing is evicted.
        min_budget: least number of tokens that a share may come to.

    Raises:
        TypeError, ValueError: naming the value and what is allowed.
    """

    value: int | float | str | None
    min_budget: int = 64

    def __post_init__(self):
        object.__setattr__(self, "value", _checked(self.value))
        least = self.min_budget
        if isinstance(least, bool) or not isinstance(least, numbers.Integral) or least < 1:
            raise ValueError(f"min_budget must be an int >= 1, got {least!r}")

    @classmethod
    def of(cls, value: "Budget | int | float | str | None") -> "Budget":
        """The budget itself, or one made from a plain value."""
        return value if isinstance(value, cls) else cls(value)

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """The budget that a person writes: "1024" (tokens), "10%" or "0.1" (share of the prompt), "full".

        Raises:
            ValueError: naming the text and what is allowed.
        """
        word = text.strip().lower()
        try:
            if word == "full":
                return cls("full")
            if word.endswith("%"):
                return cls(float(word[:-1]) / 100)
            return cls(float(word) if "." in word or "e" in word else int(word))
        except ValueError:
            raise ValueError(
                f'budget must be tokens ("1024"), a share of the prompt ("10%") or "full", got {text!r}'
            ) from None

    @property
    def evicts(self) -> bool:
        """Whether anything can ever be evicted under this budget."""
        return self.value is not None

    def tokens(self, prompt_length: int) -> int | None:
        """Tokens that a row with this prompt may hold; None where nothing is evicted."""
        if self.value is None:
            return None
        if isinstance(self.value, int):
            return self.value
        return max(math.floor(self.value * prompt_length + 1e-9), self.min_budget)

    def __str__(self) -> str:
        if self.value is None:
            return "full"
        return f"{self.value} tokens" if isinstance(self.value, int) else f"{self.value:.4g} of the prompt"


def _checked(value):
    if value is None or (isinstance(value, str) and value == "full"):
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"budget must be {ALLOWED}, got {value!r}")
    if isinstance(value, numbers.Integral):
        if value < 1:
            raise ValueError(f"budget must be {ALLOWED}, got {value!r}")
        return int(value)
    value = float(value)
    if value == 1.0:
        return None
    if not 0.0 < value < 1.0:  # NaN fails both comparisons
        raise ValueError(f"budget must be {ALLOWED}, got {value!r}")
    return value
