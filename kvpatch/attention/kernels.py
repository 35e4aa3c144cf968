"""Triton kernels of decode attention over slots. Contract and bytes; `kvpatch.attention.triton` launches them.

Shapes: B rows, H query heads, G KV heads, R = H / G queries a group, D head size, C slots allocated, Gc KV heads with a
ranking of their own (1 or G), S splits of a row's slots. A row's valid slots are 0..length-1; what lies behind them is
never read. Keys and values are [B, G, C, D] and contiguous. Logits and log-sum-exps inside are in powers of two.

Bytes per held slot and row, e the element size (`traffic` in `kvpatch.attention.triton` counts the same):

    attend                 2 D G e       keys and values, once
      with scores          + 4 H         logits, written
      with vnorm           + 4 G         norms, written
      with a window        + 8 G         positions, read
    settle with scores     4 H + 8 Gc    logits read; utility read and written
      with vnorm           + 4 G         norms read
      with entropy         4 H + 4       logits read (one head's twice, at once), scores written; then 12 in `apply`
    pooled                 D G e + 8 Gc  keys, and the utility as above (scores alone: 4 Gc)
    admit                  4 Gc          utility, a ranking
    choose                 16 Gc         of rows over budget: utility twice, positions (twice where some are protected)

Every sum is taken in a fixed order and nothing is atomic: the same inputs give the same bits.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _active_length(LENGTH, ACTIVE):
    # One comparison of slots with this, and no `&` of a vector with a scalar, which the interpreter gets wrong.
    return tl.where(tl.load(ACTIVE) != 0, tl.load(LENGTH).to(tl.int32), 0)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if PRECISION == "wide":  # the interpreter multiplies bfloat16 as if it were integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _norm(states, axis: tl.constexpr):
    wide = states.to(tl.float32)
    return tl.sqrt(tl.sum(wide * wide, axis))


@triton.jit
def _rescaled(m, l, peak):
    # A split may have met nothing valid yet: -inf minus -inf is no number.
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    return safe, l * tl.exp2(m - safe)


@triton.jit
def attend(
    Q,
    K_NEW,
    V_NEW,
    KEYS,
    VALUES,
    FREE,
    LENGTH,
    ACTIVE,
    POSITIONS,
    NEWEST,
    TABLE,
    OUT,
    PARTIAL,
    LSE,
    LOGITS,
    NORMS,
    NORM_SUMS,
    scale2,
    capacity,
    table_head,
    splits,
    window,
    groups,
    own_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WRITES: tl.constexpr,
    SCORES: tl.constexpr,
    VNORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
):
    """One split of one row's slots for one KV head; grid (S, G, B).

    With PAGE > 0 keys and values are [B, P, PAGE, D], capacity is P * PAGE, and slot s of a head is place s % PAGE of
    page TABLE[head, s // PAGE]; nothing is scored.

    The new key and value go to the free slot of the row (WRITES), by the program whose split holds it. It does not read
    them back: the new token is where its softmax begins, and the free slot is left out of the loop.

    OUT [B, H, D] and LSE [B, H, S] where S is 1; else PARTIAL [B, H, S, D] and LSE. With SCORES LOGITS [B, H, C],
    scaled, -inf where the window ends. With VNORM NORMS [B, G, C] and NORM_SUMS [B, G, S, 2], sum and count over the
    valid slots.
    A row that is not active gets zeros and reads nothing.
    """
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ranking = row * own_heads + tl.where(own_heads > 1, group, 0)
    length = _active_length(LENGTH + ranking, ACTIVE + row)
    blocks = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = split * blocks * BLOCK_N
    end = tl.minimum(begin + blocks * BLOCK_N, length)

    slot_r, slot_d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    in_r, in_d = slot_r < R, slot_d < D
    heads = group * R + slot_r
    # Places in whole tensors are counted in 64 bits: a view of a prompt's queries has long rows.
    wide_row, wide_group = row.to(tl.int64), group.to(tl.int64)
    places = wide_row * q_row + heads[:, None].to(tl.int64) * q_head + slot_d[None, :]
    q = tl.load(Q + places, mask=in_r[:, None] & in_d[None, :], other=0.0)
    pair = (row * groups + group).to(tl.int64)
    unit = wide_row if PAGE else pair
    keys, values = KEYS + unit * capacity * D, VALUES + unit * capacity * D
    logits = LOGITS + (pair * R + slot_r) * capacity
    table = TABLE + group * table_head

    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    free = -1
    own = m
    norm_sum, norm_count = 0.0, 0.0
    own_norm = 0.0
    if WRITES:
        free = tl.load(FREE + ranking).to(tl.int32)
        k_new = tl.load(K_NEW + wide_row * k_row + wide_group * k_head + slot_d, mask=in_d, other=0.0)
        v_new = tl.load(V_NEW + wide_row * v_row + wide_group * v_head + slot_d, mask=in_d, other=0.0)
        own = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale2
        holds = (free >= begin) & (free < end)
        m = tl.where(holds, own, m)
        l = tl.where(holds, 1.0, l)
        acc = tl.where(holds, v_new.to(tl.float32)[None, :], acc)
        written = slot_d < tl.where(holds, D, 0)
        home = free.to(tl.int64)
        if PAGE:
            home = tl.load(table + free // PAGE) * PAGE + free % PAGE
        tl.store(keys + home * D + slot_d, k_new, mask=written)
        tl.store(values + home * D + slot_d, v_new, mask=written)
        if VNORM:
            own_norm = _norm(v_new, 0)
            norm_sum = tl.where(holds, own_norm, 0.0)
            norm_count = tl.where(holds, 1.0, 0.0)
    if WINDOW:
        oldest = tl.load(NEWEST + row) - window

    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        slot = start + tl.arange(0, BLOCK_N)
        inside = slot < end
        lies = slot
        if PAGE:
            lies = tl.load(table + slot // PAGE, mask=inside, other=0) * PAGE + slot % PAGE
        k = tl.load(keys + lies[None, :] * D + slot_d[:, None], mask=inside[None, :] & in_d[:, None], other=0.0)
        x = _dot(q, k, PRECISION) * scale2
        valid = inside & (slot != free)
        if WINDOW:
            position = tl.load(POSITIONS + ranking * capacity + slot, mask=inside, other=0)
            valid = valid & (position > oldest)
        x = tl.where(valid[None, :], x, float("-inf"))
        peak = tl.maximum(m, tl.max(x, 1))
        safe, l = _rescaled(m, l, peak)
        p = tl.exp2(x - safe[:, None])
        l += tl.sum(p, 1)
        v = tl.load(values + lies[:, None] * D + slot_d[None, :], mask=inside[:, None] & in_d[None, :], other=0.0)
        acc = acc * tl.exp2(m - safe)[:, None]
        acc += _dot(p.to(v.dtype), v, PRECISION)
        m = peak
        if SCORES:
            noted = tl.where((slot == free)[None, :], own[:, None], x)
            tl.store(logits[:, None] + slot[None, :], noted, mask=in_r[:, None] & inside[None, :])
        if VNORM:
            norm = _norm(v, 1)
            tl.store(NORMS + pair * capacity + slot, tl.where(slot == free, own_norm, norm), mask=inside)
            norm_sum += tl.sum(tl.where(valid, norm, 0.0), 0)
            norm_count += tl.sum(valid.to(tl.float32), 0)

    some = l > 0.0
    acc = acc / tl.where(some, l, 1.0)[:, None]
    lse = tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf"))
    tl.store(LSE + (pair * R + slot_r) * splits + split, lse, mask=in_r)
    stored = in_r[:, None] & in_d[None, :]
    if SPLIT:
        at = ((pair * R + slot_r) * splits + split) * D
        tl.store(PARTIAL + at[:, None] + slot_d[None, :], acc, mask=stored)
    else:
        at = (pair * R + slot_r) * D
        tl.store(OUT + at[:, None] + slot_d[None, :], acc.to(OUT.dtype.element_ty), mask=stored)
    if VNORM:
        tl.store(NORM_SUMS + (pair * splits + split) * 2, norm_sum)
        tl.store(NORM_SUMS + (pair * splits + split) * 2 + 1, norm_count)


@triton.jit
def _joined(lse, axis: tl.constexpr):
    """log2 of the sum of powers of two along an axis; -inf where there is nothing."""
    peak = tl.max(lse, axis)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lse - tl.expand_dims(safe, axis)), axis)
    return tl.where(peak == float("-inf"), float("-inf"), safe + tl.log2(tl.where(total > 0.0, total, 1.0)))


@triton.jit
def _pooled_heads(weights, POOL: tl.constexpr):
    """Over the query heads of one group, axis 0: what `_met` and `_finished` make the policy's pool of."""
    if POOL == "max":
        return tl.max(weights, 0)
    elif POOL == "rms":
        return tl.sum(weights * weights, 0)
    else:
        return tl.sum(weights, 0)


@triton.jit
def _met(pooled, more, POOL: tl.constexpr):
    if POOL == "max":
        return tl.maximum(pooled, more)
    else:
        return pooled + more


@triton.jit
def _finished(pooled, count, POOL: tl.constexpr):
    if POOL == "max":
        return pooled
    elif POOL == "rms":
        return tl.sqrt(pooled / count)
    else:
        return pooled / count


@triton.jit
def _aggregated(utility, score, alpha, RULE: tl.constexpr):
    if RULE == "single":
        return score
    elif RULE == "cumulative":
        return utility + score
    elif RULE == "peak":
        return tl.maximum(alpha * utility, score)
    else:
        return alpha * utility + (1.0 - alpha) * score


@triton.jit
def _let_out(UTILITY, SCORES, place, score, held, inside, alpha, RULE: tl.constexpr, APPLIES: tl.constexpr):
    """Scores into the utility where something is held, with APPLIES; else into SCORES, 0 where nothing is."""
    if APPLIES:
        old = tl.load(UTILITY + place, mask=held, other=0.0)
        tl.store(UTILITY + place, _aggregated(old, score, alpha, RULE), mask=held)
    else:
        tl.store(SCORES + place, tl.where(held, score, 0.0), mask=inside)


@triton.jit
def _combine(PARTIAL, LSE, OUT, head, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr):
    split, slot_d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    lse = tl.load(LSE + head * splits + split, mask=split < splits, other=float("-inf"))
    whole = _joined(lse, 0)
    share = tl.exp2(lse - tl.where(whole == float("-inf"), 0.0, whole))
    inside = (split < splits)[:, None] & (slot_d < D)[None, :]
    part = tl.load(PARTIAL + (head * splits + split)[:, None] * D + slot_d[None, :], mask=inside, other=0.0)
    out = tl.sum(part * share[:, None], 0)
    tl.store(OUT + head * D + slot_d, out.to(OUT.dtype.element_ty), mask=slot_d < D)


@triton.jit
def settle(
    PARTIAL,
    LSE,
    OUT,
    LOGITS,
    NORMS,
    NORM_SUMS,
    LENGTH,
    ACTIVE,
    UTILITY,
    POOLED,
    ENTROPY,
    alpha,
    capacity,
    splits,
    groups,
    own_heads,
    combining,
    blocks,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCORES: tl.constexpr,
    SCORER: tl.constexpr,
    POOL: tl.constexpr,
    RULE: tl.constexpr,
    APPLIES: tl.constexpr,
):
    """What the splits come to, and what the logits mean; grid (combining + blocks of slots * Gc, B).

    The first `combining` programs of a row (H, or 0 where there was one split) add the splits of a head: OUT [B, H, D].
    The others normalise a block of logits and pool it over the heads of a ranking. With APPLIES the utility
    [B, Gc, C] is updated in place, for held slots only; else POOLED [B, Gc, C] takes the scores (0 where nothing is
    held). SCORER "entropy" writes POOLED and ENTROPY [B, blocks, 2] (entropy, count of valid slots) for `apply`.
    """
    program, row = tl.program_id(0), tl.program_id(1)
    if program < combining:
        _combine(PARTIAL, LSE, OUT, row.to(tl.int64) * groups * R + program, splits, D, BLOCK_D, BLOCK_S)
    elif SCORES:
        block = (program - combining) // own_heads
        ranking = row * own_heads + (program - combining) % own_heads
        first = (program - combining) % own_heads
        last = tl.where(own_heads > 1, first + 1, groups)
        length = _active_length(LENGTH + ranking, ACTIVE + row)
        slot = block * BLOCK_N + tl.arange(0, BLOCK_N)
        held = slot < length
        slot_r, split = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_S)
        in_r = slot_r < R
        pooled = tl.zeros([BLOCK_N], tl.float32)
        everyone = tl.zeros([BLOCK_N], tl.float32)
        for group in range(first, last):
            heads = (row * groups + group).to(tl.int64) * R + slot_r
            parts = tl.load(
                LSE + heads[:, None] * splits + split[None, :],
                mask=in_r[:, None] & (split < splits)[None, :],
                other=float("-inf"),
            )
            lse = _joined(parts, 1)
            x = tl.load(
                LOGITS + heads[:, None] * capacity + slot[None, :],
                mask=in_r[:, None] & held[None, :],
                other=float("-inf"),
            )
            weights = tl.exp2(x - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
            if SCORER == "entropy":
                everyone += tl.sum(weights, 0)
            if SCORER == "vnorm":
                pair = (row * groups + group).to(tl.int64)
                at = NORM_SUMS + (pair * splits + split) * 2
                total = tl.sum(tl.load(at, mask=split < splits, other=0.0), 0)
                count = tl.sum(tl.load(at + 1, mask=split < splits, other=0.0), 0)
                norm = tl.load(NORMS + pair * capacity + slot, mask=held, other=0.0)
                weights = weights * (norm * count / total)[None, :]
            pooled = _met(pooled, _pooled_heads(weights, POOL), POOL)
        score = _finished(pooled, (last - first) * R, POOL)
        at = ranking.to(tl.int64) * capacity + slot
        if SCORER == "entropy":
            mean = everyone / (groups * R)
            part = tl.where(mean > 0.0, -mean * tl.log2(tl.where(mean > 0.0, mean, 1.0)), 0.0)
            # A slot outside the window has a logit of -inf in every head.
            one = tl.load(LOGITS + row.to(tl.int64) * groups * R * capacity + slot, mask=held, other=float("-inf"))
            tl.store(ENTROPY + (row * blocks + block) * 2, tl.sum(part, 0))
            tl.store(ENTROPY + (row * blocks + block) * 2 + 1, tl.sum((one != float("-inf")).to(tl.float32), 0))
            tl.store(POOLED + at, tl.where(held, score, 0.0), mask=slot < capacity)
        else:
            _let_out(UTILITY, POOLED, at, score, held, slot < capacity, alpha, RULE, APPLIES)


@triton.jit
def apply(
    POOLED,
    ENTROPY,
    LENGTH,
    ACTIVE,
    UTILITY,
    OUT,
    alpha,
    capacity,
    blocks,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RULE: tl.constexpr,
    APPLIES: tl.constexpr,
):
    """The scores of `settle` times the layer's entropy over the log of the valid slots' count; grid (blocks, B).

    With APPLIES into the utility [B, 1, C], in place; else OUT [B, 1, C] takes them.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, BLOCK_M)
    at = ENTROPY + (row * blocks + part) * 2
    entropy = tl.sum(tl.load(at, mask=part < blocks, other=0.0), 0)
    count = tl.sum(tl.load(at + 1, mask=part < blocks, other=0.0), 0)
    factor = tl.where(count > 1.0, entropy / tl.log2(tl.where(count > 1.0, count, 2.0)), 0.0)
    slot = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = slot < _active_length(LENGTH + row, ACTIVE + row)
    place = row.to(tl.int64) * capacity + slot
    score = tl.load(POOLED + place, mask=held, other=0.0) * factor
    _let_out(UTILITY, OUT, place, score, held, slot < capacity, alpha, RULE, APPLIES)


@triton.jit
def _window_logits(
    Q,
    keys,
    row,
    group,
    slot,
    first,
    length,
    last_valid,
    scale2,
    queries,
    q_row,
    q_head,
    q_query,
    k_slot,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Scaled logits [BLOCK_M, slots] of BLOCK_M of a group's R * W queries from `first` on; -inf where one looks ahead.

    Query w of W stands at the place length - W + w of its row and meets the slots up to it.
    """
    item, slot_d = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, head = item // R, group * R + item % R
    in_d = slot_d < D
    there = (item < queries * R)[:, None]
    at = row.to(tl.int64) * q_row + head[:, None].to(tl.int64) * q_head + query[:, None].to(tl.int64) * q_query
    q = tl.load(Q + at + slot_d[None, :], mask=there & in_d[None, :], other=0.0)
    k = tl.load(
        keys + slot[None, :] * k_slot + slot_d[:, None], mask=(slot < length)[None, :] & in_d[:, None], other=0.0
    )
    x = _dot(q, k, PRECISION) * scale2
    ahead = slot[None, :] > (last_valid - queries + 1 + query)[:, None]
    return tl.where(there & (slot < length)[None, :] & (ahead == 0), x, float("-inf"))


@triton.jit
def window_lse(
    Q,
    KEYS,
    LENGTH,
    LSE,
    scale2,
    groups,
    queries,
    splits,
    q_row,
    q_head,
    q_query,
    k_row,
    k_head,
    k_slot,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """LSE [B, H, W, S] of the last W queries over their own past; grid (S, tiles of R W * G, B). Reads keys only."""
    split, tile, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, first = tile % groups, (tile // groups) * BLOCK_M
    length = tl.load(LENGTH + row).to(tl.int32)
    blocks = tl.cdiv(tl.cdiv(length, BLOCK_N), splits)
    begin = split * blocks * BLOCK_N
    end = tl.minimum(begin + blocks * BLOCK_N, length)
    keys = KEYS + row.to(tl.int64) * k_row + group.to(tl.int64) * k_head
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        slot = start + tl.arange(0, BLOCK_N)
        x = _window_logits(
            Q, keys, row, group, slot, first, end, length - 1, scale2, queries, q_row, q_head, q_query, k_slot, R, D,
            BLOCK_M, BLOCK_D, PRECISION
        )  # fmt: skip
        peak = tl.maximum(m, tl.max(x, 1))
        safe, l = _rescaled(m, l, peak)
        l += tl.sum(tl.exp2(x - safe[:, None]), 1)
        m = peak
    item = first + tl.arange(0, BLOCK_M)
    some = l > 0.0
    lse = tl.where(some, m + tl.log2(tl.where(some, l, 1.0)), float("-inf"))
    place = ((row * groups + group) * R + item % R) * queries + item // R
    tl.store(LSE + place * splits + split, lse, mask=item < queries * R)


@triton.jit
def pooled(
    Q,
    KEYS,
    LSE,
    LENGTH,
    ACTIVE,
    UTILITY,
    OUT,
    scale2,
    alpha,
    capacity,
    groups,
    own_heads,
    queries,
    q_row,
    q_head,
    q_query,
    k_row,
    k_head,
    k_slot,
    lse_row,
    lse_head,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    POOL: tl.constexpr,
    RULE: tl.constexpr,
    APPLIES: tl.constexpr,
):
    """Attention weights from natural log-sum-exps, pooled over queries and heads; grid (blocks of slots, Gc, B).

    Q [B, H, W, D] are the last W queries of each row, LSE [B, H, W]; keys any layout [B, G, n, D] of unit last stride.
    Weights are taken up again from the keys, a block at a time: nothing of size W times n is made. With APPLIES the
    utility [B, Gc, C] is updated for the slots of active rows; else OUT [B, Gc, C] takes the scores, 0 behind a row's
    length. A pool other than the mean needs W = 1.
    """
    block, own, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = _active_length(LENGTH + row * own_heads + own, ACTIVE + row)
    slot = block * BLOCK_N + tl.arange(0, BLOCK_N)
    held = slot < length
    total = tl.zeros([BLOCK_N], tl.float32)
    wide = row.to(tl.int64)
    first_group, last_group = own, tl.where(own_heads > 1, own + 1, groups)
    for group in range(first_group, last_group):
        # `group` is a plain number where the interpreter counts.
        keys = KEYS + wide * k_row + (wide * 0 + group) * k_head
        for first in range(0, queries * R, BLOCK_M):
            x = _window_logits(
                Q, keys, row, group, slot, first, length, length - 1, scale2, queries, q_row, q_head, q_query, k_slot,
                R, D, BLOCK_M, BLOCK_D, PRECISION
            )  # fmt: skip
            item = first + tl.arange(0, BLOCK_M)
            at = wide * lse_row + (group * R + item % R) * lse_head + item // R
            lse = tl.load(LSE + at, mask=item < queries * R, other=0.0) * LOG2E
            weights = tl.exp2(x - lse[:, None])
            total = _met(total, _pooled_heads(weights, POOL), POOL)
    score = _finished(total, (last_group - first_group) * R * queries, POOL)
    place = (row * own_heads + own).to(tl.int64) * capacity + slot
    _let_out(UTILITY, OUT, place, score, held, slot < capacity, alpha, RULE, APPLIES)


@triton.jit
def admit(
    UTILITY,
    POSITIONS,
    FREE,
    LENGTH,
    NEWEST,
    ACTIVE,
    capacity,
    rows,
    own_heads,
    BLOCK_N: tl.constexpr,
    EVICTS: tl.constexpr,
    MEAN: tl.constexpr,
):
    """`kvpatch.slots.begin` after `newest` was advanced: the free slot takes the new position and a first utility.

    Grid (Lc * B * Gc). Only active rows are touched. UTILITY [Lc, B, Gc, C] float32, POSITIONS int64, FREE and LENGTH
    [Lc, B, Gc] int64.
    """
    ranking = tl.program_id(0)
    row = (ranking // own_heads) % rows
    if tl.load(ACTIVE + row) != 0:
        free, length = tl.load(FREE + ranking), tl.load(LENGTH + ranking)
        base = ranking.to(tl.int64) * capacity
        tl.store(POSITIONS + base + free, tl.load(NEWEST + row))
        if EVICTS:
            start = 0.0
            if MEAN:
                total = tl.zeros([BLOCK_N], tl.float32)
                for block in range(0, length.to(tl.int32), BLOCK_N):
                    slot = block + tl.arange(0, BLOCK_N)
                    total += tl.load(UTILITY + base + slot, mask=(slot < length) & (slot != free), other=0.0)
                count = length - tl.where(free < length, 1, 0)
                start = tl.sum(total, 0) / tl.maximum(count, 1).to(tl.float32)
            tl.store(UTILITY + base + free, start)
        tl.store(LENGTH + ranking, tl.maximum(length, free + 1))


@triton.jit
def choose(
    UTILITY,
    PENDING,
    POSITIONS,
    FREE,
    LENGTH,
    NEWEST,
    ACTIVE,
    BUDGET,
    SINKS,
    RECENT,
    RESERVE,
    PROMPT,
    alpha,
    tie,
    scored,
    window,
    capacity,
    rows,
    own_heads,
    BLOCK_N: tl.constexpr,
    EVICTS: tl.constexpr,
    PROTECTS: tl.constexpr,
    UNIFORM: tl.constexpr,
    RULE: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """`kvpatch.slots.finish`: the next free slot of every ranking; grid (Lc * B * Gc), shapes as in `admit`.

    With UNIFORM the sum over `scored` layers in PENDING becomes one update of the utility first, and is cleared.
    """
    ranking = tl.program_id(0)
    row = (ranking // own_heads) % rows
    if tl.load(ACTIVE + row) != 0:
        length = tl.load(LENGTH + ranking)
        newest = tl.load(NEWEST + row)
        base = ranking.to(tl.int64) * capacity
        held = length.to(tl.int32)
        following = length
        if UNIFORM:
            for block in range(0, held, BLOCK_N):
                slot = block + tl.arange(0, BLOCK_N)
                inside = slot < length
                utility = tl.load(UTILITY + base + slot, mask=inside, other=0.0)
                mean = tl.load(PENDING + base + slot, mask=inside, other=0.0) / scored
                tl.store(UTILITY + base + slot, _aggregated(utility, mean, alpha, RULE), mask=inside)
                tl.store(PENDING + base + slot, tl.zeros([BLOCK_N], tl.float32), mask=inside)
            tl.debug_barrier()
        if EVICTS:
            if length > tl.load(BUDGET + row):
                least = tl.full([BLOCK_N], float("inf"), tl.float32)
                for block in range(0, held, BLOCK_N):
                    slot = block + tl.arange(0, BLOCK_N)
                    eligible = slot < length
                    if PROTECTS:
                        position = tl.load(POSITIONS + base + slot, mask=eligible, other=0)
                        eligible = eligible & _unprotected(position, newest, row, SINKS, RECENT, RESERVE, PROMPT)
                    least = tl.minimum(least, tl.load(UTILITY + base + slot, mask=eligible, other=float("inf")))
                lowest = tl.min(least, 0)
                # New tokens start at the mean of the others: by and by rounding alone would order them.
                most = tl.where(tl.abs(lowest) == float("inf"), lowest, lowest + tie * tl.abs(lowest))
                # Position and slot in one number: the oldest of the tied.
                oldest = tl.full([BLOCK_N], 0x7FFFFFFFFFFFFFFF, tl.int64)
                for block in range(0, held, BLOCK_N):
                    slot = block + tl.arange(0, BLOCK_N)
                    eligible = slot < length
                    position = tl.load(POSITIONS + base + slot, mask=eligible, other=0)
                    if PROTECTS:
                        eligible = eligible & _unprotected(position, newest, row, SINKS, RECENT, RESERVE, PROMPT)
                    utility = tl.load(UTILITY + base + slot, mask=eligible, other=float("inf"))
                    tied = eligible & (utility <= most)
                    packed = position * 4294967296 + slot.to(tl.int64)
                    oldest = tl.minimum(oldest, tl.where(tied, packed, 0x7FFFFFFFFFFFFFFF))
                found = tl.min(oldest, 0)
                # Utilities that are no numbers tie with nothing: slot 0 goes, as in `kvpatch.selection.victims`.
                following = tl.where(found == 0x7FFFFFFFFFFFFFFF, 0, found & 0xFFFFFFFF)
        if WINDOW:
            first = tl.full([BLOCK_N], 0x7FFFFFFF, tl.int32)
            for block in range(0, held, BLOCK_N):
                slot = block + tl.arange(0, BLOCK_N)
                position = tl.load(POSITIONS + base + slot, mask=slot < length, other=0x7FFFFFFF)
                gone = (slot < length) & (position <= newest + 1 - window)
                first = tl.minimum(first, tl.where(gone, slot, 0x7FFFFFFF))
            gone_first = tl.min(first, 0)
            following = tl.where(gone_first < 0x7FFFFFFF, gone_first.to(tl.int64), following)
        tl.store(FREE + ranking, following)


@triton.jit
def _unprotected(position, newest, row, SINKS, RECENT, RESERVE, PROMPT):
    sinks, recent = tl.load(SINKS + row), tl.load(RECENT + row)
    reserve, prompt = tl.load(RESERVE + row), tl.load(PROMPT + row)
    first = (position * reserve + prompt - 1) // prompt
    reserved = (first * prompt < (position + 1) * reserve) & (position < prompt)
    return (position >= sinks) & (position <= newest - recent) & (reserved == 0)
