"""Runs of steps that the host does not look into give what steps one by one give: tokens, retained sets and counts.

Without a GPU a run's steps are issued one after the other by the very code that is captured on one.
"""

import pytest
import torch
from factories import (
    ARCHITECTURES,
    BUDGET,
    assert_restored,
    left_padded,
    patch,
    prompts,
    run,
    snapshot,
    tiny,
)
from transformers import LogitsProcessor, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList

import kvpatch
from kvpatch.errors import CaptureError
from kvpatch.graphs import MOST, StepByStep

BLENDED = kvpatch.Policy(
    "blended", refresh=3, blend=kvpatch.Blend(score_heads=((1, 2), (2, 0)), share=0.6, least=0.02, closing=3)
)
CUT = [
    kvpatch.Policy(
        name, prefill=kvpatch.Prefill(window=4, recent=4, allocation=allocation), grows=True, coupling="per_head"
    )
    for name, allocation in (("heads alike", "uniform"), ("heads compete", "adaptive"))
]
AGAIN = kvpatch.Policy(
    "again", prefill=kvpatch.Prefill(window=3, recent=3), grows=True, interval=4, coupling="per_head"
)
POLICIES = ("inertia", "inertia-lazy", "score-free", "tova", "h2o-decode", "streaming-llm", "cumulative", "full")
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3}


class Rehearsing(StepByStep):
    """Runs a body as often as a capture would before it gives it back, and counts."""

    def __init__(self):
        self.captured = []

    def capture(self, body):
        self.captured.append(body.args[1])
        for _ in range(3):
            body()
        return body


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


def generated(model, policy, capturer, batch=None, patched=None, **more):
    """What a generation gave and left behind, under runs (with a capturer) or step by step (without)."""
    limit = {} if policy == "full" else {"budget": BUDGET}
    handle = kvpatch.patch(model, policy, **({"compile": False} | limit | (patched or {})))
    handle._capturer = capturer
    try:
        torch.manual_seed(5)
        tokens = run(model, batch, **more)
        state = handle._cache.state
        stats = handle.stats
        return {
            "tokens": tokens.tolist(),
            "retained": handle.retained().tolist(),
            "active": state.active.tolist(),
            "newest": state.newest.tolist(),
            "columns": handle._cache.columns,
            "counts": (stats.steps, stats.refreshes, stats.held, stats.evicted),
        }
    finally:
        kvpatch.unpatch(model)


@pytest.mark.parametrize(
    "settings", [{}, SAMPLED, {"eos_token_id": list(range(2, 12))}], ids=["greedy", "sampled", "eos"]
)
@pytest.mark.parametrize(
    "policy", [*POLICIES, BLENDED, *CUT, "h2o", AGAIN], ids=lambda policy: getattr(policy, "name", policy)
)
def test_runs_and_single_steps_agree_at_every_length(llama, policy, settings):
    for new_tokens in (1, 2, 3, 6, 11, 27):
        more = settings | {"max_new_tokens": new_tokens}
        assert generated(llama, policy, Rehearsing(), **more) == generated(llama, policy, None, **more), new_tokens


BATCHES = {"padded": (20, 9), "alone": (26,), "three": (18, 18, 18)}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_full_budget_in_runs_gives_the_unpatched_models_tokens(kind, batch):
    model, rows = tiny(kind), left_padded(prompts(batch))
    expected = run(model, rows).tolist()
    for policy, limit in (("full", {}), ("inertia-lazy", {"budget": "full"}), ("h2o-decode", {"budget": 500})):
        found = generated(model, policy, Rehearsing(), rows, patched=limit)
        assert found["tokens"] == expected, policy


@pytest.mark.parametrize("kind", ["llama", "qwen3", "ministral"])
def test_a_full_budget_through_the_interpreted_kernels_gives_the_unpatched_models_tokens(kind):
    model, rows = tiny(kind, dtype=torch.float32), left_padded(prompts((12, 7)))
    expected = run(model, rows, max_new_tokens=7).tolist()
    found = generated(model, "inertia", StepByStep(), rows, {"budget": 500, "backend": "triton"}, max_new_tokens=7)
    assert found["tokens"] == expected


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "ministral"])
def test_runs_and_single_steps_agree_on_every_architecture(kind):
    model = tiny(kind)
    assert generated(model, "inertia-lazy", Rehearsing()) == generated(model, "inertia-lazy", None)


def test_runs_and_single_steps_agree_when_a_row_is_alone(llama):
    batch = left_padded(prompts((30,)))
    for more in ({}, {"eos_token_id": list(range(2, 12))}):
        assert generated(llama, "inertia", Rehearsing(), batch, **more) == generated(
            llama, "inertia", None, batch, **more
        )


def test_runs_and_single_steps_agree_while_rows_grow_and_buffers_with_them(llama):
    more = {"max_new_tokens": 200, "patched": {"budget": 150}}
    assert generated(llama, "inertia-lazy", Rehearsing(), **more) == generated(llama, "inertia-lazy", None, **more)


def test_compiled_runs_agree_too(llama):
    compiled = {"compile": True}
    assert generated(llama, "inertia-lazy", Rehearsing(), patched=compiled) == generated(llama, "inertia-lazy", None)


def test_a_second_prompt_finds_the_runs_captured_and_the_tensors_in_place(llama):
    capturer = Rehearsing()
    handle = patch(llama, "inertia-lazy")
    handle._capturer = capturer
    try:
        run(llama)
        places = [tensor.data_ptr() for tensor in (handle._cache.current.keys[0], *handle._cache.state.ledger[:7])]
        first = len(capturer.captured)
        alone = run(llama, left_padded(prompts((40, 33), seed=9)))
        assert len(capturer.captured) == first == 3  # the cycle, a plain step, a scoring step
        now = [tensor.data_ptr() for tensor in (handle._cache.current.keys[0], *handle._cache.state.ledger[:7])]
        assert now == places
    finally:
        kvpatch.unpatch(llama)
    assert alone.tolist() == run_alone(llama, left_padded(prompts((40, 33), seed=9)))


def run_alone(model, batch) -> list:
    with kvpatch.patched(model, "inertia-lazy", budget=BUDGET, compile=False):
        return run(model, batch).tolist()


def test_two_models_that_take_turns_do_not_disturb_each_other():
    models = [tiny("llama", seed=1), tiny("qwen2", seed=2)]
    batches = [left_padded(prompts((20, 31), seed=seed)) for seed in range(4)]
    expected = [[run_alone(model, batch) for batch in batches] for model in models]
    for model in models:
        patch(model, "inertia-lazy")._capturer = Rehearsing()
    for turn, batch in enumerate(batches):
        for model, alone in zip(models, expected, strict=True):
            assert run(model, batch).tolist() == alone[turn]


def test_other_settings_of_sampling_are_captured_anew_and_old_graphs_are_dropped_together(llama):
    capturer = Rehearsing()
    handle = patch(llama, "inertia-lazy")
    handle._capturer = capturer
    try:
        for number, temperature in enumerate((0.5, 0.7, 0.9, 0.5)):
            torch.manual_seed(0)
            tokens = run(llama, do_sample=True, temperature=temperature)
            runner = next(iter(handle._runners.values()))
            assert len(runner._captured) <= MOST
            if number == 0:
                expected = tokens
        assert torch.equal(tokens, expected)
        # 0.9 makes nine, so the six before it go, and 0.5 is captured again.
        assert len(capturer.captured) == 12
    finally:
        kvpatch.unpatch(llama)


def test_freeing_the_cache_drops_the_graphs_that_hold_its_memory(llama):
    handle = patch(llama, "inertia-lazy")
    handle._capturer = Rehearsing()
    try:
        expected = run(llama)
        runner = next(iter(handle._runners.values()))
        assert runner._captured
        handle.free()
        assert not runner._captured
        assert torch.equal(run(llama), expected)
    finally:
        kvpatch.unpatch(llama)


class NeverTwice(LogitsProcessor):
    """A processor in Python: the token before last can't come."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


@pytest.mark.parametrize(
    "asked",
    [
        {"logits_processor": LogitsProcessorList([NeverTwice()])},
        {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1e6)])},
        {"output_scores": True, "return_dict_in_generate": True},
        {"min_new_tokens": 5, "eos_token_id": 3},
        {"no_repeat_ngram_size": 2},
    ],
    ids=["processor", "criterion", "scores", "minimum", "ngrams"],
)
def test_where_the_host_must_look_single_steps_are_captured(llama, asked):
    capturer = Rehearsing()
    handle = patch(llama, "inertia-lazy")
    handle._capturer = capturer
    try:
        found = run(llama, **asked)
    finally:
        kvpatch.unpatch(llama)
    assert capturer.captured and all(len(taken.kinds) == 1 for taken in capturer.captured)
    with kvpatch.patched(llama, "inertia-lazy", budget=BUDGET, compile=False):
        expected = run(llama, **asked)
    for one, other in ((found, expected),) if isinstance(found, torch.Tensor) else ():
        assert torch.equal(one, other)
    if not isinstance(found, torch.Tensor):
        assert torch.equal(found.sequences, expected.sequences)
        # Every step's scores are its own: the graph's output is overwritten by the next step.
        torch.testing.assert_close(found.scores, expected.scores)


def test_a_streamer_gets_every_token_once_and_none_after_the_end(llama):
    class Streamer:
        def __init__(self):
            self.got, self.ended = [], False

        def put(self, value):
            self.got.append(value.tolist())

        def end(self):
            self.ended = True

    for eos in (None, list(range(2, 12))):
        seen = []
        for capturer in (Rehearsing(), None):
            streamer = Streamer()
            generated(llama, "inertia-lazy", capturer, streamer=streamer, eos_token_id=eos)
            assert streamer.ended
            seen.append(streamer.got)
        assert seen[0] == seen[1]


def test_a_later_turn_goes_on_from_what_runs_left(llama):
    first, more = prompts((24,), seed=3)[0], prompts((9,), seed=4)[0]
    ended = []
    for capturer in (Rehearsing(), None):
        handle = patch(llama, "inertia-lazy")
        handle._capturer = capturer
        try:
            # The first turn may end at any place of a cycle.
            for eos in (None, list(range(2, 14))):
                cache = kvpatch.SlotCache(llama.config, "inertia-lazy", BUDGET)
                turn = run(llama, left_padded([first]), past_key_values=cache, eos_token_id=eos, max_new_tokens=15)
                both = turn[0].tolist() + more
                answer = run(llama, left_padded([both]), past_key_values=cache, max_new_tokens=13)
                ended.append((answer.tolist(), cache.retained().tolist()))
        finally:
            kvpatch.unpatch(llama)
    assert ended[:2] == ended[2:]


def test_a_capture_that_fails_names_the_operation_and_leaves_the_model_usable(llama):
    class Failing(StepByStep):
        def capture(self, body):
            torch.zeros(2).view(3)  # what an operation that can't be captured does

    before = snapshot(llama)
    handle = patch(llama, "inertia-lazy")
    expected = run(llama)
    handle._capturer = Failing()
    try:
        with pytest.raises(CaptureError, match=r"view\(3\)") as caught:
            run(llama)
        assert "4 step(s), 1 of them scoring" in str(caught.value)
        handle._capturer = None
        handle._forget_steps()
        assert torch.equal(run(llama), expected)
    finally:
        kvpatch.unpatch(llama)
    assert_restored(before, llama)


@pytest.mark.parametrize("policy", ["inertia-lazy", "h2o-decode", BLENDED], ids=["lazy", "h2o", "blended"])
def test_the_loop_through_the_interpreted_kernels_gives_the_packed_paths_tokens(policy):
    model = tiny("llama", dtype=torch.float32)
    more = {"batch": left_padded(prompts((14, 9), seed=6)), "max_new_tokens": 9}
    packed = generated(model, policy, None, **more)
    for capturer in (StepByStep(), None):
        assert generated(model, policy, capturer, patched={"backend": "triton"}, **more) == packed


def test_explain_says_what_is_captured_and_what_makes_the_host_look(llama):
    handle = patch(llama, "inertia-lazy")
    try:
        said = str(kvpatch.explain(llama))
        assert "no CUDA graphs: the model is on 'cpu'" in said
        assert handle.stats.graph_active is False
        handle._capturer, handle.graphs = None, False
        assert "no CUDA graphs: graphs=False" in str(kvpatch.explain(llama))
    finally:
        kvpatch.unpatch(llama)


def test_a_row_that_ends_with_its_first_token_takes_no_step(llama):
    batch = left_padded(prompts((30,)))
    first = run(llama, batch, max_new_tokens=1)[0, -1].item()
    for rows in (batch, left_padded(prompts((30,)) * 2)):
        more = {"batch": rows, "eos_token_id": first, "max_new_tokens": 20}
        assert generated(llama, "inertia", Rehearsing(), **more) == generated(llama, "inertia", None, **more)


def test_weights_that_moved_are_captured_anew(llama):
    capturer = Rehearsing()
    handle = patch(llama, "inertia-lazy")
    handle._capturer = capturer
    weight = llama.model.layers[0].mlp.up_proj.weight
    kept = weight.data
    try:
        run(llama)
        before = len(capturer.captured)
        run(llama)
        assert len(capturer.captured) == before
        weight.data = kept.clone()
        run(llama)
        assert len(capturer.captured) == 2 * before
    finally:
        weight.data = kept
        kvpatch.unpatch(llama)


def test_an_adapter_that_is_switched_is_captured_anew():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    capturer = Rehearsing()
    handle = patch(model, "inertia-lazy")
    handle._capturer = capturer
    run(model)
    before = len(capturer.captured)
    with model.disable_adapter():
        plain = run(model)
    assert len(capturer.captured) == 2 * before
    kvpatch.unpatch(model)
    with model.disable_adapter(), kvpatch.patched(model, "inertia-lazy", budget=BUDGET, compile=False):
        assert torch.equal(run(model), plain)


def test_a_criterion_of_ones_own_on_the_length_is_heeded(llama):
    from transformers import MaxLengthCriteria

    short = StoppingCriteriaList([MaxLengthCriteria(25)])
    found = generated(llama, "inertia-lazy", Rehearsing(), stopping_criteria=short)
    assert found == generated(llama, "inertia-lazy", None, stopping_criteria=short)
    assert len(found["tokens"][0]) == 25


def test_compiled_runs_compile_each_kind_once(llama):
    handle = patch(llama, "inertia-lazy", compile=True)
    handle._capturer = StepByStep()
    try:
        run(llama)
        compiled = handle.stats.compiles
        for lengths in ((31, 18), (25, 40)):
            run(llama, left_padded(prompts(lengths)))
        assert handle.stats.compiles == compiled
    finally:
        kvpatch.unpatch(llama)
