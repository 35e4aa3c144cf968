"""One layer of a SlotCache as transformers' `Cache` expects it, and what a config says of each layer."""

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


def windows_of(config) -> list[int | None]:
    """Each layer's sliding window in tokens, None where a layer attends to everything.

    Args:
        config: of the text model.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types[: config.num_hidden_layers]]


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
