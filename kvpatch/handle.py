"""The handle of one patched model instance: what is written into it, its caches and its compiled steps."""

import contextlib
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvpatch import attention, generation, patches, turns
from kvpatch.budget import UNSET, Budget
from kvpatch.cache import SlotCache
from kvpatch.cachelayer import site_of
from kvpatch.decoder import Decoder
from kvpatch.graphs import CudaGraphs, Runner, StepByStep
from kvpatch.policy import Policy
from kvpatch.stats import Stats

ATTRIBUTE = "_kvpatch"


class Patch:
    """A patched model's handle: what runs, what was held, and the way back (`unpatch(model)`).

    Attributes:
        model, policy, budget, backend: what was patched and how.
        stats: `Stats` of the last generation and of the compilations so far.
    """

    def __init__(self, model, architecture, policy: Policy, budget: Budget, backend: str, compile: bool, graphs: bool):
        self.model, self.architecture, self.policy, self.budget = model, architecture, policy, budget
        self.asked, self.graphs, self._chosen_for = backend, graphs, None
        self.policy_origin: str | None = None  # where a policy that is made for the model comes from
        self.uncompiled_because = architecture.uncompilable(model.config) if compile else "compile=False"
        self.compile = self.uncompiled_because is None
        self.parts = architecture.find_parts(model)
        self.keyword = patches.cache_keyword(self.parts.attentions[0])
        self.choose_backend(self.site)
        self.stats = Stats()
        self.lock = threading.Lock()
        self._cache: SlotCache | None = None
        self._last: Callable[[], SlotCache | None] = lambda: None
        self._decoders: dict[tuple, Decoder] = {}
        self._runners: dict[Decoder, Runner] = {}
        self._capturer: CudaGraphs | StepByStep | None = None
        self._met: tuple | None = None
        self._written: list[tuple[nn.Module, str, object]] = []
        self._warned: set[str] = set()

    def choose_backend(self, site: attention.Site) -> None:
        """Set `backend` and `backend_reason` for where the model is now.

        Raises:
            BackendError: if the back end that was asked for can't run there.
        """
        if site != self._chosen_for:
            self.backend, self.backend_reason = attention.choose(self.asked, site)
            self._chosen_for = site

    @property
    def site(self) -> attention.Site:
        """What a back end must serve for the model as it is now."""
        model = self.model
        return site_of(model.config, model.device, model.dtype, self.parts.attentions[0].head_dim)

    # ---- the model's own attributes ----------------------------------------------------------------------------

    def install(self) -> None:
        """Write the rewritten forwards and `generate` into the instances."""
        for module in self.parts.attentions:
            self._write(
                module,
                "forward",
                patches.rewritten_forward(
                    module.forward, self.architecture.project, self.keyword, _slots_of, _watch_of
                ),
            )
        self._write(self.parts.base, "forward", _base_forward(self.parts.base.forward, self.keyword, self))
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
        self._forget_steps()

    # ---- caches ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While the model generates or reads.

        Raises:
            RuntimeError: if it does so already.
        """
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(
                "this model is generating already, in another thread or around this call; a patched model holds one "
                "cache: run one call at a time, or load a second model"
            )
        try:
            yield
        finally:
            self.lock.release()

    def read(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, policies: Sequence = ()
    ) -> SlotCache:
        """Read a prompt and decode nothing: `fork` the cache as often as wanted and pass each fork to generate.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], left-padded; None: no pads.
            policies: names or policies that forks will have; those that cut the prompt by a method of its own
                (`Policy.prefill`) have to be known before it is read.

        Returns:
            a cache under the handle's policy and budget, which holds the whole prompt and is the caller's.

        Raises:
            ValueError: for ids or a mask of another shape, or padding on the right.
            RuntimeError: if the model is generating in another thread.
        """
        from kvpatch import sharing  # which makes caches

        return sharing.read(self, input_ids, attention_mask, policies)

    def take_cache(self, given: SlotCache | None) -> SlotCache:
        """The cache of the next generation, empty: the caller's, or the handle's own. It counts in `stats`."""
        cache = given
        if cache is None:
            if self._cache is None:
                self._cache = SlotCache(self.model.config, self.policy, self.budget, backend=self.asked)
            cache = self._cache
            cache.reset()
        if cache.phase == "empty":
            site = self.site
            cache.choose_backend(site)
            self.choose_backend(site)
        cache.stats, cache.rotary = self.stats, self.parts.rotary
        self.stats.begin(cache.nbytes)
        self._last = lambda: cache
        return cache

    def release_cache(self, cache: SlotCache) -> None:
        """The caller owns this cache from now on, with a copy of its counters."""
        cache.free_hooks()
        cache.stats = self.stats.snapshot()
        self._last = weakref.ref(cache)  # its memory is theirs to give back
        if cache is self._cache:
            self._cache = None

    def decoder_for(self, cache: SlotCache) -> Decoder:
        """The compiled steps for a cache's policy."""
        key = (cache.backend, *cache.attends.values())  # the policy's, its scorer's and the back end's
        if key not in self._decoders:
            self._decoders[key] = Decoder(
                self.parts,
                cache.policy,
                cache.backend,
                scoring_layers=cache.scoring_layers,
                compile=self.compile,
                stats=self.stats,
            )
        return self._decoders[key]

    def runner_for(self, cache: SlotCache) -> Runner | None:
        """The captured runs for a cache's policy; None where steps are not captured."""
        if self.capturer is None:
            return None
        self._meet_model()
        decoder = self.decoder_for(cache)
        if decoder not in self._runners:
            self._runners[decoder] = Runner(decoder, self.capturer)
        runner = self._runners[decoder]
        cache.before_drop = runner.clear
        return runner

    def _meet_model(self) -> None:
        """Drop captured steps if what they read of the model is not what and where it was: a graph has no guards."""
        model = self.model
        adapters = tuple(
            (*one.active_adapters, bool(one.disable_adapters), *one.merged_adapters, *one.scaling.items())
            for one in model.modules()
            if hasattr(one, "merged_adapters") and hasattr(one, "scaling")
        )
        met = (tuple(_place(one) for one in (*model.parameters(), *model.buffers())), adapters)
        if met != self._met:
            for runner in self._runners.values():
                runner.clear()
            self._met = met

    @property
    def capturer(self) -> "CudaGraphs | StepByStep | None":
        """What captures runs of steps, made when it is first asked for and anew where the model has moved."""
        if self._capturer is not None and not self._capturer.graphs:
            return self._capturer
        if self.uncaptured_because is not None:
            return None
        if self._capturer is None or self._capturer.device != self.model.device:
            self._forget_steps()
            self._capturer = CudaGraphs(self.model.device)
        return self._capturer

    @property
    def uncaptured_because(self) -> str | None:
        """Why steps are not captured as CUDA graphs; None where they are."""
        if not self.graphs:
            return "graphs=False"
        if self.model.device.type != "cuda":
            return f"the model is on {self.model.device.type!r}"
        if torch.is_autocast_enabled("cuda"):
            return "torch.autocast is on, whose copies of the weights don't outlive it"
        uncompilable = self.architecture.uncompilable(self.model.config)
        if uncompilable is not None:
            return uncompilable
        experts = getattr(self.model.config, "_experts_implementation", None)
        if experts == "grouped_mm" and not _groups_on_device(self.model):
            return 'experts_implementation="grouped_mm" asks the host, but in bfloat16 from compute capability 9 on'
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return f"rope_type {rope['rope_type']!r} asks the host for the longest position at every step"
        return None

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
        self._forget_steps()

    def _forget_steps(self) -> None:
        for runner in self._runners.values():
            runner.clear()
        self._runners.clear()
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

    def held_after(self, step: int) -> float:
        """Tokens held after decode step `step` of the last generation; see `SlotCache.held_after`.

        Raises:
            RuntimeError: before the first generation and after `free()`.
        """
        cache = self._last()
        if cache is None:
            raise RuntimeError("nothing is held: call generate first")
        return cache.held_after(step)

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


def _place(tensor: torch.Tensor) -> tuple:
    """Where a tensor lies and how it is laid out; a wrapper such as a quantised weight counts as itself."""
    try:
        return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape)
    except RuntimeError:
        return id(tensor), tensor.dtype, tuple(tensor.shape)


def _groups_on_device(model) -> bool:
    """Whether torch's product of grouped experts runs without the host there."""
    return model.dtype == torch.bfloat16 and torch.cuda.get_device_capability(model.device)[0] >= 9


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


def _slots_of(cache, layer: int):
    return cache.layer_slots(layer) if isinstance(cache, SlotCache) else None


def _watch_of(cache, layer: int):
    return cache.layer_watch(layer) if isinstance(cache, SlotCache) else None


@contextlib.contextmanager
def _showing_exit(cache: SlotCache, parts: patches.Parts, query: int) -> Iterator[None]:
    """Show a cache that reads a prompt and asks for it what the last layer gives to the norm."""
    if not cache.wants_exit:
        yield
        return
    head, thread = parts.head, threading.get_ident()
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        raise ValueError(
            f"prefill 'behavior' asks for the weight of the model's head, and {type(head).__name__} has more or other "
            "than that (an adapter, or quantised weights): merge it, or use another method"
        )

    def show(module, given: tuple) -> None:
        if threading.get_ident() == thread:  # the norm may serve another thread's plain forward meanwhile
            cache.note_exit(query, given[0], (module.weight, module.variance_epsilon, head.weight, head.bias))

    hook = parts.norm.register_forward_pre_hook(show)
    try:
        yield
    finally:
        hook.remove()


def _base_forward(original, keyword: str, handle: Patch):
    """The base model's forward, telling a SlotCache what kind of forward begins, and what it asks of the model."""
    signature = inspect.signature(original)

    def forward(self, *args, **kwargs):
        cache = next((value for value in (*kwargs.values(), *args) if isinstance(value, SlotCache)), None)
        if cache is None:
            return original(*args, **kwargs)
        parts = handle.parts  # a head or a norm may have been replaced
        cache.rotary = parts.rotary
        inputs = signature.bind_partial(*args, **kwargs).arguments
        tokens, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        query = (tokens if tokens is not None else inputs["inputs_embeds"]).shape[1]
        try:
            # No history of steps in the buffers, and no buffers that only inference mode may write.
            with torch.inference_mode(False), torch.no_grad():
                if cache.stepper is not None and query == 1 and tokens is not None and cache.phase != "empty":
                    cache.end_prompt()
                    hidden = cache.stepper.step(cache, tokens[:, 0], logits=False)
                    cache.note_fed(tokens)
                    return BaseModelOutputWithPast(last_hidden_state=hidden, **{keyword: cache})
                cache.begin_forward(query, mask)
                turn = turns.inputs(cache, query, self.get_input_embeddings().weight.dtype)
                if turn is not None:
                    turns.refuse_fused(self.config)
                    named = inputs.pop("kwargs", {}) | inputs
                    named["attention_mask"], named["position_ids"] = turn
                    args, kwargs = (), named
                with _showing_exit(cache, parts, query):
                    output = original(*args, **kwargs)
                cache.end_forward(query)
                cache.note_fed(tokens)
        except BaseException:
            cache.reset()
            raise
        return output

    return forward
