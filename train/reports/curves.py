"""Curves over steps of several seeds: one line and a band, of as many points as a page can show."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.reports.results import PolicyResult, common_steps, pairs
from train.reports.runs import Run

POINTS = 240
"""Most points of a curve; where there are more steps, a point is the mean of several."""


class Curve(NamedTuple):
    """float64[N] each; NaN where a seed is not finite.

    Attributes:
        steps: The middle of the steps of a point.
        mean, low, high: Over seeds.
        width: Steps in a point.
    """

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    width: int


def curve(runs: Sequence[Run], name: str, points: int = POINTS) -> Curve | None:
    """A metric at the steps that all seeds have; None where there are none."""
    steps = common_steps(runs, name)
    return _band(steps, _stacked(runs, name, steps), points) if len(steps) else None


def difference_curve(
    result: PolicyResult, base: PolicyResult, name: str, points: int = POINTS
) -> Curve | None:
    """A metric less that of the base, by seed, at the steps that all paired runs have."""
    paired = list(pairs(result.group, base.group).values())
    runs, others = [run for run, _ in paired], [other for _, other in paired]
    steps = common_steps([*runs, *others], name) if runs else np.empty(0, np.int64)
    if not len(steps):
        return None
    values = _stacked(runs, name, steps) - _stacked(others, name, steps)
    return _band(steps, values, points)


def bad_steps(runs: Sequence[Run], name: str) -> np.ndarray:
    """The steps at which a seed is not finite; int64[N], thinned to what can be told apart."""
    series = [run.series[name] for run in runs if name in run.series]
    bad = [s.steps[~np.isfinite(s.values)] for s in series]
    steps = np.unique(np.concatenate(bad)) if bad else np.empty(0, np.int64)
    return steps[:: -(-len(steps) // POINTS) or 1]


def thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values that must not be averaged: the least of each few, at the first step of them."""
    starts = _starts(len(steps), POINTS)
    return steps[starts], np.minimum.reduceat(values, starts)


def _stacked(runs: Sequence[Run], name: str, steps: np.ndarray) -> np.ndarray:
    values_SxN = np.stack([run.series[name].at(steps) for run in runs])
    return np.where(np.isfinite(values_SxN), values_SxN, np.nan)


def _band(steps: np.ndarray, values_SxN: np.ndarray, points: int) -> Curve:
    starts = _starts(len(steps), points)
    counts = np.diff([*starts, len(steps)])
    means_SxN = np.add.reduceat(values_SxN, starts, axis=1) / counts
    middle = np.add.reduceat(steps, starts) / counts
    low, high = means_SxN.min(axis=0), means_SxN.max(axis=0)
    return Curve(middle, means_SxN.mean(axis=0), low, high, int(counts[0]))


def _starts(n: int, points: int) -> np.ndarray:
    return np.arange(0, n, -(-n // points))
