"""One ranking of the entries that are held: what is scored, in which layers, and how scores become a utility."""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from kvpatch import scoring

AGGREGATIONS = ("single", "cumulative", "ema", "peak")
HEAD_POOLS = ("mean", "max", "rms")
NEW_TOKEN = ("mean", "zero")


@dataclass(frozen=True)
class Ranking:
    """One ranking; the fields are those of `kvpatch.Policy`.

    Raises:
        ValueError: for a value outside its axis or a combination that makes no sense.
    """

    scorer: str = "attention"
    head_pool: str = "mean"
    score_layers: str | Sequence[int] = "all"
    score_heads: str | Sequence[tuple] = "all"
    aggregation: str = "ema"
    alpha: float = 0.8
    new_token: str = "mean"

    def __post_init__(self):
        spec = scoring.scorer(self.scorer)
        one_of("head_pool", self.head_pool, HEAD_POOLS)
        one_of("aggregation", self.aggregation, AGGREGATIONS)
        one_of("new_token", self.new_token, NEW_TOKEN)
        if not (is_real(self.alpha) and 0.0 <= self.alpha < 1.0):
            raise ValueError(f"alpha must be a number in [0, 1), got {self.alpha!r}")
        if not (isinstance(self.score_layers, str) and self.score_layers == "all"):
            object.__setattr__(self, "score_layers", _layers(self.score_layers))
        if not (isinstance(self.score_heads, str) and self.score_heads == "all"):
            object.__setattr__(self, "score_heads", _heads(self.score_heads))
            if self.score_layers != "all":
                raise ValueError(
                    f"score_layers={self.score_layers!r} with score_heads={self.score_heads!r}: the heads name their "
                    'layers; use score_layers="all"'
                )
            if self.scorer != "attention":
                raise ValueError(f'score_heads with scorer={self.scorer!r}: only scorer="attention" knows heads')
        if not spec.uses_attention and self.head_pool != "mean":
            raise ValueError(
                f"head_pool={self.head_pool!r} with scorer={self.scorer!r}: that scorer does not use attention, so "
                'only head_pool="mean" makes sense'
            )

    def check_coupling(self, coupling: str, refresh) -> None:
        """Whether this ranking makes sense under a policy's coupling and refresh."""
        for field in ("score_layers", "score_heads"):
            if getattr(self, field) != "all" and coupling in ("per_layer", "per_head"):
                raise ValueError(
                    f"{field}={getattr(self, field)!r} with coupling={coupling!r}: layers outside it would "
                    f'have no ranking of their own; use {field}="all" or a shared coupling'
                )
        if self.scorer == "entropy" and coupling == "per_head":
            raise ValueError(
                'scorer="entropy" with coupling="per_head": the entropy is that of a layer whose heads hold one set; '
                "use another coupling"
            )
        if self.scorer == "recency" and refresh != 1:
            raise ValueError(f'refresh={refresh!r} with scorer="recency": recency needs refresh=1')

    def scoring_layers(self, layers: int) -> tuple[int, ...]:
        """Indices of the layers whose scores count, of a model with that many layers."""
        field, named = "score_layers", self.score_layers
        if self.score_heads != "all":
            field, named = "score_heads", tuple(dict.fromkeys(layer for layer, *_ in self.score_heads))
        if named == "all":
            return tuple(range(layers))
        outside = [index for index in named if index >= layers]
        if outside:
            raise ValueError(f"{field} names layers {outside}, the model has {layers} (0 to {layers - 1})")
        return named

    def head_weights(self, layer: int, heads: int) -> list[float] | None:
        """What each of a layer's query heads is multiplied by, so that pooling all of them pools `score_heads` only.

        None where all heads count as they are.
        """
        if self.score_heads == "all":
            return None
        outside = [one[:2] for one in self.score_heads if one[1] >= heads]
        if outside:
            raise ValueError(f"score_heads names heads {outside}, a layer has {heads} (0 to {heads - 1})")
        chosen = {head: weight[0] if weight else 1.0 for index, head, *weight in self.score_heads if index == layer}
        factor = {"mean": 1.0, "rms": 0.5, "max": 0.0}[self.head_pool]
        return [(heads / len(chosen)) ** factor * chosen[head] if head in chosen else 0.0 for head in range(heads)]


@dataclass(frozen=True)
class Blend(Ranking):
    """A second ranking, whose best entries are kept whatever the first one says of them.

    Args:
        share: part of the budget, in (0, 1), that goes to the best of this ranking.
        least: in [0, 1); an entry is among the best only if it has that part of the ranking's whole utility, so that a
            ranking which finds nothing takes nothing. Only for scorers that use attention, which is never negative.
        closing: width, in entries, of a morphological closing of the utility over positions at the first large cut: a
            gap of fewer entries between high ones is filled, so that what belongs together stays together. 1: none.
        focus: in (0, 1); a row in which the `selection.FOCUS` best entries behind the first token have less than that
            part of this ranking's utility when the first step is done holds nothing that the ranking looks for: it goes
            without the ranking from then on. Only where all layers share a ranking. None: no row does.
    """

    share: float = 0.5
    least: float = 0.0
    closing: int = 1
    focus: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not (is_real(self.share) and 0.0 < self.share < 1.0):
            raise ValueError(f"share must be a number in (0, 1), got {self.share!r}")
        if not (is_real(self.least) and 0.0 <= self.least < 1.0):
            raise ValueError(f"least must be a number in [0, 1), got {self.least!r}")
        if self.focus is not None and not (is_real(self.focus) and 0.0 < self.focus < 1.0):
            raise ValueError(f"focus must be a number in (0, 1) or None, got {self.focus!r}")
        if not (is_int(self.closing) and self.closing >= 1):
            raise ValueError(f"closing must be an int >= 1, got {self.closing!r}")
        if not scoring.scorer(self.scorer).uses_attention:
            for field, unset in (("least", 0.0), ("focus", None)):
                if getattr(self, field) != unset:
                    raise ValueError(
                        f"{field}={getattr(self, field)!r} with scorer={self.scorer!r}: only those that use attention "
                        "have it"
                    )

    def check_coupling(self, coupling: str, refresh) -> None:
        """Whether this ranking makes sense under a policy's coupling and refresh."""
        super().check_coupling(coupling, refresh)
        if self.focus is not None and coupling in ("per_layer", "per_head"):
            raise ValueError(
                f"focus={self.focus!r} with coupling={coupling!r}: a row has it where its layers share a ranking; use "
                "a shared coupling"
            )

    def count(self, budget: int) -> int:
        """Entries of a budget of that many tokens that this ranking keeps."""
        return part_of(self.share, budget)


def one_of(field: str, value, allowed: tuple[str, ...]) -> None:
    """ValueError for a value that is not allowed."""
    if value not in allowed:
        raise ValueError(f"{field} must be one of {', '.join(allowed)}, got {value!r}")


def is_int(value) -> bool:
    """Whether it is an integer and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_real(value) -> bool:
    """Whether it is a number and no truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_part(field: str, value) -> None:
    """ValueError for what is neither a count nor a share of the budget."""
    if not ((is_int(value) and value >= 0) or (isinstance(value, float) and 0.0 <= value < 1.0)):
        raise ValueError(f"{field} must be an int >= 0 or a float in [0, 1) (share of budget), got {value!r}")


def part_of(value: int | float, budget: int) -> int:
    """A count, or a share of a budget, as a number of entries."""
    return math.floor(value * budget + 1e-9) if isinstance(value, float) else value


def check_seed(value) -> None:
    """ValueError for what the scorer "random" can't take."""
    if not (is_int(value) and abs(value) < 2**32):
        raise ValueError(f"seed must be an int between -2**32 and 2**32, got {value!r}")


def _layers(value) -> tuple[int, ...]:
    indices = value.tolist() if hasattr(value, "tolist") else value  # arrays and tensors
    if isinstance(indices, str) or not isinstance(indices, Sequence) or not indices:
        raise ValueError(f'score_layers must be "all", a range or a non-empty list of layer indices, got {value!r}')
    if not all(is_int(index) and index >= 0 for index in indices):
        raise ValueError(f"score_layers must hold layer indices >= 0, got {value!r}")
    return tuple(sorted({int(index) for index in indices}))


def _heads(value) -> tuple[tuple, ...]:
    given = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise ValueError(f'score_heads must be "all" or a non-empty list of (layer, head) pairs, got {value!r}')
    found: dict[tuple[int, int], float] = {}
    for one in given:
        fits = isinstance(one, Sequence) and len(one) in (2, 3)
        if not fits or not all(is_int(index) and index >= 0 for index in one[:2]):
            raise ValueError(f"score_heads must hold pairs of indices >= 0, or such pairs with a weight, got {one!r}")
        if len(one) == 3 and not (is_real(one[2]) and 0.0 < one[2] < math.inf):
            raise ValueError(f"score_heads must hold weights above 0, got {one!r}")
        pair, weight = (int(one[0]), int(one[1])), float(one[2]) if len(one) == 3 else 1.0
        if found.setdefault(pair, weight) != weight:
            raise ValueError(f"score_heads must give the head {pair} one weight, got {found[pair]} and {weight}")
    return tuple((*pair, found[pair]) if found[pair] != 1.0 else pair for pair in sorted(found))
