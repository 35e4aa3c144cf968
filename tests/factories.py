"""Small models, batches and forced token streams that tests share."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

VOCABULARY = 97
EOS = 1
PAD = 0


def llama(query_groups: int = 2, kv_heads: int = 2, layers: int = 3, seed: int = 0, dtype=torch.float64, **config):
    """A random Llama with R = query_groups query heads a KV head, in eval mode."""
    torch.manual_seed(seed)
    heads = query_groups * kv_heads
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16 * heads,
        "head_dim": 16,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 8192,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "initializer_range": 0.2,  # large enough for attention that is far from uniform
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **config})).to(dtype).eval()


def prompts(lengths, seed: int = 0) -> list[list[int]]:
    """Random prompts without pad or EOS."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def left_padded(rows: list[list[int]]) -> dict:
    """input_ids and attention_mask of a batch."""
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[PAD] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


class Forced(LogitsProcessor):
    """Makes every row continue with its own given tokens."""

    def __init__(self, tokens: list[list[int]], prompt_columns: int):
        self.tokens, self.columns = tokens, prompt_columns

    def __call__(self, input_ids, scores):
        step = input_ids.shape[1] - self.columns
        forced = torch.tensor([row[min(step, len(row) - 1)] for row in self.tokens])
        return torch.full_like(scores, -torch.inf).scatter(1, forced[:, None], 0.0)


class Watcher:
    """A streamer that looks at the model's retained positions each time a token comes."""

    def __init__(self, look):
        self.look, self.seen, self.puts = look, [], 0

    def put(self, value):
        self.puts += 1
        if self.puts > 2:  # the prompt, and the first token, which no decode step has fed yet
            self.seen.append(self.look())

    def end(self):
        pass


def retained_sets(retained: torch.Tensor, row: int) -> list[list[list[int]]]:
    """[layer][KV head] -> positions that one row holds."""
    return [[[p for p in head.tolist() if p >= 0] for head in layer[row]] for layer in retained]
