"""Emission: run a plan on arrays or tracers.

Operations are bound anew to operands of the planned dtypes. Programs inside are entered and not
inlined where inlining would lose something: jit's name and sharding, a loop, remat's policy, a
user's derivative rule.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import source_info_util

from jaxamp import derivatives, jaxprs, residuals
from jaxamp.decide import make_plan
from jaxamp.plans import Info, Plan, Step
from jaxamp.rules import RULES


def emit(plan: Plan, args: Sequence[Any], mode: str = residuals.PLAIN) -> list[Any]:
    """The outputs of the planned program, in the dtypes of `plan.outs`.

    Args:
        plan: From `jaxamp.decide.make_plan`.
        args: Arrays or tracers in the dtypes of `plan.ins`.
        mode: See `jaxamp.residuals`.
    """
    env = dict(zip(plan.jaxpr.constvars, plan.consts, strict=False))
    env.update(zip(plan.jaxpr.invars, args, strict=True))
    if mode in (residuals.SEGMENTS, residuals.ROUND):
        run = functools.partial(_run, plan=plan, mode=residuals.NAMED)
        for wrap, steps in residuals.segments(plan):
            if wrap:
                residuals.wrapped(run, steps, plan, env, mode)
            else:
                _run(steps, env, plan, mode)
    else:
        _run(plan.steps, env, plan, mode)
    return [
        cast(_read(env, atom), atom, info, plan)
        for atom, info in zip(plan.jaxpr.outvars, plan.outs, strict=True)
    ]


def _run(steps: Sequence[Step], env: dict[Any, Any], plan: Plan, mode: str) -> None:
    for step in steps:
        with _as_traced(step.eqn):
            operands = [_read(env, atom) for atom in step.eqn.invars]
            outs = _emit_step(step, cast_operands(step, operands, plan), plan, mode)
        env.update(zip(step.eqn.outvars, outs, strict=True))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return jaxprs.literal(atom) if jaxprs.is_literal(atom) else env[atom]


def cast(value: Any, atom: Any, info: Info, plan: Plan) -> Any:
    """The value in the dtype that `info` says, if the trace has an array there."""
    dtype = planned_dtype(atom, info, plan)
    if dtype is None or value.dtype == dtype:
        return value
    if isinstance(value, np.generic):
        return value.astype(dtype)
    if jaxprs.inlines_at_once():
        return _converter(dtype)(value)
    return lax.convert_element_type(value, dtype)


@functools.cache
def _converter(dtype: Any) -> Callable:
    """A cast that JAX linearises once per shape; casts are a third of what is emitted."""
    return jax.jit(lambda x: lax.convert_element_type(x, dtype), inline=True)


def planned_dtype(atom: Any, info: Info, plan: Plan) -> Any:
    """The dtype in which a value is held; None where the trace has no array."""
    return plan.policy.compute_dtype if info.low else jaxprs.dtype_of(atom)


def planned_aval(atom: Any, info: Info, plan: Plan) -> Any:
    """The abstract value of the trace in the dtype in which it is held, strongly typed for JAX."""
    dtype = planned_dtype(atom, info, plan)
    return atom.aval if dtype is None else atom.aval.update(dtype=dtype, weak_type=False)


def cast_operands(step: Step, operands: Sequence[Any], plan: Plan) -> list[Any]:
    """Operands in the dtypes that the step wants; each use of a value has its own cast."""
    as_they_are = step.float32_grads or (False,) * len(operands)
    return [
        value if low is None or left else cast(value, atom, Info(low=low), plan)
        for value, atom, low, left in zip(
            operands, step.eqn.invars, step.to_low, as_they_are, strict=True
        )
    ]


@contextlib.contextmanager
def _as_traced(eqn: Any) -> Iterator[None]:
    """Under the scopes, source line and settings with which the user's line was traced."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=name_stack), eqn.ctx.manager:
        try:
            yield
        except Exception as error:
            error.add_note(f"while autocast emitted {eqn.primitive.name} of {jaxprs.where(eqn)}")
            raise


def _emit_step(step: Step, operands: list[Any], plan: Plan, mode: str) -> list[Any]:
    if step.kind == "enter":
        outs = _ENTER[step.eqn.primitive.name](step, operands, mode)
    else:
        outs = _bind(step, operands, plan)
    outs = [
        cast(value, var, info, plan)
        for value, var, info in zip(outs, step.eqn.outvars, step.outs, strict=True)
    ]
    return residuals.named(step, outs, mode)


def _bind(step: Step, operands: list[Any], plan: Plan) -> list[Any]:
    eqn, compute_dtype = step.eqn, plan.policy.compute_dtype
    if step.float32_out or step.float32_grads:
        out_dtype = np.dtype(np.float32) if step.float32_out else compute_dtype
        of_weight = any(info.weak for info in step.ins)
        return [derivatives.matmul(eqn, compute_dtype, out_dtype, of_weight)(*operands)]
    if eqn.primitive.name == "convert_element_type" and all(
        map(jaxprs.is_float32, (*eqn.invars, *eqn.outvars))
    ):
        return operands
    if step.outs[0:1] and step.outs[0].low and "preferred_element_type" in eqn.params:
        return jaxprs.bind_remembered(eqn, operands, preferred_element_type=compute_dtype)
    changes = {}
    if RULES.get(eqn.primitive.name) == "matmul" and operands[0].dtype.itemsize > 2:
        changes = {"precision": eqn.params.get("precision") or jaxprs.default_precision()}
    if step.kind != "rigid" and not eqn.effects:
        return jaxprs.bind_remembered(eqn, operands, **changes)
    return jaxprs.bind(eqn, operands, **changes)


# Programs inside. `inside` is the program as a function of the equation's operands.


def inside(plan: Plan, mode: str, outs: Sequence[Info] | None = None) -> Callable:
    """The program as a function; `outs` are infos to which its results are cast."""

    def program(*args):
        results = emit(plan, args, mode)
        if outs is None:
            return results
        pairs = zip(results, plan.jaxpr.outvars, outs, strict=True)
        return [cast(value, atom, info, plan) for value, atom, info in pairs]

    return program


def _retraced(plan: Plan, mode: str, outs: Sequence[Info] | None = None) -> Any:
    """The emitted program as a jaxpr. It is kept, so that what is compiled once stays compiled."""
    key = (mode, None if outs is None else tuple(outs), jaxprs.default_precision())
    if key not in plan.emitted:
        pairs = zip(plan.jaxpr.invars, plan.ins, strict=True)
        avals = [planned_aval(atom, info, plan) for atom, info in pairs]
        with source_info_util.reset_name_stack():
            plan.emitted[key] = jax.make_jaxpr(inside(plan, mode, outs))(*avals)
    return plan.emitted[key]


def _emit_jit(step: Step, operands: list[Any], mode: str) -> list[Any]:
    return jaxprs.bind(step.eqn, operands, jaxpr=_retraced(step.subs[0], mode))


def _emit_inlined(step: Step, operands: list[Any], mode: str) -> list[Any]:
    return emit(step.subs[0], operands, mode)


def _emit_remat(step: Step, operands: list[Any], mode: str) -> list[Any]:
    mode = residuals.PLAIN  # what is saved here is the user's business
    program = _retraced(step.subs[0], mode)
    if program.consts:  # cannot be a param of remat: let JAX hoist them
        params = {k: step.eqn.params[k] for k in ("prevent_cse", "policy")}
        return jax.checkpoint(inside(step.subs[0], mode), **params)(*operands)
    return jaxprs.bind(step.eqn, operands, jaxpr=jaxprs.opened(program)[0])


def _emit_scan(step: Step, operands: list[Any], mode: str) -> list[Any]:
    (plan,) = step.subs
    num_consts, num_carry = jaxprs.scan_counts(step.eqn)
    carry = step.outs[:num_carry]
    operands[num_consts : num_consts + num_carry] = _cast_carry(
        operands[num_consts : num_consts + num_carry], step, carry, plan
    )
    outs = (*carry, *plan.outs[num_carry:])
    if mode == residuals.SEGMENTS and step.eqn.params["unroll"] == 1:
        mode = residuals.ROUND
    return jaxprs.bind(step.eqn, operands, jaxpr=_retraced(plan, mode, outs))


def _emit_while(step: Step, operands: list[Any], mode: str) -> list[Any]:
    condition, body = step.subs
    start = len(operands) - len(step.outs)
    operands[start:] = _cast_carry(operands[start:], step, step.outs, body)
    return jaxprs.bind(
        step.eqn,
        operands,
        cond_jaxpr=_retraced(condition, residuals.PLAIN),
        body_jaxpr=_retraced(body, mode, step.outs),
    )


def _cast_carry(values, step: Step, infos: Sequence[Info], plan: Plan) -> list[Any]:
    atoms = step.eqn.outvars[: len(infos)]
    return [cast(v, a, i, plan) for v, a, i in zip(values, atoms, infos, strict=True)]


def _emit_cond(step: Step, operands: list[Any], mode: str) -> list[Any]:
    branches = tuple(_retraced(plan, mode, step.outs) for plan in step.subs)
    return jaxprs.bind(step.eqn, operands, branches=branches)


def _emit_shard_map(step: Step, operands: list[Any], mode: str) -> list[Any]:
    params = step.eqn.params
    mapped = jax.shard_map(
        lambda *args: tuple(emit(step.subs[0], args, mode)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return list(mapped(*operands))


def _with_rule(wrap: Callable) -> Callable:
    def emit_with_rule(step: Step, operands: list[Any], mode: str) -> list[Any]:
        (plan,), eqn = step.subs, step.eqn
        inner = derivatives.Entered(
            eqn,
            step.ins,
            step.outs,
            [planned_dtype(v, info, plan) for v, info in zip(eqn.invars, step.ins, strict=True)],
            [planned_dtype(v, info, plan) for v, info in zip(eqn.outvars, step.outs, strict=True)],
            inside(plan, residuals.PLAIN),
            functools.partial(_autocast_rule, plan),
        )
        return list(wrap(inner)(*operands))

    return emit_with_rule


def _autocast_rule(like: Plan, fun, avals, infos, args) -> tuple:
    program = jaxprs.trace(fun, *avals)
    plan = make_plan(program, infos, like.policy, like.forced)
    return emit(plan, args), plan.outs, [var.aval for var in plan.jaxpr.outvars]


_ENTER: dict[str, Callable] = {
    "jit": _emit_jit,
    "pjit": _emit_jit,
    "scan": _emit_scan,
    "while": _emit_while,
    "cond": _emit_cond,
    "shard_map": _emit_shard_map,
    "custom_jvp_call": _with_rule(derivatives.custom_jvp),
    "custom_vjp_call": _with_rule(derivatives.custom_vjp),
    "custom_vmap_call": _with_rule(derivatives.custom_vmap),
    "linear_call": _with_rule(derivatives.linear_call),
    **dict.fromkeys(jaxprs.REMATS, _emit_remat),
    **dict.fromkeys(jaxprs.INLINED, _emit_inlined),
}
