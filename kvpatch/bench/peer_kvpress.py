"""Runs kvpress's released code in kvpress's own environment; kvpatch is not installed there.

Started with one JSON argument (model, dtype, threads, setting, share); then one JSON request a line on standard input,
one JSON answer a line on standard output.
"""

import contextlib
import json
import resource
import sys
import time

import torch
import transformers

SETTINGS = {  # name: (press, every how many steps it compresses)
    "tova": ("TOVAPress", 1),
    "tova-16": ("TOVAPress", 16),
    "knorm-16": ("KnormPress", 16),
}


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # nothing that a library prints may come between answers
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given["threads"])
    import kvpress
    from kvpress import DecodingPress

    model = transformers.AutoModelForCausalLM.from_pretrained(given["model"], dtype=getattr(torch, given["dtype"]))
    model = model.eval()
    model.generation_config.eos_token_id = None
    name, interval = SETTINGS[given["setting"]]
    prompts = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prompts":
            prompts = torch.tensor(request["ids"])
            answer = {}
        else:
            target = max(int(given["share"] * prompts.shape[1]), 1)
            press = DecodingPress(
                base_press=getattr(kvpress, name)(), compression_interval=interval, target_size=target
            )
            clock = Clock()
            started = time.perf_counter()
            with press(model):
                output = model.generate(
                    prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=request["tokens"],
                    do_sample=False,
                    pad_token_id=0,
                    streamer=clock,
                    return_dict_in_generate=True,
                )
            whole = time.perf_counter() - started
            keys = [layer.keys for layer in output.past_key_values.layers]
            answer = {
                "first": clock.times[1] - started,
                "steps": [after - before for before, after in zip(clock.times[1:], clock.times[2:], strict=False)],
                "whole": whole,
                "held": keys[0].shape[2],
                "cache_bytes": 2 * sum(key.nbytes for key in keys),
                "peak_process_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
