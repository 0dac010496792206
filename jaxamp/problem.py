"""A run that went bad, and what several remedies ask of it; each is found out once."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxamp import blame, census, jaxprs
from jaxamp.autocast import Call
from jaxamp.interpret import Run, run
from jaxamp.operate import is_finite, is_narrow
from jaxamp.policy import Policy
from jaxamp.record import Record, Site
from jaxamp.scopes import full_precision


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is needed to try again.

    Attributes:
        cause: The first cause.
        run: Under the policy, with its records.
        twin: The same in float32, with its records.
        call: The traced gradient; its argument `loss_scale` is the loss scale.
        policy: The policy.
        trace: (policy, decorator of the function) -> the gradient traced so.
        weights: Which arrays of the call are differentiated.
        scale: The loss scale for the 16-bit values of the backward pass, if it has any.
    """

    cause: blame.Cause
    run: Run
    twin: Run
    call: Call
    policy: Policy
    trace: Callable[..., Call]
    weights: Sequence[int]
    scale: census.Scale | None

    def again(self, call: Call | None = None, arrays: Sequence[Any] | None = None, **how) -> bool:
        """Whether all is well in a run of the call; `how` is for `interpret.run`."""
        call = call or self.call
        result = run(call.program, arrays or call.arrays, observe=False, **how)
        return self.is_well(result)

    def is_well_in_float32(self, **how) -> bool:
        """Whether all is well in a run with all that has 16 bits in float32."""
        return self.again(widen=_everywhere, **how)

    def is_well(self, result: Run) -> bool:
        """Loss and gradients are finite, and no gradient lost its numbers."""
        return finite(result) and not blame.vanished(result, self.twin)

    @functools.cached_property
    def float32_call(self) -> Call:
        """The gradient with all of autocast's 16 bits in float32, and the function's own casts."""
        return self.trace(self.policy.replace(full=()), full_precision)

    @functools.cached_property
    def float32_policy_helps(self) -> bool:
        """Whether all is well under `compute=f32`, which leaves the function's own casts."""
        return self.again(self.float32_call)

    @property
    def fails_in_float32(self) -> bool:
        """Neither the twin is finite nor `compute=f32`: one keeps kernels, the other own casts."""
        if finite(self.twin) or self.float32_policy_helps:
            return False
        return self.cause.argument is not None or self.lost_constant is None

    @functools.cached_property
    def own_lines(self) -> set[str]:
        """Lines with 16-bit values when autocast makes none."""
        return _narrow_lines(self.float32_call.program)

    @functools.cached_property
    def lost_constant(self) -> Record | None:
        """The reader of a constant that 16 bits cannot hold, if all is well with one that they can.

        An Inf that float32 has too was meant.
        """
        for lost in blame.lost_constants(self.run, self.cause.record):
            is_own = blame.adds_zero(lost.eqn) or lost.site.where in self.own_lines
            if is_own and self.is_well_in_float32(restored=frozenset([id(lost.eqn)])):
                return lost
        return None

    @functools.cached_property
    def lost(self) -> Record | None:
        """The first operation behind the fault whose results have zeros that float32 has not."""
        record = self.cause.record
        return record and blame.lost_at(self.run, self.twin, record)


def finite(result: Run) -> bool:
    """Whether all outputs are."""
    return all(is_finite(value.array) for value in result.outs)


def _everywhere(site: Site) -> bool:
    return True


def _narrow_lines(program: Any, around: str = "") -> set[str]:
    found: set[str] = set()
    for eqn in jaxprs.opened(program)[0].eqns:
        line = jaxprs.users_line(eqn) or around
        if any(is_narrow(jaxprs.dtype_of(atom)) for atom in (*eqn.invars, *eqn.outvars)):
            found.add(line)
        for inner in jaxprs.programs(eqn):
            found |= _narrow_lines(inner, line)
    return found
