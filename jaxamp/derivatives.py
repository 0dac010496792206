"""Primitives with a rule of their user's: a derivative, a transpose, a batching rule.

The wrapper is made anew around the emitted program, and the rule is whatever JAX makes of the
*original* equation: its `jax.jvp`, `jax.vjp`, `jax.linear_transpose` or `jax.vmap`, traced in the
original dtypes and autocast in turn. So the user's rule is used, and it sees the dtypes for which
it was written.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap as jax_custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.custom_derivatives import linear_call as jax_linear_call
from jax.extend import linear_util, source_info_util

from jaxamp import dots, jaxprs
from jaxamp.plans import Info


class Entered(NamedTuple):
    """An equation with a rule, and its emitted program.

    Attributes:
        eqn: The equation of the trace.
        ins: Infos of its operands.
        outs: Infos of its results.
        in_dtypes: Dtypes of its operands as emitted; None for keys.
        out_dtypes: Dtypes of its results as emitted.
        primal: The emitted program, a function of the operands.
        autocast: `(fun, avals, infos, args) -> (outputs, infos, avals)`: traces `fun` for `avals`,
            plans it for arguments with `infos`, and emits it on `args`.
    """

    eqn: Any
    ins: Sequence[Info]
    outs: Sequence[Info]
    in_dtypes: Sequence[Any]
    out_dtypes: Sequence[Any]
    primal: Callable
    autocast: Callable


def custom_jvp(inner: Entered) -> Callable:
    """The primal with the JVP rule of the original equation."""
    return _closing_over_constants(inner, _custom_jvp)


def custom_vjp(inner: Entered) -> Callable:
    """The primal with the VJP rule of the original equation.

    The residuals are those of the user's rule, in the dtypes that the emitted forward pass gives
    them; the backward pass is traced for the dtypes that they had.
    """
    return _closing_over_constants(inner, _custom_vjp)


def _closing_over_constants(inner: Entered, wrap: Callable) -> Callable:
    """A rule knows nothing of what the user's function closes over, its first operands.

    JAX refuses to differentiate with respect to it; here it is closed over too, and JAX judges.
    """
    num_consts = inner.eqn.params.get("num_consts", 0)

    def wrapped(*operands):
        return wrap(inner, operands[:num_consts])(*operands[num_consts:])

    return wrapped


def _custom_jvp(inner: Entered, consts: Sequence[Any]) -> Callable:
    eqn, start = inner.eqn, len(consts)
    ins, outs = _inexact(eqn.invars, start), _inexact(eqn.outvars)
    wrapped = jax.custom_jvp(lambda *args: tuple(inner.primal(*consts, *args)))
    symbolic = bool(eqn.params.get("symbolic_zeros"))

    def rule(primals, tangents):
        moved = [k for k in ins if not isinstance(tangents[k - start], SymbolicZero)]

        def original(*args):
            primals, tangents = list(args[: len(eqn.invars)]), args[len(eqn.invars) :]
            fun, at = _restricted(eqn, primals, moved)
            values, tangents = jax.jvp(fun, at, tuple(tangents))
            return [*values, *(tangents[k] for k in outs)]

        avals = [atom.aval for atom in (*eqn.invars, *(eqn.invars[k] for k in moved))]
        infos = (*inner.ins, *(inner.ins[k] for k in moved))
        args = (*consts, *primals, *(tangents[k - start] for k in moved))
        results, *_ = inner.autocast(original, avals, infos, args)
        values = _cast(results[: len(eqn.outvars)], inner.out_dtypes)
        tangents_out: list[Any] = [_float0(var) for var in eqn.outvars]
        for k, tangent in zip(outs, results[len(eqn.outvars) :], strict=True):
            tangents_out[k] = lax.convert_element_type(tangent, inner.out_dtypes[k])
        return tuple(values), tuple(tangents_out)

    wrapped.defjvp(rule, symbolic_zeros=symbolic)
    return wrapped


def _custom_vjp(inner: Entered, consts: Sequence[Any]) -> Callable:
    eqn, start = inner.eqn, len(consts)
    ins, outs = _inexact(eqn.invars, start), _inexact(eqn.outvars)
    num_outs = len(eqn.outvars)
    wrapped = jax.custom_vjp(lambda *args: tuple(inner.primal(*consts, *args)))
    saved: dict[str, Any] = {}  # of the forward pass, for the backward pass that follows it
    symbolic = bool(eqn.params.get("symbolic_zeros"))

    def forward(*args):
        saved["ins"] = ins
        if symbolic:  # the user's rule is told what is differentiated, and so are we
            saved["ins"] = [k for k in ins if args[k - start].perturbed]
            args = tuple(arg.value for arg in args)

        def original(*args):
            fun, at = _restricted(eqn, list(args), saved["ins"], **_on_own_lines(eqn))
            values, pullback = jax.vjp(fun, *at)
            residuals, saved["tree"] = jax.tree.flatten(pullback)
            return [*values, *residuals]

        results, infos, avals = inner.autocast(
            original, [a.aval for a in eqn.invars], inner.ins, (*consts, *args)
        )
        saved["infos"], saved["avals"] = infos[num_outs:], avals[num_outs:]
        values = _cast(results[:num_outs], inner.out_dtypes)
        return tuple(values), tuple(results[num_outs:])

    def backward(residuals, cotangents):
        def original(*args):
            pullback = jax.tree.unflatten(saved["tree"], args[: len(residuals)])
            given = dict(zip(outs, args[len(residuals) :], strict=True))
            full = tuple(given.get(k, _float0(var)) for k, var in enumerate(eqn.outvars))
            return list(pullback(full))

        avals = (*saved["avals"], *(eqn.outvars[k].aval for k in outs))
        infos = (*saved["infos"], *(inner.outs[k] for k in outs))
        args = (*residuals, *(_instantiated(cotangents[k]) for k in outs))
        results, *_ = inner.autocast(original, avals, infos, args)
        gradients: list[Any] = [None] * len(eqn.invars)
        for k, gradient in zip(saved["ins"], results, strict=True):
            gradients[k] = lax.convert_element_type(gradient, inner.in_dtypes[k])
        return tuple(gradients[start:])

    wrapped.defvjp(forward, backward, symbolic_zeros=symbolic)
    return wrapped


def custom_vmap(inner: Entered) -> Callable:
    """The primal with the batching rule of the original equation."""
    eqn = inner.eqn
    wrapped = jax_custom_vmap(lambda *args: tuple(inner.primal(*args)))

    @wrapped.def_vmap
    def rule(axis_size, in_batched, *args):
        axes = [0 if batched else None for batched in in_batched]

        def original(*args):
            return jax.vmap(lambda *one: tuple(jaxprs.bind(eqn, one)), axes, axis_size=axis_size)(
                *args
            )

        avals = [
            atom.aval.update(shape=arg.shape) for atom, arg in zip(eqn.invars, args, strict=True)
        ]
        results, *_ = inner.autocast(original, avals, inner.ins, args)
        return tuple(_cast(results, inner.out_dtypes)), (True,) * len(results)

    return wrapped


def linear_call(inner: Entered) -> Callable:
    """The primal with the transpose of the original equation."""
    eqn = inner.eqn
    num_linear = len(eqn.invars) - eqn.params["num_callee_consts"] - eqn.params["num_res"]
    split = len(eqn.invars) - num_linear
    linear_atoms = eqn.invars[split:]

    def transpose(residuals, cotangents):
        def original(*args):
            residuals, cotangents = args[:split], args[split:]
            forward = lambda *linear: jaxprs.bind(eqn, (*residuals, *linear))  # noqa: E731
            return jax.linear_transpose(forward, *(a.aval for a in linear_atoms))(list(cotangents))

        avals = [a.aval for a in (*eqn.invars[:split], *eqn.outvars)]
        infos = (*inner.ins[:split], *inner.outs)
        results, *_ = inner.autocast(original, avals, infos, (*residuals, *cotangents))
        return tuple(_cast(results, inner.in_dtypes[split:]))

    def wrapped(*args):
        forward = lambda residuals, linear: tuple(inner.primal(*residuals, *linear))  # noqa: E731
        return jax_linear_call(forward, transpose, tuple(args[:split]), tuple(args[split:]))

    return wrapped


def matmul(eqn: Any, compute_dtype: Any, out_dtype: Any, of_weight: bool) -> Callable:
    """A matmul in `compute_dtype` whose gradients are in the dtypes of its operands.

    The result is in `out_dtype`: float32 is the accumulator, for a reader that wants it.
    `preferred_element_type=float32` alone would make both matmuls of the backward pass float32 by
    float32; here the tangent is a 16-bit matmul, so its transpose casts the cotangent down first.
    """
    is_dot = dots.can_round(eqn)
    how = {name: eqn.params[name] for name in ("dimension_numbers", "precision") if is_dot}

    def product(*operands):
        operands = _cast(operands, [compute_dtype] * len(operands))
        return jaxprs.bind(eqn, operands, preferred_element_type=out_dtype)[0]

    def moved(lhs, rhs, *more):
        if is_dot:
            return dots.rounded_dot(lhs, rhs, dtype=compute_dtype, **how)
        return jaxprs.bind(eqn, (lhs, rhs, *more), preferred_element_type=compute_dtype)[0]

    def rule(primals, tangents):
        terms = [
            moved(*primals[:k], tangent, *primals[k + 1 :])
            for k, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero)  # else a matmul with zeros
        ]
        return value(*primals), lax.convert_element_type(sum(terms[1:], terms[0]), out_dtype)

    matmul = jax.custom_jvp(product)
    # A remat policy such as dots_saveable looks for a `dot_general` and finds the bare product.
    # The float32 product of two activations, such as the logits of attention, is not to be saved.
    value = product if of_weight else matmul
    matmul.defjvp(rule, symbolic_zeros=True)
    return matmul


def _inexact(atoms: Sequence[Any], start: int = 0) -> list[int]:
    return [k for k, atom in enumerate(atoms) if k >= start and jaxprs.is_inexact(atom)]


def _restricted(
    eqn: Any, args: list[Any], ins: Sequence[int], **changes: Any
) -> tuple[Callable, tuple]:
    """The original equation as a function of its differentiable operands, and these."""

    def fun(*at):
        full = list(args)
        for k, value in zip(ins, at, strict=True):
            full[k] = value
        return tuple(jaxprs.bind(eqn, full, **changes))

    return fun, tuple(args[k] for k in ins)


def _on_own_lines(eqn: Any) -> dict[str, Any]:
    """The user's backward rule, each operation at its line in there.

    JAX would put all of them at the line that called the function. There those of a rule in an
    installed library stay.
    """
    rule = eqn.params["bwd"]
    file = rule.debug_info.func_src_info.rpartition(" at ")[2]
    return {} if jaxprs.is_installed(file) else {"bwd": _with_own_lines(rule)}


@linear_util.transformation2
def _with_own_lines(rule: Callable, *args: Any) -> Any:
    with source_info_util.user_context(_OwnLines()):
        return rule(*args)


class _OwnLines:
    """For `user_context`: no traceback, so that JAX takes one; None would keep the old."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        """Nothing to add to an error."""


def _instantiated(cotangent: Any) -> Any:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zero: Any = cotangent
    return lax.full(zero.shape, 0, zero.dtype)


def _float0(var: Any) -> np.ndarray:
    return np.zeros(getattr(var.aval, "shape", ()), jax.dtypes.float0)


def _cast(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    pairs = zip(values, dtypes, strict=True)
    return [v if d is None or v.dtype == d else lax.convert_element_type(v, d) for v, d in pairs]
