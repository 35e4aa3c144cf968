"""Decode attention over slots in Triton: launches of `kvpatch.attention.kernels` as operators that torch.compile keeps.

Each operator's docstring is its contract. Tensors may be float16, bfloat16 or float32; sums are float32. On a CPU the
kernels run in Triton's interpreter only (TRITON_INTERPRET=1 before the first import), which is for tests.
"""

import functools

import torch
import triton
from torch import Tensor

from kvpatch.attention import configs, kernels

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_QUERIES = 16
WIDEST = 256
SCORERS = ("attention", "vnorm", "entropy")  # those that the kernels compute themselves
_BLOCK_SCORES = 256  # slots a program of the second kernel
_BLOCK_RANKS = 1024  # slots a step of the kernels that rank
_ALL = 0  # no window
_LN2 = 0.6931471805599453
_INTERPRETED = not isinstance(kernels.attend, triton.runtime.JITFunction)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return _INTERPRETED


def why_not(device: torch.device, dtype: torch.dtype, queries: int, width: int) -> str:
    """Why these kernels can't run such a model; an empty text if they can."""
    if device.type == "cpu" and not interpreted():
        return "it needs a GPU (on a CPU only Triton's interpreter runs it, for tests, with TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda"):
        return f"it needs CUDA, and the model is on {device.type!r}"
    if dtype not in DTYPES:
        return f"the model is in {dtype}, the kernels take {', '.join(str(one) for one in DTYPES)}"
    if queries > MOST_QUERIES:
        return f"{queries} queries share a KV head, the kernels take at most {MOST_QUERIES}"
    if width > WIDEST or width % 8:
        return f"the head size is {width}, the kernels take multiples of 8 up to {WIDEST}"
    return ""


@functools.lru_cache
def _programs(index: int | None) -> int:
    """Multiprocessors of a CUDA device; a few for the interpreter, so that rows are split there too."""
    return 4 if index is None else torch.cuda.get_device_properties(index).multi_processor_count


def _splits(q: Tensor, groups: int, n: int, config: configs.Config) -> int:
    index = q.device.index if q.device.type == "cuda" else None
    programs = _programs(index) * config.resident
    return configs.splits_for(q.shape[0] * groups, n, config.block, programs)


def _power(size: int, least: int = 1) -> int:
    return max(least, triton.next_power_of_2(size))


def _precision(dtype: torch.dtype) -> str:
    if dtype == torch.bfloat16 and interpreted():
        return "wide"
    return "ieee" if dtype == torch.float32 else "tf32"


class _Forward:
    """The first kernel's launch, and the tensors that it leaves for the second."""

    def __init__(
        self, q, keys, values, length, active, n, scale, scorer, written=None, window=_ALL, places=None, table=None
    ):
        batch, heads, _, width = q.shape
        groups, capacity, page = keys.shape[1], keys.shape[2], 0
        if table is not None:
            groups, page, capacity = table.shape[0], keys.shape[2], keys.shape[1] * keys.shape[2]
        queries = heads // groups
        self.config = configs.config_for(queries, width, q.element_size())
        self.splits = _splits(q, groups, n, self.config)
        self.keys, self.length, self.active, self.n = keys, length, active, n
        self.own_heads, self.scorer = length.shape[1], scorer
        self.shape = {
            "R": queries,
            "D": width,
            "BLOCK_R": _power(queries, configs.BLOCK_ROWS),
            "BLOCK_D": _power(width, 16),
        }
        wide = functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        self.out = torch.empty(batch, 1, heads, width, dtype=q.dtype, device=q.device)
        self.lse = wide(batch, heads, self.splits)
        self.partial = wide(batch, heads, self.splits, width) if self.splits > 1 else self.lse
        self.logits = wide(batch, heads, capacity) if scorer else self.lse
        vnorm = scorer == "vnorm"
        self.norms = wide(batch, groups, capacity) if vnorm else self.lse
        self.norm_sums = wide(batch, groups, self.splits, 2) if vnorm else self.lse
        k, v, free = written if written is not None else (q, q, length)
        positions, newest = places if places is not None else (length, length)
        kernels.attend[(self.splits, groups, batch)](
            q,
            k,
            v,
            keys,
            values,
            free,
            length,
            active,
            positions,
            newest,
            length if table is None else table,
            self.out,
            self.partial,
            self.lse,
            self.logits,
            self.norms,
            self.norm_sums,
            scale / _LN2,
            capacity,
            0 if table is None else table.stride(0),
            self.splits,
            window,
            groups,
            self.own_heads,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            **self.shape,
            BLOCK_N=self.config.block,
            STAGES=self.config.stages,
            PRECISION=_precision(q.dtype),
            WRITES=written is not None,
            SCORES=bool(scorer),
            VNORM=vnorm,
            WINDOW=window != _ALL,
            SPLIT=self.splits > 1,
            PAGE=page,
            num_warps=self.config.warps,
        )

    def combine(self) -> None:
        """Add the splits up."""
        self._settle("", "mean", None, "single", 0.0)

    def settle(self, head_pool: str, utility: Tensor | None = None, rule: str = "single", alpha: float = 0.0):
        """Add the splits up and score; the scores [B, Gc, C] where no utility takes them, else None."""
        return self._settle(self.scorer, head_pool, utility, rule, alpha)

    def _settle(self, scorer: str, head_pool: str, utility: Tensor | None, rule: str, alpha: float):
        batch, heads = self.out.shape[0], self.out.shape[2]
        capacity = self.keys.shape[2]
        blocks = triton.cdiv(self.n, _BLOCK_SCORES) if scorer else 0
        combining = heads if self.splits > 1 else 0
        applies, entropy = utility is not None, scorer == "entropy"
        nothing = self.lse
        pooled = nothing
        if scorer and (entropy or not applies):
            pooled = nothing.new_zeros(batch, self.own_heads, capacity)
        partial_entropy = nothing.new_empty(batch, blocks, 2) if entropy else nothing
        target = utility if applies else nothing
        if combining + blocks:
            kernels.settle[(combining + blocks * self.own_heads, batch)](
                self.partial,
                self.lse,
                self.out,
                self.logits,
                self.norms,
                self.norm_sums,
                self.length,
                self.active,
                target,
                pooled,
                partial_entropy,
                alpha,
                capacity,
                self.splits,
                heads // self.shape["R"],
                self.own_heads,
                combining,
                blocks,
                R=self.shape["R"],
                D=self.shape["D"],
                BLOCK_R=_power(self.shape["R"]),
                BLOCK_D=self.shape["BLOCK_D"],
                BLOCK_S=_power(self.splits),
                BLOCK_N=_BLOCK_SCORES,
                SCORES=bool(scorer),
                SCORER=scorer,
                POOL=head_pool,
                RULE=rule,
                APPLIES=applies,
                num_warps=4,
            )
        if entropy:
            scores = pooled if applies else torch.zeros_like(pooled)
            kernels.apply[(blocks, batch)](
                pooled,
                partial_entropy,
                self.length,
                self.active,
                target,
                scores,
                alpha,
                capacity,
                blocks,
                BLOCK_N=_BLOCK_SCORES,
                BLOCK_M=_power(blocks),
                RULE=rule,
                APPLIES=applies,
                num_warps=4,
            )
            pooled = scores
        return None if applies or not scorer else pooled

    @property
    def log_sum_exp(self) -> Tensor:
        """[B, H], natural logarithm."""
        return torch.logsumexp(self.lse * _LN2, -1)


@torch.library.custom_op("kvpatch::attend", mutates_args=("keys", "values", "utility"))
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    utility: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    newest: Tensor,
    active: Tensor,
    n: int,
    scale: float,
    window: int,
    scorer: str,
    head_pool: str,
    rule: str,
    alpha: float,
) -> Tensor:
    """One layer's decode step: write the new token, attend, and let the scores into the utility.

    Args:
        q: [B, H, 1, D], last stride 1.   k, v: [B, G, 1, D], last stride 1.
        keys, values: [B, G, C, D] contiguous; slot `free` of each row takes k and v.
        utility: [1, B, Gc, C] float32 contiguous; updated where a slot is held, if `scorer` is not empty.
        positions: [B, Gc, C] int64.   free, length: [B, Gc] int64, free < length <= n <= C.
        newest: [B] int64.   active: [B] bool; a row that is not active gets zeros and leaves no trace but in its free
            slot.
        n: slots of the longest row at most.   scale: of the logits.
        window: positions that the layer meets, 0 for all.
        scorer: "" or one of `SCORERS`.   head_pool: "mean", "max" or "rms".
        rule: as `kvpatch.aggregation.aggregate`, with `alpha`.

    Returns:
        [B, 1, H, D] in q's dtype.
    """
    with torch.cuda.device_of(q):
        forward = _Forward(q, keys, values, length, active, n, scale, scorer, (k, v, free), window, (positions, newest))
        forward.settle(head_pool, utility[0] if scorer else None, rule, alpha)
        return forward.out


@attend.register_fake
def _(q, k, v, keys, *_, **__):
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@torch.library.custom_op("kvpatch::attend_pages", mutates_args=("keys", "values"))
def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    free: Tensor,
    length: Tensor,
    active: Tensor,
    scale: float,
) -> Tensor:
    """As `attend` without scores or a window, over slots in pages.

    Args:
        keys, values: [B, P, S, D] contiguous.
        table: [G, at most P] int64, last stride 1: slot s of head g is place s % S of page table[g, s // S].

    Returns:
        [B, 1, H, D] in q's dtype.
    """
    with torch.cuda.device_of(q):
        n = triton.cdiv(keys.shape[1] * keys.shape[2], table.shape[0])  # heads are alike to what the work is split by
        forward = _Forward(q, keys, values, length, active, n, scale, "", (k, v, free), table=table)
        forward.combine()
        return forward.out


@attend_pages.register_fake
def _(q, *_, **__):
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])


@torch.library.custom_op("kvpatch::attend_weights", mutates_args=("keys", "values"))
def attend_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    newest: Tensor,
    active: Tensor,
    n: int,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """As `attend`, for a scorer that is no kernel: output, and weights [B, G, R, n] float32, 0 where invalid."""
    with torch.cuda.device_of(q):
        forward = _Forward(
            q, keys, values, length, active, n, scale, "attention", (k, v, free), window, (positions, newest)
        )
        forward.combine()
        batch, groups = keys.shape[:2]
        inside = torch.arange(n, device=q.device) < length[..., None]
        inside = (inside & active[:, None, None]).unsqueeze(2)
        logits = forward.logits[..., :n] * _LN2
        weights = torch.exp(logits - forward.log_sum_exp[..., None]).view(batch, groups, -1, n)
        return forward.out, torch.where(inside, weights, 0.0)


@attend_weights.register_fake
def _(q, k, v, keys, values, positions, free, length, newest, active, n, scale, window):
    weights = q.new_empty(q.shape[0], keys.shape[1], q.shape[1] // keys.shape[1], n, dtype=torch.float32)
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3]), weights


@torch.library.custom_op("kvpatch::decode", mutates_args=())
def decode(
    q: Tensor, keys: Tensor, values: Tensor, length: Tensor, n: int, scale: float, scorer: str, head_pool: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention over slots as they are, for `kvpatch.attention.decode`.

    Returns:
        output [B, 1, H, D], natural log-sum-exp [B, H] float32, scores [B, Gc, C] float32 ([0] without a scorer).
    """
    with torch.cuda.device_of(q):
        active = torch.ones(q.shape[0], dtype=torch.bool, device=q.device)
        forward = _Forward(q, keys, values, length, active, n, scale, scorer)
        scores = forward.settle(head_pool)
        return forward.out, forward.log_sum_exp, forward.lse.new_empty(0) if scores is None else scores


@decode.register_fake
def _(q, keys, values, length, n, scale, scorer, head_pool):
    batch, heads, _, width = q.shape
    scores = q.new_empty((batch, length.shape[1], keys.shape[2]) if scorer else (0,), dtype=torch.float32)
    return q.new_empty(batch, 1, heads, width), q.new_empty(batch, heads, dtype=torch.float32), scores


def _pooled(q, keys, lse, length, active, utility, out, n, scale, head_pool, rule, alpha) -> None:
    batch, heads, window, width = q.shape
    groups = keys.shape[1]
    queries = heads // groups
    config = configs.config_for(queries, width, q.element_size())
    target = out if utility is None else utility
    block = config.block if window == 1 else configs.window_block(config.block, q.element_size())
    kernels.pooled[(triton.cdiv(n, block), length.shape[1], batch)](
        q,
        keys,
        lse,
        length,
        active,
        target,
        target,
        scale / _LN2,
        alpha,
        target.shape[-1],
        groups,
        length.shape[1],
        window,
        *q.stride()[:3],
        *keys.stride()[:3],
        lse.stride(0),
        lse.stride(1),
        R=queries,
        D=width,
        BLOCK_M=configs.window_rows(queries * window, q.element_size()),
        BLOCK_D=_power(width, 16),
        BLOCK_N=block,
        PRECISION=_precision(q.dtype),
        POOL=head_pool,
        RULE=rule,
        APPLIES=utility is not None,
        num_warps=config.warps,
    )


@torch.library.custom_op("kvpatch::pooled", mutates_args=("utility",))
def pooled(
    q: Tensor,
    keys: Tensor,
    lse: Tensor,
    length: Tensor,
    active: Tensor,
    utility: Tensor,
    n: int,
    scale: float,
    head_pool: str,
    rule: str,
    alpha: float,
) -> None:
    """Scores from an attention's natural log-sum-exp, into the utility in place.

    Args:
        q: [B, H, 1, D].   keys: [B, G, C, D] of any layout with last stride 1.   lse: [B, H, 1] float32, last stride 1.
        the others: as of `attend`.
    """
    with torch.cuda.device_of(q):
        _pooled(q, keys, lse, length, active, utility[0], None, n, scale, head_pool, rule, alpha)


@torch.library.custom_op("kvpatch::window_scores", mutates_args=())
def window_scores(
    q: Tensor, keys: Tensor, length: Tensor, lse: Tensor | None, scale: float, per_head: bool, head_pool: str
) -> Tensor:
    """Attention that a row's last W queries pay to each of its tokens, without a tensor of W times n.

    Args:
        q: [B, H, W, D], the queries at each row's last W places.   keys: [B, G, n, D], last stride 1.
        length: [B] int64 tokens of each row, W <= length <= n.   lse: [B, H, W] natural log-sum-exps, or None to have
            them computed (keys are read once more).
        per_head: a score per KV head, else one over all heads.   head_pool: "mean", or any with W = 1.

    Returns:
        [B, G or 1, n] float32: mean over the window of the attention, pooled over heads; 0 behind a row's length.
    """
    batch, heads, window, width = q.shape
    groups, n = keys.shape[1], keys.shape[2]
    with torch.cuda.device_of(q):
        if lse is None:
            lse = _window_lse(q, keys, length, scale)
        active = torch.ones(batch, dtype=torch.bool, device=q.device)
        own = groups if per_head else 1
        lengths = length[:, None].expand(batch, own).contiguous()
        out = torch.zeros(batch, own, n, dtype=torch.float32, device=q.device)
        _pooled(q, keys, lse.contiguous(), lengths, active, None, out, n, scale, head_pool, "single", 0.0)
        return out


@window_scores.register_fake
def _(q, keys, length, lse, scale, per_head, head_pool):
    return q.new_empty(q.shape[0], keys.shape[1] if per_head else 1, keys.shape[2], dtype=torch.float32)


def _window_lse(q: Tensor, keys: Tensor, length: Tensor, scale: float) -> Tensor:
    batch, heads, window, width = q.shape
    groups, n = keys.shape[1], keys.shape[2]
    queries = heads // groups
    config = configs.config_for(queries, width, q.element_size())
    block_m = configs.window_rows(queries * window, q.element_size())
    tiles = triton.cdiv(queries * window, block_m)
    splits = _splits(q, keys.shape[1], n, config)
    lse = torch.empty(batch, heads, window, splits, dtype=torch.float32, device=q.device)
    kernels.window_lse[(splits, tiles * groups, batch)](
        q,
        keys,
        length,
        lse,
        scale / _LN2,
        groups,
        window,
        splits,
        *q.stride()[:3],
        *keys.stride()[:3],
        R=queries,
        D=width,
        BLOCK_M=block_m,
        BLOCK_D=_power(width, 16),
        BLOCK_N=configs.window_block(config.block, q.element_size()),
        STAGES=config.stages,
        PRECISION=_precision(q.dtype),
        num_warps=config.warps,
    )
    return torch.logsumexp(lse * _LN2, -1)


@torch.library.custom_op("kvpatch::admit", mutates_args=("utility", "positions", "length"))
def admit(
    utility: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    newest: Tensor,
    active: Tensor,
    evicts: bool,
    mean: bool,
) -> None:
    """Give each active row's free slot the newest position and a first utility; grow the row if it was its end.

    Args:
        utility: [1, Lc, B, Gc, C] float32.   positions: [Lc, B, Gc, C] int64.   free, length: [Lc, B, Gc] int64.
        newest: [B] int64, advanced already.   active: [B] bool.
        evicts: whether a utility is kept.   mean: start at the mean of the others that are held, else at 0.
    """
    with torch.cuda.device_of(utility):
        kernels.admit[(free.numel(),)](
            utility,
            positions,
            free,
            length,
            newest,
            active,
            positions.shape[-1],
            positions.shape[1],
            positions.shape[2],
            BLOCK_N=_BLOCK_RANKS,
            EVICTS=evicts,
            MEAN=mean,
            num_warps=4,
        )


@torch.library.custom_op("kvpatch::choose", mutates_args=("utility", "pending", "free"))
def choose(
    utility: Tensor,
    pending: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    newest: Tensor,
    active: Tensor,
    rows: list[Tensor],
    evicts: bool,
    protects: bool,
    scored: int,
    rule: str,
    alpha: float,
    tie: float,
    window: int,
) -> None:
    """Choose each active row's next free slot: its victim once it is over budget, else the one behind its last entry.

    Args:
        utility, positions, free, length, newest, active: as of `admit`.
        pending: sums over `scored` layers for one update a step, cleared; unread where `scored` is 0.
        rows: budget, sinks, recent, reserve and prompt, each [B] int64.
        protects: whether any of the middle three is not 0.   tie: relative difference below which utilities are equal.
        window: that every layer has, 0 for none.
    """
    with torch.cuda.device_of(utility):
        kernels.choose[(free.numel(),)](
            utility,
            pending,
            positions,
            free,
            length,
            newest,
            active,
            *rows,
            alpha,
            tie,
            float(scored),
            window,
            positions.shape[-1],
            positions.shape[1],
            positions.shape[2],
            BLOCK_N=_BLOCK_RANKS,
            EVICTS=evicts,
            PROTECTS=protects,
            UNIFORM=scored > 0,
            RULE=rule,
            WINDOW=window != _ALL,
            num_warps=4,
        )


def traffic(batch, heads, groups, width, held, itemsize, *, own_heads=1, scorer="", window=False) -> dict[str, int]:
    """Bytes that a layer's kernels must move for `held` slots a row, by kernel, as `kvpatch.attention.kernels` says.

    Splits, queries and outputs are left out: they don't grow with the slots.
    """
    slots = batch * held
    attend = slots * 2 * width * groups * itemsize
    settle = 0
    if scorer:
        attend += slots * 4 * heads
        settle += slots * (4 * heads + (4 if scorer == "entropy" else 8 * own_heads))
    if scorer == "vnorm":
        attend += slots * 4 * groups
        settle += slots * 4 * groups
    if window:
        attend += slots * 8 * groups
    bytes_of = {"attend": attend, "settle": settle}
    if scorer == "entropy":
        bytes_of["apply"] = slots * 12
    return bytes_of
