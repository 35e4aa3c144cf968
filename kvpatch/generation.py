"""`generate` of a patched model: transformers prepares everything, our loop takes the steps."""

import contextlib
import copy
import inspect
import warnings
from collections.abc import Callable, Iterator

import torch
from transformers import StoppingCriteriaList, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from kvpatch import loops, turns
from kvpatch.cache import SlotCache
from kvpatch.cachelayer import windows_of
from kvpatch.hooks import of_transformers, silenced

CACHE_NAMES = ("cache", "past_key_values")
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# Generation settings that need a cache that can be cropped, another cache, or another loop.
UNSUPPORTED = (
    "cache_implementation",
    "prompt_lookup_num_tokens",
    "penalty_alpha",
    "dola_layers",
    "constraints",
    "force_words_ids",
    "assistant_early_exit",
    "use_mtp",
    "is_assistant",
    "token_healing",
)


def generate(handle, original: Callable, args: tuple, kwargs: dict):
    """Run one call of the patched model's `generate`.

    Args:
        handle: the model's `Patch`.
        original: the `generate` that stood there, bound.
        args, kwargs: of the call.

    Raises:
        ValueError: for an argument that can't be honoured, naming it, before any work.
        RuntimeError: if the model is generating in another thread.
    """
    call = inspect.signature(original).bind(*args, **kwargs).arguments
    call.update(call.pop("kwargs", {}))
    with handle.in_use():
        foreign = next((name for name in CACHE_NAMES if call.get(name) is not None), None)
        given = call.pop(foreign, None) if foreign else None
        if given is not None and not isinstance(given, SlotCache):
            handle.warn_once(
                f"{foreign}={type(given).__name__} is not a SlotCache: this call runs unpatched, without eviction"
            )
            return original(*args, **kwargs)
        for name in (*CACHE_NAMES, "custom_generate"):
            if name in call and call[name] is None:
                del call[name]
        handle.check_parts()
        config = _effective_config(handle.model, call)
        _refuse(handle.model, call, config)
        _own_stop_strings(call, config)
        if given is not None:
            _check_given(foreign, given, call, config, handle)
        cache = handle.take_cache(given)
        try:
            # One grad mode for all calls: compiled code is guarded by it, and buffers made in inference mode could
            # not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                result = _run(handle, original, call, config, cache)
        except BaseException:
            cache.free()  # the next call starts from nothing
            if cache is given:
                handle.release_cache(cache)
            raise
        if given is not None or getattr(config, "return_dict_in_generate", False):
            handle.release_cache(cache)
        return result


def _run(handle, original: Callable, call: dict, config, cache: SlotCache):
    why = host_loop_reason(config, call)
    if why:
        if config.prefill_chunk_size is not None:
            raise ValueError(
                f"prefill_chunk_size={config.prefill_chunk_size!r} can't be used together with {why}: leave it out"
            )
        if cache.needs.repeat:
            raise ValueError(
                f"policy {cache.policy.name!r} has the model repeat its prompt, which can't be used together with {why}"
            )
        # Beams need our steps only; whoever asks for every layer's output gets transformers' own layers.
        cache.stepper = handle.decoder_for(cache) if config.num_beams > 1 and not config.output_hidden_states else None
        try:
            with _without_default_stop_strings(handle.model), _compilable(handle, cache.stepper is not None):
                return original(**call, **{handle.keyword: cache})
        finally:
            cache.stepper = None
    streamer = call.get("streamer")

    def decode_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        return loops.decode(
            handle, cache, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, streamer
        )

    with _without_default_stop_strings(handle.model), _compilable(handle):
        return original(**call, custom_generate=decode_loop)


def _compilable(handle, ours: bool = True):
    """Around a call whose steps are compiled ones of `ours`."""
    return silenced(handle.model, of_transformers) if ours and handle.compile else contextlib.nullcontext()


@contextlib.contextmanager
def _without_default_stop_strings(model) -> Iterator[None]:
    """They are a criterion now; transformers would look for the tokenizer, which the call no longer has."""
    defaults = model.generation_config
    stop_strings, defaults.stop_strings = defaults.stop_strings, None
    try:
        yield
    finally:
        defaults.stop_strings = stop_strings


def host_loop_reason(config, call: dict) -> str | None:
    """Why transformers' own loop has to run; None where our loop runs."""
    if config.num_beams > 1:
        return f"num_beams={config.num_beams}"
    if getattr(config, "output_hidden_states", False):
        return "output_hidden_states needs every layer's output"
    if call.get("inputs_embeds") is not None:
        return "inputs_embeds"
    return None


def _effective_config(model, call: dict):
    """The generation config that transformers will arrive at."""
    given = copy.deepcopy(call.get("generation_config"))
    names = inspect.signature(type(model).generate).parameters
    fields = {name: value for name, value in call.items() if name not in names and name != "tokenizer"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model._prepare_generation_config(given, **fields)[0]


def _refuse(model, call: dict, config) -> None:
    if model.training:
        raise ValueError("model is in training mode: call model.eval() before generate")
    if call.get("custom_generate") is not None:
        raise ValueError(
            f"custom_generate={call['custom_generate']!r} can't be used on a patched model: leave it out, or "
            "unpatch(model) first"
        )
    if call.get("assistant_model") is not None:
        raise ValueError(
            f"assistant_model={type(call['assistant_model']).__name__}: assisted decoding needs a cache that can be "
            "cropped; leave it out"
        )
    if call.get("synced_gpus"):
        raise ValueError("synced_gpus=True is not supported by a patched model: leave it out")
    for name in UNSUPPORTED:
        if getattr(config, name, None) not in (None, False, "dynamic"):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not supported by a patched model: leave it out, or unpatch(model)"
            )
    if config.use_cache is False:
        raise ValueError("use_cache=False: a patched model decodes over its cache; leave it out")
    if getattr(config, "output_attentions", False):
        raise ValueError("output_attentions=True: the attention of evicted entries does not exist; leave it out")
    mode = config.get_generation_mode(None)
    if mode not in MODES:
        raise ValueError(
            f"num_beams={config.num_beams} with num_beam_groups={getattr(config, 'num_beam_groups', 1)} (generation "
            f"mode {mode.value!r}) is not supported by a patched model; use greedy search, sampling or plain beams"
        )


def _check_given(name: str, cache: SlotCache, call: dict, config, handle) -> None:
    """A cache must be one for this model; one that holds something is for a later turn, which is checked whole."""
    if len(cache.layers) != len(handle.parts.layers) or cache.windows != windows_of(handle.model.config):
        raise ValueError(
            f"{name}: the SlotCache was made for another model, of {len(cache.layers)} layers; make one with "
            "kvpatch.SlotCache(model.config, ...)"
        )
    if cache.phase == "empty":
        return
    ids = next((call[key] for key in ("inputs", "input_ids") if call.get(key) is not None), None)
    why = host_loop_reason(config, call)
    if why or ids is None:
        raise ValueError(
            f"{name}: the SlotCache holds {cache.columns} tokens of an earlier call, and a later turn can't use "
            f"{why or 'anything but input_ids'}; reset() it first"
        )
    rows, columns = ids.shape[0] * config.num_return_sequences, ids.shape[1]
    if rows != cache.current.batch or columns < cache.columns + (cache.logits is None):
        raise ValueError(
            f"{name}: the SlotCache holds {cache.columns} tokens of {cache.current.batch} row(s), so input_ids must be "
            f"the whole conversation of as many rows and at least one token more, got {list(ids.shape)}; reset() the "
            "cache to start anew"
        )
    mask = call.get("attention_mask")
    given = ids[:, : cache.columns].repeat_interleave(config.num_return_sequences, 0)
    if cache.fed is not None and mask is not None:  # pads may be any token
        marked = mask[:, : cache.columns].repeat_interleave(config.num_return_sequences, 0).bool()
        given = torch.where(marked.to(given.device), given, cache.fed.to(given.device))
    if cache.fed is None or not torch.equal(given, cache.fed.to(given.device)):
        raise ValueError(
            f"{name}: input_ids must begin with the {cache.columns} tokens that the SlotCache has read, row by row (a "
            "beam search leaves the rows of its last beams, not of what it returned); reset() the cache to start anew"
        )
    if cache.phase == "decode":
        turns.check(cache, columns, mask)
        turns.refuse_fused(handle.model.config)


def _own_stop_strings(call: dict, config) -> None:
    # A custom loop makes transformers forget the tokenizer, so stop strings become a criterion here.
    tokenizer = call.pop("tokenizer", None)
    if not config.stop_strings:
        return
    if tokenizer is None:
        raise ValueError("stop_strings needs tokenizer=: pass the model's tokenizer to generate")
    criteria = StoppingCriteriaList(call.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, config.stop_strings))
    call["stopping_criteria"] = criteria
    call.pop("stop_strings", None)
    if getattr(call.get("generation_config"), "stop_strings", None):
        call["generation_config"] = copy.deepcopy(call["generation_config"])
        call["generation_config"].stop_strings = None
