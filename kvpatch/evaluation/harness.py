"""EleutherAI's lm-evaluation-harness over a patched model: `--model kvpatch`.

    python -m kvpatch.evaluation.harness --model kvpatch --model_args pretrained=DIR,policy=inertia-lazy,budget=0.1 \
        --tasks gsm8k --batch_size 8

takes lm_eval's own arguments. Importing this module registers the name, also for `lm_eval.simple_evaluate`. Releases of
lm_eval after 0.4.13 find it by kvpatch's entry point: there plain `lm_eval --model kvpatch` does the same.

Only generate_until tasks decode, so only they measure eviction.
"""

import dataclasses
import inspect

import torch

import kvpatch
from kvpatch import attention, demo
from kvpatch.budget import UNSET, Budget
from kvpatch.policy import Policy, settle

try:
    from lm_eval.api.registry import model_registry
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'lm-evaluation-harness is run by lm_eval: {error.name} is missing, pip install "kvpatch[lm-eval]"',
        name=error.name,
    ) from error

NAME = "kvpatch"
FIELDS = [field.name for field in dataclasses.fields(Policy)]
# What `patch` takes beside policy, budget and the policy's fields, with its defaults.
SETTINGS = {
    name: parameter.default
    for name, parameter in inspect.signature(kvpatch.patch).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "budget"
}
OWN = ("policy", "budget", "min_budget", *SETTINGS, *FIELDS)
COUNTED = ("steps", "refreshes", "evicted")


class KVPatchLM(HFLM):
    """lm_eval's `hf` model, patched: `generate_until` decodes with a cache of fixed size.

    Args:
        pretrained: folder or hub name of a checkpoint, "demo", or a loaded model, which stays patched.
        policy: a name of `kvpatch.list_policies()`, or a `Policy`.
        budget: as `kvpatch.patch` takes it, or as text: "1024" (tokens), "10%" or "0.1" (share of the prompt), "full".
            May be left out for policy "full" only.
        min_budget: least number of tokens that a share may come to.
        **arguments: `patch`'s other keywords, such as ``compile=False``; fields of the policy, such as ``alpha=0.9``;
            and what lm_eval's `hf` takes, except its `backend`: that name is the attention back end here.

    Attributes:
        handle: the model's `Patch`.
        totals: calls of generate, and steps, refreshes and evicted tokens summed over them, in this process.

    Raises:
        ValueError, TypeError: for a bad argument, naming it; before the model is loaded where that is possible.
    """

    def __init__(self, pretrained, policy="inertia-lazy", budget=UNSET, min_budget=None, **arguments):
        settings = {name: arguments.pop(name) for name in SETTINGS if name in arguments}
        fields = {name: arguments.pop(name) for name in FIELDS if name in arguments}
        for name, value in settings.items():
            # "no" on the command line is a text, and would count as true.
            if isinstance(SETTINGS[name], bool) and not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r}")
        policy, budget = settle(policy, _budget(budget, min_budget), fields)
        attention.check_name(settings.get("backend", "auto"))
        if arguments.get("mixed_precision_dtype") is not None:
            raise ValueError(
                f"mixed_precision_dtype={arguments['mixed_precision_dtype']!r}: a patched cache has its model's "
                "dtype, and autocast would mix it with another; leave it out and give dtype, such as dtype=bfloat16"
            )
        unknown = [name for name in arguments if name not in inspect.signature(HFLM.__init__).parameters]
        if unknown and not isinstance(pretrained, str):  # HFLM would drop them; otherwise they are for from_pretrained
            raise TypeError(_unknown(f"unexpected argument {unknown[0]!r}"))
        if isinstance(pretrained, str) and pretrained == "demo":
            pretrained = str(demo.path())
        # HFLM's own default is "cuda" even where there is none.
        arguments.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(pretrained, backend="causal", **arguments)
        self.handle = kvpatch.patch(self.model, policy, budget=budget, **settings)
        self.totals = dict.fromkeys(("calls", *COUNTED), 0)

    def _create_model(self, *args, **kwargs):
        try:
            super()._create_model(*args, **kwargs)
        except TypeError as error:  # of the model's class, for a name that nobody knows
            raise TypeError(_unknown(str(error))) from error

    def _model_generate(self, context, max_length, stop, **generation_kwargs):
        output = super()._model_generate(context, max_length, stop, **generation_kwargs)
        self.totals["calls"] += 1
        for name in COUNTED:
            self.totals[name] += getattr(self.handle.stats, name)
        return output

    def _loglikelihood_tokens(self, requests, *args, **kwargs):
        if self.handle.budget.evicts:
            self.handle.warn_once(
                "log-likelihood requests run the model's plain forward over the whole text: policy "
                f"{self.handle.policy.name!r} has no effect on their results; generate_until tasks measure eviction"
            )
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def get_model_info(self) -> dict:
        """What lm_eval writes beside the results: also the patch, and what it did."""
        patch = {
            "version": kvpatch.__version__,
            "policy": dataclasses.asdict(self.handle.policy),
            "budget": str(self.handle.budget),
            "min_budget": self.handle.budget.min_budget,
            "backend": self.handle.backend,
            "compile": self.handle.compile,
        }
        return super().get_model_info() | {"kvpatch": patch | self.totals}


def _budget(value, least):
    """A `Budget` of what the command line or Python gave; UNSET where nothing was given."""
    if value is UNSET:
        if least is not None:
            raise ValueError(f"min_budget={least!r} without budget: it bounds a budget that is a share of the prompt")
        return UNSET
    budget = Budget.parse(value) if isinstance(value, str) else Budget.of(value)  # lm_eval reads numbers itself
    return budget if least is None else dataclasses.replace(budget, min_budget=least)


def _unknown(reason: str) -> str:
    return f"{reason}; beside the arguments of lm_eval's hf model, kvpatch takes {', '.join(OWN)}"


# A name and not the class: as a program this module is __main__, whose class would be another one.
if NAME not in model_registry:
    model_registry.register(NAME, target=f"kvpatch.evaluation.harness:{KVPatchLM.__name__}")


def main() -> None:
    """lm_eval's own command, which now knows the name."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
