"""StreamingLLM's positions inside the cache equal a plain re-rotation of all that is held, in every layer."""

import pytest
import torch
from factories import EOS, Forced, Watcher, left_padded, llama, prompts, retained_sets, run, tiny
from test_runs import Rehearsing, generated
from transformers import AttentionInterface

import kvpatch
from kvpatch.policy import resolve

BUDGET, SINKS = 12, 4
RECENT = {"compact": True, "scorer": "recency", "aggregation": "single"}


class Reference:
    """A row of a plain model whose layers meet what a list holds, at places 0, 1, ... of that list.

    Args:
        model: in float64.   budget, sinks: held between steps at most, and how many of the first tokens always.
    """

    def __init__(self, model, budget: int = BUDGET, sinks: int = SINKS):
        self.model, self.budget, self.sinks = model, budget, sinks
        self.held = {layer: [] for layer in range(len(model.model.layers))}  # (position, key after RoPE, value)
        self.first = 0

    def turned(self, states, places: int):
        cos, sin = self.model.model.rotary_emb(states, position_ids=torch.tensor([[abs(places)]]))
        cos, sin = cos[0, 0].double(), sin[0, 0].double()
        scaling = (cos**2 + sin**2).sqrt()
        cos, sin = cos / scaling, sin / scaling * (1 if places >= 0 else -1)
        left, right = states.chunk(2, -1)
        return states * cos + torch.cat((-right, left), -1) * sin

    def attention(self, module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        held, group = self.held[module.layer_idx], query.shape[1] // key.shape[1]
        outputs = []
        for n in range(key.shape[2]):
            position = self.first + n
            held.append((position, key[0, :, n], value[0, :, n]))
            keys = torch.stack([self.turned(k, place - p) for place, (p, k, _) in enumerate(held)], 1)
            values = torch.stack([v for _, _, v in held], 1)
            q = self.turned(query[0, :, n], len(held) - 1 - position)
            keys, values = (one.repeat_interleave(group, 0) for one in (keys, values))
            weights = (torch.einsum("hd,hnd->hn", q, keys) * scaling).softmax(-1)
            outputs.append(torch.einsum("hn,hnd->hd", weights, values))
        return torch.stack(outputs)[None], None

    def feed(self, ids: list[int]) -> torch.Tensor:
        """Logits [V] after these tokens, of which all are met by those behind them."""
        AttentionInterface.register("compact_reference", self.attention)
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = "compact_reference"
        try:
            places = torch.arange(self.first, self.first + len(ids))[None]
            logits = self.model(torch.tensor([ids]), position_ids=places, use_cache=False).logits[0, -1]
        finally:
            self.model.config._attn_implementation = before
        self.first += len(ids)
        return logits

    def evict(self) -> None:
        for held in self.held.values():
            while len(held) > self.budget:
                del held[min(self.sinks, len(held) - 1)]


def scaled(kind: str):
    """A small model, with scaled rotary frequencies by name."""
    scalings = {
        "llama": None,
        "linear": {"rope_type": "linear", "factor": 3.0},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }
    fields = {} if scalings[kind] is None else {"rope_parameters": {"rope_theta": 10000.0} | scalings[kind]}
    return llama(query_groups=2, kv_heads=2, **fields)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["llama", "linear", "yarn"])
def test_every_step_says_what_a_re_rotated_cache_says(kind, compile):
    """Rows beside each other: a long prompt, one that fills up later, one shorter than the sinks."""
    model, rows, count = scaled(kind), prompts((30, 9, 2)), 25
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, model.config.vocab_size, (3, count + 1), generator=generator).tolist()
    batch = left_padded(rows)
    forced = Forced(tokens, batch["input_ids"].shape[1])
    with kvpatch.patched(model, "streaming-llm", budget=BUDGET, compile=compile) as handle:
        watcher = Watcher(handle.retained)
        out = model.generate(
            **batch,
            max_new_tokens=count + 1,
            do_sample=False,
            logits_processor=[forced],
            streamer=watcher,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert handle.stats.recompiles == 0
    for row, prompt in enumerate(rows):
        reference = Reference(model)
        logits = reference.feed(prompt)
        for step in range(count + 1):
            assert torch.allclose(out.logits[step][row], logits.float(), rtol=2e-4, atol=2e-5), (row, step)
            if step < count:
                logits = reference.feed([tokens[row][step]])
                reference.evict()
                held = retained_sets(watcher.seen[step], row)
                assert sorted(held[0][0]) == [position for position, _, _ in reference.held[0]]


def test_positions_differ_from_the_texts_as_soon_as_a_token_has_gone():
    model, batch = llama(), left_padded(prompts((30, 20)))
    found = []
    for compact in (True, False):
        with kvpatch.patched(model, "streaming-llm", budget=BUDGET, compact=compact, compile=False):
            forced = Forced([[5, 6, 7, 8], [5, 6, 7, 8]], batch["input_ids"].shape[1])
            more = {"return_dict_in_generate": True, "output_logits": True, "logits_processor": [forced]}
            found.append(model.generate(**batch, max_new_tokens=4, do_sample=False, **more).logits)
    same = [torch.allclose(one, other, atol=1e-9) for one, other in zip(*found, strict=True)]
    assert same == [True, True, False, False]  # the prompt's end and step 1 meet everything


def test_a_later_turn_goes_on_from_where_the_sinks_stand():
    model, count = llama(query_groups=2, kv_heads=2), 17
    first, second = prompts((26, 7))
    tokens = torch.randint(2, model.config.vocab_size, (2, count + 1), generator=torch.Generator().manual_seed(8))
    reference, ids = Reference(model), torch.tensor([first])
    with kvpatch.patched(model, "streaming-llm", budget=BUDGET, compile=False):
        cache = kvpatch.SlotCache(model.config, "streaming-llm", budget=BUDGET)
        for turn, prompt in enumerate((first, second)):
            if turn:
                ids = torch.cat((ids, torch.tensor([prompt])), -1)
            said = tokens[turn].tolist()
            out = model.generate(
                ids,
                max_new_tokens=count + 1,
                do_sample=False,
                eos_token_id=None,
                past_key_values=cache,
                logits_processor=[Forced([said], ids.shape[1])],
                return_dict_in_generate=True,
                output_logits=True,
            )
            ids = out.sequences
            unread = [] if turn == 0 else [tokens[0, -1].item()]  # the last token of a turn is fed with the next one
            logits = reference.feed(unread + prompt)
            for step in range(count + 1):
                assert torch.allclose(out.logits[step][0], logits.float(), rtol=2e-4, atol=2e-5), (turn, step)
                if step < count:
                    logits = reference.feed([said[step]])
                    reference.evict()


def test_no_sinks_and_more_sinks_than_slots():
    model, batch = llama(), left_padded(prompts((5, 3)))
    expected = run(model, batch, max_new_tokens=4)
    with kvpatch.patched(model, "streaming-llm", budget=200, sinks=100, compile=False):
        assert torch.equal(run(model, batch, max_new_tokens=4), expected)
    batch = left_padded(prompts((30, 20)))
    said = []
    for fields in ({"compact": True}, {"compact": False}):  # without sinks nothing has to be turned
        with kvpatch.patched(model, "streaming-llm", budget=BUDGET, sinks=0, compile=False, **fields):
            said.append(run(model, batch, max_new_tokens=20))
    assert torch.equal(*said)


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": list(range(2, 12))}], ids=["greedy", "eos"])
def test_runs_of_several_steps_say_the_same(settings):
    model, batch = llama(), left_padded(prompts((30, 3)))
    more = settings | {"max_new_tokens": 27}
    runs, single = (generated(model, "streaming-llm", capturer, batch, **more) for capturer in (Rehearsing(), None))
    assert runs == single


def test_after_ten_thousand_tokens_the_sinks_are_held_and_stand_where_they_should():
    model, count, prompt = llama(layers=1, kv_heads=1, max_position_embeddings=16384), 10_000, prompts((20,))[0]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, model.config.vocab_size, (count + 1,), generator=generator).tolist()
    batch = left_padded([prompt])
    last = []

    class Last:
        def __call__(self, ids, scores):
            last[:] = [scores.clone()]
            return scores

    with kvpatch.patched(model, "streaming-llm", budget=BUDGET) as handle:
        processors = [Last(), Forced([tokens], len(prompt))]
        run(model, batch, max_new_tokens=count + 1, logits_processor=processors, eos_token_id=EOS + 10**6)
        held = sorted(set(handle.retained()[0, 0, 0].tolist()) - {-1})
    seen = len(prompt) + count
    assert held == [0, 1, 2, 3, *range(seen - BUDGET + SINKS, seen)]
    # In one layer keys and values follow from the tokens alone: the last step met these, at places 0, 1, ...
    whole = prompt + tokens[:count]
    met = [whole[place] for place in (0, 1, 2, 3, *range(seen - BUDGET + SINKS - 1, seen))]
    expected = model(torch.tensor([met])).logits[0, -1]
    assert torch.allclose(last[0][0], expected.float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"compact": 1}, ("compact", "1")),
        ({"compact": True}, ("compact=True", "scorer='attention'")),
        ({"compact": True, "scorer": "recency"}, ("compact=True", "aggregation='ema'", "compact=False")),
        (RECENT | {"sinks": 0.1}, ("compact=True", "sinks=0.1", "compact=False")),
        (RECENT | {"reserve": 2}, ("compact=True", "reserve=2", "compact=False")),
        (RECENT | {"prefill": "knorm"}, ("compact=True", "prefill='knorm'", "compact=False")),
    ],
    ids=repr,
)
def test_what_would_leave_gaps_is_refused(fields, words):
    with pytest.raises(ValueError) as caught:
        kvpatch.Policy(**fields)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("kind", ["ministral", "ministral3", "dynamic"])
def test_a_model_that_counts_positions_of_the_text_keeps_them_and_says_so(kind):
    if kind.startswith("ministral"):
        model = tiny(kind)
    else:
        model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    batch = left_padded(prompts((20, 9)))
    plain = resolve("streaming-llm", compact=False)
    with kvpatch.patched(model, plain, budget=BUDGET, compile=False):
        expected = run(model, batch, max_new_tokens=15)
    with pytest.warns(UserWarning, match="positions stay those of the text"):
        handle = kvpatch.patch(model, "streaming-llm", budget=BUDGET, compile=False)
    try:
        assert torch.equal(run(model, batch, max_new_tokens=15), expected)
    finally:
        handle.undo()
