"""Entries whose removal moves the next token's distribution least (behaviour-preserving compression, arXiv 2610.06479).

What a mask removes changes each head's output (`kvpatch.deletion`), through the output projection the last state, and
through norm and head the logits of the likeliest tokens, all to first order and without the response of later layers.
Its cost is the KL divergence of that change, averaged over the prompt's last positions. Entries are removed greedily,
those first that raise it least.

Pure tensor code, one row at a time. Shapes: L layers, G KV heads, R query heads of each, U scoring positions, D head
size, E hidden size, n entries, K likeliest tokens.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpatch.compression.prompt import Exit, Prompt, window_attention
from kvpatch.ranking import is_int, is_real

NAME = "behavior"
EVERY = 10  # rounds after which all candidates are weighed anew
HEAD_ROWS = 2**14  # of the head's weight that are widened at once
CELLS = 2**24  # of the largest piece that is made at once


@dataclass(frozen=True)
class Behavior:
    """How behaviour-preserving compression (`prefill="behavior"`) searches for what may go.

    Args:
        support: likeliest next tokens whose distribution is to be kept; the whole vocabulary gives all of it. The
            search holds support * D floats for every layer, query head and scoring position.
        pool: candidates, as a multiple of the number to be removed: those that cost least alone.
        epsilon: least attention mass that a query's head must retain. Where no entry can be removed otherwise it is
            halved.
        rounds: share of the remaining candidates that is removed at once; 0: one entry at a time, after weighing all.
        again: with rounds, share of the remaining candidates that is weighed anew in each: those that were lightest
            when they were weighed last. All of them are every `EVERY` rounds.

    Raises:
        ValueError: for a value outside its range.
    """

    support: int = 64
    pool: float = 1.5
    epsilon: float = 0.05
    rounds: float = 0.02
    again: float = 0.1

    def __post_init__(self):
        if not (is_int(self.support) and self.support >= 2):
            raise ValueError(f"support must be an int >= 2, got {self.support!r}")
        if not (is_real(self.pool) and self.pool >= 1.0):
            raise ValueError(f"pool must be a number >= 1, got {self.pool!r}")
        if not (is_real(self.epsilon) and 0.0 < self.epsilon < 1.0):
            raise ValueError(f"epsilon must be a number in (0, 1), got {self.epsilon!r}")
        if not (is_real(self.rounds) and 0.0 <= self.rounds < 1.0):
            raise ValueError(f"rounds must be a number in [0, 1), got {self.rounds!r}")
        if not (is_real(self.again) and self.rounds <= self.again <= 1.0):
            raise ValueError(f"again must be a number in [rounds, 1] = [{self.rounds}, 1], got {self.again!r}")

    def pooled(self, quota: int) -> int:
        """Candidates for so many removals, if there are as many."""
        return math.ceil(self.pool * quota - 1e-9)

    def weighs_all(self, number: int) -> bool:
        """Whether all candidates are weighed anew after round `number`, counted from 1."""
        return not self.rounds or number % EVERY == 0


class Removal(NamedTuple):
    """What a search has found.

    order: [removed, 3] int64, (layer, KV head, entry) in the order of removal; of one round those that cost less first.
    divergence: of the mask after each round, nats.   halved: how often epsilon was.
    """

    order: Tensor
    divergence: list[float]
    halved: int


def root_of(states: Tensor, epsilon: float) -> Tensor:
    """What the norm divides by: [U, E] to [U, 1]."""
    return (states.square().mean(-1, keepdim=True) + epsilon).sqrt()


def jacobian(states: Tensor, gain: Tensor, epsilon: float, rows: Tensor) -> Tensor:
    """Rows of the head times the norm's derivative: how much the logits move with the last state.

    Args:
        states: [U, E].   gain: [E].   rows: [U, K, E] of the head.

    Returns:
        [U, K, E].
    """
    width = states.shape[-1]
    scale = root_of(states, epsilon)
    rows = rows * gain
    along = torch.einsum("uke,ue->uk", rows, states) / (width * scale**3)
    return rows / scale[..., None] - along[..., None] * states[:, None]


def support_of(states: Tensor, way: Exit, size: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens at each position, [U, K] int64, and their log-probabilities among themselves.

    Args:
        states: [U, E].
    """
    normed = states / root_of(states, way.epsilon) * way.gain.to(states.dtype)
    logits = torch.cat([normed @ some.to(states.dtype).T for some in way.head.split(HEAD_ROWS)], -1)
    if way.bias is not None:
        logits = logits + way.bias.to(states.dtype)
    best = logits.topk(min(size, logits.shape[-1]), dim=-1)
    return best.indices, best.values.log_softmax(-1)


def divergence(logp: Tensor, shift: Tensor) -> Tensor:
    """KL(p || p moved by a shift of the logits), never negative: [..., U, K, c] each to [..., U, c]."""
    moved = torch.logsumexp(logp + shift, -2) - (logp.exp() * shift).sum(-2)
    return moved.clamp_min(0.0)


def weighings(how: Behavior, eligible: int, wanted: int) -> int:
    """How often the search weighs an entry, as long as enough mass is left everywhere; what it costs follows from that.

    Each time takes R U K D multiplications: of the demo model 0.4 million, of Llama 3 8B 1.0 million.
    """
    alive, total, number = min(eligible, how.pooled(wanted)), eligible, 0
    while wanted > 0:
        gone, number = min(wanted, max(1, int(how.rounds * alive))), number + 1
        alive, wanted = alive - gone, wanted - gone
        if wanted > 0:
            total += alive if how.weighs_all(number) else max(1, int(how.again * alive))
    return total


class Search:
    """The greedy search over one row.

    Args:
        weights: of each layer [G, R, U, n], attention at the scoring positions, n the row's length.
        values: of each layer [G, n, D].
        outputs: of each layer [E, H * D].
        way: its `states` [1, U, E] of this row.
        how: `Behavior`.
    """

    def __init__(self, weights: list[Tensor], values: list[Tensor], outputs: list[Tensor], way: Exit, how: Behavior):
        wide = weights[0].dtype
        self.how, self.layers, (self.groups, self.n, _) = how, len(values), values[0].shape
        states = way.states[0].to(wide)
        tokens, logp = support_of(states, way, how.support)
        self.logp = logp[..., None]  # [U, K, 1]
        rows = jacobian(states, way.gain.to(wide), way.epsilon, way.head[tokens].to(wide))
        self.weights = [one.transpose(1, 2) for one in weights]  # [G, U, R, n]
        self.values, self.projected, self.of_outputs = values, [], []
        for weight, value, output in zip(self.weights, values, outputs, strict=True):
            by_group = output.to(wide).unflatten(-1, (self.groups, -1)).transpose(0, 1)
            projected = torch.stack([rows @ one for one in by_group])  # [G, U, K, R * D]
            self.projected.append(projected)
            self.of_outputs.append(self._through(projected, weight @ value.to(wide)[:, None]))
        self.mass = [torch.zeros_like(one[..., 0]) for one in self.weights]  # removed, [G, U, R]
        self.of_lost = [torch.zeros_like(one) for one in self.of_outputs]  # what m o - c comes to, [G, U, K, R]
        self.shift = torch.zeros_like(self.logp)  # of the logits by the mask, [U, K, 1]

    def _through(self, projected: Tensor, states: Tensor) -> Tensor:
        """What states [..., U, R, D] of the heads come to in the logits: [..., U, K, R]."""
        own = torch.diag_embed(states.transpose(-1, -2)).transpose(-3, -2)  # [..., U, R, D, R]: each in a column
        return projected @ own.flatten(-3, -2)

    def _head_shift(self, layer: int, group: int) -> Tensor:
        """What one KV head's mask adds to the shift, [U, K, 1]."""
        return self.of_lost[layer][group] @ (1 / self._left(self.mass[layer][group]))[..., None]

    def _left(self, mass: Tensor) -> Tensor:
        """What remains of a head's attention; where rounding leaves nothing, as little as can be told from nothing."""
        return (1 - mass).clamp_min(torch.finfo(mass.dtype).eps)

    def costs(self, layer: int, group: int, entries: Tensor) -> Tensor:
        """The mask's divergence with each of some entries [c] of a head removed too: [c]."""
        rest = self.shift - self._head_shift(layer, group)
        weights, values = self.weights[layer][group], self.values[layer][group]
        mass, projected = self.mass[layer][group], self.projected[layer][group]
        known = torch.cat((self.of_lost[layer][group], self.of_outputs[layer][group]), -1)  # [U, K, 2 R]
        found = []
        for some in entries.split(max(1, CELLS // (len(mass) * max(projected.shape[1:])))):
            a = weights[..., some]  # [U, R, c]
            left = 1 / self._left(mass[..., None] + a)
            # (m o - c) + a (o - v), over what is left; lost and o have been through norm and head before.
            part = a * left
            moved = (part[:, :, None] * values[some].T.to(a.dtype)).flatten(1, 2)  # [U, R * D, c]
            shift = torch.baddbmm(rest + known @ torch.cat((left, part), 1), projected, moved, alpha=-1)
            found.append(divergence(self.logp, shift).mean(0))
        # A cost that is no number is one that nobody wants to pay, and is paid if there is no other.
        return torch.cat(found).nan_to_num(nan=torch.finfo(self.shift.dtype).max)

    def admissible(self, layer: int, group: int, entries: Tensor, epsilon: float) -> Tensor:
        """Which of some entries [c] leave every query's heads at least that mass: [c] bool."""
        left = self._left(self.mass[layer][group][..., None] + self.weights[layer][group][..., entries])
        return (left >= epsilon).flatten(0, 1).all(0)

    def remove(self, layer: int, group: int, entries: Tensor) -> None:
        """Add entries [c] of a head to the mask."""
        self.shift -= self._head_shift(layer, group)
        a, values = self.weights[layer][group][..., entries], self.values[layer][group][entries]
        mass = a.sum(-1)  # [U, R]
        self.mass[layer][group] += mass
        of_values = self._through(self.projected[layer][group], a @ values.to(a.dtype))
        self.of_lost[layer][group] += mass[:, None] * self.of_outputs[layer][group] - of_values
        self.shift += self._head_shift(layer, group)

    @property
    def divergence(self) -> float:
        """Of the mask, nats."""
        return divergence(self.logp, self.shift).mean().item()

    def run(
        self, eligible: Tensor, quotas: Sequence[int], tick: Callable[[int], None] = lambda weighed: None
    ) -> Removal:
        """Remove entries.

        Args:
            eligible: [L, G, n] bool.
            quotas: how many entries to remove: one number over all layers and heads, one for each layer, or one for
                each head of each layer, in order.
            tick: told after every pass over the candidates how many were weighed; see `weighings`.

        Raises:
            ValueError: if a quota is more than is eligible.
        """
        how, shape = self.how, (len(quotas), -1)
        wanted, alive = torch.tensor(list(quotas)), eligible.cpu()
        among = alive.reshape(shape).sum(-1)
        if bool((wanted > among).any()):
            raise ValueError(f"quotas must be at most {among.tolist()}, what is eligible, got {wanted.tolist()}")
        alone = self._all_costs(alive)
        tick(int(alive.sum()))
        pool = torch.minimum(torch.tensor([how.pooled(one) for one in quotas]), among)
        alive = alive & _lightest(alone.reshape(shape), pool).view(alive.shape)
        costs, epsilon, halved = alone.masked_fill(~alive, torch.inf), how.epsilon, 0
        order, divergences, before = [], [], 0.0
        while int(wanted.sum()):
            open_ = alive & (wanted > 0)[:, None].expand(alone.reshape(shape).shape).reshape(alive.shape)
            chosen = self._chosen(costs.masked_fill(~open_, torch.inf), open_, wanted, epsilon)
            if not chosen:
                epsilon, halved = epsilon / 2, halved + 1
                continue
            taken = torch.zeros_like(alive)
            for layer, group, entry in chosen:
                taken[layer, group, entry] = True
            for layer, group in taken.any(-1).nonzero().tolist():
                self.remove(layer, group, taken[layer, group].nonzero()[:, 0].to(self.shift.device))
            alive &= ~taken
            wanted -= taken.reshape(shape).sum(-1)
            order += chosen
            divergences.append(self.divergence)
            if int(wanted.sum()):
                # What was weighed in an earlier round keeps its distance from that round's mask.
                costs += divergences[-1] - before
                before, some = divergences[-1], alive
                if not how.weighs_all(len(divergences)):
                    light = costs.masked_fill(~alive, torch.inf).reshape(shape)
                    most = (how.again * alive.reshape(shape).sum(-1)).long().clamp_min(1)
                    some = alive & _lightest(light, most).view(alive.shape)
                costs = torch.where(some, self._all_costs(some), costs)
                tick(int(some.sum()))
        return Removal(torch.tensor(order, dtype=torch.int64).view(-1, 3), divergences, halved)

    def _all_costs(self, alive: Tensor) -> Tensor:
        """`costs` of what is alive, [L, G, n] on the host; infinite elsewhere."""
        costs = torch.full(alive.shape, torch.inf, dtype=self.shift.dtype)
        for layer, group in alive.any(-1).nonzero().tolist():
            entries = alive[layer, group].nonzero()[:, 0]
            costs[layer, group, entries] = self.costs(layer, group, entries.to(self.shift.device)).cpu()
        return costs

    def _chosen(self, costs: Tensor, open_: Tensor, wanted: Tensor, epsilon: float) -> list[tuple[int, int, int]]:
        """The entries that go in this round: those that cost least, as far as quotas and the retained mass allow."""
        for layer, group in open_.any(-1).nonzero().tolist():
            entries = open_[layer, group].nonzero()[:, 0]
            fine = self.admissible(layer, group, entries.to(self.shift.device), epsilon).cpu()
            costs[layer, group, entries[~fine]] = torch.inf
        if not self.how.rounds:
            best = int(costs.argmin())
            places = [best] if math.isfinite(costs.flatten()[best]) else []
        else:
            by_quota, places = costs.reshape(len(wanted), -1), []
            for number, (row, left) in enumerate(zip(by_quota, wanted.tolist(), strict=True)):
                there = int(row.isfinite().sum())
                most = min(left, there, max(1, int(self.how.rounds * there)))
                places += [number * by_quota.shape[1] + one for one in row.argsort(stable=True)[:most].tolist()]
            places.sort(key=lambda place: (float(costs.flatten()[place]), place))
        triples = [(one // (self.groups * self.n), one // self.n % self.groups, one % self.n) for one in places]
        return self._together(triples, epsilon) if len(triples) > 1 else triples

    def _together(self, triples: list[tuple[int, int, int]], epsilon: float) -> list[tuple[int, int, int]]:
        """Those of a round, in order, that leave enough mass together; the others are asked again in the next one."""
        of_heads: dict[tuple[int, int], list[int]] = {}
        for layer, group, entry in triples:
            of_heads.setdefault((layer, group), []).append(entry)
        fine = set()
        for (layer, group), entries in of_heads.items():
            some = torch.tensor(entries, device=self.shift.device)
            gone = self.weights[layer][group][..., some].cumsum(-1) + self.mass[layer][group][..., None]
            enough = (self._left(gone) >= epsilon).flatten(0, 1).all(0).cpu()
            fine |= {(layer, group, entry) for entry in entries[: int(enough.int().cumprod(0).sum())]}
        return [one for one in triples if one in fine]


def _lightest(costs: Tensor, count: Tensor) -> Tensor:
    """Which entries cost least: of costs [parts, m] so many of each part [parts], of equals the first; bool."""
    return costs.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True) < count[:, None]


def choose(
    how: Behavior,
    allocation: str,
    prompts: list[Prompt],
    way: Exit,
    held: Tensor,
    protected: Tensor,
    lengths: Sequence[int],
    budgets: Sequence[int],
    showing: Callable = lambda label, total: contextlib.nullcontext(lambda weighed: None),
) -> list[Tensor]:
    """What stays of every row.

    Args:
        allocation: "global" (all heads of all layers have the budget together), "adaptive" (those of a layer) or
            "uniform" (each has its own).
        prompts: of each layer, its last queries and output projection among it.
        way: the model's, with each row's states at those queries.
        held, protected: [B, 1, n] bool.   lengths, budgets: entries of each row, and what a head may hold on average.
        showing: as `kvpatch.progress.shown`: it is told how the work goes on.

    Returns:
        keep masks of the layers, [B, G, n] bool.
    """
    layers, (groups, n) = len(prompts), prompts[0].keys.shape[1:3]
    keep = held.expand(-1, groups, n)[:, None].repeat(1, layers, 1, 1)
    parts = {"global": 1, "adaptive": layers}.get(allocation, layers * groups)
    cells = layers * groups // parts  # heads that share a quota
    loose = (held & ~protected)[:, 0]
    wanted = [max(0, length - budget) * cells for length, budget in zip(lengths, budgets, strict=True)]
    each = zip(loose.sum(-1).tolist(), wanted, strict=True)
    total = parts * sum(weighings(how, some * cells, quota) for some, quota in each if quota)
    with showing("weighing entries", total) as tick:
        for row, quota in enumerate(wanted):
            if quota:
                eligible = loose[row, : int(prompts[0].length[row])].expand(layers, groups, -1)
                search = _search_of(row, how, prompts, way)
                order = search.run(eligible, [quota] * parts, tick).order.to(keep.device)
                keep[row, order[:, 0], order[:, 1], order[:, 2]] = False
    return list(keep.unbind(1))


def _search_of(row: int, how: Behavior, prompts: list[Prompt], way: Exit) -> Search:
    """The search over one row."""
    one, asks, most = slice(row, row + 1), prompts[0].asks[row], int(prompts[0].length[row])
    alone = [
        prompt._replace(
            **{name: getattr(prompt, name)[one] for name in ("queries", "length", "asks")},
            keys=prompt.keys[one, :, :most],
            values=prompt.values[one, :, :most],
        )
        for prompt in prompts
    ]
    weights = [window_attention(prompt)[0, :, :, asks] for prompt in alone]
    values, outputs = [prompt.values[0] for prompt in alone], [prompt.output for prompt in alone]
    return Search(weights, values, outputs, way._replace(states=way.states[one, asks]), how)
