"""A matrix product of rounded operands, whose gradients leave their matmul in float32.

`lax.dot_general` gives the gradient of an operand in the dtype of the product. Here it is given in
the dtype of the operand: that of a float32 weight is the accumulator of its matmul, rounded
nowhere. `preferred_element_type=float32` would give it too, but with a float32 cotangent, and so by
a float32 matmul.

It is a primitive because nothing else in JAX is linear, has a transpose of one's own, and can be
batched: `custom_vjp` forbids forward mode, and `linear_call` forbids `vmap`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir

from jaxamp.jaxprs import Primitive

rounded_dot_p = Primitive("rounded_dot")


def can_round(eqn: Any) -> bool:
    """Whether an equation is a matmul that `rounded_dot` can take the place of."""
    return eqn.primitive.name == "dot_general" and eqn.params.get("out_sharding") is None


def rounded_dot(
    lhs: Any, rhs: Any, *, dimension_numbers: Any, precision: Any, dtype: Any
) -> jax.Array:
    """`lax.dot_general` of operands that are rounded to `dtype`, given in it.

    Args:
        lhs: Float32 or `dtype`, and so is the gradient with respect to it.
        rhs: As lhs.
        dimension_numbers: Of `lax.dot_general`.
        precision: Of `lax.dot_general`.
        dtype: The 16-bit dtype.
    """
    return _bind(lhs, rhs, dimension_numbers, precision, np.dtype(dtype), np.dtype(dtype))


def _bind(lhs, rhs, dimension_numbers, precision, dtype, out_dtype):
    return rounded_dot_p.bind(
        lhs,
        rhs,
        dimension_numbers=tuple((tuple(a), tuple(b)) for a, b in dimension_numbers),
        precision=precision,
        dtype=dtype,
        out_dtype=out_dtype,
    )


def _run(lhs, rhs, *, dimension_numbers, precision, dtype, out_dtype):
    lhs, rhs = (x if x.dtype == dtype else lax.convert_element_type(x, dtype) for x in (lhs, rhs))
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision=precision, preferred_element_type=out_dtype
    )


def _run_on_cpu(lhs, rhs, *, dtype, out_dtype, **params):
    """XLA has no float32 result of 16-bit operands on a CPU for every order of axes."""
    if out_dtype == dtype:
        return _run(lhs, rhs, dtype=dtype, out_dtype=out_dtype, **params)
    kept = jnp.finfo(dtype)
    rounded = (
        lax.convert_element_type(x, out_dtype)
        if x.dtype == dtype
        else lax.reduce_precision(x, kept.nexp, kept.nmant)
        for x in (lhs, rhs)
    )
    return _run(*rounded, dtype=out_dtype, out_dtype=out_dtype, **params)


mlir.register_lowering(rounded_dot_p, mlir.lower_fun(_run, multiple_results=False))
mlir.register_lowering(
    rounded_dot_p, mlir.lower_fun(_run_on_cpu, multiple_results=False), platform="cpu"
)


@rounded_dot_p.def_impl
def _run_now(*operands, **params):
    return _compiled(**params)(*operands)


@functools.cache
def _compiled(**params):
    return jax.jit(lambda *operands: rounded_dot_p.bind(*operands, **params))


@rounded_dot_p.def_abstract_eval
def _abstract_eval(lhs, rhs, *, dtype, out_dtype, **params):
    lhs, rhs = (aval.update(dtype=dtype, weak_type=False) for aval in (lhs, rhs))
    params |= {"preferred_element_type": out_dtype, "out_sharding": None}
    return lax.dot_general_p.abstract_eval(lhs, rhs, **params)[0]


def _transpose_lhs(cotangent, lhs, rhs, *, dimension_numbers, precision, dtype, out_dtype):
    del out_dtype
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_kept = _kept(lhs.aval.ndim, lhs_summed, lhs_batch)
    rhs_kept = _kept(rhs.ndim, rhs_summed, rhs_batch)
    # The cotangent's axes: batch, kept of lhs, kept of rhs. Those of rhs are summed.
    batch, start = range(len(lhs_batch)), len(lhs_batch) + len(lhs_kept)
    numbers = ((range(start, start + len(rhs_kept)), rhs_kept), (batch, rhs_batch))
    gradient = _bind(cotangent, rhs, numbers, precision, dtype, lhs.aval.dtype)
    # Its axes: batch, kept of lhs, and what was summed, in the order of rhs.
    summed = [lhs_summed[k] for k in np.argsort(rhs_summed)]
    return lax.transpose(gradient, np.argsort([*lhs_batch, *lhs_kept, *summed]))


def _transpose_rhs(cotangent, lhs, rhs, *, dimension_numbers, precision, dtype, out_dtype):
    del out_dtype
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_kept = _kept(lhs.ndim, lhs_summed, lhs_batch)
    rhs_kept = _kept(rhs.aval.ndim, rhs_summed, rhs_batch)
    # As above, with those of lhs summed; lhs comes first, as its axes do in a weight.
    batch, start = range(len(lhs_batch)), len(lhs_batch)
    numbers = ((lhs_kept, range(start, start + len(lhs_kept))), (lhs_batch, batch))
    gradient = _bind(lhs, cotangent, numbers, precision, dtype, rhs.aval.dtype)
    # Its axes: batch, what was summed, in the order of lhs, and kept of rhs.
    summed = [rhs_summed[k] for k in np.argsort(lhs_summed)]
    return lax.transpose(gradient, np.argsort([*rhs_batch, *summed, *rhs_kept]))


ad.defbilinear(rounded_dot_p, _transpose_lhs, _transpose_rhs)


def _batch(operands, axes, *, dimension_numbers, **params):
    (lhs, rhs), (lhs_axis, rhs_axis) = operands, axes
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    out_axis = len(lhs_batch) if rhs_axis is None else lhs.ndim - len(lhs_summed)
    if lhs_axis is not None:
        lhs, lhs_summed, lhs_batch = _with_front(lhs, lhs_axis, lhs_summed, lhs_batch)
    if rhs_axis is not None:
        rhs, rhs_summed, rhs_batch = _with_front(rhs, rhs_axis, rhs_summed, rhs_batch)
    if lhs_axis is not None and rhs_axis is not None:
        out_axis, lhs_batch, rhs_batch = 0, (0, *lhs_batch), (0, *rhs_batch)
    # Else it is the first of the axes that its operand keeps.
    numbers = ((lhs_summed, rhs_summed), (lhs_batch, rhs_batch))
    return rounded_dot_p.bind(lhs, rhs, dimension_numbers=numbers, **params), out_axis


batching.primitive_batchers[rounded_dot_p] = _batch


def _with_front(x, axis: int, *numbers: Sequence[int]):
    """The axis moved to the front, and the numbers of the others."""
    x = lax.transpose(x, [axis, *(k for k in range(x.ndim) if k != axis)])
    return x, *(tuple(k + 1 for k in axes) for axes in numbers)


def _kept(ndim: int, summed: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    return tuple(k for k in range(ndim) if k not in (*summed, *batch))
