"""What to do against a NaN or Inf, tried out: a remedy is named if a run with it came out finite.

The likely ones first, and few: each is one run more, and a new `full=` pattern one trace more.
"""

import dataclasses
import functools
import glob
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxamp import blame, census, jaxprs
from jaxamp.autocast import Call
from jaxamp.interpret import Record, Run, run
from jaxamp.operate import is_finite, is_narrow
from jaxamp.policy import Policy
from jaxamp.rules import RULES


class Remedy(NamedTuple):
    """What to try.

    Attributes:
        setting: As it is written: `full=head`, `rules=exp:full`, `loss_scale=1024`, `compute=f32`;
            empty where the function or its data have to change.
        advice: In words.
        checked: What was run to verify it, and how it came out.
    """

    setting: str
    advice: str
    checked: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """A run that went bad, what is needed to try again, and what several remedies ask of it.

    Attributes:
        cause: Its first cause.
        run: Under the policy, with its records.
        twin: The same in float32, with its records.
        call: The traced gradient; its argument `loss_scale` is the loss scale.
        policy: The policy.
        trace: Policy -> the gradient traced under it.
        scale: The loss scale for the 16-bit values of the backward pass, if it has any.
    """

    cause: blame.Cause
    run: Run
    twin: Run
    call: Call
    policy: Policy
    trace: Callable[[Policy], Call]
    scale: census.Scale | None

    @property
    def in_float32(self) -> bool:
        """Whether float32 has NaN or Inf at the same operation, for the same reason."""
        record = self.cause.record
        if record is None:
            return True
        also = any(other.bad for other in self.twin.records if other.key == record.key)
        return also and self.fails_in_float32 and self.eps is None

    @functools.cached_property
    def float32_call(self) -> Call:
        """The gradient traced under `compute=f32`."""
        return self.trace(self.policy.replace(compute_dtype=np.float32, full=()))

    @functools.cached_property
    def float32_policy_helps(self) -> bool:
        """Whether all is finite under `compute=f32`, which leaves the function's own casts."""
        call = self.float32_call
        return _finite(run(call.program, call.arrays, observe=False))

    @property
    def fails_in_float32(self) -> bool:
        """Neither the twin is finite nor `compute=f32`: one keeps kernels, the other own casts."""
        return not _finite(self.twin) and not self.float32_policy_helps

    @functools.cached_property
    def own_lines(self) -> set[str]:
        """Lines with 16-bit values when autocast makes none."""
        return _narrow_lines(self.float32_call.program)

    @functools.cached_property
    def eps(self) -> Remedy | None:
        """What to do if an eps was lost."""
        return _eps(self)

    @functools.cached_property
    def lost(self) -> Record | None:
        """The first operation behind the fault whose results have zeros that float32 has not."""
        record = self.cause.record
        return record and blame.lost_at(self.run, self.twin, record)


def scale_at(call: Call) -> int:
    """Which array of a traced gradient is the loss scale."""
    return list(call.paths).index("loss_scale")


def find(problem: Problem) -> Remedy:
    """The first remedy that works."""
    tries = (_data, lambda p: p.eps, _loss_scale, _float32_fails, _policies, _own_casts, _line)
    for attempt in tries:
        remedy = attempt(problem)
        if remedy is not None:
            return remedy
    return _last(problem)


def _last(problem: Problem) -> Remedy:
    """Float32 everywhere: by `compute=f32` alone, or else the twin, as one of them is finite."""
    if problem.float32_policy_helps:
        return Remedy("compute=f32", "nothing smaller that was tried helped", _ran("compute=f32"))
    advice = "compute=f32, and leave out the casts of the function itself"
    return Remedy("", advice, _ran("all 16-bit values held in float32"))


def _ran(setting: str) -> str:
    return f"with {setting} the loss and all gradients are finite"


def _finite(result: Run) -> bool:
    return all(is_finite(value.array) for value in result.outs)


def _data(problem: Problem) -> Remedy | None:
    if problem.cause.argument is None:
        return None
    path = problem.call.paths[problem.cause.argument]
    failed = "is not finite either" if not _finite(problem.twin) else "is finite"
    return Remedy("", f"look at the data: {path} is not finite itself", f"float32 {failed}")


def _eps(problem: Problem) -> Remedy | None:
    lost = problem.cause.record and blame.lost_eps(problem.run, problem.cause.record)
    if not lost:
        return None
    restored = frozenset([id(lost.eqn)])
    args = problem.call.program, problem.call.arrays, lambda site: True
    if not _finite(run(*args, observe=False, restored=restored)):
        return None
    dtype = jaxprs.dtype_of(lost.eqn.outvars[0])
    least = float(census.FORMATS[census.NAMES[dtype]].flush) * 2
    advice = f"a constant that is 0 in {dtype} is added at {lost.site.where}: an eps needs float32"
    if dtype == np.float16:
        advice += f", or {least:.0e} at least"
    return Remedy("", advice, _ran("a small number there, in float32,"))


def _loss_scale(problem: Problem) -> Remedy | None:
    record, at = problem.cause.record, scale_at(problem.call)
    scale = problem.call.arrays[at]
    reads_scale = record and any(-1 - at in makers for makers in record.ins)
    if record is None or not (record.site.phase == "backward" or reads_scale):
        return None
    # Below 1 only by the user's own choice: what needs that has another cause.
    best = problem.scale.loss_scale if problem.scale else 1.0
    tries = dict.fromkeys([max(best, 1.0), 1.0])
    for lower in (s for s in tries if s < float(scale)):
        arrays = list(problem.call.arrays)
        arrays[at] = np.float32(lower)
        if _finite(run(problem.call.program, arrays, observe=False)):
            setting = f"loss_scale={lower:g}"
            return Remedy(setting, f"lower the loss scale from {float(scale):g}", _ran(setting))
    return None


def _float32_fails(problem: Problem) -> Remedy | None:
    if not problem.fails_in_float32:
        return None
    cause = blame.first_cause(problem.twin, problem.call.arrays)
    where = f" at {cause.record.site.where}" if cause and cause.record else ""
    advice = "float32 fails too: a lower learning rate, or look at the data and the formula"
    return Remedy("", advice, f"in float32 the first bad operation is{where or ' the same'}")


def _policies(problem: Problem) -> Remedy | None:
    for setting, advice, policy in _changed(problem):
        try:
            call = problem.trace(policy)
        except ValueError:  # a scope that JAX made, or a rule that the primitive cannot have
            continue
        if _finite(run(call.program, call.arrays, observe=False)):
            return Remedy(setting, advice, _ran(setting))
    return None


def _changed(problem: Problem) -> Iterator[tuple[str, str, Policy]]:
    record, policy = problem.cause.record, problem.policy
    if record is None:
        return
    name = record.eqn.primitive.name
    rules = dict(policy.rules)
    if name in rules:
        yield f"rules={name}:full", "policy.rules took it from float32", _with_rule(policy, name)
    patterns = dict.fromkeys(p for p in _patterns(problem, record) if not set(p) & set(",|"))
    for pattern in list(patterns)[:_MOST_PATTERNS]:
        changed = policy.replace(full=(*policy.full, pattern))
        yield f"full={pattern}", "keep that in float32", changed
    if name not in rules and RULES.get(name) in ("matmul", "follow", "guarded"):
        yield f"rules={name}:full", f"every {name} in float32", _with_rule(policy, name)


_MOST_PATTERNS = 4


def _with_rule(policy: Policy, name: str) -> Policy:
    return policy.replace(rules={**dict(policy.rules), name: "full"})


def _patterns(problem: Problem, record: Record) -> Iterator[str]:
    """The scope of the operation, of where its numbers were lost, then around, then its weights."""
    scopes = [made.site.scope for made in (record, problem.lost) if made]
    while any(scopes):
        yield from (glob.escape(scope) for scope in scopes if scope)
        scopes = [scope.rpartition("/")[0] for scope in scopes]
    yield from (glob.escape(problem.call.paths[-1 - m]) for m in _arguments(problem.run, record))


def _arguments(result: Run, record: Record) -> list[int]:
    """Arguments that the operation reads, but for a cast or a change of shape."""
    found, ahead = [], [m for makers in record.ins for m in makers]
    while ahead:
        maker = ahead.pop(0)
        if maker < 0:
            found.append(maker)
        elif RULES.get(result.records[maker].eqn.primitive.name) == "structure":
            ahead += [m for makers in result.records[maker].ins for m in makers]
    return found


def _own_casts(problem: Problem) -> Remedy | None:
    """What the function itself makes 16-bit: no policy can undo that."""
    own = problem.own_lines
    program, arrays = problem.call.program, problem.call.arrays
    if not own or not _finite(run(program, arrays, lambda site: site.where in own, observe=False)):
        return None
    record = problem.cause.record
    roots = blame.narrowed_at(problem.run, record) if record else []
    lines = dict.fromkeys(r.site.where for r in roots if r.site.where in own)
    at = ", ".join(list(lines)[:3]) or ", ".join(sorted(own)[:3])
    checked = _ran("what the function itself makes 16-bit held in float32")
    return Remedy("", f"the function itself casts to 16 bits: leave that out at {at}", checked)


def _line(problem: Problem) -> Remedy | None:
    record = problem.cause.record
    if record is None or not record.site.where:
        return None
    line = record.site.where.rpartition(":")[0]
    if any(own.rpartition(":")[0] == line for own in problem.own_lines):
        return None
    there = lambda site: site.where.rpartition(":")[0] == line  # noqa: E731
    if not _finite(run(problem.call.program, problem.call.arrays, there, observe=False)):
        return None
    advice = "`with jaxamp.full_precision():` around that line"
    return Remedy("", advice, _ran("that line held in float32"))


def _narrow_lines(program: Any, around: str = "") -> set[str]:
    found: set[str] = set()
    for eqn in jaxprs.opened(program)[0].eqns:
        line = jaxprs.users_line(eqn) or around
        if any(is_narrow(jaxprs.dtype_of(atom)) for atom in (*eqn.invars, *eqn.outvars)):
            found.add(line)
        for inner in jaxprs.programs(eqn):
            found |= _narrow_lines(inner, line)
    return found
