"""Which operation made the NaN or Inf that reached the loss or a gradient.

A NaN or Inf *appears* where all that was read for it is finite, and is passed on from there. Where
it is dropped again, as the -inf of a mask is by a softmax, it has done no harm. So the search goes
back from what came out: of all appearances that it was passed on from, the first is to blame.

An Inf that the program wrote down is meant: it is to blame only if it comes out as it is. If a NaN
is made of it (a row that is masked whole), the operation that makes the NaN is. What an argument
holds is to blame if anything of it comes out.

Where all is finite, a gradient may have lost its numbers: what is zero in it is not so in float32.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxamp import jaxprs
from jaxamp.interpret import Run, Value
from jaxamp.operate import SMALL, is_finite, lost_literal, on_host
from jaxamp.record import Record


class Cause(NamedTuple):
    """The first cause of a value that is not finite.

    Attributes:
        kind: "nan", "overflow" (a finite number too large for its dtype), "division by zero" (an
            exact pole: 1/0, log 0), "index" (out of range: JAX gives NaN), "argument" (it was
            there before the function ran), or "underflow" (a gradient lost its numbers).
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
    origins = _origins(run.records, arrays)
    found = set().union(*(origins.get(maker, ()) for value in bad for maker in value.makers))
    if found:
        first = min(found)
        return _argument(run, first) if first < 0 else _operation(run.records[first])
    first = next((record for record in run.records if record.bad), None)
    return Cause("overflow", first, None)  # a constant comes out as it is


def _origins(records: Sequence[Record], arrays: Sequence[Any]) -> dict[int, frozenset[int]]:
    """Per maker: the appearances of NaN and Inf that its own were passed on from."""
    origins = {-1 - k: frozenset([-1 - k]) for k, x in enumerate(arrays) if not is_finite(x)}
    for k, record in enumerate(records):
        if not record.bad:
            continue
        makers = [maker for j in record.bad_ins for maker in record.ins[j]]
        passed_on = frozenset().union(*(origins.get(maker, frozenset()) for maker in makers))
        nan_of_constants = record.nan and not record.nan_read and not passed_on
        origins[k] = passed_on | {k} if record.born or nan_of_constants else passed_on
    return origins


def _argument(run: Run, maker: int) -> Cause:
    reads = (r for r in run.records if any(maker in makers for makers in r.ins))
    return Cause("argument", next(reads, None), -1 - maker)


def _operation(record: Record) -> Cause:
    if index_bounds(record) is not None:
        kind = "index"
    elif record.nan and record.born != "inf":
        kind = "nan"
    else:
        kind = "division by zero" if _at_pole(record) else "overflow"
    return Cause(kind, record, None)


_POLES = {"div": 0, "rsqrt": 0, "log": 0, "log2": 0, "log1p": -1, "pow": 0, "integer_pow": 0}


def _at_pole(record: Record) -> bool:
    """What went bad is of an operand exactly where the operation has no finite value."""
    name = record.eqn.primitive.name
    if name not in _POLES or record.born_at is None:
        return False
    operand = on_host(record.operands[1 if name == "div" else 0])
    read = np.broadcast_to(operand, record.born_at.shape)[record.born_at]
    return bool((read == _POLES[name]).any())


def index_bounds(record: Record) -> int | None:
    """The largest index of a gather that read some out of range and has NaN for them."""
    eqn = record.eqn
    if eqn.primitive.name != "gather" or not record.born:
        return None
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    shape, at = eqn.invars[0].aval.shape, numbers.start_index_map
    bounds = np.array([shape[k] - sizes[k] for k in at])
    indices = np.asarray(record.operands[1])
    out = ((indices < 0) | (indices > bounds)).any(tuple(range(indices.ndim - 1)))
    return int(bounds[out].min()) if out.any() else None


# Where numbers became zero that are not zero in float32.


def lost_at(run: Run, twin: Run, record: Record) -> Record | None:
    """The first operation behind `record` whose results have zeros that the twin's have not."""
    in_twin = {other.key: other for other in twin.records}

    def lost(made: Record) -> bool:
        other = in_twin.get(made.key)
        return other is not None and made.zeros > other.zeros

    behind = _behind(run, record, lost)
    found = min((k for k in behind if lost(run.records[k])), default=None)
    return None if found is None else run.records[found]


def vanished(run: Run, twin: Run) -> list[Value]:
    """Gradients that are zero where, for most of their numbers, those of the twin are not."""
    exact = [on_host(value.array) for value in twin.outs[1:]]
    sizes = [float(np.abs(array).max(initial=0)) for array in exact]
    least = max(sizes, default=0) * _ROUNDED
    return [
        value
        for value, array, size in zip(run.outs[1:], exact, sizes, strict=True)
        if size > least and _is_most_zero(on_host(value.array), array != 0)
    ]


# Of the largest gradient: what is smaller may be a zero that float32 rounded.
_ROUNDED = 2.0**-20


def _is_most_zero(array: np.ndarray, nonzero: np.ndarray) -> bool:
    lost = np.count_nonzero(nonzero & (array == 0))
    return bool(lost > np.count_nonzero(nonzero) / 2)


def underflow(run: Run, twin: Run) -> Cause | None:
    """The first operation that lost most of its numbers, behind a gradient that did."""
    in_twin = {other.key: other for other in twin.records}

    def lost(made: Record) -> bool:
        other = in_twin.get(made.key)
        return other is not None and made.zeros - other.zeros > (other.size - other.zeros) / 2

    found = {k for value in vanished(run, twin) for k in value.makers if k >= 0}
    found = {k for k in found if lost(run.records[k])}
    for end in tuple(found):
        found |= {k for k in _behind(run, run.records[end], lost) if lost(run.records[k])}
    return Cause("underflow", run.records[min(found)], None) if found else None


def lost_constants(run: Run, record: Record | None) -> list[Record]:
    """What reads, at or behind `record`, a 16-bit 0 (once an eps?) or Inf (once -1e9?) of the code.

    The first of each kind.
    """
    if record is None:
        return []
    behind = itertools.islice(_behind(run, record, lambda made: True), _STEPS_BACK)
    near = [record, *(run.records[k] for k in behind)]
    found = [next(filter(reads, near), None) for reads in (_adds_eps, _reads_inf)]
    return [one for one in found if one]


_STEPS_BACK = 16


def _adds_eps(record: Record) -> bool:
    return adds_zero(record.eqn)


def adds_zero(eqn: Any) -> bool:
    """Whether a 16-bit zero is added: an eps that 16 bits could not hold."""
    return eqn.primitive.name in ("add", "max") and any(x == SMALL for x in _lost_literals(eqn))


def _reads_inf(record: Record) -> bool:
    return any(abs(x) > 1 for x in _lost_literals(record.eqn))


def _lost_literals(eqn: Any) -> list[np.float32]:
    return [x for x in map(lost_literal, eqn.invars) if x is not None]


def narrowed_at(run: Run, record: Record) -> list[Record]:
    """Where the 16-bit values that `record` works with were made 16-bit, first ones first."""
    behind = _behind(run, record, lambda made: made.narrow)
    made = [run.records.index(record), *behind]

    def is_first(made: Record) -> bool:
        return made.narrow and not any(run.records[m].narrow for m in _makers(made))

    return [run.records[k] for k in sorted(made) if is_first(run.records[k])]


def _behind(run: Run, record: Record, goes_on: Callable[[Record], bool]) -> Iterator[int]:
    """Operations that `record` reads from, each once, the nearest first.

    Behind those that `goes_on` accepts it goes on.
    """
    ahead, seen = deque(_makers(record)), set[int]()
    while ahead:
        maker = ahead.popleft()
        if maker in seen:
            continue
        seen.add(maker)
        yield maker
        if goes_on(run.records[maker]):
            ahead += _makers(run.records[maker])


def arguments_behind(run: Run, record: Record) -> list[int]:
    """Which arguments an operation depends on."""
    behind = [record, *(run.records[k] for k in _behind(run, record, lambda made: True))]
    found = {maker for made in behind for makers in made.ins for maker in makers if maker < 0}
    return sorted(-1 - maker for maker in found)


def _makers(record: Record) -> list[int]:
    """Operations that an operation reads from; arguments are not among them."""
    return [maker for makers in record.ins for maker in makers if maker >= 0]


def ranges(record: Record) -> list[tuple[str, float, float]]:
    """(dtype, least, largest) of each floating operand of an operation."""
    found = []
    for atom, array in zip(record.eqn.invars, record.operands, strict=bool(record.operands)):
        if jaxprs.is_inexact(atom) and getattr(array, "size", 1):
            values = on_host(array)
            found.append((str(array.dtype), float(values.min()), float(values.max())))
    return found
