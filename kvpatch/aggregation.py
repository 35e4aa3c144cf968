"""How scores of successive layers and steps become one utility."""

import torch
from torch import Tensor


def aggregate(utility: Tensor, score: Tensor, aggregation: str, alpha: float) -> Tensor:
    """The utility after one more score, both of one shape.

    single: s.   cumulative: m + s.   ema: alpha m + (1 - alpha) s.   peak: max(alpha m, s), the largest score so far,
    fading.
    """
    if aggregation == "single":
        return score.expand_as(utility)
    if aggregation == "cumulative":
        return utility + score
    if aggregation == "peak":
        return torch.maximum(alpha * utility, score)
    return alpha * utility + (1.0 - alpha) * score
