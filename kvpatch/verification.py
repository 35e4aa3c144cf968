"""Comparing the rewritten attention with the model's own, on ten tokens, unseen by the user's hooks."""

import torch

from kvpatch.errors import VerificationError
from kvpatch.hooks import silenced

# Relative RMS of logits: what one more order of summation may cost in that precision.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@torch.no_grad()
def probe(model, keyword: str, cache) -> torch.Tensor:
    """Logits of eight prompt tokens and two decode steps, [3, V]."""
    tokens = torch.arange(1, 11, device=model.device)[None] % model.config.vocab_size
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


def compare(expected: torch.Tensor, got: torch.Tensor, model) -> None:
    error = ((got - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
    allowed = TOLERANCE.get(model.dtype, 3e-2)
    if not error <= allowed:
        raise VerificationError(
            f"the rewritten attention of {type(model).__name__} differs from its own by {error:.2g} (relative RMS of "
            f"logits, {allowed:.0e} allowed for {model.dtype}); the model has been left as it was"
        )
