"""Patching one model instance, and taking it back."""

import contextlib

from kvpatch import attention, best, patches
from kvpatch.budget import UNSET
from kvpatch.cache import SlotCache
from kvpatch.cachelayer import heads_of, windows_of
from kvpatch.compact import why_not
from kvpatch.errors import UnsupportedModelError
from kvpatch.explanation import Explanation
from kvpatch.handle import ATTRIBUTE, Patch
from kvpatch.policy import Policy, settle
from kvpatch.verification import compare, probe, rounding


def patch(
    model,
    policy: str | Policy = "inertia-lazy",
    *,
    budget=UNSET,
    prefill=None,
    backend: str = "auto",
    compile: bool = True,
    graphs: bool = True,
    profile=None,
    verify: bool = True,
    replace: bool = False,
    **policy_fields,
) -> Patch:
    """Make `model.generate` decode with a cache of fixed size, compiled. Changes this instance only.

    Args:
        model: a loaded causal LM of a supported architecture, in eval mode, or a PEFT model around one.
        policy: a name of `list_policies()` or a `Policy`.
        budget: tokens (int), a share of each row's prompt (float in (0, 1)), a `Budget`, or 1.0, None or "full" for no
            eviction. May be left out for policy "full" only.
        prefill: a name of `list_prefill()` or a `Prefill`: the prompt is cut by that method before anything is decoded,
            and the policy goes on from there.
        profile: for policy "best", a file that `kvpatch calibrate` has written, in place of one that is looked for.
        backend: "auto", or a named attention back end, which raises where it can't run.
        compile: False runs every step eagerly.
        graphs: on a GPU, capture the steps between two looks of the host as one CUDA graph; False starts every step's
            kernels one by one. Without a GPU it changes nothing.
        verify: compare the rewritten attention with the model's own on ten tokens; costs two short forwards, and in
            half precision the ten tokens twice more, which says how much the model itself loses there.
        replace: take an earlier patch of this model back first.
        **policy_fields: fields of the policy to replace, such as ``alpha=0.9``.

    Returns:
        the model's handle.

    Raises:
        UnsupportedModelError: for a model that can't be patched.
        ValueError, TypeError: for a bad argument, naming it.
        VerificationError: if the rewritten attention differs from the model's own; the model is left as it was.
    """
    if prefill is not None:
        policy_fields["prefill"] = prefill
    model = _inside(model)
    attention.check_name(backend)
    architecture = patches.find(model)
    policy, origin = _of_model(model, policy, profile)
    policy, budget = settle(policy, budget, policy_fields)
    policy.check_backend(backend)
    _check_state(model)
    text = model.config.get_text_config(decoder=True)
    policy.check_model(windows_of(text), heads_of(text)[1], budget.evicts)
    for ranking in policy.rankings:
        for layer in ranking.scoring_layers(model.config.num_hidden_layers):
            ranking.head_weights(layer, model.config.num_attention_heads)
    if isinstance(budget.value, int):
        policy.check_budget(budget.value)
    if ATTRIBUTE in model.__dict__:
        if not replace:
            raise ValueError(
                "model is patched already: pass replace=True, or unpatch(model) first "
                f"(now: {model.__dict__[ATTRIBUTE]!r})"
            )
    try:
        architecture.find_parts(model)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not laid out as a {architecture.name} model ({error}); patch the model that it "
            "wraps"
        ) from error
    handle = Patch(model, architecture, policy, budget, backend, bool(compile), bool(graphs))
    handle.policy_origin = origin
    if origin is not None and policy.blend is None:
        handle.warn_once(f"policy 'best': {origin}")
    kept = why_not(windows_of(text), getattr(text, "rope_parameters", None)) if policy.compact else ""
    if kept:
        handle.warn_once(f"policy {policy.name!r}: positions stay those of the text: {kept}")
    if compile and not handle.compile:
        handle.warn_once(f"decode steps are not compiled: {handle.uncompiled_because}")
    earlier = model.__dict__.get(ATTRIBUTE)
    if earlier is not None:
        earlier.undo()
    try:
        expected = probe(model, handle.keyword, None) if verify else None
        own = rounding(model, handle.keyword, expected) if verify else 0.0
        handle.install()
        if verify:
            cache = SlotCache(model.config, "full", backend=handle.backend)
            compare(expected, probe(model, handle.keyword, cache), model, own)
    except BaseException:
        handle.undo()
        if earlier is not None:
            earlier.install()
        raise
    return handle


def _of_model(model, policy, profile) -> "tuple[str | Policy, str | None]":
    """The policy, and where it comes from if it is made for this model."""
    if policy == best.NAME:
        return best.policy_for(model, profile)
    if profile is not None:
        raise ValueError(f"profile={profile!r} is for policy 'best', got policy {policy!r}: leave it out")
    return policy, None


def unpatch(model) -> None:
    """Restore the model exactly; a model that is not patched is left alone."""
    handle = _inside(model).__dict__.get(ATTRIBUTE)
    if handle is not None:
        handle.undo()


@contextlib.contextmanager
def patched(model, policy: str | Policy = "inertia-lazy", **arguments):
    """`patch` for the length of a with block; the model is restored after an exception too."""
    handle = patch(model, policy, **arguments)
    try:
        yield handle
    finally:
        unpatch(model)


def explain(model) -> Explanation:
    """Which path each layer and the loop of a patched model take, and why.

    Raises:
        ValueError: if the model is not patched.
    """
    handle = getattr(_inside(model), "__dict__", {}).get(ATTRIBUTE)
    if handle is None:
        raise ValueError("model is not patched: call kvpatch.patch(model, ...) first")
    return Explanation.of(handle)


def _inside(model):
    """The causal LM inside a PEFT model, whose own `generate` leads to it; any other model itself.

    Raises:
        UnsupportedModelError: for adapters that put virtual tokens before the prompt.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{type(model).__name__} with {type(config).__name__}: adapters that put virtual tokens before the "
                "prompt bring a cache of their own; only adapters inside the layers, such as LoRA, are supported"
            )
    return model.get_base_model()


def _check_state(model) -> None:
    for module in model.modules():
        other = module.__dict__.get(ATTRIBUTE)
        if other is not None and other.model is not model:
            raise ValueError(
                f"model shares {type(module).__name__} with another patched {type(other.model).__name__}: unpatch that "
                "one first"
            )
    if model.training:
        raise ValueError("model is in training mode: call model.eval() before patch")
    devices = {parameter.device for parameter in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise UnsupportedModelError("model has parameters on the meta device: load its weights before patch")
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"model is spread over {', '.join(sorted(map(str, devices)))}: only models on one device are supported"
        )
