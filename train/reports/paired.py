"""Statistics of few runs: the interval of a paired difference, spreads, and what they allow to say.

Two runs of one seed see the same data in the same order from the same initial parameters, so what
differs between them is precision alone; the difference is taken first and averaged over seeds then.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import stdtrit

CONFIDENCE = 0.95

Outcome = Literal["within", "beyond", "undecided"]


class Interval(NamedTuple):
    """A mean, and where the mean of all seeds lies; no bounds (None) from a single one."""

    mean: float
    low: float | None
    high: float | None
    count: int


class Spread(NamedTuple):
    """A middle value of `count`, and the range of them or their quartiles."""

    middle: float
    low: float
    high: float
    count: int


def t_interval(differences: Sequence[float]) -> Interval:
    """Mean and Student's 95 % interval: mean +- t(0.975; n - 1) s / sqrt(n).

    >>> [round(float(x), 4) for x in t_interval([0.01, 0.02, 0.03])[:3]]
    [0.02, -0.0048, 0.0448]
    >>> t_interval([0.01])
    Interval(mean=0.01, low=None, high=None, count=1)
    """
    n = len(differences)
    mean = float(np.mean(differences))
    if n == 1:
        return Interval(mean, None, None, 1)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2) * np.std(differences, ddof=1) / np.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """`t_interval` of the logarithms, as ratios: the geometric mean and its bounds."""
    mean, low, high, count = t_interval(np.log(ratios).tolist())
    back = lambda x: None if x is None else float(np.exp(x))  # noqa: E731
    return Interval(float(np.exp(mean)), back(low), back(high), count)


def outcome(interval: Interval, tolerance: float) -> Outcome:
    """What an interval says about a tolerance that was set before it was looked at.

    within: all of it lies inside +-tolerance; beyond: all of it lies outside, on one side;
    undecided: it has a part inside and a part outside, or there is none.
    """
    if interval.low is None or interval.high is None:
        return "undecided"
    if -tolerance <= interval.low and interval.high <= tolerance:
        return "within"
    if interval.low > tolerance or interval.high < -tolerance:
        return "beyond"
    return "undecided"


def covers(low: float, high: float, value: float) -> bool:
    return low <= value <= high


def mean_and_range(values: Sequence[float]) -> Spread:
    """NaN, all three, where a value is."""
    return Spread(float(np.mean(values)), float(np.min(values)), float(np.max(values)), len(values))


def median_and_range(values: Sequence[float]) -> Spread:
    low, high = float(np.min(values)), float(np.max(values))
    return Spread(float(np.median(values)), low, high, len(values))


def quartiles(values: np.ndarray) -> Spread:
    """The median, and the quartiles around it."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return Spread(float(middle), float(low), float(high), len(values))


def window(steps: int) -> int:
    """A tenth of the steps, rounded up: over so many the final train loss is averaged.

    >>> window(300), window(5)
    (30, 1)
    """
    return -(-steps // 10)
