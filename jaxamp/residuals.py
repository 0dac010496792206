"""`residuals="compute"`: float32 islands are recomputed in the backward pass, not saved.

Values worth saving are given a name when they are emitted, and the program runs under
`jax.checkpoint`, which saves what has the name and recomputes the rest: results of matmuls and
residual adds, in 16 bits, and of what is no elementwise operation. A `jax.checkpoint` of the
user's is left as it is: it stands between the segments that are wrapped, and nothing in it is
named.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxamp import jaxprs
from jaxamp.plans import Plan, Step
from jaxamp.rules import is_elementwise

# How a program is emitted.
PLAIN = "plain"  # as it is
SEGMENTS = "segments"  # segments without a user's checkpoint are wrapped
ROUND = "round"  # the same, in the body of a loop that is compiled one round at a time
NAMED = "named"  # inside such a segment: what is worth saving gets the name

_NAME = "jaxamp_saved"


def mode_of(plan: Plan) -> str:
    """The mode of an outermost program."""
    return SEGMENTS if plan.policy.residuals == "compute" else PLAIN


def named(step: Step, outs: Sequence[Any], mode: str) -> list[Any]:
    """Results of a step, with the name where they are worth saving."""
    if mode != NAMED or step.kind == "enter" or not _is_worth_saving(step):
        return list(outs)
    pairs = zip(outs, step.eqn.outvars, strict=True)
    return [checkpoint_name(x, _NAME) if jaxprs.is_inexact(var) else x for x, var in pairs]


def _is_worth_saving(step: Step) -> bool:
    name = step.eqn.primitive.name
    if step.kind == "structure":
        return False
    is_join = name == "add" and not any(info.weak for info in step.ins)
    return is_join or not is_elementwise(name)


def segments(plan: Plan) -> Iterator[tuple[bool, list[Step]]]:
    """Runs of steps, each to be wrapped or not."""
    run: list[Step] = []
    for step in plan.steps:
        if _stands_alone(step):
            if run:
                yield True, run
            yield False, [step]
            run = []
        else:
            run.append(step)
    if run:
        yield True, run


def _stands_alone(step: Step) -> bool:
    """A user's checkpoint, an effect that happens once, a loop, or a program with one of these.

    Around a loop, a checkpoint would first recompute all rounds and keep them, and then go back.
    It is each round that is wrapped.
    """
    name = step.eqn.primitive.name
    if step.eqn.effects or name == "scan" or name in jaxprs.REMATS:
        return True
    return any(_stands_alone(inner) for sub in step.subs for inner in sub.steps)


def wrapped(
    run: Callable, steps: Sequence[Step], plan: Plan, env: dict[Any, Any], mode: str
) -> None:
    """Run the steps under `jax.checkpoint`; `run(steps, env)` adds their results to `env`."""
    made = {var for step in steps for var in step.eqn.outvars}
    read = {v for step in steps for v in step.eqn.invars if not jaxprs.is_literal(v)} - made
    inside = {id(step) for step in steps}
    later = {v for s in plan.steps if id(s) not in inside for v in s.eqn.invars if _is_variable(v)}
    later |= {v for v in plan.jaxpr.outvars if _is_variable(v)}
    # In the order of the program, so that the same program gives the same jaxpr.
    ins = [v for v in env if v in read]
    outs = [v for step in steps for v in step.eqn.outvars if v in later]

    # XLA cannot merge the recomputed with the computed across the rounds of a loop.
    @functools.partial(jax.checkpoint, policy=_saved, prevent_cse=mode != ROUND)
    def segment(values):
        local = dict(zip(ins, values, strict=True))
        run(steps, local)
        return [local[var] for var in outs]

    env.update(zip(outs, segment([env[var] for var in ins]), strict=True))


_saved = jax.checkpoint_policies.save_only_these_names(_NAME)


def _is_variable(atom: Any) -> bool:
    return not jaxprs.is_literal(atom)
