"""One decode step of a patched model: embedding, the model's own layers, norm and head, over the slots.

One decoder layer is compiled and reused for all of them. Which of two kinds a step is (scoring or plain) is known on
the host, so each kind is a graph of its own and none of them branches.
"""

import contextlib
import itertools
import time
import types
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvpatch import slots
from kvpatch.cache import SlotCache
from kvpatch.linear import replace_linears
from kvpatch.patches import Parts
from kvpatch.replay import Tape, lengths_of
from kvpatch.stats import Stats

_NUMBERS = itertools.count()


def layer_step(layer, hidden: Tensor, cos: Tensor, sin: Tensor, of_layer: slots.LayerSlots) -> Tensor:
    """One decoder layer over its slots: hidden [B, 1, E] to [B, 1, E]. Mutates the layer's slots."""
    positions = of_layer.newest[:, None]
    return layer(hidden, position_embeddings=(cos, sin), position_ids=positions, slots=of_layer)


def head_step(norm, head, hidden: Tensor, ledger: slots.Ledger, finish: Callable) -> Tensor:
    """Logits [B, V] in float32 or wider, and the choice of the next free slots. Mutates the ledger."""
    logits = head(norm(hidden[:, -1]))
    finish(ledger)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def norm_step(norm, head, hidden: Tensor, ledger: slots.Ledger, finish: Callable) -> Tensor:
    """What the head is given, [B, 1, E], and the choice of the next free slots. Mutates the ledger."""
    hidden = norm(hidden)
    finish(ledger)
    return hidden


def _plainly(function: Callable, changing: tuple, *arguments) -> Tensor:
    return function(*arguments)


class Decoder:
    """Runs decode steps of one model under one policy.

    Args:
        parts: the model's pieces.
        policy, backend: what the end of a step follows, and what runs it (`kvpatch.backends.Backend`).
        scoring_layers: for each of the policy's rankings, how many layers score.
        compile: whether the layer and the head are compiled.
        stats: where compilations are counted.
    """

    def __init__(self, parts: Parts, policy, backend, *, scoring_layers: tuple[int, ...], compile: bool, stats: Stats):
        self.parts, self.policy, self.stats = parts, policy, stats
        self.compiled = compile
        plain = _finisher(backend, policy, ())
        # Only one update a step makes the end of a scoring step differ from that of a plain one.
        self._finish = {
            False: plain,
            True: _finisher(backend, policy, scoring_layers) if policy.coupling == "uniform" else plain,
        }
        self._tape = Tape()
        self._layer = self._compile(layer_step) if compile else layer_step
        # The end of a step: the logits, or what transformers' own loop takes to the head itself.
        self._ends = {True: head_step, False: norm_step}
        if compile:
            self._ends = {whole: self._compile(function) for whole, function in self._ends.items()}
        self._warm: set[tuple] = set()

    def _compile(self, function: Callable) -> Callable:
        # Compiled code is cached per code object, and what once varied is remembered by its name: with a name and an
        # object of its own, a model shares no limit with others, and another model's sizes don't make its own dynamic.
        name = f"{function.__name__}_{next(_NUMBERS)}"
        own = types.FunctionType(
            function.__code__.replace(co_name=name, co_qualname=name),
            function.__globals__,
            name,
            function.__defaults__,
        )
        return torch.compile(own, backend=self._inductor, fullgraph=True)

    def _inductor(self, graph, inputs):
        from torch._inductor.compile_fx import compile_fx

        self.stats.compiles += 1
        replace_linears(graph)
        return self._tape.wrap(compile_fx(graph, inputs), lengths_of(graph))

    def step(self, cache: SlotCache, tokens: Tensor, *, logits: bool = True) -> Tensor:
        """Feed one token a row.

        Args:
            cache: holds the prompt and what was fed since; mutated.
            tokens: [B] int64.
            logits: whether the head runs too.

        Returns:
            logits [B, V], float32 or wider; without the head what it would be given, [B, 1, E].
        """
        started = time.perf_counter()
        cache.begin_step()
        if not self.compiled:
            result = self._run(cache, tokens, logits)
        else:
            with self._counted((cache.scores, logits, tokens.shape[0] > 1)):
                result = self._compiled_step(cache, tokens, logits)
        cache.end_step()
        self.stats.step_seconds.append(time.perf_counter() - started)
        return result

    def device_step(self, cache: SlotCache, tokens: Tensor, scores: bool) -> Tensor:
        """What a step does on the device, and nothing that the host counts: for runs of steps (`kvpatch.graphs`).

        Args:
            cache: decodes already; its slots to be read are set.
            tokens: [B] int64.   scores: the step's kind.

        Returns:
            logits [B, V], float32 or wider.
        """
        cache.scores = scores
        cache.admit()
        with self._counted((scores, True, tokens.shape[0] > 1)):
            return self._run(cache, tokens, True)

    @contextlib.contextmanager
    def _counted(self, kind: tuple) -> Iterator[None]:
        """Count what is compiled inside, and as recompiled what a step of that kind should have had already."""
        before, started = self.stats.compiles, time.perf_counter()
        yield
        compiled = self.stats.compiles - before
        self.stats.recompiles += compiled if kind in self._warm else 0
        self.stats.compile_seconds += time.perf_counter() - started if compiled else 0.0
        self._warm.add(kind)

    def _compiled_step(self, cache: SlotCache, tokens: Tensor, logits: bool) -> Tensor:
        """A step repeated from the tape, or looked up under all of torch.compile's guards and written down."""
        kind, owner = (cache.scores, logits), cache.step_views
        if self._tape.holds(kind, owner):
            indexes = [*cache.state.indexes, cache.state.ledger.index]
            return self._tape.play(kind, *self._enter(cache, tokens), indexes)
        cache.before_move = self._tape.clear
        return self._tape.record(kind, owner, lambda call: self._run(cache, tokens, logits, call))

    def _enter(self, cache: SlotCache, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, 1, E], cos and sin [B, 1, D] of the new tokens."""
        hidden = self.parts.embed(tokens[:, None])
        return hidden, *self.parts.rotary(hidden, position_ids=cache.state.newest[:, None])

    def _run(self, cache: SlotCache, tokens: Tensor, logits: bool, call: Callable = _plainly) -> Tensor:
        parts, ledger = self.parts, cache.state.ledger
        hidden, cos, sin = self._enter(cache, tokens)
        index, rows_dim = ledger.index, 0 if tokens.shape[0] > 1 else None
        for tensor in (cos, sin):
            slots.mark_dynamic(tensor, None, rows_dim)
        for number, layer in enumerate(parts.layers):
            of_layer = cache.layer_slots(number)
            slots.mark_dynamic(hidden, None, rows_dim)
            changing = (hidden, cos, sin, of_layer.index)
            hidden = call(self._layer, changing, layer, hidden, cos, sin, of_layer)
        slots.mark_dynamic(hidden, None, rows_dim)
        finish = self._finish[cache.scores]
        return call(self._ends[logits], (hidden, cos, sin, index), parts.norm, parts.head, hidden, ledger, finish)


def _finisher(backend, policy, scored: tuple[int, ...]) -> Callable:
    def finish(ledger: slots.Ledger) -> None:
        backend.finish(ledger, policy, scored)

    return finish
