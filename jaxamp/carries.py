"""Loops and branches: in which dtype a carry goes round, and where branches meet.

A carry starts in the dtype that its initial value has, and is widened until the body gives back
what it was given. What is left to choose is a weak carry, float32 so far, whose next value is
strong:

    the next value is the carry plus something           ->  float32
        (a sum; a residual stream over layers: it is rounded once per round, and that adds up)
    starts as a constant                                 ->  float32
        (a recurrent state, for the same reason)
    starts from inputs, and goes through a matmul        ->  the body's dtype

What a residual stream in the compute dtype saves and costs is in `docs/notes/autocast.md`.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxamp import jaxprs
from jaxamp.plans import LOW, STRONG, Info, Plan, Step
from jaxamp.rules import RULES

_ADDS = ("add", "sub", "add_any")
_PASSES = (
    "neg",
    "convert_element_type",
    "copy",
    "name",
    "reshape",
    "transpose",
    "reduce_precision",
)


def scan_step(eqn: Any, ins: Sequence[Info], make_plan: Callable[..., Plan]) -> Step:
    """Operands are (constants, carry, scanned over), results (carry, stacked)."""
    num_consts, num_carry = jaxprs.scan_counts(eqn)
    end = num_consts + num_carry
    body = eqn.params["jaxpr"]
    carry, plan = _fixed_point(body, ins[:num_consts], ins[num_consts:end], ins[end:], make_plan)
    stacked = tuple(info._replace(const=False) for info in plan.outs[num_carry:])
    return Step(eqn, "enter", "", tuple(ins), (None,) * len(ins), (*carry, *stacked), (plan,))


def while_step(eqn: Any, ins: Sequence[Info], make_plan: Callable[..., Plan]) -> Step:
    """Operands are (constants of the condition, constants of the body, carry)."""
    start = eqn.params["cond_nconsts"]
    end = start + eqn.params["body_nconsts"]
    carry, body = _fixed_point(eqn.params["body_jaxpr"], ins[start:end], ins[end:], (), make_plan)
    condition = make_plan(eqn.params["cond_jaxpr"], (*ins[:start], *carry))
    return Step(eqn, "enter", "", tuple(ins), (None,) * len(ins), carry, (condition, body))


def cond_step(eqn: Any, ins: Sequence[Info], make_plan: Callable[..., Plan]) -> Step:
    """Operands are (index, arguments of every branch)."""
    branches = tuple(make_plan(branch, ins[1:]) for branch in eqn.params["branches"])
    outs = tuple(
        functools.reduce(_meet, infos)
        for infos in zip(*(branch.outs for branch in branches), strict=True)
    )
    return Step(eqn, "enter", "", tuple(ins), (None,) * len(ins), outs, branches)


def _meet(a: Info, b: Info) -> Info:
    """The widest of the strong ones; weak only if all are."""
    strong = [info.low for info in (a, b) if not info.weak]
    return Info(
        low=bool(strong) and all(strong),
        weak=not strong,
        const=a.const and b.const,
        wide=not strong and (a.wide or b.wide),
        computed=not strong and (a.computed or b.computed),
        pinned=a.pinned and b.pinned,
    )


def _fixed_point(body, before, start, after, make_plan) -> tuple[tuple[Info, ...], Plan]:
    """The infos with which the carry goes round, and the plan of the body for them."""
    floats = [jaxprs.is_float32(v) for v in jaxprs.opened(body)[0].invars[len(before) :]]
    flow = functools.cache(lambda: _Flow(body, before, start, after))
    carry = tuple(
        STRONG if info.low and flow().accumulates(k) else info for k, info in enumerate(start)
    )
    while True:
        plan = make_plan(body, (*before, *carry, *after))
        new = tuple(
            _next(info, out, start[k], floats[k], flow, k)
            for k, (info, out) in enumerate(zip(carry, plan.outs, strict=False))
        )
        if new == carry:
            return carry, plan
        carry = new


def _next(info: Info, out: Info, start: Info, is_float32: bool, flow: Callable, k: int) -> Info:
    if not is_float32 or out.weak:
        met = _meet(info, out)
        return met if info.weak else info
    if info.weak:
        narrow = out.low and not start.const and flow().is_stream(k)
        return LOW if narrow else STRONG
    return info if out.low else STRONG


class _Flow:
    """What each value of a loop body reads: bitmasks over the carries."""

    def __init__(self, body, before, start, after):
        nodes, inputs, outs = jaxprs.flat_graph(body, lambda name: RULES.get(name) == "matmul")
        self.made_by = {out: node for node in nodes for out in node.outs}
        outs = outs[: len(start)]
        carry_ids = inputs[len(before) : len(before) + len(start)]
        self.reads = {-1: 0} | dict.fromkeys(inputs, 0)
        self.reads |= {value: 1 << k for k, value in enumerate(carry_ids)}
        self.by_matmul = dict.fromkeys(self.reads, 0)
        for node in nodes:
            self._visit(node)
        own = {value: 1 << k for k, value in enumerate(carry_ids)}
        rounds = _over_all_rounds([self.reads[out] for out in outs])
        self.mixed = [_through(self.by_matmul[out], rounds) for out in outs]
        self.sums = _over_all_rounds(
            [_union(own.get(term, 0) for term in self._terms(out)) for out in outs]
        )

    def _visit(self, node: jaxprs.Node) -> None:
        reads = _union(self.reads[v] for v in node.ins)
        by_matmul = _union(self.by_matmul[v] for v in node.ins)
        for out in node.outs:
            self.reads[out] = reads
            self.by_matmul[out] = by_matmul | (reads if node.has_matmul else 0)

    def is_stream(self, k: int) -> bool:
        """The next value of carry k reads it through a matmul, and is no sum."""
        return bool(self.mixed[k] >> k & 1) and not self.accumulates(k)

    def accumulates(self, k: int) -> bool:
        """The next value of carry k, or of one that becomes it, is the carry plus something."""
        return bool(self.sums[k] >> k & 1)

    def _terms(self, value: int) -> set[int]:
        node = self.made_by.get(value)
        if node is None or node.name not in _ADDS + _PASSES:
            return {value}
        return set().union(*map(self._terms, node.ins))


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(int.__or__, masks, 0)


def _over_all_rounds(reach: list[int]) -> list[int]:
    """Element k: the carries that reach carry k, in one round or more."""
    for _ in reach:
        reach = [_through(mask, reach) for mask in reach]
    return reach


def _through(mask: int, reach: Sequence[int]) -> int:
    """`mask`, and what reaches the carries in it."""
    return mask | _union(more for k, more in enumerate(reach) if mask >> k & 1)
