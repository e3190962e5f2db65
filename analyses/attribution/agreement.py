"""How far two rankings agree, and how sure that is: statistics on plain arrays, whatever was ranked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.stats

MIN_FOR_INTERVAL = 20  # prompts
N_RESAMPLES = 2000
PAIRS_AT_A_TIME = 2**22  # comparisons held at once


def kendall(x: np.ndarray, y: np.ndarray) -> float:
    """Kendall's τ-b (Kendall 1945) of two vectors; NaN where one of them is constant."""
    return float(scipy.stats.kendalltau(x, y).statistic) if _vary(x, y) else float("nan")


def spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's ρ of two vectors, ties at their mean rank; NaN where one of them is constant."""
    return float(scipy.stats.spearmanr(x, y).statistic) if _vary(x, y) else float("nan")


def partial_kendall(x: np.ndarray, y: np.ndarray, given: np.ndarray) -> float:
    """τ of x and y with that of ``given`` taken out (Kendall 1942); NaN where that leaves nothing to rank.

    (τ_xy − τ_xg τ_yg) / √((1 − τ_xg²)(1 − τ_yg²)), each τ a τ-b. It is not 0 where x and y are related through
    ``given`` alone, only much nearer to 0 than τ (Korn 1984), so it is no test by itself.
    """
    xy, xg, yg = kendall(x, y), kendall(x, given), kendall(y, given)
    left = (1 - xg**2) * (1 - yg**2)
    return (xy - xg * yg) / left**0.5 if left > 1e-12 else float("nan")


def _vary(*vectors: np.ndarray) -> bool:
    return all(len(vector) > 1 and np.ptp(vector) > 0 for vector in vectors)


def mean_interval(values: np.ndarray, *, confidence: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean of the known values, bias-corrected and accelerated (Efron 1987).

    NaN for fewer than 20 of them: resamples of a few prompts say little about others.
    """
    known = values[np.isfinite(values)]
    if len(known) < MIN_FOR_INTERVAL:
        return float("nan"), float("nan")
    if np.ptp(known) <= 1e-9 * np.abs(known).max():  # no spread but rounding, of which BCa makes nothing
        return float(known.min()), float(known.max())
    found = scipy.stats.bootstrap(
        (known,), np.mean, n_resamples=N_RESAMPLES, confidence_level=confidence, method="BCa",
        rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(found.low), float(found.high)


def permutation_p(
    x: Sequence[np.ndarray],
    y: Sequence[np.ndarray],
    *,
    groups: np.ndarray | None = None,
    n_permutations: int = 1000,
    seed: int = 0,
) -> np.ndarray:
    """Two-sided p of the mean over prompts of τ-b, against shuffles of the items: (1 + #{|τ*| ≥ |τ|}) / (1 + B).

    Args:
        x: of each prompt, [measure, item].
        y: of each prompt, [item].
        groups: [item], where the items are the same in every prompt, as heads are: they are shuffled within their
            group, and alike in all prompts, because what ranks them in one prompt ranks them in others too. None
            shuffles the items of each prompt by themselves.

    Returns:
        [measure]; NaN for a measure that is constant in every prompt.
    """
    rng = np.random.default_rng(seed)
    shared = None if groups is None else _shuffles(groups, n_permutations, rng)
    sums = np.zeros((1 + n_permutations, len(x[0])))  # the first row is the order as it is
    counts = np.zeros(len(x[0]))
    for of_x, of_y in zip(x, y, strict=True):
        n = len(of_y)
        orders = _shuffles(np.zeros(n), n_permutations, rng) if shared is None else shared
        taus = _taus(of_x, of_y, np.vstack((np.arange(n), orders)))
        counts += np.isfinite(taus[0])
        sums += np.nan_to_num(taus)
    means = np.abs(sums) / np.where(counts > 0, counts, np.nan)
    # What is equal on paper may differ by rounding, which must not make a shuffle count for less.
    return np.where(counts > 0, (1 + (means[1:] >= means[0] - 1e-9).sum(axis=0)) / (1 + n_permutations), np.nan)


def _shuffles(groups: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """``n`` orders [n, item] that leave every item in its group."""
    orders = np.tile(np.arange(len(groups)), (n, 1))
    for group in np.unique(groups):
        (members,) = np.nonzero(groups == group)
        orders[:, members] = rng.permuted(orders[:, members], axis=1)
    return orders


def _taus(x: np.ndarray, y: np.ndarray, orders: np.ndarray) -> np.ndarray:
    """τ-b of each row of x [measure, item] with y [item] in each order [order, item]; [order, measure].

    All pairs of items, as bits: which is the greater in x, and which in y.
    """
    ranks = scipy.stats.rankdata(np.vstack((x, y)), axis=1).astype(np.float32)  # float32 would tie what differs
    of_x, of_y = ranks[:-1], ranks[-1]
    greater = _bits(np.greater, of_x)  # [measure, byte]
    n_greater = np.bitwise_count(greater).sum(axis=1, dtype=np.int64)
    n_untied = int(np.bitwise_count(_bits(np.greater, of_y[None])).sum(dtype=np.int64))
    has_ties = 2 * n_untied < len(y) * (len(y) - 1)
    shuffled = of_y[orders]
    sums = np.empty((len(orders), len(x)), dtype=np.int64)  # concordant less discordant pairs
    size = max(1, PAIRS_AT_A_TIME // len(y) ** 2)
    for start in range(0, len(orders), size):
        some = shuffled[start : start + size]
        concordant = _common(greater, _bits(np.greater, some))
        discordant = _common(greater, _bits(np.less, some)) if has_ties else n_greater - concordant
        sums[start : start + size] = concordant - discordant
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / np.sqrt(n_greater * float(n_untied))


def _bits(compare: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Whether ``compare`` holds for each ordered pair of a row's items, as bits: values [row, item] → [row, byte]."""
    return np.packbits(compare(values[:, :, None], values[:, None, :]).reshape(len(values), -1), axis=1)


def _common(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How many bits are set in both, [row of y, row of x]."""
    return np.stack([np.bitwise_count(of_x & y).sum(axis=1, dtype=np.int64) for of_x in x], axis=1)


def adjusted_for_many(p: np.ndarray) -> np.ndarray:
    """p-values of any shape adjusted for their number, so that their false discovery rate is known (Benjamini and
    Hochberg 1995); NaN stays."""
    adjusted = np.full(p.shape, np.nan)
    known = np.isfinite(p)
    if known.any():
        adjusted[known] = scipy.stats.false_discovery_control(p[known])
    return adjusted


def sign_flip_p(values: np.ndarray, *, n_flips: int = 1000, seed: int = 0) -> np.ndarray:
    """p of each item's mean over prompts being 0, with the chance of one false alarm among all items kept (max-T).

    Flipping the signs of whole prompts leaves means of 0 as they are; the largest |t| over items under such flips is
    what each item's |t| is held against (Westfall and Young 1993).

    Args:
        values: [prompt, item].

    Returns:
        [item]; 1 for an item that is 0 in every prompt.
    """
    flips = np.random.default_rng(seed).choice((-1.0, 1.0), size=(n_flips, len(values)))
    squares = np.square(values).sum(axis=0)
    observed = _t(values.sum(axis=0), squares, len(values))
    largest = _t(flips @ values, squares, len(values)).max(axis=1)  # [flip]
    return (1 + (largest[:, None] >= observed - 1e-9).sum(axis=0)) / (1 + n_flips)


def _t(sums: np.ndarray, squares: np.ndarray, n: int) -> np.ndarray:
    """|t| of means of n values, of which flipped signs leave the sum of squares as it is; infinite without spread."""
    variance = np.maximum(squares - np.square(sums) / n, 0.0) / (n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums == 0, 0.0, np.abs(sums) / np.sqrt(n * variance))


def split_half(values: np.ndarray, *, n_splits: int = 100, seed: int = 0) -> float:
    """How well the ranking of items by their mean over prompts would repeat itself with other prompts.

    Spearman's ρ of the items' means in two random halves, stepped up to the full number of prompts (Spearman 1910,
    Brown 1910: 2ρ / (1 + ρ)), mean over splits; NaN for fewer than 4 prompts. 1 is a ranking without noise.

    Args:
        values: [prompt, item].
    """
    if len(values) < 4:
        return float("nan")
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n_splits):
        order = rng.permutation(len(values))
        rho = spearman(*(np.abs(values[half].mean(axis=0)) for half in np.array_split(order, 2)))
        found.append(max(2 * rho / (1 + rho), -1.0) if rho > -1 else -1.0)
    return float(np.mean(found))


def top_overlap(x: np.ndarray, y: np.ndarray, k: int) -> float:
    """The share of the k largest items of x that are among the k largest of y; k / n is chance. Ties to the first."""
    first, second = (set(np.argsort(-values, kind="stable")[:k].tolist()) for values in (x, y))
    return len(first & second) / k
