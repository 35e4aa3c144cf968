"""What the decode kernels must compute, written from the methods in loops over rows and heads, in float64.

Nothing here comes from the library. Tensors are as the operators take them: B rows, H query heads, G KV heads, C slots,
Gc rankings a layer (1 or G), Lc layers with a ranking of their own; float64 for whatever is not an integer or a bool.
What the operators mutate, these functions mutate.

The victim's bound: a kernel sums in float32, so its victim may differ from `choose`'s only if the utilities that are
computed here differ for the two entries by less than `VICTIM`, relative to the larger. Where the kernel is given the
utilities and sums nothing, it has no such room, but for a utility at the very edge of the rule's own tie, `TIE`.
"""

import math

import torch

VICTIM = 1e-5
TIE = 1e-6


def of(per_ranking, b: int, g: int):
    """Row b's entry for KV head g of [B, Gc, ...], where one ranking serves all KV heads or each has its own."""
    return per_ranking[b, g if per_ranking.shape[1] > 1 else 0]


def write(keys, values, k, v, free) -> None:
    """The new token's k, v [B, G, 1, D] go to slot `free` [B, Gc] of keys and values [B, G, C, D]."""
    for b in range(keys.shape[0]):
        for g in range(keys.shape[1]):
            keys[b, g, of(free, b, g)] = k[b, g, 0]
            values[b, g, of(free, b, g)] = v[b, g, 0]


def valid_slots(length, groups: int, positions=None, newest=None, window: int = 0) -> list[list[list[int]]]:
    """[row][KV head] -> slots that the newest query meets: those held whose position its window (0: none) reaches."""
    valid = []
    for b in range(length.shape[0]):
        valid.append([])
        for g in range(groups):
            held = range(int(of(length, b, g)))
            if window:
                held = [i for i in held if of(positions, b, g)[i] > newest[b] - window]
            valid[b].append(list(held))
    return valid


def attention(q, keys, values, valid, scale: float, active=None):
    """Output [B, H, D], natural log-sum-exp [B, H] and weights [B, H, C] of q [B, H, 1, D] over the valid slots.

    A row that is not active gets an output and weights of 0, and no log-sum-exp (-inf).
    """
    batch, heads, _, width = q.shape
    per_group = heads // keys.shape[1]
    out = torch.zeros(batch, heads, width, dtype=torch.float64)
    lse = torch.full((batch, heads), -math.inf, dtype=torch.float64)
    weights = torch.zeros(batch, heads, keys.shape[2], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            if active is not None and not active[b]:
                continue
            g = h // per_group
            slots = valid[b][g]
            logits = keys[b, g, slots].double() @ q[b, h, 0].double() * scale
            lse[b, h] = logits.max() + (logits - logits.max()).exp().sum().log()
            weights[b, h, slots] = (logits - lse[b, h]).exp()
            out[b, h] = weights[b, h, slots] @ values[b, g, slots].double()
    return out, lse, weights


def pool(scores, how: str):
    """[N, C] -> [C]: mean, max or root of the mean square over heads."""
    if how == "mean":
        return scores.mean(0)
    if how == "max":
        return scores.max(0).values
    return scores.square().mean(0).sqrt()


def scores(weights, values, valid, rankings: int, scorer: str, head_pool: str):
    """[B, Gc, C] of weights [B, H, C]: heads' scores pooled over each group and then, for one ranking, over groups."""
    batch, heads, capacity = weights.shape
    groups = values.shape[1]
    per_group = heads // groups
    found = torch.zeros(batch, rankings, capacity, dtype=torch.float64)
    for b in range(batch):
        of_groups = []
        for g in range(groups):
            of_heads = weights[b, g * per_group : (g + 1) * per_group].clone()
            if scorer == "vnorm":
                norms = torch.zeros(capacity, dtype=torch.float64)
                norms[valid[b][g]] = values[b, g, valid[b][g]].double().square().sum(-1).sqrt()
                of_heads *= norms / norms[valid[b][g]].mean()
            of_groups.append(pool(of_heads, head_pool))
        if rankings > 1:
            found[b] = torch.stack(of_groups)
        else:
            found[b, 0] = pool(torch.stack(of_groups), head_pool)
        if scorer == "entropy":
            found[b] *= entropy(weights[b].mean(0), len(valid[b][0]))
    return found


def entropy(mean, count: int) -> float:
    """Of a layer's head-mean attention [C] over the log of the slots it is spread over; 0 where that is one slot."""
    total = sum(-p * math.log(p) for p in mean.tolist() if p > 0)
    return total / math.log(count) if count > 1 else 0.0


def aggregated(utility, score, rule: str, alpha: float):
    """m after one more score s: s, m + s, alpha m + (1 - alpha) s, or max(alpha m, s)."""
    if rule == "single":
        return score
    if rule == "peak":
        return torch.maximum(alpha * utility, score)
    return utility + score if rule == "cumulative" else alpha * utility + (1 - alpha) * score


def update(utility, found, length, active, rule: str, alpha: float) -> None:
    """Scores [B, Gc, C] into the utility [B, Gc, C] of what active rows hold."""
    for b in range(utility.shape[0]):
        for g in range(utility.shape[1]):
            if active[b]:
                held = slice(0, int(length[b, g]))
                utility[b, g, held] = aggregated(utility[b, g, held], found[b, g, held], rule, alpha)


def window_scores(q, keys, length, scale: float, per_head: bool, head_pool: str = "mean"):
    """Mean causal attention [B, G or 1, n] of a row's last W queries q [B, H, W, D], and their lse [B, H, W].

    Query w stands at the place length - W + w and meets what stands there and before.
    """
    batch, heads, queries, _ = q.shape
    groups, n = keys.shape[1:3]
    lse = torch.zeros(batch, heads, queries, dtype=torch.float64)
    total = torch.zeros(batch, groups if per_head else 1, n, dtype=torch.float64)
    for w in range(queries):
        valid = [[list(range(int(length[b]) - queries + w + 1))] * groups for b in range(batch)]
        _, lse[:, :, w], weights = attention(q[:, :, w : w + 1], keys, keys, valid, scale)
        total += scores(weights, keys, valid, total.shape[1], "attention", head_pool) / queries
    return total, lse


def admit(utility, positions, free, length, newest, active, evicts: bool, mean: bool) -> None:
    """The free slot takes the newest position, and the mean utility of the others that are held, or 0."""
    for l, b, g in torch.cartesian_prod(*(torch.arange(size) for size in free.shape)).tolist():
        if not active[b]:
            continue
        slot, held = int(free[l, b, g]), int(length[l, b, g])
        positions[l, b, g, slot] = newest[b]
        if evicts:
            others = [float(utility[0, l, b, g, i]) for i in range(held) if i != slot]
            utility[0, l, b, g, slot] = sum(others) / len(others) if mean and others else 0.0
        length[l, b, g] = max(held, slot + 1)


def protected(position: int, newest: int, sinks: int, recent: int, reserve: int, prompt: int) -> bool:
    """Whether sinks, recent window or the reserve, spread evenly over the prompt, hold a position."""
    spread = [j * prompt // reserve for j in range(reserve)]
    return position < sinks or position > newest - recent or position in spread


def victim(utility: list[float], positions: list[int], slots: list[int], tie: float) -> int:
    """Of the slots whose utility is the lowest, within `tie` of it, the one of lowest position."""
    lowest = min(utility[i] for i in slots)
    tied = [i for i in slots if utility[i] == lowest or utility[i] <= lowest + tie * abs(lowest)]
    return min(tied, key=lambda i: positions[i])


def may_differ(utility, one: int, other: int) -> bool:
    """Whether two slots' utilities [C] lie so close that float32 may order them the other way."""
    one, other = float(utility[one]), float(utility[other])
    return abs(one - other) < VICTIM * max(abs(one), abs(other))


def choose(
    utility, pending, positions, free, length, newest, active, rows, evicts, scored, rule, alpha, window, tie=TIE
) -> None:
    """The next free slot of active rows: the victim where more than the budget is held, else the one behind the last.

    With `scored` layers the mean of what is pending [1, 1, B, 1, C] enters the utility first, once, and is cleared.
    What the sliding window (0: none) of every layer passes with the next token goes before any other.
    """
    for l, b, g in torch.cartesian_prod(*(torch.arange(size) for size in free.shape)).tolist():
        if not active[b]:
            continue
        held = range(int(length[l, b, g]))
        if scored:
            mean = pending[0, 0, b, 0] / scored
            utility[0, l, b, g, held] = aggregated(utility[0, l, b, g, held], mean[held], rule, alpha)
            pending[0, 0, b, 0] = 0.0
        places, last = positions[l, b, g].tolist(), int(newest[b])
        budget, *limits = (int(limit[b]) for limit in rows)
        following = len(held)
        if evicts and len(held) > budget:
            open_to = [i for i in held if not protected(places[i], last, *limits)]
            following = victim(utility[0, l, b, g].tolist(), places, open_to, tie)
        passed = [i for i in held if window and places[i] <= last + 1 - window]
        free[l, b, g] = passed[0] if passed else following
