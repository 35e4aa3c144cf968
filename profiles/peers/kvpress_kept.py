"""What presses of kvpress keep of a prompt. Runs in kvpress's own environment; kvpatch is not installed there.

Started with one JSON argument: model (folder), ids (of one prompt), presses (name to an expression over kvpress's
names, and the attention it needs), ratio (of entries removed), out (file). Writes, for each press, the positions kept
by layer and KV head as JSON.
"""

import json
import sys

import kvpress
import torch
import transformers


def kept_of(model, press, ids: torch.Tensor, whole: list[torch.Tensor]) -> list[list[list[int]]]:
    """Positions kept, by layer and KV head.

    Args:
        whole: of each layer the keys [G, n, D] that are read without a press.
    """
    cache = transformers.DynamicCache()
    with press(model):
        model(ids, past_key_values=cache, use_cache=True)
    found = []
    for index, (keys, layer) in enumerate(zip(whole, model.model.layers, strict=True)):
        attention, held = layer.self_attn, cache.layers[index].keys[0]
        heads = [set(range(keys.shape[1])) for _ in range(keys.shape[0])]
        masked = getattr(attention, "masked_key_indices", None)
        if masked is not None:  # presses that mask instead of removing
            for head, position in zip(masked[1].tolist(), masked[2].tolist(), strict=True):
                heads[head].discard(position)
            attention.masked_key_indices = None
            found.append([sorted(head) for head in heads])
            continue
        # The same keys bit for bit: a key's place is that of its equal, the next one where equals repeat.
        rows = []
        for head in range(keys.shape[0]):
            equal = (held[head][:, None] == keys[head][None]).all(-1)
            rows.append(sorted(equal.any(0).nonzero().flatten().tolist()))
        found.append(rows)
    return found


def main() -> None:
    given = json.loads(sys.argv[1])
    ids = torch.tensor([given["ids"]])
    found = {}
    for name, (expression, implementation) in given["presses"].items():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            given["model"], dtype=torch.float32, attn_implementation=implementation
        ).eval()
        with torch.no_grad():
            cache = transformers.DynamicCache()
            model(ids, past_key_values=cache, use_cache=True)
            whole = [layer.keys[0] for layer in cache.layers]
            press = eval(expression, vars(kvpress) | {"ratio": given["ratio"]})  # noqa: S307
            found[name] = kept_of(model, press, ids, whole)
    with open(given["out"], "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
