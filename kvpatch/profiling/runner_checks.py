"""Checks of what captures and compiles steps: made anew, side by side, made once, without copies or waiting."""

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from kvpatch.graphs import Runner
from kvpatch.profiling import models
from kvpatch.profiling.loop_checks import BOTH, CAPTURED, COMPILED, LENGTHS, patched, run
from kvpatch.profiling.models import VOCABULARY, Place
from kvpatch.profiling.parts import Part, Skipped, require


def made_anew(how: dict, place: Place) -> str:
    """The same tokens after `free`, and after unpatching and patching again."""
    model, batch = models.tiny("llama", place), models.prompts(LENGTHS, VOCABULARY, place)
    with patched(model, place, "inertia-lazy", how) as handle:
        first = run(handle, place, batch)
        handle.free()
        second = run(handle, place, batch)
    with patched(model, place, "inertia-lazy", how) as handle:
        third = run(handle, place, batch)
    require(torch.equal(first, second), "the tokens after handle.free() must be those before it")
    require(torch.equal(first, third), "the tokens after unpatching and patching again must be those before it")
    return "after free, and after unpatching and patching"


def side_by_side(how: dict, place: Place) -> str:
    """Two models that take turns generate what each does alone."""
    both = [models.tiny("llama", place, seed) for seed in (0, 1)]
    batch = models.prompts(LENGTHS, VOCABULARY, place)
    alone = []
    for model in both:
        with patched(model, place, "inertia-lazy", how) as handle:
            alone.append(run(handle, place, batch))
    with contextlib.ExitStack() as open_patches:
        handles = [open_patches.enter_context(patched(model, place, "inertia-lazy", how)) for model in both]
        for turn in range(3):
            for number, handle in enumerate(handles):
                require(
                    torch.equal(run(handle, place, batch), alone[number]),
                    f"model {number} must generate in turn {turn} what it does alone",
                )
    return "three turns each"


def nothing_made_twice(policy: str, how: dict, place: Place) -> str:
    """After the first prompt nothing is compiled or captured, and every buffer keeps its place."""
    model = models.tiny("llama", place)
    batches = [models.prompts([length], VOCABULARY, place, seed=length) for length in (30, 47, 33, 61)]
    with patched(model, place, policy, how) as handle:
        run(handle, place, batches[0])
        cache, stats = handle._cache, handle.stats
        places = [cache.current.keys[0].data_ptr(), cache.current.books.free.data_ptr()]
        made = stats.compiles, stats.graphs
        for batch in batches[1:]:
            run(handle, place, batch)
            length = batch["input_ids"].shape[1]
            require(handle._cache is cache, f"the cache must be the first call's after a prompt of {length} tokens")
            now = [cache.current.keys[0].data_ptr(), cache.current.books.free.data_ptr()]
            require(now == places, f"keys and books must lie where they lay, and moved at a prompt of {length} tokens")
            require(
                stats.recompiles == 0 and (stats.compiles, stats.graphs) == made,
                f"nothing may be compiled or captured again for a prompt of {length} tokens: {stats.recompiles} "
                f"recompiled, {stats.compiles - made[0]} compiled and {stats.graphs - made[1]} captured more",
            )
    return f"{made[0]} compiled and {made[1]} captured for the first prompt, nothing for three more"


def no_copy_of_the_cache(place: Place) -> str:
    """A compiled step allocates less than one layer's keys: no operator makes the compiler copy a buffer."""
    if not place.cuda:
        raise Skipped("the largest allocation is known of CUDA's allocator only")
    model, batch = models.tiny("llama", place), models.prompts([2500], VOCABULARY, place)
    with patched(model, place, "inertia", COMPILED | {"budget": 2000}) as handle:
        run(handle, place, batch)
        cache, token = handle._cache, torch.tensor([5], device=place.device)
        decoder, keys = handle.decoder_for(cache), cache.current.keys[0].nbytes
        with torch.inference_mode(False), torch.no_grad():
            decoder.step(cache, token)
            place.synchronize()
            torch.cuda.reset_peak_memory_stats(place.device)
            before = torch.cuda.memory_allocated(place.device)
            decoder.step(cache, token)
            place.synchronize()
            most = torch.cuda.max_memory_allocated(place.device) - before
    require(most < keys, f"a step must allocate less than a layer's keys, {keys:,} bytes, and took {most:,}")
    return f"{most:,} bytes at most, a layer's keys are {keys:,}"


SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def synchronisations(names: list[str]) -> int:
    """How many of a profile's events make the host wait for the device."""
    return sum(name in SYNCHRONISING for name in names)


def waits(how: dict, place: Place) -> str:
    """The host waits for the device once a run of steps: counted over two lengths, so that constants fall out."""
    if not place.cuda:
        raise Skipped("synchronisations are counted of CUDA only")
    from torch.profiler import ProfilerActivity, profile

    model, batch = models.tiny("llama", place), models.prompts(LENGTHS, VOCABULARY, place)
    counted = []
    with patched(model, place, "inertia-lazy", how) as handle:
        for new_tokens in (models.whole_runs(32), models.whole_runs(96)):
            run(handle, place, batch, new_tokens)  # whatever is made once
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                run(handle, place, batch, new_tokens)
            names = [event.name for event in seen.events()]
            counted.append((synchronisations(names), handle.stats.replays, new_tokens))
        with _no_waiting_in_replays(place):
            run(handle, place, batch)
    (few, few_runs, short), (many, many_runs, long) = counted
    require(
        few > 0,
        "the profiler must see the host wait at least once a call; it saw none, so nothing can be concluded from it",
    )
    runs, more = many_runs - few_runs, many - few
    require(
        more <= runs + 2,
        f"the host must wait once a run of steps at most: for {runs} runs more it waited {more} times more",
    )
    return (
        f"{more} more waits for {runs} more runs, {long - short} more tokens; {few} in a call of {short} tokens and "
        f"{few_runs} runs; none inside a replay"
    )


@contextlib.contextmanager
def _no_waiting_in_replays(place: Place) -> Iterator[None]:
    """torch raises where an operation inside a replay waits for the device."""
    replay = Runner.replay

    def watched(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return replay(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(Runner, "replay", watched):
        yield


def parts(place: Place) -> list[Part]:
    """All of them."""
    # For a CPU one kind of step is compiled, which takes as long as all the other checks.
    how, once = (CAPTURED, ("inertia", COMPILED)) if place.small else (BOTH, ("inertia-lazy", BOTH))
    return [
        Part("a runner made anew", partial(made_anew, how, place), 25),
        Part("two models side by side", partial(side_by_side, CAPTURED, place), 20),
        Part("nothing is made twice", partial(nothing_made_twice, *once, place), 25),
        Part("no copy of the cache", partial(no_copy_of_the_cache, place), 20),
        Part("waits of the host", partial(waits, BOTH, place), 25),
    ]
