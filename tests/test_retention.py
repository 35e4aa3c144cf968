"""What is held after every step equals the naive float64 simulator, over the axes."""

import itertools
import os
import random
from pathlib import Path

import oracle
import pytest
from allpairspy import AllPairs
from factories import EOS, VOCABULARY, Forced, Watcher, left_padded, llama, prompts, retained_sets
from oracle import Axes, Row

import kvpatch
from kvpatch.bench.record import append_rows

AXES = {
    "scorer": ["attention", "vnorm", "value-mass", "output-change", "entropy", "keydiff", "knorm", "recency", "random"],
    "head_pool": ["mean", "max", "rms"],
    "aggregation": ["single", "cumulative", "ema", "peak"],
    "coupling": ["sequential", "uniform", "per_layer", "per_head"],
    "refresh": [1, 3, "once"],
    "protections": ["none", "sinks", "recent", "reserve", "all"],
    "rescue": [False, True],
    "new_token": ["mean", "zero"],
    "score_layers": ["all", (1, 2)],
    "query_groups": [1, 3, 4],
    "budget": [0.35, 12, 33],
}
PROTECTIONS = {
    "none": {},
    "sinks": {"sinks": 2},
    "recent": {"recent": 0.25},
    "reserve": {"reserve": 0.2},
    "all": {"sinks": 1, "recent": 3, "reserve": 2},
}
WITHOUT_ATTENTION = ("keydiff", "knorm", "recency", "random")
LENGTHS = (41, 29, 21)
STEPS = 200


def legal(case: dict) -> bool:
    if case.get("scorer") in WITHOUT_ATTENTION and case.get("head_pool", "mean") != "mean":
        return False
    if case.get("scorer") == "recency" and case.get("refresh", 1) != 1:
        return False
    if case.get("scorer") == "entropy" and case.get("coupling") == "per_head":
        return False
    return not (case.get("coupling") in ("per_layer", "per_head") and case.get("score_layers", "all") != "all")


def covering() -> list[dict]:
    """Every pair of values of two axes that may meet does meet."""
    names = list(AXES)
    pairs = AllPairs(list(AXES.values()), filter_func=lambda row: legal(dict(zip(names, row, strict=False))))
    return [dict(zip(names, row, strict=True)) for row in pairs]


def named(case: dict) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


def compare(case: dict, compile: bool = False, lengths=LENGTHS, steps: int = STEPS) -> int:
    """Run kvpatch and the simulator side by side; returns how many steps a rounding difference was adopted in."""
    model = llama(query_groups=case["query_groups"])
    budget = kvpatch.Budget(case["budget"], min_budget=1)
    fields = {name: case[name] for name in list(AXES)[:5]} | {
        name: case[name] for name in ("rescue", "new_token", "score_layers")
    }
    fields["score_heads"] = case.get("score_heads", "all")
    fields |= PROTECTIONS[case["protections"]]
    blend = case.get("blend")
    mine, theirs = (fields | {"blend": blend and kind(**blend)} for kind in (kvpatch.Blend, oracle.Blend))
    rows = prompts(lengths)
    generator = random.Random(5)
    tokens = [[generator.randrange(2, VOCABULARY) for _ in range(steps + 1)] for _ in rows]
    stop = steps * 3 // 5
    tokens[1] = tokens[1][:stop] + [EOS]  # the second row ends while the others go on
    batch = left_padded(rows)
    with kvpatch.patched(model, kvpatch.Policy(**mine), budget=budget, compile=compile) as handle:
        watcher = Watcher(handle.retained)
        model.generate(
            **batch,
            max_new_tokens=steps + 1,
            do_sample=False,
            logits_processor=[Forced(tokens, batch["input_ids"].shape[1])],
            streamer=watcher,
        )
    assert len(watcher.seen) == steps
    adopted = 0
    for index, prompt in enumerate(rows):
        row = Row(model, Axes(**theirs), case["budget"], min_budget=1)
        row.prefill(prompt)
        for step, seen in enumerate(watcher.seen):
            observed = retained_sets(seen, index)
            if tokens[index][step] == EOS:  # generated, never fed: nothing may change from here on
                assert all(
                    retained_sets(later, index) == retained_sets(watcher.seen[step - 1], index)
                    for later in watcher.seen[step:]
                )
                break
            row.step(tokens[index][step], observed=observed)
        adopted += row.adopted
    return adopted


@pytest.mark.parametrize("case", covering(), ids=named)
def test_every_step_holds_what_the_simulator_holds(case):
    assert compare(case) <= 1  # of 520 row steps


FIRST = {name: values[0] for name, values in AXES.items()} | {"aggregation": "ema", "query_groups": 3, "budget": 12}
BLENDS = {
    "one layer's loudest head": ({}, {"share": 0.75, "score_layers": (1,), "head_pool": "max"}),
    "a few heads": ({}, {"share": 0.7, "score_heads": ((0, 1), (2, 0), (2, 5), (2, 1))}),
    "heads of unlike weight": ({}, {"share": 0.7, "score_heads": ((0, 1, 2.5), (2, 0, 0.25), (2, 5), (2, 1, 0.5))}),
    "the loudest of a few heads": ({"refresh": 3}, {"share": 0.5, "score_heads": ((1, 4), (1, 0)), "head_pool": "max"}),
    "a few heads, one update a step": (
        {"coupling": "uniform", "score_heads": ((0, 0), (1, 3))},
        {"share": 0.5, "score_heads": ((1, 2), (2, 3), (2, 4)), "head_pool": "rms"},
    ),
    "only what it finds": ({}, {"share": 0.8, "score_heads": ((1, 4), (2, 0)), "least": 0.083}),
    "only what it finds, fading": (
        {"refresh": 3},
        {"share": 0.8, "aggregation": "peak", "alpha": 0.9, "score_layers": (1,), "least": 0.11, "new_token": "zero"},
    ),
    "gaps filled": ({"budget": 0.35}, {"share": 0.7, "score_heads": ((1, 4), (2, 0)), "closing": 4}),
    "gaps filled where more than one goes": ({"budget": 29}, {"share": 0.9, "aggregation": "peak", "closing": 5}),
    "gaps filled, a layer each": (
        {"coupling": "per_layer", "budget": 0.35, "protections": "sinks"},
        {"share": 0.7, "head_pool": "max", "closing": 3, "least": 0.017},
    ),
    # In focus are the first two rows, then the first and the last, all, and the first.
    "nothing found in one row": (
        {},
        {"share": 0.8, "score_heads": ((1, 4), (2, 0)), "least": 0.03, "focus": 0.98},
    ),
    "nothing found in one row, gaps filled": (
        {"coupling": "uniform", "budget": 0.5, "protections": "sinks", "refresh": 3},
        {"share": 0.8, "aggregation": "peak", "focus": 0.93, "closing": 3},
    ),
    "all found": ({"budget": 0.35}, {"share": 0.7, "least": 0.1, "focus": 0.2}),
    "not asked before one goes": (
        {"budget": 29},
        {"share": 0.9, "score_heads": ((2, 1),), "focus": 0.99},
    ),
    "its own rule": ({"refresh": 3}, {"share": 0.5, "aggregation": "peak", "alpha": 0.9, "new_token": "zero"}),
    "one update a step": ({"coupling": "uniform"}, {"share": 0.4, "score_layers": (0, 2), "aggregation": "cumulative"}),
    "a layer each": ({"coupling": "per_layer"}, {"share": 0.5, "scorer": "vnorm", "head_pool": "rms"}),
    "a head each": ({"coupling": "per_head", "aggregation": "cumulative"}, {"share": 0.3, "scorer": "keydiff"}),
    "protected entries": ({"protections": "all"}, {"share": 0.25, "scorer": "random"}),
    "rescue, scored once": ({"rescue": True, "refresh": "once"}, {"share": 0.6, "head_pool": "max"}),
    "a share that comes to nothing": ({"budget": 3}, {"share": 0.3}),
    "a share of the prompt": ({"budget": 0.35, "new_token": "zero"}, {"share": 0.9, "aggregation": "single"}),
    "no attention at first": ({"scorer": "recency"}, {"share": 0.5}),
}


@pytest.mark.parametrize("name", BLENDS)
def test_with_a_second_ranking_every_step_holds_what_the_simulator_holds(name):
    fields, blend = BLENDS[name]
    assert compare(FIRST | fields | {"blend": blend}, steps=80) <= 1


def test_a_second_ranking_compiled_holds_what_the_simulator_holds():
    fields, blend = BLENDS["one layer's loudest head"]
    assert compare(FIRST | fields | {"blend": blend, "refresh": 3}, compile=True) <= 1


def test_the_compiled_step_holds_what_the_simulator_holds():
    case = {name: values[0] for name, values in AXES.items()} | {"aggregation": "ema", "query_groups": 3}
    assert compare(case | {"protections": "all", "refresh": 3}, compile=True) <= 1


@pytest.mark.parametrize("preset", [name for name in kvpatch.list_policies() if name not in ("full", "best")])
def test_presets_hold_what_their_paper_says(preset):
    from kvpatch.policy import resolve

    policy = resolve(preset)
    # Where the first ones take more of a budget than there is, a larger one.
    budget = 12 if policy.sinks < 12 else 2 * policy.sinks + 2
    case = {name: values[0] for name, values in AXES.items()} | {"query_groups": 3, "budget": budget}
    fields = ("scorer", "head_pool", "aggregation", "coupling", "refresh", "rescue", "new_token")
    case |= {name: getattr(policy, name) for name in fields}
    case["protections"] = preset
    PROTECTIONS[preset] = {name: getattr(policy, name) for name in ("sinks", "recent", "reserve")}
    assert compare(case, steps=60) <= 1


PRODUCT = ("scorer", "head_pool", "aggregation", "coupling", "refresh", "protections", "query_groups")


def whole_product() -> list[dict]:
    """Every legal combination of the axes that interact; the others take turns."""
    cases = []
    for values in itertools.product(*(AXES[name] for name in PRODUCT)):
        case = dict(zip(PRODUCT, values, strict=True)) | {"score_layers": "all"}
        if legal(case):
            turn = len(cases)
            for name in ("rescue", "new_token", "budget"):
                case[name] = AXES[name][turn % len(AXES[name])]
                turn //= len(AXES[name])
            cases.append(case)
    return cases


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scorer", AXES["scorer"])
def test_the_whole_product_of_the_axes_holds_what_the_simulator_holds(scorer):
    steps = 40
    cases = [case for case in whole_product() if case["scorer"] == scorer]
    adopted = [compare(case, steps=steps) for case in cases]
    row_steps = len(cases) * (2 * steps + steps * 3 // 5)
    if os.environ.get("KVPATCH_RECORD"):  # a folder, for the committed record
        row = {"scorer": scorer, "cases": len(cases), "steps": steps, "row_steps": row_steps, "adopted": sum(adopted)}
        append_rows(Path(os.environ["KVPATCH_RECORD"]) / "retention_product.csv", [row])
    assert sum(adopted) <= row_steps / 1000
