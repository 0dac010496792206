import ml_dtypes
import numpy as np
import pytest

from jaxamp.census import DTYPES, best_scale, count


@pytest.mark.parametrize("name", DTYPES)
def test_shares_are_those_of_the_cast(name):
    """Every float32 near an edge of a format, and random ones of all sizes, against ml_dtypes."""
    rng = np.random.default_rng(0)
    powers = np.float32(2.0) ** np.arange(-140, 128, dtype=np.float32)
    edges = [powers * f for f in (1, 0.75, 1.5, 1.75, 1.8125, 1.875, 1.99, 1.99951172, 1.9980469)]
    near = np.concatenate([np.nextafter(e, t) for e in edges for t in np.float32([0, np.inf])])
    x = np.concatenate([*edges, near, [0, np.inf, np.nan], 65520 + np.arange(-9, 9) * 2**-8])
    x = np.concatenate([x, [464, 61440], rng.normal(size=99) * 2.0 ** rng.integers(-40, 20, 99)])
    x = x.astype(np.float32) * rng.choice(np.float32([1, -1]), x.size)
    with np.errstate(over="ignore"):
        cast = x.astype(DTYPES[name]).astype(np.float32)
    tiny = float(ml_dtypes.finfo(DTYPES[name]).smallest_normal)
    finite = np.isfinite(x)
    flushed = np.count_nonzero((cast == 0) & (x != 0) & finite)
    subnormal = np.count_nonzero((cast != 0) & (np.abs(cast) < tiny) & finite)
    overflow = np.count_nonzero(~np.isfinite(cast) & finite)
    assert count(x).casts[name] == (flushed, subnormal, overflow)
    assert flushed and subnormal and overflow
    one_by_one = sum((count(v[None]) for v in x[1:]), count(x[:1]))
    assert one_by_one.casts == count(x).casts and one_by_one.size == x.size


def test_numbers_of_an_array():
    numbers = count(np.float32([0, 0, 3, -0.25, np.inf, np.nan]))
    assert numbers.exponent_range == (-2, 1) and numbers.zeros == 2 and numbers.largest == 3
    assert count(np.float32([np.inf])).exponent_range is None
    assert count(np.zeros((0, 3), np.float32)).size == 0


@pytest.mark.parametrize(
    "values,used,scale,margin",
    [
        ([1.0], 1.0, 1, 15),  # nothing to rescue
        ([2.0**-26], 1.0, 4, 39),  # 2**-25 is not enough: it rounds to zero
        ([2.0**-40, 2.0**-28, 2.0**10], 1.0, 16, 1),  # one is lost in any case
        ([2.0**20], 2.0**10, 1, 5),  # too high
        ([2.0**20], 1.0, 2.0**-5, 0),
        ([2.0**-10], 2.0**15, 2, 39),
    ],
)
def test_the_scale_that_rescues(values, used, scale, margin):
    found = best_scale(count(np.float32(values)), "f16", used)
    assert (found.loss_scale, found.margin_log2) == (scale, margin)
    held = (np.float32(values) * (scale / used)).astype(np.float16)
    assert np.isfinite(held).all()
    assert held.all() or values[0] == 2.0**-40
