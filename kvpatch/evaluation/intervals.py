"""How sure a mean, a difference or a share is, from its samples alone."""

import numpy as np

# Numbers drawn at a time: a bootstrap over thousands of samples would else take gigabytes.
_DRAWN = 2_000_000

Interval = tuple[float, float, float]


def paired_bootstrap(difference, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of differences between two ways on the same samples, and its percentile-bootstrap interval.

    With few samples it holds the true mean less often than `level` says: 0.8 to 0.9 instead of 0.95 at n = 15, 0.94 at
    n = 60, for differences that are mostly zero.

    Args:
        difference: `[n]`, the score of one way less that of the other, sample by sample.
        level: share of such intervals that hold the true mean, in (0, 1).
        resamples: how often n differences are drawn with replacement.
        seed: same numbers, same interval.

    Returns:
        mean, low, high. All NaN without a sample; low and high NaN with one, which says nothing of spread. Equal
        samples give an interval of no width: resampling them can't show more, it does not mean that nothing is open.

    Raises:
        ValueError: if `difference` isn't one row of finite numbers, or `level` is not between 0 and 1.
        ModuleNotFoundError: without the extra `eval`.
    """
    values = _row(difference)
    _check(level)
    if len(values) < 2:
        return (float(values[0]) if len(values) else np.nan), np.nan, np.nan
    mean = float(values.mean())
    if (values == values[0]).all():
        return float(values[0]), float(values[0]), float(values[0])
    # Percentile: on skewed and on mostly equal differences BCa kept its level no better on the whole.
    found = _scipy_stats().bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, _DRAWN // len(values)),
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return mean, float(found.confidence_interval.low), float(found.confidence_interval.high)


def mean_interval(values, level: float = 0.95, resamples: int = 10_000, seed: int = 0) -> Interval:
    """Mean of one way's scores `[n]` and its interval; all else as `paired_bootstrap`, which compares two ways better:
    what makes a sample hard for both cancels out there."""
    return paired_bootstrap(values, level, resamples, seed)


def proportion_interval(hits: int, n: int, level: float = 0.95, method: str = "wilson") -> Interval:
    """Share of hits and its interval.

    Args:
        hits: 0 to n.
        n: trials; 0 gives NaN three times.
        level: as in `paired_bootstrap`.
        method: "wilson" (holds the level on average) or "exact" (Clopper-Pearson: holds it always, hence wider).

    Raises:
        ValueError: for other arguments.
        ModuleNotFoundError: without the extra `eval`.
    """
    _check(level)
    if method not in ("wilson", "exact"):
        raise ValueError(f"method must be 'wilson' or 'exact', not {method!r}")
    if not 0 <= hits <= n:
        raise ValueError(f"hits must be between 0 and n = {n}, not {hits}")
    if n == 0:
        return np.nan, np.nan, np.nan
    found = _scipy_stats().binomtest(int(hits), int(n)).proportion_ci(confidence_level=level, method=method)
    return hits / n, float(found.low), float(found.high)


def disjoint(a: Interval, b: Interval) -> bool:
    """Whether two intervals (mean, low, high) share no point; an unknown end (NaN) leaves that open: False."""
    return bool(a[2] < b[1] or b[2] < a[1])


def _row(values) -> np.ndarray:
    row = np.asarray(values, dtype=np.float64)
    if row.ndim != 1:
        raise ValueError(f"values must be one row, not of shape {row.shape}")
    if not np.isfinite(row).all():
        raise ValueError(f"values must be finite; number {int((~np.isfinite(row)).argmax())} is not")
    return row


def _check(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, not {level}")


def _scipy_stats():
    try:
        from scipy import stats
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError('intervals need scipy: pip install "kvpatch[eval]"', name=error.name) from error
    return stats
