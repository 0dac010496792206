"""What one operation of a run did."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxamp import jaxprs
from jaxamp.census import Numbers
from jaxamp.operate import all_finite, is_finite, is_floating, is_narrow, on_host


class Site(NamedTuple):
    """Where an equation stands: the user's line, name scopes, forward or backward, loop rounds."""

    where: str
    scope: str
    phase: str
    rounds: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class Record:
    """One equation, once.

    Attributes:
        key: The equation and how often it had run: the same in every run of the program.
        eqn: The equation.
        site: Where it stands.
        ins: Makers of each operand.
        operands: What it read; kept where the run is not just looked at, or its result not finite.
        outs: The results, kept where the run is not just looked at.
        bad_ins: Which of them are not finite.
        nan_read: One of them has a NaN.
        narrow: A result is held in 16 bits.
        nan: A result has a NaN.
        inf: A result has an Inf.
        born: "nan" or "inf" if one appeared where all that was read is finite, else "".
        born_at: Where in the result that was.
        size: How many numbers the results have.
        zeros: How many of them are zero.
    """

    key: tuple[int, int]
    eqn: Any
    site: Site
    ins: tuple[tuple[int, ...], ...]
    operands: tuple[Any, ...] = ()
    outs: Sequence[Any] = ()
    bad_ins: tuple[int, ...] = ()
    nan_read: bool = False
    narrow: bool = False
    nan: bool = False
    inf: bool = False
    born: str = ""
    born_at: np.ndarray | None = None
    size: int = 0
    zeros: int = 0

    @property
    def bad(self) -> bool:
        """Whether a result is not finite."""
        return self.nan or self.inf


def fill(
    record: Record,
    eqn: Any,
    ins: Sequence[Any],
    outs: Sequence[Any],
    counted: Sequence[Numbers | None] | None,
) -> None:
    """Notes in the record what went in and came out; `counted` has what is known of the results."""
    record.narrow = any(is_narrow(jaxprs.dtype_of(var)) for var in eqn.outvars)
    for out, numbers in zip(outs, counted or [None] * len(outs), strict=True):
        if not is_floating(out):
            continue
        zeros, is_all_finite = _looked_through(out, numbers)
        record.size += out.size
        record.zeros += zeros
        if is_all_finite:
            continue
        values = on_host(out)
        finite = np.isfinite(values)
        record.nan |= bool(np.isnan(values).any())
        record.inf |= bool(np.isinf(values).any())
        born = ~finite & _all_read_is_finite(ins, values.shape)
        if born.any():
            record.born = "nan" if np.isnan(values[born]).any() else record.born or "inf"
            record.born_at = born
    if record.bad:
        record.operands = tuple(ins)
        record.bad_ins = tuple(k for k, array in enumerate(ins) if not is_finite(array))
        record.nan_read = any(np.isnan(on_host(ins[k])).any() for k in record.bad_ins)


def _looked_through(array: Any, numbers: Numbers | None) -> tuple[int, bool]:
    """How many numbers are zero, and whether all are finite."""
    if numbers is not None:
        return numbers.zeros, not numbers.exponents[-1]
    values = np.asarray(array)
    if not is_narrow(values.dtype):
        return int(np.count_nonzero(values == 0)), all_finite(values)
    bits = values.view(np.uint16) << np.uint16(1)  # without the sign
    infinite = np.array(np.inf, values.dtype).view(np.uint16) << np.uint16(1)
    return values.size - int(np.count_nonzero(bits)), bool(bits.max(initial=0) < infinite)


def _all_read_is_finite(ins: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Per number of the result: what was read for it. Of another shape, everything was."""
    finite = np.ones(shape, bool)
    for operand in ins:
        if is_floating(operand):
            own = np.isfinite(on_host(operand))
            finite &= own if own.shape == shape else own.all()
    return finite
