"""Numbers about numbers: which range an array covers, and what each narrow format makes of it.

An array is summed up by how many of its values there are in each power of two, and, for each
format, how many a cast would turn into zero, into a subnormal number, into Inf or NaN. All of these
add up, over the rounds of a loop and over the arrays of a scope.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxamp.operate import on_host


class Format(NamedTuple):
    """Where rounding to nearest, ties to even, changes what a number is.

    Attributes:
        flush: The largest magnitude that becomes zero.
        normal: The least that becomes a normal number.
        overflow: The least that becomes Inf or NaN.
    """

    flush: np.float32
    normal: np.float32
    overflow: np.float32


def _format(dtype: Any) -> Format:
    info = ml_dtypes.finfo(dtype)
    tiny, least, largest = (
        float(x) for x in (info.smallest_normal, info.smallest_subnormal, info.max)
    )
    half_ulp = 2.0 ** (math.floor(math.log2(largest)) - info.nmant - 1)
    edge = np.float32(largest + half_ulp)
    with np.errstate(over="ignore"):
        tie_stays = np.isfinite(edge.astype(dtype))  # where the largest is even
    if tie_stays:
        edge = np.nextafter(edge, np.float32(np.inf))
    return Format(np.float32(least / 2), np.float32(tiny - least / 2), edge)


DTYPES = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}
FORMATS = {name: _format(dtype) for name, dtype in DTYPES.items()}

# Of float32; bin 0 has zeros and its subnormals, bin 255 what is not finite.
_BINS, _BIAS = 256, 127
_PART = 2**15


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Counts over some arrays; `+` adds them up.

    Attributes:
        exponents: int64[256], values per binary exponent, biased by 127 as in float32.
        zeros: Values that are zero.
        largest: The largest finite magnitude; 0 if there is none.
        casts: Per format: (flushed to zero, subnormal, overflowing).
    """

    exponents: np.ndarray
    zeros: int
    largest: float
    casts: dict[str, tuple[int, int, int]]

    def __add__(self, other: "Numbers") -> "Numbers":
        casts = {
            name: (a + d, b + e, c + f)
            for (name, (a, b, c)), (d, e, f) in zip(
                self.casts.items(), other.casts.values(), strict=True
            )
        }
        return Numbers(
            self.exponents + other.exponents,
            self.zeros + other.zeros,
            max(self.largest, other.largest),
            casts,
        )

    @property
    def size(self) -> int:
        """How many values there are."""
        return int(self.exponents.sum())

    @property
    def exponent_range(self) -> tuple[int, int] | None:
        """Least and largest binary exponent of the nonzero finite values."""
        counts = self.exponents[:-1].copy()
        counts[0] -= self.zeros
        at = np.flatnonzero(counts)
        return (int(at[0]) - _BIAS, int(at[-1]) - _BIAS) if at.size else None

    def shares(self) -> dict[str, dict[str, float]]:
        """Per format, the share of all values that a cast flushes, makes subnormal, overflows."""
        names = ("flushed", "subnormal", "overflowing")
        return {
            name: {key: n / max(self.size, 1) for key, n in zip(names, counts, strict=True)}
            for name, counts in self.casts.items()
        }


def count(array: Any) -> Numbers:
    """Sum up an array of floating numbers.

    >>> numbers = count(np.float32([0, 1, 1e-8, 1e5]))
    >>> numbers.exponent_range, numbers.zeros, numbers.casts["f16"]
    ((-27, 16), 1, (1, 0, 1))
    """
    sizes = np.abs(np.asarray(on_host(array), np.float32)).ravel()
    exponents = np.zeros(_BINS, np.int64)
    for k in range(0, sizes.size, _PART):  # what a core's cache holds
        exponents += np.bincount(sizes[k : k + _PART].view(np.uint32) >> 23, minlength=_BINS)
    zeros = int(np.count_nonzero(sizes == 0)) if exponents[0] else 0
    finite_bins = np.flatnonzero(exponents[:-1])
    largest = 0.0
    if finite_bins.size:
        whole = not exponents[-1]
        largest = float(sizes.max() if whole else sizes[np.isfinite(sizes)].max())
    counts = {name: _casts(sizes, exponents, zeros, form) for name, form in FORMATS.items()}
    return Numbers(exponents, zeros, largest, counts)


def _casts(sizes, exponents, zeros: int, form: Format) -> tuple[int, int, int]:
    below = [
        _count_below(sizes, exponents, edge)
        for edge in (np.nextafter(form.flush, np.float32(1)), form.normal, form.overflow)
    ]
    finite = sizes.size - int(exponents[-1])
    return below[0] - zeros, below[1] - below[0], finite - below[2]


def _count_below(sizes: np.ndarray, exponents: np.ndarray, edge: np.float32) -> int:
    """How many are less than the edge; they are only looked at if some are close to it."""
    at = int(edge.view(np.uint32) >> 23)
    if not exponents[at]:
        return int(exponents[:at].sum())
    return int(np.count_nonzero(sizes < edge))


class Scale(NamedTuple):
    """A loss scale for the 16-bit values of a backward pass.

    Attributes:
        loss_scale: The least power of two with which no more of them are zero than must be.
        margin_log2: How often it can be doubled before the largest of them overflows.
        flushed: Share that is zero with it.
        flushed_now: Share that is zero with the scale that was used.
    """

    loss_scale: float
    margin_log2: int
    flushed: float
    flushed_now: float


def best_scale(numbers: Numbers, name: str, used: float) -> Scale | None:
    """The loss scale for a backward pass whose values, at scale `used`, are `numbers`.

    >>> best_scale(count(np.float32([2**-30, 1])), "f16", used=1.0)
    Scale(loss_scale=64.0, margin_log2=9, flushed=0.0, flushed_now=0.5)
    """
    if not numbers.largest:
        return None
    form, base = FORMATS[name], round(math.log2(used))
    held = float(np.nextafter(form.overflow, np.float32(0)))
    most = math.floor(math.log2(held / numbers.largest))
    least_kept = math.frexp(form.flush)[1]  # the bin of the least number that the format has
    at = np.arange(_BINS - 1) - _BIAS
    counts = numbers.exponents[:-1].copy()
    counts[0] -= numbers.zeros
    flushed = lambda k: int(counts[at + k < least_kept].sum())  # noqa: E731
    least = min(most, max(-base, -126 - base))  # a scale below 1 only against an overflow
    chosen = next((k for k in range(least, most + 1) if flushed(k) == flushed(most)), most)
    chosen = min(max(chosen, -126 - base), 126 - base)
    return Scale(
        2.0 ** (base + chosen),
        most - chosen,
        flushed(chosen) / numbers.size,
        flushed(0) / numbers.size,
    )
