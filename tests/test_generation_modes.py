"""Generation modes x architectures x batch x padding: a patched model without eviction is the unpatched one."""

import pytest
import torch
from factories import EOS, PAD, Forced, left_padded, prompts, retained_sets, run, tiny
from transformers import GenerationConfig, LogitsProcessor, MaxTimeCriteria, StoppingCriteria, TextIteratorStreamer

import kvpatch


class Halved(LogitsProcessor):
    """A user's processor."""

    def __call__(self, input_ids, scores):
        scores[:, 2::2] *= 0.5
        return scores


class Repeated(StoppingCriteria):
    """A user's criterion: a row ends when it repeats itself."""

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == input_ids[:, -3]


def criteria():
    from transformers import StoppingCriteriaList

    return StoppingCriteriaList([Repeated(), MaxTimeCriteria(600.0)])


# Each a function, because processors and criteria may keep state.
MODES = {
    "greedy": lambda: {},
    "eos": lambda: {"eos_token_id": [EOS, *range(40, 60)]},
    "sample": lambda: {"do_sample": True},
    "temperature": lambda: {"do_sample": True, "temperature": 0.6, "top_k": 0},
    "top_k": lambda: {"do_sample": True, "top_k": 5},
    "top_p": lambda: {"do_sample": True, "top_p": 0.7, "eos_token_id": list(range(40, 50))},
    "min_p": lambda: {"do_sample": True, "min_p": 0.2},
    "typical": lambda: {"do_sample": True, "typical_p": 0.5},
    "top_h": lambda: {"do_sample": True, "top_h": 0.4},
    "eta_epsilon": lambda: {"do_sample": True, "eta_cutoff": 0.02, "epsilon_cutoff": 0.01},
    "repetition": lambda: {"repetition_penalty": 1.7},
    "no_repeat_ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad_words": lambda: {"bad_words_ids": [[5], [7, 8], *[[word] for word in range(60, 90)]]},
    "suppressed": lambda: {"suppress_tokens": list(range(50, 90)), "begin_suppress_tokens": list(range(20, 50))},
    "sequence_bias": lambda: {"sequence_bias": [[[9], 4.0], [[11, 12], -8.0]]},
    "forced_end": lambda: {"forced_eos_token_id": 3, "forced_bos_token_id": None},
    "length_penalty": lambda: {
        "exponential_decay_length_penalty": (2, 1.5),
        "eos_token_id": EOS,
    },
    "min_tokens": lambda: {"min_new_tokens": 9, "eos_token_id": list(range(1, 60))},
    "watermark": lambda: {"watermarking_config": {"bias": 2.0, "seeding_scheme": "lefthash"}, "do_sample": True},
    "processor": lambda: {"logits_processor": [Halved()]},
    "criterion": lambda: {"stopping_criteria": criteria()},
    "allowed_tokens": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: list(range(int(ids[-1]) % 7, 90, 3))},
    "sequences": lambda: {"do_sample": True, "num_return_sequences": 3},
    "config": lambda: {
        "generation_config": GenerationConfig(
            do_sample=True, top_k=9, temperature=0.8, max_new_tokens=14, pad_token_id=PAD, eos_token_id=EOS
        ),
        **dict.fromkeys(("max_new_tokens", "do_sample", "eos_token_id", "pad_token_id")),
    },
    "guidance": lambda: {"guidance_scale": 1.5},
    "beams": lambda: {"num_beams": 4},
    "beams_eos": lambda: {"num_beams": 3, "eos_token_id": list(range(40, 60)), "early_stopping": True},
    "beams_sequences": lambda: {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
    "beam_sample": lambda: {"num_beams": 3, "do_sample": True, "temperature": 0.9},
    "beams_penalty": lambda: {"num_beams": 2, "repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
}
BATCHES = {"one": (23,), "several": (19, 19, 19), "padded": (31, 4, 17)}


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def model(request):
    return tiny(request.param)


def call(model, batch: str, more: dict, **others) -> torch.Tensor:
    torch.manual_seed(3)
    settings = {"max_new_tokens": 20} | more | others
    return run(model, left_padded(prompts(BATCHES[batch])), **settings)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("mode", MODES)
def test_a_patched_model_generates_what_the_unpatched_one_does(model, mode, batch):
    expected = call(model, batch, MODES[mode]())
    with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=False, verify=False) as handle:
        assert torch.equal(call(model, batch, MODES[mode]()), expected)
        made = expected.shape[1] - max(BATCHES[batch])
        # Our own steps ran; a beam search goes on after the beam that wins has ended.
        assert handle.stats.steps >= made - 1 if "beam" in mode else handle.stats.steps == made - 1


@pytest.mark.parametrize("mode", ["greedy", "sample", "sequences", "beams", "beam_sample"])
def test_what_is_asked_back_is_the_same(model, mode):
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = call(model, "padded", MODES[mode](), **asked)
    with kvpatch.patched(model, "full", compile=False, verify=False):
        got = call(model, "padded", MODES[mode](), **asked)
    assert {name for name in got if "cache" not in name and "past" not in name} == {
        name for name in expected if "cache" not in name and "past" not in name
    }
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(got[name]), torch.stack(expected[name]), rtol=1e-4, atol=1e-4)
    if mode.startswith("beam"):
        assert torch.equal(got.beam_indices, expected.beam_indices)
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, rtol=1e-5, atol=1e-5)


def test_compiled_beams_are_the_unpatched_ones_and_compile_once():
    model = tiny("llama", dtype=torch.float32)
    for batch in BATCHES:
        expected = call(model, batch, {"num_beams": 4})
        with kvpatch.patched(model, "inertia-lazy", budget=1.0) as handle:
            assert torch.equal(call(model, batch, {"num_beams": 4}), expected)
            compiled = handle.stats.compiles
            assert compiled == 2  # nothing is scored without eviction: a plain layer, and the norm behind the last
            call(model, batch, {"num_beams": 4}, max_new_tokens=30)
            assert handle.stats.compiles == compiled


@pytest.mark.parametrize("policy", ["inertia-lazy", "tova", "h2o-decode", "streaming-llm"])
def test_each_beam_holds_what_its_sequence_would_alone(policy):
    class Look(LogitsProcessor):
        def __call__(self, input_ids, scores):
            self.rows, self.held = input_ids.clone(), handle.retained()
            return scores

    model, look = tiny("llama"), Look()
    batch = left_padded(prompts((37,)))
    with kvpatch.patched(model, policy, budget=10, compile=False) as handle:
        output = run(model, batch, num_beams=3, max_new_tokens=25, logits_processor=[look])
        rows, held = look.rows[:, 37:].tolist(), look.held
        assert len({tuple(row) for row in rows}) == 3 and output[0, 37:-1].tolist() in rows
        for row, sequence in enumerate(rows):
            forced = [Forced([[*sequence, 5]], 37)]
            run(model, batch, max_new_tokens=len(sequence) + 1, logits_processor=forced)
            alone = retained_sets(handle.retained(), 0)
            assert [list(map(set, layer)) for layer in alone] == [
                list(map(set, layer)) for layer in retained_sets(held, row)
            ]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_beams_begin_with_a_single_token(compile):
    model, batch = tiny("llama", dtype=torch.float32), {"input_ids": torch.tensor([[5]])}
    expected = run(model, batch, num_beams=3)
    with kvpatch.patched(model, "inertia", budget=1.0, compile=compile):
        assert torch.equal(run(model, batch, num_beams=3), expected)


def test_a_streamer_is_fed_by_a_batch():
    class Rows:
        def __init__(self):
            self.shapes = []

        def put(self, value):
            self.shapes.append(tuple(value.shape))

        def end(self):
            self.shapes.append("end")

    model = tiny("llama")
    with kvpatch.patched(model, "inertia", budget=8, compile=False):
        streamer = Rows()
        run(model, left_padded(prompts((20, 9))), max_new_tokens=5, streamer=streamer)
        assert streamer.shapes == [(2, 20), *[(2,)] * 5, "end"]


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_the_same_seed_gives_the_same_samples_with_eviction(compile):
    model = tiny("llama", dtype=torch.float32)
    with kvpatch.patched(model, "inertia-lazy", budget=8, compile=compile):
        first, second = (call(model, "padded", {"do_sample": True}) for _ in range(2))
        assert torch.equal(first, second)


def test_a_stop_string_ends_a_row(tmp_path):
    from kvpatch import demo

    model, tokenizer = demo.load()
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    more = {"stop_strings": ["Paris"], "tokenizer": tokenizer, "do_sample": False, "max_new_tokens": 20}
    expected = model.generate(**inputs, **more)
    assert tokenizer.decode(expected[0]).rstrip().endswith("Paris")
    with kvpatch.patched(model, "inertia", budget=1.0, compile=False):
        assert torch.equal(model.generate(**inputs, **more), expected)
        model.generation_config.stop_strings = more.pop("stop_strings")  # and as the model's own setting
        for beams in (1, 2):
            got = model.generate(**inputs, **more, num_beams=beams)
            assert tokenizer.decode(got[0]).rstrip().endswith("Paris")
        assert model.generation_config.stop_strings == ["Paris"]


def test_a_pipeline_runs_a_patched_model():
    from transformers import pipeline

    from kvpatch import demo

    model, tokenizer = demo.load()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "left"
    ask = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    chats = [[{"role": "user", "content": text}] for text in ("Name a colour.", "What is two plus two, in one word?")]
    more = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    expected = ask(chats, **more)
    with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=False) as handle:
        assert ask(chats, **more) == expected
        assert handle.stats.steps > 0


def test_text_streams_from_a_chat_template():
    import threading

    from kvpatch import demo

    model, tokenizer = demo.load()
    chat = [{"role": "user", "content": "Count to five."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with kvpatch.patched(model, "inertia-lazy", budget=1.0, compile=False):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120)
        more = {**inputs, "max_new_tokens": 16, "do_sample": False, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=more)
        thread.start()
        text = "".join(streamer)
        thread.join()
        output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    prompt = inputs["input_ids"].shape[1]
    assert text.strip() == tokenizer.decode(output[0, prompt:], skip_special_tokens=True).strip()
