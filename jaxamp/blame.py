"""Which operation made the NaN or Inf that reached the loss or a gradient.

A NaN or Inf *appears* where all that was read for it is finite, and is passed on from there. Where
it is dropped again, as the -inf of a mask is by a softmax, it has done no harm. So the search goes
back from what came out: of all appearances that it was passed on from, the first is to blame.

An Inf that the program wrote down, or was given, is meant: it is to blame only if it comes out as
it is. If a NaN is made of it (a row that is masked whole), the operation that makes the NaN is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxamp import jaxprs
from jaxamp.interpret import Record, Run, Value
from jaxamp.operate import is_finite, is_zero_literal, on_host

_CONSTANT = -(2**62)  # the maker of what nothing made


class Cause(NamedTuple):
    """The first cause of a value that is not finite.

    Attributes:
        kind: "nan", "overflow" (a finite number too large for its dtype), "division by zero" (an
            exact pole: 1/0, log 0), or "argument" (it was there before the function ran).
        record: Of the operation that made it; for an argument of the first that read it, if any.
        argument: Which input it was, or None.
    """

    kind: str
    record: Record | None
    argument: int | None


def first_cause(run: Run, arrays: Sequence[Any]) -> Cause | None:
    """What is to blame for outputs that are not finite; None if all are finite."""
    bad = [value for value in run.outs if not is_finite(value.array)]
    if not bad:
        return None
    bad_arguments = {-1 - k: array for k, array in enumerate(arrays) if not is_finite(array)}
    strong, weak = _origins(run.records, bad_arguments)
    found = set().union(*(_of(value, strong) for value in bad))
    if found:
        first = min(found)
        return _argument(run, first) if first < 0 else _operation(run.records[first])
    meant = set().union(*(_of(value, weak) for value in bad)) - {_CONSTANT}
    if meant:
        return _argument(run, min(meant))
    first = next((record for record in run.records if record.bad), None)
    return Cause("overflow", first, None)  # a constant comes out as it is


def _of(value: Value, origins: dict[int, frozenset[int]]) -> set[int]:
    return set().union(*(origins.get(maker, frozenset()) for maker in value.makers))


def _origins(records: Sequence[Record], bad_arguments: dict[int, Any]):
    """Per maker: the appearances behind it, and the infinities behind it that are meant."""
    strong: dict[int, frozenset[int]] = {}
    weak: dict[int, frozenset[int]] = {}
    for maker, array in bad_arguments.items():
        nan = bool(np.isnan(on_host(array)).any())
        (strong if nan else weak)[maker] = frozenset([maker])
    for k, record in enumerate(records):
        if not record.bad:
            continue
        makers = [maker for j in record.bad_ins for maker in record.ins[j] or (_CONSTANT,)]
        own = frozenset().union(*(strong.get(maker, frozenset()) for maker in makers))
        weak[k] = frozenset().union(
            *(weak.get(m, frozenset()) for m in makers if m != _CONSTANT),
            [_CONSTANT] if _CONSTANT in makers else [],
        )
        nan_of_meant = record.nan and not record.nan_read and not own
        strong[k] = own | {k} if record.born or nan_of_meant else own
    return strong, weak


def _argument(run: Run, maker: int) -> Cause:
    reads = (r for r in run.records if any(maker in makers for makers in r.ins))
    return Cause("argument", next(reads, None), -1 - maker)


def _operation(record: Record) -> Cause:
    if record.nan and record.born != "inf":
        kind = "nan"
    else:
        kind = "division by zero" if _at_pole(record) else "overflow"
    return Cause(kind, record, None)


_POLES = {"div": 0, "rsqrt": 0, "log": 0, "log2": 0, "log1p": -1, "pow": 0, "integer_pow": 0}


def _at_pole(record: Record) -> bool:
    """An operand is exactly where the operation has no finite value."""
    name = record.eqn.primitive.name
    if name == "integer_pow" and record.eqn.params["y"] >= 0:
        return False
    if name not in _POLES:
        return False
    operand = record.operands[1 if name == "div" else 0]
    return bool((on_host(operand) == _POLES[name]).any())


# Where numbers became zero that are not zero in float32.


def lost_at(run: Run, twin: Run, record: Record) -> Record | None:
    """The first operation behind `record` whose results have zeros that the twin's have not."""
    in_twin = {other.key: other for other in twin.records}
    found = None
    ahead = [m for makers in record.ins for m in makers]
    seen: set[int] = set()
    while ahead:
        maker = ahead.pop()
        if maker < 0 or maker in seen:
            continue
        seen.add(maker)
        made = run.records[maker]
        other = in_twin.get(made.key)
        if other is not None and made.zeros > other.zeros:
            found = maker if found is None else min(found, maker)
            ahead += [m for makers in made.ins for m in makers]
    return None if found is None else run.records[found]


def lost_eps(run: Run, record: Record) -> Record | None:
    """An addition of a 16-bit zero behind `record`: an eps that 16 bits could not hold."""
    ahead = [m for makers in record.ins for m in makers]
    for _ in range(_STEPS_BACK):
        if not ahead:
            return None
        maker = ahead.pop(0)
        if maker < 0:
            continue
        made = run.records[maker]
        if made.eqn.primitive.name in ("add", "max") and any(
            is_zero_literal(atom) for atom in made.eqn.invars
        ):
            return made
        ahead += [m for makers in made.ins for m in makers]
    return None


_STEPS_BACK = 16


def narrowed_at(run: Run, record: Record) -> list[Record]:
    """Where the 16-bit values that `record` works with were made 16-bit, first ones first."""
    found: set[int] = set()
    ahead, seen = [run.records.index(record)], set[int]()
    while ahead:
        maker = ahead.pop()
        if maker < 0 or maker in seen:
            continue
        seen.add(maker)
        made = run.records[maker]
        if not made.narrow and made is not record:
            continue
        above = [m for makers in made.ins for m in makers]
        if made.narrow and not any(m >= 0 and run.records[m].narrow for m in above):
            found.add(maker)
        ahead += above
    return [run.records[k] for k in sorted(found)]


def ranges(record: Record) -> list[tuple[str, float, float]]:
    """(dtype, least, largest) of each floating operand of an operation that went bad."""
    found = []
    for atom, array in zip(record.eqn.invars, record.operands, strict=True):
        if jaxprs.is_inexact(atom) and getattr(array, "size", 1):
            values = on_host(array)
            found.append((str(array.dtype), float(values.min()), float(values.max())))
    return found
