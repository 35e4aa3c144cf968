"""Which heads, how many of them, and what share of the budget they decide over: chosen by trying them out."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import kvpatch
from kvpatch import best, needle
from kvpatch.calibration import observing, prompts, trials
from kvpatch.policy import Policy, resolve
from kvpatch.ranking import Blend

COUNTS, SHARES = (1, 2, 4), (0.5, 0.75)
PLAIN = 0.9
LEAST, CLOSING = 0.005, 5  # an answer's last token has little more than that at the first step
NEEDLE_BUDGETS, PROSE_BUDGETS = (0.03, 0.02), (0.03, 0.02)
LEAST_SOLVED = 6
FINALISTS = 6  # candidates whose prose is tried too


@dataclass(frozen=True)
class Effort:
    """How much is looked at. observed: prompts whose attention is read.   tried: prompts that policies answer.
    texts, forced: of prose, and tokens of their continuations.   length: tokens of a prompt.   batch: rows."""

    observed: int = 32
    tried: int = 32
    texts: int = 16
    forced: int = 64
    length: int = 1024
    batch: int = 8


@dataclass(frozen=True)
class Outcome:
    """How one policy did. kept: share of the full cache's needles at each budget of `NEEDLE_BUDGETS`.
    divergence: nats at each of `PROSE_BUDGETS`."""

    policy: Policy
    kept: tuple[float, ...]
    divergence: tuple[float, ...]


def calibrate(
    model,
    tokenizer,
    effort: Effort = Effort(),
    seed: int = 50_000,
    tick: Callable[[str, int, int], None] = lambda *_: None,
) -> best.Profile:
    """Find the policy "best" for a model.

    Args:
        model: unpatched; it is patched meanwhile and restored.
        seed: of the first prompt; evaluation uses other ones.
        tick: told of a stage's name, what is done of it, and how much it is.

    Returns:
        a profile, not yet written. Where no blend is worth more than "inertia" (see `choose`), it holds that.

    Raises:
        ValueError: if the model answers too few prompts with its full cache.
    """
    seeds = iter(range(seed, seed + 10**6))
    seen = []
    for done in range(effort.observed):
        found = observing.observe(model, tokenizer, prompts.document(effort.length, tokenizer, next(seeds)))
        if found is not None and found.solved:
            seen.append(found)
        tick("reading prompts", done + 1, effort.observed)
    if len(seen) < LEAST_SOLVED:
        raise ValueError(
            f"the model answers {len(seen)} of {effort.observed} needle prompts of {effort.length} tokens with its "
            f"full cache, and {LEAST_SOLVED} are needed: calibrate at another length, or with more prompts"
        )
    texts = torch.stack([needle.prose(effort.length, tokenizer, next(seeds)) for _ in range(effort.texts)])
    plain = []
    for done, text in enumerate(texts):
        plain.append(observing.look(model, text))
        tick("reading prose", done + 1, effort.texts)
    heads = observing.by_cost(seen)[: max(COUNTS)]
    chosen_of = {count: observing.weighted(heads[:count], seen) for count in COUNTS}
    attentions = [one.attention for one in seen]
    foci = {count: focus_of(some, attentions, plain) for count, some in chosen_of.items()}
    candidates = [resolve(best.FALLBACK, name=best.NAME)]
    candidates += [
        resolve(best.FALLBACK, name=best.NAME, blend=_blend(chosen_of[count], share, foci[count]))
        for count in COUNTS
        for share in SHARES
    ]
    outcomes = _tried(model, tokenizer, candidates, effort, seeds, texts, tick)
    chosen = choose(outcomes)
    measured = {
        "kvpatch": kvpatch.__version__,
        "seed": seed,
        "length": effort.length,
        "prompts": effort.observed,
        "solved": len(seen),
        "needle_budgets": list(NEEDLE_BUDGETS),
        "prose_budgets": list(PROSE_BUDGETS),
        "bits": round(observing.cost(observing.mean_of(heads[: max(COUNTS)]), seen), 3),
        "fallback": _numbers(outcomes[0]),
        "chosen": _numbers(chosen),
        "tried": [_described(one) for one in outcomes[1:]],
    }
    return best.Profile(best.identity(model), chosen.policy, measured)


def focus_of(heads: list[tuple], seen: list[Tensor], plain: list[Tensor]) -> float:
    """What tells rows that have something to copy from others, to two digits.

    Half-way between the least focus of prompts with a fact and what nine of ten plain texts stay below; where these
    overlap, the former. A fact that is missed costs more than a plain text in which copies are kept.

    Args:
        heads: as of `observing.running`.
        seen, plain: attention of prompts that hide a fact, and of plain texts.
    """
    ranked = observing.running(heads)
    found = observing.foci(ranked, seen).min().item()
    beneath = observing.foci(ranked, plain).quantile(PLAIN).item()
    between = min(found, (found + beneath) / 2)
    return min(max(math.floor(100 * between) / 100, 0.01), 0.99)


def _blend(heads: list[tuple], share: float, focus: float) -> Blend:
    return Blend(
        score_heads=heads,
        share=share,
        least=LEAST,
        closing=CLOSING,
        focus=focus,
    )


def _tried(
    model, tokenizer, candidates: list[Policy], effort: Effort, seeds: Iterator[int], texts: Tensor, tick
) -> list[Outcome]:
    """Needles of all candidates, prose of the first one and of those that keep most; the first one's outcome first."""
    needle_ways = [("full", None)] + [(one, trials.share(x)) for one in candidates for x in NEEDLE_BUDGETS]
    batches = -(-effort.tried // effort.batch)
    finalists = min(FINALISTS, len(candidates) - 1) + 1
    total, done = batches * len(needle_ways) + finalists * len(PROSE_BUDGETS) + 2, 0

    def one_done() -> None:
        nonlocal done
        done += 1
        tick("trying policies", done, total)

    with kvpatch.patched(model, "full", compile=False) as handle:
        found: list[list[Tensor]] = []
        for start in range(0, effort.tried, effort.batch):
            rows = range(start, min(start + effort.batch, effort.tried))
            hidden = [prompts.document(effort.length, tokenizer, next(seeds)) for _ in rows]
            found.append(trials.hits(handle, tokenizer, hidden, needle_ways, one_done))
        full, *others = (torch.cat(parts) for parts in zip(*found, strict=True))
        kept = [((one & full).sum() / full.sum().clamp_min(1)).item() for one in others]
        needles = _by_policy(kept, len(NEEDLE_BUDGETS))
        left = _finalists(candidates, needles)
        prose_ways = [(candidates[number], trials.share(x)) for number in left for x in PROSE_BUDGETS]
        apart = trials.divergences(handle, tokenizer, texts, effort.forced, prose_ways, one_done)
    nats = _by_policy([one.mean().item() for one in apart], len(PROSE_BUDGETS))
    return [Outcome(candidates[n], needles[n], apart) for n, apart in zip(left, nats, strict=True)]


def _by_policy(values: list[float], budgets: int) -> list[tuple[float, ...]]:
    return [tuple(values[start : start + budgets]) for start in range(0, len(values), budgets)]


def _finalists(candidates: list[Policy], needles: list[tuple[float, ...]]) -> list[int]:
    """The first candidate and those that keep most needles; of equals those that take little of the budget."""

    def rank(number: int) -> tuple:
        blend = candidates[number].blend
        return -sum(needles[number]), blend.share, len(blend.score_heads)

    return [0, *sorted(range(1, len(candidates)), key=rank)[:FINALISTS]]


def choose(outcomes: list[Outcome]) -> Outcome:
    """The outcome whose share of needles, less the part by which its divergence on prose exceeds the first one's, the
    fallback's, is largest: a needle in a hundred is worth one per cent of divergence."""
    fallback = outcomes[0]

    def worth(one: Outcome) -> float:
        excess = [nats / other - 1 for nats, other in zip(one.divergence, fallback.divergence, strict=True)]
        return sum(one.kept) / len(one.kept) - sum(excess) / len(excess)

    return max(outcomes, key=worth)


def _numbers(one: Outcome) -> dict:
    return {"kept": [round(x, 4) for x in one.kept], "nats": [round(x, 4) for x in one.divergence]}


def _described(one: Outcome) -> dict:
    blend = one.policy.blend
    return {"heads": len(blend.score_heads), "share": blend.share, "focus": blend.focus, **_numbers(one)}
