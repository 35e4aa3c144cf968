"""Checks of the loops on random models in float32: however a policy's steps are started, the tokens are the same."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import kvpatch
from kvpatch.graphs import StepByStep
from kvpatch.profiling import models
from kvpatch.profiling.kernel_checks import relative_rows
from kvpatch.profiling.models import VOCABULARY, Place
from kvpatch.profiling.parts import Part, require

BUDGET = 12
NEW_TOKENS = 27  # not a whole number of runs
LENGTHS = [30, 19]
POLICIES = ("inertia-lazy", "inertia", "score-free", "tova", "h2o-decode")
# How steps are started, beside EAGER that they are compared with.
EAGER = {"compile": False, "graphs": False}
CAPTURED = {"compile": False, "graphs": True}
COMPILED = {"compile": True, "graphs": False}
BOTH = {"compile": True, "graphs": True}
LOGITS = 1e-4  # relative root mean square of a step's logits in float32


@contextlib.contextmanager
def patched(model, place: Place, policy: str, how: dict) -> Iterator[kvpatch.Patch]:
    """The model patched for the length of a with block; without CUDA its runs are made step by step."""
    with kvpatch.patched(model, policy, **{"budget": BUDGET} | how) as handle:
        if how.get("graphs") and not place.cuda:
            handle._capturer = StepByStep()
        yield handle


def run(handle, place: Place, batch: dict[str, Tensor], new_tokens: int = NEW_TOKENS, **more):
    """Generate; where steps are to be captured, they must have been."""
    found = models.generate(handle.model, batch, new_tokens, **more)
    if handle.graphs and place.cuda:
        require(
            handle.stats.graph_active and handle.stats.replays > 0,
            f"the steps of {handle!r} must run as CUDA graphs, and did not: {handle.uncaptured_because}",
        )
    return found


PADDED, ONE, SAMPLING, ENDING = SCENARIOS = ("padded rows", "one row", "sampling", "a row that ends")


def tokens(handle, place: Place, names: tuple[str, ...], count: int, eos: int | None = None) -> dict[str, Tensor]:
    """New tokens [B, count] of each scenario; `eos` is the token that ends a row in the last one."""
    found = {}
    for name in names:
        batch = models.prompts(LENGTHS[:1] if name == ONE else LENGTHS, VOCABULARY, place)
        more = {"do_sample": True, "temperature": 1.3, "top_k": 20} if name in (SAMPLING, ENDING) else {}
        more |= {"eos_token_id": eos} if name == ENDING else {}
        torch.manual_seed(11)
        found[name] = run(handle, place, batch, count, **more)[:, batch["input_ids"].shape[1] :].cpu()
    return found


def ending_token(sampled: Tensor) -> int:
    """A token of the first row that comes first inside a run of several steps: neither its first nor its last one."""
    row = sampled[0].tolist()
    # Token 2 is the first run's first; runs are of four steps or of eight.
    for place in range(3, len(row)):
        if (place - 2) % 4 in (1, 2) and row[place] not in row[:place]:
            return row[place]
    raise ValueError(f"no token of {row} can end a row inside a run")


def same_tokens(
    kind: str,
    policy: str,
    ways: dict[str, dict],
    place: Place,
    names: tuple[str, ...] = SCENARIOS,
    count: int = NEW_TOKENS,
) -> str:
    """Every way's tokens, `count` a row, are those of eager steps, one at a time."""
    require(
        not (place.cuda and torch.backends.cuda.matmul.allow_tf32),
        "float32 products must be made in float32: torch.backends.cuda.matmul.allow_tf32 is True",
    )
    model = models.tiny(kind, place)
    with patched(model, place, policy, EAGER) as handle:
        eos = ending_token(tokens(handle, place, (SAMPLING,), count)[SAMPLING]) if ENDING in names else None
        wanted = tokens(handle, place, names, count, eos)
    for name, how in ways.items():
        with patched(model, place, policy, how) as handle:
            got = tokens(handle, place, names, count, eos)
            _equal(got, wanted, f"{kind}, {policy}, {name} ({handle.backend})")
    return f"{', '.join(names)}: the tokens of eager steps"


def _equal(got: dict[str, Tensor], wanted: dict[str, Tensor], who: str) -> None:
    for name, expected in wanted.items():
        same = got[name].shape == expected.shape and torch.equal(got[name], expected)
        if same:
            continue
        columns = min(got[name].shape[1], expected.shape[1])
        differ = (got[name][:, :columns] != expected[:, :columns]).nonzero().tolist()
        where = f"first at row {differ[0][0]}, new token {differ[0][1]}" if differ else "in their number"
        require(False, f"{who}, {name}: the tokens must be those of eager steps, and differ {where}")


def same_logits(how: dict, place: Place, steps: int = 64) -> str:
    """Single steps give the logits of eager ones, step by step: the host asks for them, so each is a run of its own."""
    model, batch = models.tiny("llama", place), models.prompts(LENGTHS, VOCABULARY, place)
    more = {"return_dict_in_generate": True, "output_logits": True}
    found = []
    for way in (EAGER, how):
        with patched(model, place, "inertia-lazy", way) as handle:
            found.append(torch.stack(run(handle, place, batch, steps + 1, **more).logits).cpu())
    wanted, got = found
    require(bool(got.isfinite().all()), "every logit must be a finite number")
    error = relative_rows(got, wanted)
    worst = int(error.argmax())
    require(
        float(error.max()) <= LOGITS,
        f"the logits of every step must lie within {LOGITS:.0e} of eager steps' (relative root mean square); those of "
        f"step {worst} lie {float(error[worst]):.2e} from them, the first beyond at {_first(error > LOGITS)}",
    )
    return f"{steps} steps, at most {float(error.max()):.1e} away (step {worst})"


def _first(beyond: Tensor) -> int:
    return int(beyond.nonzero()[0]) if beyond.any() else -1


QUICK = {"captured": CAPTURED, "packed and captured": CAPTURED | {"backend": "packed"}}


def _tokens(kind: str, policy: str, ways: dict[str, dict], place: Place, seconds: float, *more) -> Part:
    name = f"tokens: {kind}, {policy}, {', '.join(ways)}"
    return Part(name, partial(same_tokens, kind, policy, ways, place, *more), seconds)


def parts(place: Place) -> list[Part]:
    """Checks that come first."""
    if place.small:
        kernels = {"fused and captured": CAPTURED | {"backend": "triton"}}
        how = CAPTURED
        found = [
            _tokens("llama", "inertia-lazy", QUICK, place, 10),
            _tokens("llama", "tova", kernels, place, 20, (ONE,), 10),
            _tokens("qwen2", "score-free", QUICK, place, 10),
            _tokens("mistral", "h2o-decode", QUICK, place, 10),
        ]
    else:
        both = {"captured and compiled": BOTH}
        several = (PADDED, SAMPLING, ENDING)  # a batch of one row is compiled by itself
        how = BOTH
        found = [_tokens("llama", "inertia-lazy", both | {"compiled": COMPILED} | QUICK, place, 60)]
        found += [_tokens("llama", policy, both | QUICK, place, 20, several) for policy in POLICIES[1:]]
        found += [_tokens(kind, "inertia-lazy", both | QUICK, place, 20, several) for kind in ("qwen2", "mistral")]
    return [
        *found,
        Part("logits of single steps", partial(same_logits, how, place), 20),
    ]


def more_parts(place: Place) -> list[Part]:
    """The other policies of the other models."""
    if place.small:
        return []
    kinds = ("qwen2", "mistral")
    return [_tokens(kind, policy, QUICK, place, 15) for kind in kinds for policy in POLICIES[1:]]
