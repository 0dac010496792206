"""What runs in which dtype: a plan for a traced program, made before anything is emitted.

Every float32 value of the trace is given an `Info`: is it held in the compute dtype (`low`), and
is it `weak`. A value is weak when it is made from inputs and constants alone, as a parameter is;
like a Python scalar it stays float32 until it meets a strong value and then takes its dtype.
Matmuls make strong values, and what is made from a strong value is strong.

A `Plan` is what `autocast` emits and what `explain` shows. Programs inside (jit, scan ...) have
plans of their own, remembered per program, so that what JAX traces once is planned once.
"""

import functools
import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxamp import carries, jaxprs
from jaxamp.plans import Info, Plan, Step
from jaxamp.policy import Policy
from jaxamp.rules import kind_of, reason_of
from jaxamp.scopes import Scopes

_PLANS: Any = weakref.WeakKeyDictionary()


def make_plan(
    program: Any,
    ins: Sequence[Info],
    policy: Policy,
    forced: bool = False,
    scope: str = "",
    wanted_outs: tuple[bool, ...] = (),
) -> Plan:
    """The plan of a program (a jaxpr, open or closed) whose inputs have the given infos.

    Args:
        program: From `jax.make_jaxpr`, or found inside another one.
        ins: One `Info` per input.
        policy: Its compute dtype, `rules` and `full`.
        forced: Everything inside stays in float32.
        scope: The name scopes around the program.
        wanted_outs: Per output, whether only float32 islands read it; empty: none is known to be.
    """
    remembered = _PLANS.setdefault(program, {})
    wanted_outs = wanted_outs if any(wanted_outs) else ()
    key = (tuple(ins), policy, forced, scope if policy.full else "", wanted_outs)
    if key not in remembered:
        remembered[key] = _plan(program, tuple(ins), policy, forced, scope, wanted_outs)
    return remembered[key]


def _plan(program, ins, policy, forced, scope, wanted_outs) -> Plan:
    jaxpr, consts = jaxprs.opened(program)
    planner = _Planner(policy, forced, scope)
    steps, outs = planner.forward(jaxpr, consts, ins, {})
    wanted = planner.look_ahead(jaxpr, steps, wanted_outs)
    # Results of matmuls are saved for the backward pass, and in 16 bits where residuals="compute".
    widened = "matmul" if policy.residuals == "float32" else "follow"
    marks = {
        k: tuple(var in wanted for var in step.eqn.outvars)
        for k, step in enumerate(steps)
        if step.kind == widened or _is_call(step)
    }
    if any(map(any, marks.values())):
        steps, outs = planner.forward(jaxpr, consts, ins, marks)
    wanted_ins = frozenset(k for k, var in enumerate(jaxpr.invars) if var in wanted)
    return Plan(jaxpr, consts, ins, outs, steps, policy, forced, wanted_ins, planner.scopes)


class _Planner:
    """Walks one program forward, equation by equation."""

    def __init__(self, policy: Policy, forced: bool, scope: str):
        self.policy, self.forced, self.scope = policy, forced, scope
        self.scopes = Scopes(policy.full)

    def forward(self, jaxpr, consts, ins, marks):
        """Steps and infos of the outputs; `marks[k]` are the wanted results of equation k."""
        infos: dict[Any, Info] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=False):
            infos[var] = Info(wide=_is_wide(value, self.policy.compute_dtype))
        read = functools.partial(self._read, infos)
        steps = []
        for k, eqn in enumerate(jaxpr.eqns):
            step = self._step(eqn, tuple(map(read, eqn.invars)), marks.get(k, ()))
            infos.update(zip(eqn.outvars, step.outs, strict=True))
            steps.append(step)
        return steps, tuple(map(read, jaxpr.outvars))

    def _read(self, infos, atom) -> Info:
        if jaxprs.is_literal(atom):
            return Info(const=True, wide=_is_wide(atom.val, self.policy.compute_dtype))
        return infos.get(atom) or Info()

    def look_ahead(self, jaxpr, steps: Sequence[Step], wanted_outs) -> set[Any]:
        """Values that only float32 islands read: a matmul that makes one may give it in float32."""
        outs = {atom for atom in jaxpr.outvars if not jaxprs.is_literal(atom)}
        good = {atom for atom, w in zip(jaxpr.outvars, wanted_outs, strict=False) if w} & outs
        bad = outs - good
        for step in reversed(steps):
            wanted = tuple(var in good and var not in bad for var in step.eqn.outvars)
            if _is_call(step) and any(wanted):
                step = self._step(step.eqn, step.ins, wanted)
            for k, atom in enumerate(step.eqn.invars):
                if not jaxprs.is_literal(atom):
                    (good if _reads_float32(step, k, wanted) else bad).add(atom)
        return good - bad

    def _step(self, eqn, ins, wanted) -> Step:
        scope = self.scopes.enter(self.scope, eqn)
        forced = self.forced or self.scopes.is_full(scope)
        kind = kind_of(eqn.primitive.name, self.policy.rules)
        if kind == "enter":
            step = self._enter(eqn, ins, forced, scope, wanted)
        else:
            step = self._first_order(eqn, kind, ins, forced, any(wanted))
        step.scope = scope
        return step

    # Programs inside.

    def _enter(self, eqn, ins, forced, scope, wanted) -> Step:
        plan = functools.partial(make_plan, policy=self.policy, forced=forced, scope=scope)
        name = eqn.primitive.name
        if name == "scan":
            step = carries.scan_step(eqn, ins, plan)
        elif name == "while":
            step = carries.while_step(eqn, ins, plan)
        elif name == "cond":
            step = carries.cond_step(eqn, ins, plan)
        else:
            sub = plan(jaxprs.called(eqn), ins, wanted_outs=wanted)
            step = Step(eqn, "enter", "", ins, (None,) * len(ins), sub.outs, (sub,))
        for sub in step.subs:
            self.scopes.absorb(sub.scopes)
        return step

    # Single operations.

    def _first_order(self, eqn, kind, ins, forced, upgraded) -> Step:
        name, rules = eqn.primitive.name, self.policy.rules
        reason = reason_of(name, rules)
        operands = [
            info for atom, info in zip(eqn.invars, ins, strict=True) if jaxprs.is_float32(atom)
        ]
        if kind == "matmul":
            upgraded = upgraded and not _outgrows(eqn, ins)
            kind, reason = _matmul_kind(eqn, _ACCUMULATOR if upgraded else reason)
        elif kind == "guarded" or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
            kind = _guarded_kind(eqn, self.policy.compute_dtype)
        if name == "scatter" and _applies_a_function(eqn):
            kind, reason = "rigid", "`.at[].apply` has a function inside, traced for its dtypes"
        if kind == "structure":
            step = _structure_step(eqn, ins, operands, reason)
            if step is not None:
                return step
            kind = "follow"
        if forced:
            kind, reason = (
                ("rigid" if kind == "rigid" else "full"),
                "inside full_precision or full=",
            )
        elif any(info.pinned for info in operands):
            kind, reason = "full", "reads a parameter that full= names"
        elif kind == "follow" and _low(operands) and any(info.wide for info in operands):
            kind, reason = "full", self._reason_to_widen(operands)
        elif kind == "follow" and upgraded:
            kind, reason = "full", "only float32 ops read it"
        low = kind == "matmul" or (kind == "follow" and _low(operands))
        step = _step(eqn, kind, reason, ins, low, upgraded)
        if kind == "matmul" and self.policy.reduce == "float32":
            step.float32_grads = _float32_grads(eqn, ins)
        return step

    def _reason_to_widen(self, operands) -> str:
        if any(info.const for info in operands if info.wide):
            return f"a constant that {self.policy.compute_dtype.name} cannot hold"
        return "a factor computed in float32 from inputs alone, such as a rotation by position"


_ACCUMULATOR = "a matmul of 16-bit operands; only float32 ops read it, so it gives its float32 sum"


def _low(operands: Sequence[Info]) -> bool:
    """The widest of the strong operands is in the compute dtype."""
    strong = [info.low for info in operands if not info.weak]
    return bool(strong) and all(strong)


def _step(eqn, kind, reason, ins, low, float32_out=False) -> Step:
    """A step whose float32 operands all go to one dtype, and its float32 results too."""
    to_low = tuple(low if jaxprs.is_float32(atom) else None for atom in eqn.invars)
    weak = kind != "matmul" and _all_weak(eqn, ins)
    const = all(info.const for info in ins)
    # Rounded, such a value would shift alike all that it is multiplied with: nothing averages out.
    computed = kind == "full" and not const
    out = Info(
        low=low and not float32_out,
        weak=weak,
        const=const,
        wide=weak and (computed or (kind == "follow" and any(info.wide for info in ins))),
    )
    outs = tuple(out if jaxprs.is_float32(var) else out._replace(low=False) for var in eqn.outvars)
    return Step(eqn, kind, reason, tuple(ins), to_low, outs, float32_out=float32_out and low)


def _all_weak(eqn, ins) -> bool:
    """Integers and keys carry no precision: what is made from them is weak."""
    pairs = zip(eqn.invars, ins, strict=True)
    return all(info.weak for atom, info in pairs if jaxprs.is_inexact(atom))


def _structure_step(eqn, ins, operands, reason) -> Step | None:
    """Results keep their operand's info; None where several operands have to agree."""
    if len(eqn.invars) == len(eqn.outvars):
        outs = tuple(ins)
    elif len(operands) == 1:
        outs = tuple(operands) * len(eqn.outvars)
    else:
        return None
    if eqn.primitive.name == "convert_element_type":
        outs = (outs[0]._replace(weak=_all_weak(eqn, ins)),)
    if eqn.primitive.name == "gather":  # has consumed the parameter; its rows are activations
        outs = (outs[0]._replace(pinned=False),)
    outs = tuple(
        info if jaxprs.is_float32(var) else info._replace(low=False)
        for info, var in zip(outs, eqn.outvars, strict=True)
    )
    return Step(eqn, "structure", reason, tuple(ins), (None,) * len(ins), outs)


def _applies_a_function(eqn) -> bool:
    """Whether a scatter is one of `.at[].apply`, and not one that overwrites."""
    program = eqn.params.get("update_jaxpr")
    return program is not None and bool(jaxprs.opened(program)[0].eqns)


def _matmul_kind(eqn, reason) -> tuple[str, str]:
    """Which matmuls are left alone, and why."""
    narrowable = (np.float32, jnp.bfloat16, np.float16)
    dtypes = [jaxprs.dtype_of(atom) for atom in eqn.invars[:2]]
    if np.float32 not in dtypes or not jaxprs.is_float32(eqn.outvars[0]):
        return "rigid", "the program chose these dtypes itself"
    if any(dtype not in narrowable for dtype in dtypes):
        return "rigid", "operands that are not float32, bfloat16 or float16"
    precision = eqn.params.get("precision")
    chosen = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH) for p in chosen):
        return "full", f"precision={chosen[0]} is asked for"
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        if math.prod(eqn.invars[0].aval.shape[k] for k in contracted) <= 1:
            return "follow", "an outer product adds nothing up: it is a multiplication"
    return "matmul", reason


def _outgrows(eqn, ins) -> bool:
    """A weight makes far more numbers of an activation, as a language model's head does.

    In float32 they would be the largest array of the program, for 2 % of the gradient's error.
    """
    if eqn.primitive.name != "dot_general" or not any(info.weak for info in ins):
        return False
    pairs = list(zip(eqn.invars, ins, strict=True))
    activations = [atom for atom, info in pairs if not info.weak] or eqn.invars
    read = max(atom.aval.size for atom in activations)
    return eqn.outvars[0].aval.size > _LARGEST_GROWTH * read


_LARGEST_GROWTH = 8


def _float32_grads(eqn, ins) -> tuple[bool, ...]:
    """Operands that are float32 weights: what is weak, and cast where it is used."""
    if eqn.primitive.name != "dot_general" or eqn.params.get("out_sharding") is not None:
        return ()
    pairs = zip(eqn.invars, ins, strict=True)
    weights = tuple(jaxprs.is_float32(atom) and i.weak and not i.low for atom, i in pairs)
    return weights if any(weights) else ()


def _guarded_kind(eqn, compute_dtype) -> str:
    if compute_dtype == np.float16 or not 0 <= eqn.params.get("y", 2) <= 3:
        return "full"
    return "follow"


def _is_wide(value: Any, compute_dtype: np.dtype) -> bool:
    """A finite number in there is infinite, or a nonzero one zero, in the compute dtype."""
    if isinstance(value, jax.core.Tracer) or getattr(value, "size", 1) > _LARGEST_CHECKED:
        return False
    if getattr(value, "dtype", None) not in (None, np.dtype(np.float32)):
        return False
    try:
        size = np.abs(np.asarray(value, np.float32))
    except (TypeError, ValueError):  # a key, or an array on devices of other processes
        return False
    size = size[np.isfinite(size) & (size > 0)]
    with np.errstate(over="ignore", under="ignore"):
        held = size.astype(compute_dtype).astype(np.float32)
    return bool(size.size) and not bool(np.all(np.isfinite(held) & (held > 0)))


_LARGEST_CHECKED = 2**24  # elements: looking at a constant costs a copy to the host


def _is_call(step: Step) -> bool:
    """A program inside that is run once, as it is: no loop, no branch, no rule of its user's."""
    name = step.eqn.primitive.name
    return step.kind == "enter" and (name in ("jit", "pjit", *jaxprs.INLINED, *jaxprs.REMATS))


def _reads_float32(step: Step, k: int, wanted: Sequence[bool]) -> bool:
    if step.kind == "enter":
        return step.eqn.primitive.name in jaxprs.CALLS and k in step.subs[0].wanted
    if step.kind == "matmul":
        return False
    if step.to_low[k] is False:
        return True
    # Low, or untouched: given a float32 operand it would be float32, which its readers want.
    floats = [w for var, w in zip(step.eqn.outvars, wanted, strict=True) if jaxprs.is_float32(var)]
    return bool(floats) and all(floats)
