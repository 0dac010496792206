"""What runs in which dtype: a plan for a traced program, made before anything is emitted.

Every float32 value of the trace is given an `Info`: is it held in the compute dtype (`low`), and
is it `weak`. A value is weak when it is made from inputs and constants alone, as a parameter is;
like a Python scalar it stays float32 until it meets a strong value and then takes its dtype.
Matmuls make strong values, and what is made from a strong value is strong.

A `Plan` is what `autocast` emits and what `explain` shows. Programs inside (jit, scan ...) have
plans of their own, remembered per program, so that what JAX traces once is planned once.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from jaxamp import carries, jaxprs
from jaxamp.operations import decided, is_wide
from jaxamp.plans import Info, Plan, Step
from jaxamp.policy import Policy
from jaxamp.rules import kind_of
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
            infos[var] = Info(wide=is_wide(value, self.policy.compute_dtype))
        read = functools.partial(self._read, infos)
        steps = []
        for k, eqn in enumerate(jaxpr.eqns):
            step = self._step(eqn, tuple(map(read, eqn.invars)), marks.get(k, ()))
            infos.update(zip(eqn.outvars, step.outs, strict=True))
            steps.append(step)
        return steps, tuple(map(read, jaxpr.outvars))

    def _read(self, infos, atom) -> Info:
        if jaxprs.is_literal(atom):
            return Info(const=True, wide=is_wide(atom.val, self.policy.compute_dtype))
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
            step = decided(eqn, kind, ins, self.policy, forced, any(wanted))
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
