"""What to do against a fault, tried out: a remedy is named if all was well in a run with it.

The likely ones first, and few: each is one run more, and a new `full=` pattern one trace more.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxamp import blame, candidates, jaxprs
from jaxamp.autocast import Call
from jaxamp.candidates import Candidate
from jaxamp.interpret import run
from jaxamp.operate import is_floating, on_host
from jaxamp.policy import Policy
from jaxamp.problem import Problem, finite


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


def scale_at(call: Any) -> int:
    """Which array of a traced gradient is the loss scale."""
    return list(call.paths).index("loss_scale")


def find(problem: Problem) -> Remedy:
    """The first remedy that works."""
    tries = (
        _argument,
        _index,
        _constant,
        _cast_of_gradient,
        _loss_scale,
        _large_arguments,
        _float32_fails,
        _place,
        _several_places,
        _everywhere,
        _own_casts,
        _line,
    )
    remedy = next(filter(None, (attempt(problem) for attempt in tries)), None) or _last(problem)
    if problem.cause.kind == "underflow":
        remedy = remedy._replace(checked=f"{remedy.checked}, and none of them vanishes")
    return remedy


def _last(problem: Problem) -> Remedy:
    """Float32 everywhere: by `compute=f32` alone, or else the twin, as one of them is well."""
    if problem.float32_policy_helps:
        return Remedy("compute=f32", "nothing smaller that was tried helped", _ran("compute=f32"))
    advice = "compute=f32, and leave out the casts of the function itself"
    return Remedy("", advice, _ran("all 16-bit values held in float32"))


def _ran(setting: str) -> str:
    return f"with {setting} the loss and all gradients are finite"


# The data and the weights.


def _argument(problem: Problem) -> Remedy | None:
    at = problem.cause.argument
    if at is None:
        return None
    path = problem.call.paths[at]
    failed = "is not finite either" if not finite(problem.twin) else "is finite"
    advice = f"look at the data: {path} is not finite itself"
    if at in problem.weights:
        advice = f"an earlier update made {path} not finite: go back to weights before it, lower "
        advice += "the learning rate, and skip bad steps with jaxamp.apply_if_finite"
    return Remedy("", advice, f"float32 {failed}")


def _index(problem: Problem) -> Remedy | None:
    """JAX gives NaN where an index is out of range."""
    record, arrays = problem.cause.record, list(problem.call.arrays)
    bounds = record and blame.index_bounds(record)
    if record is None or bounds is None:
        return None
    makers = blame.arguments_behind(problem.run, record)
    at = [k for k in makers if np.issubdtype(np.asarray(arrays[k]).dtype, np.integer)]
    for k in at:
        arrays[k] = np.clip(np.asarray(arrays[k]), 0, bounds)
    if not at or not problem.is_well_in_float32(arrays=arrays):
        return None
    names = ", ".join(problem.call.paths[k] for k in at)
    advice = f"look at the data: {names} has an index out of range, which is 0 to {bounds}"
    return Remedy("", advice, _ran("indices held in that range"))


def _large_arguments(problem: Problem) -> Remedy | None:
    """Weights that have grown, or data that was not normalized, until float32 fails too."""
    if not problem.fails_in_float32:
        return None
    weights = list(problem.weights)
    others = [k for k in range(len(problem.call.arrays)) if k not in weights]
    others.remove(scale_at(problem.call))
    for group, advice in ((weights, _GROWN), (others, _NOT_NORMALIZED)):
        arrays = list(problem.call.arrays)
        sizes = {k: _size(arrays[k]) for k in group}
        largest = max(sizes, key=lambda k: sizes[k], default=None)
        if largest is None or sizes[largest] < _LARGE:
            continue
        for k, size in sizes.items():
            arrays[k] = arrays[k] / np.float32(size) if size > 1 else arrays[k]
        if problem.is_well_in_float32(arrays=arrays):
            advice = advice.format(path=problem.call.paths[largest], size=sizes[largest])
            return Remedy("", advice, f"in float32, {_ran('none of them over 1')}")
    return None


_GROWN = (
    "float32 fails too, as the weights have grown: {path} reaches {size:.1e}. Go back to weights "
    "before that, with a lower learning rate"
)
_NOT_NORMALIZED = (
    "float32 fails too, as numbers of the data are too large: {path} reaches {size:.1e}"
)
_LARGE = 2.0**10


def _size(array: Any) -> float:
    return float(np.abs(on_host(array)).max(initial=0)) if is_floating(array) else 0.0


def _float32_fails(problem: Problem) -> Remedy | None:
    if not problem.fails_in_float32:
        return None
    cause = blame.first_cause(problem.twin, problem.call.arrays)
    where = f" at {cause.record.site.where}" if cause and cause.record else ""
    advice = "float32 fails too: look at the formula there, and at the data that it reads"
    return Remedy("", advice, f"in float32 the first bad operation is{where or ' the same'}")


# What 16 bits lost.


def _constant(problem: Problem) -> Remedy | None:
    lost = problem.lost_constant
    if lost is None:
        return None
    dtype = jaxprs.dtype_of(lost.eqn.outvars[0])
    if not blame.adds_zero(lost.eqn):
        advice = f"a constant that is infinite in {dtype} is read at {lost.site.where}: "
        advice += "a mask needs float32, or a number that is finite"
        if dtype == np.float16:
            advice += ", such as -6e4"
        return Remedy("", advice, _ran("-1e9 or 1e9 there, in float32,"))
    advice = f"a constant that is 0 in {dtype} is added at {lost.site.where}: an eps, and what is "
    advice += "made of the sum, need float32"
    return Remedy("", advice, _ran("a small number there, in float32,"))


def _cast_of_gradient(problem: Problem) -> Remedy | None:
    """A gradient that a rule of the user's gives in 16 bits, under a policy that needs no scale."""
    record = problem.cause.record
    if record is None or record.eqn.primitive.name != "convert_element_type":
        return None
    if problem.cause.kind != "underflow" or problem.policy.compute_dtype == np.float16:
        return None
    is_own = record.site.phase == "backward" and record.site.where in problem.own_lines
    return _own_casts(problem) if is_own else None


def _loss_scale(problem: Problem) -> Remedy | None:
    record, at = problem.cause.record, scale_at(problem.call)
    used = float(problem.call.arrays[at])
    reads_scale = record and any(-1 - at in makers for makers in record.ins)
    if record is None or not (record.site.phase == "backward" or reads_scale):
        return None
    # Below 1 only by the user's own choice: what needs that has another cause.
    best = max(problem.scale.loss_scale if problem.scale else 1.0, 1.0)
    is_higher = problem.cause.kind == "underflow"
    tries = [s for s in dict.fromkeys([best, 1.0]) if (s > used if is_higher else s < used)]
    for scale in tries:
        arrays = list(problem.call.arrays)
        arrays[at] = np.float32(scale)
        if problem.again(arrays=arrays):
            setting = f"loss_scale={scale:g}"
            verb = "raise" if is_higher else "lower"
            return Remedy(setting, f"{verb} the loss scale from {used:g}", _ran(setting))
    return None


# More float32.


def _place(problem: Problem) -> Remedy | None:
    return _first_that_helps(problem, candidates.places(problem))


def _several_places(problem: Problem) -> Remedy | None:
    """One is kept in float32, then the next that shows, until none is left."""
    found: list[str] = []
    left = problem
    for _ in range(candidates.MOST_PATTERNS):
        new = [pattern for pattern in candidates.patterns(left) if pattern not in found]
        if not new:
            return None
        found = [one for one in found if not one.startswith(f"{new[0]}/")] + new[:1]
        tried = candidates.in_float32(problem, found)
        call = _traced(problem, tried.policy)
        if call is None:
            return None
        result = run(call.program, call.arrays)
        if problem.is_well(result):
            return _remedy(tried)
        cause = blame.first_cause(result, call.arrays)
        if cause is None:
            return None
        left = dataclasses.replace(left, cause=cause, run=result, call=call)
    return None


def _everywhere(problem: Problem) -> Remedy | None:
    return _first_that_helps(problem, candidates.everywhere(problem))


def _first_that_helps(problem: Problem, tries: Iterable[Candidate]) -> Remedy | None:
    for tried in tries:
        call = _traced(problem, tried.policy)
        if call is not None and problem.again(call):
            return _remedy(tried)
    return None


def _traced(problem: Problem, policy: Policy) -> Call | None:
    try:
        return problem.trace(policy)
    except ValueError:  # a scope that JAX made, or a rule that the primitive cannot have
        return None


def _remedy(tried: Candidate) -> Remedy:
    return Remedy(tried.setting, tried.advice, _ran(tried.setting))


def _own_casts(problem: Problem) -> Remedy | None:
    """What the function itself makes 16-bit: no policy can undo that."""
    own = problem.own_lines
    if not own or not problem.again(widen=lambda site: site.where in own):
        return None
    record = problem.cause.record
    roots = blame.narrowed_at(problem.run, record) if record else []
    lines = dict.fromkeys(r.site.where for r in roots if r.site.where in own)
    at = _listed(list(lines) or sorted(own))
    checked = _ran("what the function itself makes 16-bit held in float32")
    return Remedy("", f"the function itself casts to 16 bits: leave that out at {at}", checked)


def _listed(lines: Sequence[str]) -> str:
    return ", ".join(lines[:3])


def _line(problem: Problem) -> Remedy | None:
    record = problem.cause.record
    if record is None or not record.site.where:
        return None
    line = record.site.where.rpartition(":")[0]
    if any(own.rpartition(":")[0] == line for own in problem.own_lines):
        return None
    if not problem.again(widen=lambda site: site.where.rpartition(":")[0] == line):
        return None
    advice = "`with jaxamp.full_precision():` around that line"
    return Remedy("", advice, _ran("that line held in float32"))
