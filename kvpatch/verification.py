"""Comparing the rewritten attention with the model's own, on ten tokens, unseen by the user's hooks."""

import torch

from kvpatch.errors import VerificationError
from kvpatch.hooks import silenced

# Relative RMS of logits: what another order of summation may cost in that precision. In half precision the model itself
# may lose more, by the machine's arithmetic: `rounding` measures how much.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}

MOST = 0.3  # a forward that computes something else is further off


@torch.no_grad()
def probe(model, keyword: str, cache) -> torch.Tensor:
    """Logits of eight prompt tokens and two decode steps, [3, V]."""
    tokens = _tokens(model)
    with silenced(model):
        logits = []
        for block in (tokens[:, :8], tokens[:, 8:9], tokens[:, 9:10]):
            # Asked for nothing more, transformers installs no hooks of its own into what `silenced` puts away.
            output = model(
                input_ids=block,
                use_cache=True,
                output_hidden_states=False,
                output_attentions=False,
                **{keyword: cache},
            )
            cache = output[keyword]
            logits.append(output.logits[0, -1].float())
    return torch.stack(logits)


@torch.no_grad()
def rounding(model, expected: torch.Tensor) -> float:
    """How much the unpatched model's own logits change, as relative RMS, when the ten tokens are read at once.

    Args:
        expected: what `probe` gave for the unpatched model.
    """
    if TOLERANCE.get(model.dtype, 1.0) < 1e-3:
        return 0.0  # far below what is allowed
    with silenced(model):
        whole = model(
            input_ids=_tokens(model), use_cache=False, output_hidden_states=False, output_attentions=False
        ).logits
    return _distance(whole[0, -3:].float(), expected)


def _tokens(model) -> torch.Tensor:
    return torch.arange(1, 11, device=model.device)[None] % model.config.vocab_size


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def compare(expected: torch.Tensor, got: torch.Tensor, model, own: float = 0.0) -> None:
    """Whether the patched model's logits are the unpatched one's.

    Args:
        own: `rounding` of the unpatched model; up to twice as much is allowed, `MOST` at most.

    Raises:
        VerificationError: if they are not.
    """
    error = _distance(got, expected)
    allowed = max(TOLERANCE.get(model.dtype, 3e-2), min(2 * own, MOST))
    if not error <= allowed:
        raise VerificationError(
            f"the rewritten attention of {type(model).__name__} differs from its own by {error:.2g} (relative RMS of "
            f"logits, {allowed:.2g} allowed for {model.dtype}); the model has been left as it was"
        )
