"""One layer of a SlotCache as transformers' `Cache` expects it, and what a config says of each layer."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpatch.attention import Site


def windows_of(config) -> list[int | None]:
    """Each layer's sliding window in tokens, None where a layer attends to everything.

    Args:
        config: of the text model.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types[: config.num_hidden_layers]]


def heads_of(config) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of every layer."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    return heads, groups, getattr(config, "head_dim", None) or config.hidden_size // heads


def site_of(config, device: torch.device, dtype: torch.dtype, width: int) -> Site:
    """What an attention back end must serve for a model of that config, with heads of that size, at some place."""
    heads, groups, _ = heads_of(config)
    return Site(device, dtype, heads // groups, width, any(windows_of(config)))


class LayerWatch:
    """What a layer of the model shows its queries to while it reads a prompt.

    Attributes:
        raw, output: whether queries before RoPE and the output projection's weight are wanted; the latter once.
    """

    def __init__(self, cache, layer: int):
        self.cache, self.layer = cache, layer
        needs = cache.watch.needs
        self.raw, self.output = needs.law, needs.output and cache.watch.outputs[layer] is None

    def columns(self, block: int) -> int:
        """How many of a block's last columns are wanted; in a later turn pads may lie before and behind any token."""
        return block if self.cache.before else self.cache.watch.columns(block)

    def note(self, block: int, queries: Tensor, raw: Tensor | None, scale: float, output: Tensor | None) -> None:
        """Take the queries [B, H, columns, D] of those columns of a block, after RoPE and before."""
        if self.output:
            self.cache.watch.outputs[self.layer] = output
        self.cache.note_queries(self.layer, block, queries, raw, scale)


class SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`, as transformers' `Cache` expects it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, cache, index: int):
        super().__init__()
        self.cache, self.index = cache, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: buffers are made when the prompt arrives."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return self.cache.store(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.columns

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        self.cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise NotImplementedError("rows are reordered in all layers at once: call SlotCache.reorder_cache")

    def crop(self, *args, **kwargs) -> None:
        raise NotImplementedError("what a SlotCache has evicted can't be brought back: it can't be cropped")

    def batch_repeat_interleave(self, *args, **kwargs) -> None:
        raise NotImplementedError("the rows of a SlotCache stay as many as they are")

    batch_select_indices = batch_repeat_interleave
