"""The data types of a plan: what autocast knows of a value, of an equation, of a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxamp.policy import Policy
from jaxamp.scopes import Scopes


class Info(NamedTuple):
    """What autocast knows of one value.

    Attributes:
        low: float32 in the trace, held in the compute dtype.
        weak: made from inputs and constants alone.
        const: made from literals alone.
        wide: weak, and may hold numbers that the compute dtype cannot.
        computed: weak, and made by an op that runs in float32.
        pinned: a parameter that `policy.full` names, possibly reshaped.
    """

    low: bool = False
    weak: bool = True
    const: bool = False
    wide: bool = False
    computed: bool = False
    pinned: bool = False


STRONG = Info(weak=False)
LOW = Info(low=True, weak=False)


@dataclasses.dataclass(slots=True)
class Step:
    """One equation and what was decided about it.

    Attributes:
        eqn: The equation of the trace.
        kind: A kind of `jaxamp.rules`, after guards and exceptions.
        reason: Why, in words for people.
        ins: What was known of each operand.
        to_low: Per operand: True casts it to the compute dtype, False to float32, None leaves it.
        outs: What is known of each result.
        subs: Plans of the programs inside.
        scope: Name scopes from the outermost program on.
        float32_out: A matmul of 16-bit operands that gives its float32 accumulator.
        float32_grads: Per operand, whether the gradient leaves its matmul as the accumulator;
            empty: none does.
    """

    eqn: Any
    kind: str
    reason: str
    ins: tuple[Info, ...]
    to_low: tuple[bool | None, ...]
    outs: tuple[Info, ...]
    subs: tuple["Plan", ...] = ()
    scope: str = ""
    float32_out: bool = False
    float32_grads: tuple[bool, ...] = ()


@dataclasses.dataclass(slots=True)
class Plan:
    """The steps of one program.

    Attributes:
        jaxpr: The open jaxpr of the trace.
        consts: Values of its constvars.
        ins: One info per input.
        outs: One info per output.
        steps: In the order of the equations.
        policy: The policy that was asked.
        forced: Everything is kept in float32.
        wanted: Inputs that only float32 islands read.
        scopes: Name scopes seen, and patterns of `policy.full` that matched.
        emitted: What emission keeps with the plan, so that it exists once.
    """

    jaxpr: Any
    consts: Sequence[Any]
    ins: tuple[Info, ...]
    outs: tuple[Info, ...]
    steps: list[Step]
    policy: Policy
    forced: bool
    wanted: frozenset[int]
    scopes: Scopes
    emitted: dict = dataclasses.field(default_factory=dict)
