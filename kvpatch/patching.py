"""Patching one model instance, and taking it back."""

import contextlib
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import nn

from kvpatch import attention, generation, patches
from kvpatch.budget import UNSET, Budget
from kvpatch.cache import SlotCache
from kvpatch.decoder import Decoder
from kvpatch.errors import UnsupportedModelError
from kvpatch.explanation import Explanation
from kvpatch.policy import Policy, settle
from kvpatch.stats import Stats
from kvpatch.verification import compare, probe

ATTRIBUTE = "_kvpatch"


class Patch:
    """A patched model's handle: what runs, what was held, and the way back (`unpatch(model)`).

    Attributes:
        model, policy, budget, backend: what was patched and how.
        stats: `Stats` of the last generation and of the compilations so far.
    """

    def __init__(self, model, architecture, policy: Policy, budget: Budget, backend: str, compile: bool):
        self.model, self.architecture, self.policy, self.budget = model, architecture, policy, budget
        self.backend, self.backend_reason = attention.choose(backend)
        self.compile = compile
        self.parts = architecture.find_parts(model)
        self.keyword = patches.cache_keyword(self.parts.attentions[0])
        self.stats = Stats()
        self.lock = threading.Lock()
        self._cache: SlotCache | None = None
        self._last: Callable[[], SlotCache | None] = lambda: None
        self._decoders: dict[tuple, Decoder] = {}
        self._written: list[tuple[nn.Module, str, object]] = []
        self._warned: set[str] = set()

    # ---- the model's own attributes ----------------------------------------------------------------------------

    def install(self) -> None:
        """Write the rewritten forwards and `generate` into the instances."""
        for module in self.parts.attentions:
            self._write(
                module,
                "forward",
                patches.rewritten_forward(module.forward, self.architecture.project, self.keyword, _slots_of),
            )
        self._write(self.parts.base, "forward", _base_forward(self.parts.base.forward))
        original = self.model.generate

        def generate(model, *args, **kwargs):
            return generation.generate(self, original, args, kwargs)

        self._write(self.model, "generate", generate)
        # What transformers may compile from now on is traced through the patched forward: `undo` drops it.
        self._remember(self.model, "_compiled_call")

    def _write(self, module: nn.Module, name: str, function) -> None:
        function = _in_place_of(getattr(module, name), function)
        self._remember(module, name)
        module.__dict__[name] = types.MethodType(function, module)
        if ATTRIBUTE not in module.__dict__:
            # Also a part of the model must not be copied: its forward would still run the original's.
            self._remember(module, ATTRIBUTE)
            module.__dict__[ATTRIBUTE] = self

    def _remember(self, module: nn.Module, name: str) -> None:
        self._written.append((module, name, module.__dict__.get(name, UNSET)))

    def undo(self) -> None:
        """Put back exactly what stood in each module's `__dict__`."""
        for module, name, previous in reversed(self._written):
            if previous is UNSET:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = previous
        self._written.clear()
        self.free()
        self._decoders.clear()

    # ---- caches ------------------------------------------------------------------------------------------------

    def take_cache(self, given: SlotCache | None) -> SlotCache:
        """The cache of the next generation, empty: the caller's, or the handle's own. It counts in `stats`."""
        cache = given
        if cache is None:
            if self._cache is None:
                self._cache = SlotCache(self.model.config, self.policy, self.budget, backend=self.backend)
            cache = self._cache
            cache.reset()
        cache.stats = self.stats
        self.stats.begin(cache.nbytes)
        self._last = lambda: cache
        return cache

    def release_cache(self, cache: SlotCache) -> None:
        """The caller owns this cache from now on, with a copy of its counters."""
        cache.before_move()
        cache.stats = self.stats.snapshot()
        self._last = weakref.ref(cache)  # its memory is theirs to give back
        if cache is self._cache:
            self._cache = None

    def decoder_for(self, cache: SlotCache) -> Decoder:
        """The compiled steps for a cache's policy."""
        key = tuple(cache.attends.values())  # the policy's, its scorer's and the back end's
        if key not in self._decoders:
            self._decoders[key] = Decoder(
                self.parts,
                cache.policy,
                scoring_layers=len(cache.scoring_layers),
                compile=self.compile,
                stats=self.stats,
            )
        return self._decoders[key]

    def check_parts(self) -> None:
        """Meet modules that were replaced after patching, such as a resized head.

        Raises:
            RuntimeError: if an attention or the base model is another one than was patched.
        """
        parts = self.architecture.find_parts(self.model)
        if parts == self.parts:
            return
        if parts.base is not self.parts.base or parts.attentions != self.parts.attentions:
            raise RuntimeError("the model's layers were replaced after patching: unpatch(model) and patch it again")
        self.parts = parts
        self._decoders.clear()

    def retained(self) -> torch.Tensor:
        """Original positions held: [layers, B, G, slots] int64, -1 for an empty slot.

        Raises:
            RuntimeError: before the first generation and after `free()`.
        """
        cache = self._last()
        if cache is None:
            raise RuntimeError("nothing is held: call generate first")
        return cache.retained()

    def free(self) -> None:
        """Give the cache's memory back; the next generation allocates anew."""
        if self._cache is not None:
            self._cache.free()
        self._cache, self._last = None, lambda: None
        self.stats.note_bytes(0)

    def warn_once(self, message: str) -> None:
        """Warn the first time that this message comes up."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def __deepcopy__(self, memo):
        raise RuntimeError("a patched model can't be copied: unpatch(model), copy it, and patch both")

    def __reduce_ex__(self, protocol):
        raise RuntimeError(
            "a patched model can't be pickled: unpatch(model) first; state_dict() and save_pretrained() work as they "
            "are"
        )

    def __repr__(self) -> str:
        return f"Patch({type(self.model).__name__}, {self.policy.name}, budget={self.budget}, backend={self.backend})"


def patch(
    model,
    policy: str | Policy = "inertia-lazy",
    *,
    budget=UNSET,
    prefill=None,
    backend: str = "auto",
    compile: bool = True,
    profile=None,
    verify: bool = True,
    replace: bool = False,
    **policy_fields,
) -> Patch:
    """Make `model.generate` decode with a cache of fixed size, compiled. Changes this instance only.

    Args:
        model: a loaded causal LM of a supported architecture, in eval mode.
        policy: a name of `list_policies()` or a `Policy`.
        budget: tokens (int), a share of each row's prompt (float in (0, 1)), a `Budget`, or 1.0, None or "full" for no
            eviction. May be left out for policy "full" only.
        prefill, profile: reserved; must be None.
        backend: "auto", or a named attention back end, which raises where it can't run.
        compile: False runs every step eagerly.
        verify: compare the rewritten attention with the model's own on ten tokens; costs two short forwards.
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
        raise ValueError(f"prefill={prefill!r}: prefill-time compression is not part of this release; leave it out")
    if profile is not None:
        raise ValueError(f"profile={profile!r}: tuned profiles are not part of this release; leave it out")
    policy, budget = settle(policy, budget, policy_fields)
    attention.choose(backend)
    architecture = patches.find(model)
    _check_state(model)
    policy.scoring_layers(model.config.num_hidden_layers)
    if isinstance(budget.value, int):
        policy.protected(budget.value)
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
    handle = Patch(model, architecture, policy, budget, backend, bool(compile))
    earlier = model.__dict__.get(ATTRIBUTE)
    if earlier is not None:
        earlier.undo()
    try:
        expected = probe(model, handle.keyword, None) if verify else None
        handle.install()
        if verify:
            cache = SlotCache(model.config, "full", backend=handle.backend)
            compare(expected, probe(model, handle.keyword, cache), model)
    except BaseException:
        handle.undo()
        if earlier is not None:
            earlier.install()
        raise
    return handle


def unpatch(model) -> None:
    """Restore the model exactly; a model that is not patched is left alone."""
    handle = model.__dict__.get(ATTRIBUTE)
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
    handle = getattr(model, "__dict__", {}).get(ATTRIBUTE)
    if handle is None:
        raise ValueError("model is not patched: call kvpatch.patch(model, ...) first")
    return Explanation.of(handle)


def _in_place_of(original, function):
    """`function(self, ...)` under the name and signature of the bound `original`."""
    functools.update_wrapper(function, original)
    del function.__wrapped__
    signature = inspect.signature(original)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [
        one.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) if one.kind == one.POSITIONAL_ONLY else one
        for one in signature.parameters.values()
    ]
    function.__signature__ = signature.replace(parameters=[itself, *rest])
    return function


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


def _slots_of(cache, layer: int):
    return cache.layer_slots(layer) if isinstance(cache, SlotCache) else None


def _base_forward(original):
    """The base model's forward, telling a SlotCache what kind of forward begins."""
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, SlotCache)), None)
        if cache is None:
            return original(*args, **kwargs)
        inputs = signature.bind_partial(*args, **kwargs).arguments
        tokens = inputs.get("input_ids")
        query = (tokens if tokens is not None else inputs["inputs_embeds"]).shape[1]
        try:
            # No history of steps in the buffers, and no buffers that only inference mode may write.
            with torch.inference_mode(False), torch.no_grad():
                cache.begin_forward(query, inputs.get("attention_mask"))
                output = original(*args, **kwargs)
                cache.end_forward(query)
        except BaseException:
            cache.reset()
            raise
        return output

    return forward
