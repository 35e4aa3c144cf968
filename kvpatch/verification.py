"""Comparing the rewritten attention with the model's own, on ten tokens, unseen by the user's hooks."""

import torch

from kvpatch.errors import VerificationError
from kvpatch.hooks import silenced

# Relative RMS of logits: what another order of summation may cost in that precision. In half precision the model itself
# may lose more, by the machine's arithmetic: `rounding` measures how much.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}

MOST = 0.3  # a forward that computes something else is further off


def probe(model, keyword: str, cache) -> torch.Tensor:
    """Logits of eight prompt tokens and two decode steps, [3, V]."""
    return _read(model, keyword, cache, (8, 1, 1))


@torch.no_grad()
def _read(model, keyword: str, cache, blocks: tuple[int, ...]) -> torch.Tensor:
    """The last three tokens' logits, [3, V], of ten that are read in blocks of those lengths, the last two alone."""
    tokens = _tokens(model)
    with silenced(model):
        logits = []
        for block in tokens.split(list(blocks), dim=1):
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
    return torch.stack(logits[-3:])


@torch.no_grad()
def rounding(model, keyword: str, expected: torch.Tensor) -> float:
    """How much the unpatched model's own logits change, as relative RMS, when the ten tokens are read at once, or one
    by one, whichever changes them more.

    Args:
        expected: what `probe` gave for the unpatched model.
    """
    if TOLERANCE.get(model.dtype, 1.0) < 1e-3:
        return 0.0  # far below what is allowed
    with silenced(model):
        whole = model(
            input_ids=_tokens(model), use_cache=False, output_hidden_states=False, output_attentions=False
        ).logits
    single = _read(model, keyword, None, (1,) * 10)
    return max(_distance(one, expected) for one in (whole[0, -3:].float(), single))


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
