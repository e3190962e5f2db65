from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from workbench.analyses.attribution import agreement


def by_pairs(x: np.ndarray, y: np.ndarray) -> float:
    """τ-b as Kendall defines it, pair by pair."""
    signs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j])) for i, j in itertools.combinations(range(len(x)), 2)]
    untied = [sum(pair[side] != 0 for pair in signs) for side in (0, 1)]
    return float(sum(a * b for a, b in signs) / (untied[0] * untied[1]) ** 0.5)


vectors = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=12)


@given(vectors)
def test_every_tau_is_that_of_the_pairs(pairs: list[tuple[int, int]]) -> None:
    x, y = np.array(pairs, dtype=float).T
    found = agreement.kendall(x, y)
    fast = agreement._taus(np.stack((x, -x)), y, np.arange(len(x))[None])[0]
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert np.isnan(found) and np.isnan(fast).all() and np.isnan(agreement.spearman(x, y))
    else:
        assert found == pytest.approx(by_pairs(x, y), abs=1e-9)
        np.testing.assert_allclose(fast, [found, -found], atol=1e-6)


def test_known_agreements() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert agreement.kendall(x, x**3) == 1 and agreement.spearman(x, -x) == -1
    assert agreement.kendall(x, np.array([1.0, 3.0, 2.0, 4.0])) == pytest.approx(4 / 6)  # one of 6 pairs is swapped
    assert agreement.top_overlap(np.array([5, 4, 3, 0]), np.array([0, 5, 4, 3]), 2) == 0.5


def test_what_position_explains_is_taken_out() -> None:
    rng = np.random.default_rng(0)
    position = np.arange(300.0)
    x, y = (position + 60 * rng.standard_normal(300) for _ in range(2))  # alike because both grow
    assert agreement.kendall(x, y) > 0.4 > 2 * agreement.partial_kendall(x, y, position) > 0
    # By hand: τ_xy = 1/3, τ_xg = 1/3, τ_yg = −1/3 of three items, (1/3 + 1/9) / (1 − 1/9) = 1/2.
    by_hand = agreement.partial_kendall(np.array([0, 1, 2]), np.array([1, 0, 2]), np.array([0, 2, 1]))
    assert by_hand == pytest.approx(0.5)
    assert np.isnan(agreement.partial_kendall(x, position, position))


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
def test_intervals_hold_the_mean_as_often_as_they_say(draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "N_RESAMPLES", 600)
    rng = np.random.default_rng(1)
    samples = getattr(rng, draw)((300, 20))
    mean = {"standard_normal": 0.0, "standard_exponential": 1.0}[draw]
    intervals = [agreement.mean_interval(sample, seed=place) for place, sample in enumerate(samples)]
    coverage = np.mean([low <= mean <= high for low, high in intervals])
    # 0.90 to 0.98; for a normal mean, less the sampling error of 300 draws for the skewed one.
    assert (0.90 if draw == "standard_normal" else 0.87) <= coverage <= 0.98


def test_few_prompts_have_no_interval() -> None:
    assert np.isnan(agreement.mean_interval(np.append(np.arange(19.0), np.nan))).all()
    assert agreement.mean_interval(np.full(20, 0.5)) == (0.5, 0.5)


def test_p_is_uniform_where_nothing_is_related() -> None:
    rng = np.random.default_rng(2)
    groups = np.repeat([0, 1, 2], 10)
    found = []
    for trial in range(150):
        # The groups differ in both, as layers do: shuffles within them must not take that for agreement.
        level = rng.standard_normal(3)[groups] * 3
        x = level + rng.standard_normal(30) + rng.standard_normal((4, 30))  # the same heads in every prompt
        y = level + rng.standard_normal(30) + rng.standard_normal((4, 30))
        p = agreement.permutation_p(x[:, None], y, groups=groups, n_permutations=99, seed=trial)
        found.append(p[0] - rng.uniform(0, 0.01))  # p is a multiple of 1 / 100
    assert scipy.stats.kstest(found, "uniform").pvalue > 0.01


def test_p_is_uniform_for_the_items_of_each_prompt() -> None:
    rng = np.random.default_rng(3)
    found = []
    for trial in range(150):
        lengths = rng.integers(4, 12, size=4)
        x, y = [rng.standard_normal((1, n)) for n in lengths], [rng.standard_normal(n) for n in lengths]
        found.append(agreement.permutation_p(x, y, n_permutations=99, seed=trial)[0] - rng.uniform(0, 0.01))
    assert scipy.stats.kstest(found, "uniform").pvalue > 0.01


def test_agreement_beyond_chance_has_a_small_p() -> None:
    rng = np.random.default_rng(4)
    y = rng.standard_normal((5, 12))
    x = np.stack((y, -y, np.ones_like(y)), axis=1)  # [prompt, measure, item]
    p = agreement.permutation_p(x, y, groups=np.repeat([0, 1], 6), n_permutations=199)
    assert p[:2].tolist() == [1 / 200, 1 / 200] and np.isnan(p[2])


def test_many_tests_together() -> None:
    p = np.array([[0.01, 0.02], [np.nan, 0.9]])
    # Of three: 0.01 · 3/1, 0.02 · 3/2, 0.9.
    np.testing.assert_allclose(agreement.adjusted_for_many(p), [[0.03, 0.03], [np.nan, 0.9]])
    rng = np.random.default_rng(5)
    alarms = [
        agreement.sign_flip_p(rng.standard_normal((12, 30)), n_flips=199, seed=s).min() <= 0.05 for s in range(200)
    ]
    assert np.mean(alarms) < 0.1  # 0.05 on paper; one standard error is 0.015
    values = rng.standard_normal((12, 30))
    values[:, 3] += 4
    values[:, 4] = 0
    found = agreement.sign_flip_p(values)
    assert found[3] < 0.01 and found[4] == 1 and (np.delete(found, 3) > 0.05).all()


def test_split_halves_tell_signal_from_noise() -> None:
    rng = np.random.default_rng(6)
    items, noise = rng.standard_normal(80) ** 2, rng.standard_normal((20, 80))
    assert agreement.split_half(np.tile(items, (20, 1))) == pytest.approx(1.0)
    assert agreement.split_half(items + 0.5 * noise) > 0.9
    assert abs(agreement.split_half(noise)) < 0.35
    assert np.isnan(agreement.split_half(noise[:3]))
