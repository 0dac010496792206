"""One operation on arrays: as the program has it, or widened to float32.

What IEEE arithmetic defines to the last bit, and what only moves numbers, is done by numpy: XLA
would compile each once per shape and dtype, which takes longer than everything else. The exceptions
are subnormal numbers, of dtypes with the range of float32 or more: on a CPU XLA takes them for zero
and numpy does not, so where there are any, XLA computes.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxamp import jaxprs

SMALL = np.float32(2**-26)
"""Half of what float16 rounds to zero."""

LARGE = np.float32(1e9)


def lost_literal(atom: Any) -> np.float32 | None:
    """What a literal that 16 bits cannot hold may have been; None for other operands.

    A zero may have been an eps, an Inf the -1e9 of a mask.
    """
    if not jaxprs.is_literal(atom) or not is_narrow(jaxprs.dtype_of(atom)):
        return None
    value = np.float32(jaxprs.literal(atom))
    if value == 0:
        return SMALL
    return np.copysign(LARGE, value) if np.isinf(value) else None


def is_narrow(dtype: Any) -> bool:
    """Whether it is a floating dtype of 16 bits."""
    return dtype in (np.float16, jnp.bfloat16)


def works_narrow(eqn: Any) -> bool:
    """Whether an operation reads or gives numbers of 16 bits, or rounds to them."""
    dtypes = [jaxprs.dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    return any(map(is_narrow, [*dtypes, eqn.params.get("dtype")]))


def has_precision(eqn: Any) -> bool:
    """Whether it may be another operation in float32 than as it is written."""
    return works_narrow(eqn) or "precision" in eqn.params


def as_written(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Results of an equation whose operands are taken to the dtypes of the program."""
    operands = [_held(x, jaxprs.dtype_of(a)) for x, a in zip(ins, eqn.invars, strict=True)]
    return _bound(eqn, operands)


def _held(array: Any, dtype: Any) -> Any:
    """What was widened before, in the dtype of the program."""
    if is_narrow(dtype) and array.dtype != dtype:
        return _as_dtype(array, dtype)
    return array


def _as_dtype(array: Any, dtype: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(array).astype(dtype)


def widened(eqn: Any, ins: Sequence[Any]) -> list[Any]:
    """Results of an equation with all that has 16 bits in float32, itself at full precision."""
    name = eqn.primitive.name
    if name not in _OF_BITS:
        changes: dict[str, Any] = {
            key: np.dtype(np.float32) for key in _DTYPES if is_narrow(eqn.params.get(key))
        }
        if "precision" in eqn.params:
            changes["precision"] = jax.lax.Precision.HIGHEST
        if eqn.params.get("update_jaxpr") is not None:  # how a scatter puts two numbers together
            changes["update_jaxpr"] = jaxprs.in_float32(eqn.params["update_jaxpr"])
        arrays = [_as_dtype(x, np.float32) if _is_low(x) else x for x in ins]
        try:
            return _bound(eqn, arrays, **changes)
        except (TypeError, ValueError, NotImplementedError):  # made for its dtypes, as a kernel is
            pass
    return [_as_dtype(x, np.float32) if _is_low(x) else x for x in as_written(eqn, ins)]


def _bound(eqn: Any, operands: Sequence[Any], **changes: Any) -> list[Any]:
    out = NotImplemented
    if all(map(_is_plain, operands)) and not _is_slow(eqn, operands):
        with np.errstate(all="ignore"):
            out = _by_numpy(eqn.primitive.name, {**eqn.params, **changes}, operands)
    return jaxprs.bind(eqn, operands, **changes) if out is NotImplemented else [out]


def _by_numpy(name: str, params: dict[str, Any], operands: Sequence[Any]) -> Any:
    """The result, or NotImplemented."""
    arrays = [np.asarray(x) for x in operands]
    if name in _MOVES:
        return _MOVES[name](params, *arrays)
    if name not in _ARITHMETIC or any(np.iscomplexobj(x) or _has_subnormal(x) for x in arrays):
        return NotImplemented
    out = _ARITHMETIC[name](params, *arrays)
    return NotImplemented if out is NotImplemented or _has_subnormal(np.asarray(out)) else out


def _has_subnormal(array: np.ndarray) -> bool:
    """Whether XLA may take one of the numbers for zero.

    The least normal number counts too: XLA has zero where bfloat16 is rounded up to it.
    """
    look = _LOOK.get(array.dtype)
    if look is None or not array.size or _without_subnormal.get(id(array)) is array:
        return False
    found = any(map(look, _parts(array)))
    if not found:
        _without_subnormal[id(array)] = array
    return found


def _some_underflows(part: np.ndarray) -> bool:
    """This part of a subnormal number is never exact, of which the processor keeps a flag."""
    try:
        with np.errstate(all="ignore", under="raise"):
            np.multiply(part, part.dtype.type(_ODD), out=_SCRATCH[part.dtype][: part.size])
    except FloatingPointError:
        return True
    return False


_ODD = np.nextafter(0.7, 1)
"""The last bit of its significand is 1, as float32 and as float64."""


def _some_small_bfloat16(part: np.ndarray) -> bool:
    bits = part.view(np.uint16) << np.uint16(1)  # without the sign
    bits -= np.uint16(1)  # zero becomes the largest
    return bool(bits.min() < 2 << 7)


def _parts(array: np.ndarray) -> list[np.ndarray]:
    """Its numbers, what is repeated once, as much at a time as a core's cache holds."""
    once = array[tuple(slice(1 if step == 0 else None) for step in array.strides)]
    flat = once.reshape(-1)
    return [flat[k : k + _PART] for k in range(0, flat.size, _PART)]


_PART = 2**14


# What is a result here is an operand of the next ones.
_without_subnormal: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()


def _is_slow(eqn: Any, operands: Sequence[Any]) -> bool:
    """Numpy takes 10 ns for a float16, XLA one, and some 20 ms to compile it."""
    dtypes = [eqn.params.get("new_dtype"), *(x.dtype for x in operands)]
    return np.float16 in dtypes and max(x.size for x in operands) > _LARGEST_FLOAT16


_LARGEST_FLOAT16 = 2**15


def _is_plain(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


def _converted(params: Any, x: np.ndarray) -> Any:
    to_float = jnp.issubdtype(params["new_dtype"], jnp.floating)
    return x.astype(params["new_dtype"]) if to_float else NotImplemented


def _broadcast(params: Any, x: np.ndarray, *sizes: Any) -> Any:
    shape, at = params["shape"], params["broadcast_dimensions"]
    if sizes:
        return NotImplemented
    return np.broadcast_to(x.reshape(_with_ones(x.shape, at, len(shape))), shape)


def _with_ones(sizes: Sequence[int], at: Sequence[int], ndim: int) -> list[int]:
    by_axis = dict(zip(at, sizes, strict=True))
    return [by_axis.get(k, 1) for k in range(ndim)]


def _reshaped(params: Any, x: np.ndarray, *sizes: Any) -> Any:
    if sizes or params["dimensions"] is not None:
        return NotImplemented
    return x.reshape(params["new_sizes"])


def _sliced(params: Any, x: np.ndarray) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    ends = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return x[tuple(slice(*end) for end in ends)]


def _divided(params: Any, x: np.ndarray, y: np.ndarray) -> Any:
    return x / y if jnp.issubdtype(x.dtype, jnp.floating) else NotImplemented


def _larger(_: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """The maximum, of two zeros the positive one as in XLA."""
    return np.where(x == y, np.where(np.signbit(x), y, x), np.maximum(x, y))


def _smaller(_: Any, x: np.ndarray, y: np.ndarray) -> Any:
    return np.where(x == y, np.where(np.signbit(x), x, y), np.minimum(x, y))


def _selected(params: Any, which: np.ndarray, *cases: np.ndarray) -> Any:
    if which.dtype != bool or len(cases) != 2:
        return NotImplemented
    return np.where(which, cases[1], cases[0])


_MOVES: dict[str, Callable] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "slice": _sliced,
    "select_n": _selected,
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: np.transpose(x, params["permutation"]),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
}
_ARITHMETIC: dict[str, Callable] = {
    "convert_element_type": _converted,
    "add": lambda _, x, y: x + y,
    "add_any": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "mul": lambda _, x, y: x * y,
    "div": _divided,
    "neg": lambda _, x: -x,
    "abs": lambda _, x: abs(x),
    "max": _larger,
    "min": _smaller,
    "eq": lambda _, x, y: x == y,
    "ne": lambda _, x, y: x != y,
    "lt": lambda _, x, y: x < y,
    "le": lambda _, x, y: x <= y,
    "gt": lambda _, x, y: x > y,
    "ge": lambda _, x, y: x >= y,
}


_SCRATCH = {np.dtype(dtype): np.empty(_PART, dtype) for dtype in (np.float32, np.float64)}
_LOOK = {dtype: _some_underflows for dtype in _SCRATCH}
_LOOK[np.dtype(jnp.bfloat16)] = _some_small_bfloat16


_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "out_dtype")
_OF_BITS = ("bitcast_convert_type", "random_bits", "nextafter")


def _is_low(array: Any) -> bool:
    return is_narrow(getattr(array, "dtype", None))


def is_floating(array: Any) -> bool:
    """Whether it is an array of real floating numbers."""
    dtype = getattr(array, "dtype", None)
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating)


def is_finite(array: Any) -> bool:
    """Whether it has neither NaN nor Inf; what holds no floating numbers has none."""
    return not is_floating(array) or all_finite(on_host(array))


def all_finite(values: np.ndarray) -> bool:
    """A sum is not finite if one of its terms is not, and is had at once."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(values.sum()) or np.isfinite(values).all())


def on_host(array: Any) -> np.ndarray:
    """The numbers for numpy, 16-bit ones in float32, which holds each of them."""
    values = np.asarray(array)
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)
