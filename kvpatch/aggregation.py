"""How scores of successive layers and steps become one utility."""

from torch import Tensor


def aggregate(utility: Tensor, score: Tensor, aggregation: str, alpha: float) -> Tensor:
    """The utility after one more score, both of one shape: the score, the sum, or ``alpha m + (1 - alpha) s``."""
    if aggregation == "single":
        return score.expand_as(utility)
    if aggregation == "cumulative":
        return utility + score
    return alpha * utility + (1.0 - alpha) * score
