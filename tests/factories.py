"""Small models, batches and forced token streams that tests share."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessor

import kvpatch
from kvpatch.needle import document

VOCABULARY = 97
EOS = 1
PAD = 0
BUDGET = 8


def llama(query_groups: int = 2, kv_heads: int = 2, layers: int = 3, seed: int = 0, dtype=torch.float64, **config):
    """A random Llama with R = query_groups query heads a KV head, in eval mode."""
    return tiny("llama", query_groups, kv_heads, layers, seed, dtype, **config)


# Model type, and what makes its tiny model use what sets it apart.
ARCHITECTURES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "ministral": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 128,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
}


def tiny(kind, query_groups: int = 2, kv_heads: int = 2, layers: int = 3, seed: int = 0, dtype=torch.float64, **config):
    """A random model of that model type, in eval mode; norms and biases are random too."""
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
        "bos_token_id": None,
        "initializer_range": 0.2,  # large enough for attention that is far from uniform
    }
    settings = {**settings, **ARCHITECTURES[kind], **config}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).to(dtype).eval()
    if kind == "qwen3_moe" and dtype == torch.float64:
        model.set_experts_implementation("batched_mm")  # torch's grouped product knows no float64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # initialised to ones or zeros, which would hide that they are left out
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


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


def run(model, batch: dict | None = None, **more):
    """Greedy generation that no EOS ends, unless `more` says otherwise; two padded rows if no batch is given."""
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    return model.generate(**{**(batch or left_padded(prompts((20, 9)))), **settings, **more})


def patch(model, policy="inertia", **more) -> kvpatch.Patch:
    """Patched at `BUDGET` tokens, uncompiled, unless `more` says otherwise."""
    return kvpatch.patch(model, policy, **({"budget": BUDGET, "compile": False} | more))


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


def snapshot(model) -> dict:
    """Every key of every module's `__dict__` and what it is, and the entries of the dicts therein."""
    seen = {}
    for path, module in model.named_modules():
        for key, value in module.__dict__.items():
            seen[path, key] = value
            if isinstance(value, dict):
                seen |= {(path, key, inner): entry for inner, entry in value.items()}
    return seen


def assert_restored(before: dict, model) -> None:
    """The model is as it was when `snapshot` gave `before`."""
    after = snapshot(model)
    assert list(after) == list(before)
    changed = [key for key in before if after[key] is not before[key]]
    # A bound method or a plain value may be an equal object; anything else must be the same one.
    assert [key for key in changed if after[key] != before[key]] == []


def demo_prose(tokenizer, length: int, seed: int) -> list[int]:
    """Ids of a prompt of that length for the demo model."""
    return document(length, tokenizer, seed).prompt_ids.tolist()


def generate_on(model, batch, **more):
    """Greedy generation that no token ends."""
    return model.generate(**batch, **({"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | more))
