"""The smallest set of scopes that must stay float32, found by trying sets out.

Delta debugging (Zeller and Hildebrandt, IEEE TSE 28, 2002): of a set that is enough, parts and
what is left without a part are tried, parts half as large each time, until no member can be left
out. Then each scope that is left gives way to what is inside of it, its weights and inner scopes,
where those are enough.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

import jaxamp
from jaxamp.sensitivity import error
from train.enquiry.case import Case
from train.enquiry.evidence import Evidence
from train.enquiry.trial import counted, gradient_fn
from train.step import make_loss_fn, step_policy

MOST_TRIES = 30
"""Each compiles and runs loss and gradients once."""

Set = tuple[str, ...]


class Bisection(NamedTuple):
    """What was found.

    Attributes:
        goal: What a set must bring about, in words.
        before: How it is without any set, in words.
        patterns: The set, as patterns of `full=`; None where none is enough.
        policy: With the set in it, to be pasted; None where none is enough.
        checked: How it is with the set, in words; where there is none, with all scopes.
        minimal: Whether each member was tried to be left out; tries may run out before.
        tries: How many sets were run.
    """

    goal: str
    before: str
    patterns: Set | None
    policy: str | None
    checked: str
    minimal: bool
    tries: int

    def __str__(self) -> str:
        lines = [f"goal: {self.goal}; without any: {self.before}"]
        if self.policy is None:
            lines.append(f"no set is enough: with all scopes in float32 {self.checked}")
        elif not self.patterns:
            lines.append("nothing has to stay float32: the goal is met as it is")
        else:
            lines.append(f"float32 is needed in {', '.join(self.patterns)}")
            lines.append(f"--policy '{self.policy}'")
            lines.append(f"checked: with it {self.checked}")
        ends = "none of them can be left out" if self.minimal else "a smaller one may do"
        more = f"; {ends}" if self.patterns else ""
        return "\n".join([*lines, f"{self.tries} sets were run, of {MOST_TRIES} at most{more}"])


class _Tried(NamedTuple):
    """A set that was run: whether it is enough, and how it is with it, in words."""

    enough: bool
    words: str


class _OutOfTries(Exception):
    """As many sets were run as may be."""


class _Tries:
    """Runs sets, each one once."""

    def __init__(self, measure: Callable[[Set], _Tried], most: int):
        self.measure, self.most = measure, most
        self.seen: dict[Set, _Tried] = {}

    def __call__(self, patterns: Sequence[str]) -> bool:
        key = tuple(sorted(patterns))
        if key not in self.seen:
            if len(self.seen) >= self.most:
                raise _OutOfTries
            self.seen[key] = self.measure(key)
        return self.seen[key].enough

    def words(self, patterns: Sequence[str]) -> str:
        return self.seen[tuple(sorted(patterns))].words


def bisect(case: Case, evidence: Evidence, target_error: float | None = None) -> Bisection:
    """The smallest set that makes loss and gradients finite, or that brings the error to a target.

    Args:
        case: Its policy has 16 bits.
        evidence: Of the case.
        target_error: Of the gradients, ||g - g32|| / ||g32||; None: half of the policy's own. It
            counts where the gradients are finite under the policy.
    """
    goal, measure = _goal(case, evidence, target_error)
    tries = _Tries(measure, MOST_TRIES)
    scopes = _likely_first(all_scopes(case), evidence)
    if tries(()):
        return _found(case, goal, tries, (), ())
    if not tries(scopes):
        return _found(case, goal, tries, None, scopes)
    best, minimal = [scopes], True
    try:
        best.append(smallest(scopes, tries))
        paths = parameter_paths(case)
        for scope in best[-1]:
            best.append(_finer(best[-1], scope, _inside(scope, scopes, paths), tries))
    except _OutOfTries:
        minimal = False
    return _found(case, goal, tries, best[-1], best[-1], minimal)


def _goal(
    case: Case, evidence: Evidence, target_error: float | None
) -> tuple[str, Callable[[Set], _Tried]]:
    """In words, and what a set is measured by."""

    def gradient(patterns: Set):
        evidence.note(f"float32 in {', '.join(patterns) or 'nothing'}")
        policy = case.policy.replace(full=(*case.policy.full, *patterns))
        return gradient_fn(case, policy)(case.state.params, case.batch, case.key())

    def is_finite(patterns: Set) -> _Tried:
        finite = gradient(patterns).finite
        return _Tried(finite, f"loss and gradients are {'' if finite else 'not '}finite")

    if not evidence.gradient.finite:
        return "loss and gradients are finite", is_finite
    exact = jax.tree.leaves(evidence.gradient32.grads)
    own = error(jax.tree.leaves(evidence.gradient.grads), exact)
    target = own / 2 if target_error is None else target_error

    def is_close(patterns: Set) -> _Tried:
        found = error(jax.tree.leaves(gradient(patterns).grads), exact)
        return _Tried(found <= target, f"the gradient error against float32 is {found:.3g}")

    return f"a gradient error of {target:.3g} at most", is_close


def _likely_first(scopes: Set, evidence: Evidence) -> Set:
    """Of two sets that are enough, that with the scope of the fault or most of the error is met."""
    found = evidence.diagnosis
    names = [found.fault.scope] if found.fault else [one.scope for one in found.contributions]
    likely = [as_pattern(name) for name in names]
    rank = {name: number for number, name in enumerate(likely)}
    return tuple(sorted(scopes, key=lambda scope: rank.get(scope, len(rank))))


def _finer(members: Set, scope: str, inside: Set, tries: _Tries) -> Set:
    """With what is needed of the inside of a scope in its place, if that is not all of it."""
    rest = tuple(member for member in members if member != scope)
    if not inside or not tries((*rest, *inside)):
        return members
    needed = smallest(inside, lambda some: tries((*rest, *some)))
    return (*rest, *needed) if len(needed) < len(inside) else members


def _inside(scope: str, scopes: Set, paths: Sequence[str]) -> Set:
    """The inner scopes of a scope and its weights, as patterns."""
    inner = [other for other in scopes if other.startswith(f"{scope}/")]
    weights = [path for path in paths if f"/{path}".find(f"/{scope}/") >= 0]
    return (*inner, *(f"*/{path.rpartition('/')[0]}" for path in weights))


def _found(
    case: Case, goal: str, tries: _Tries, patterns: Set | None, last: Set, minimal: bool = True
) -> Bisection:
    policy = None
    if patterns is not None:
        policy = str(case.policy.replace(full=(*case.policy.full, *patterns)))
    return Bisection(
        goal, tries.words(()), patterns, policy, tries.words(last), minimal, len(tries.seen)
    )


def parameter_paths(case: Case) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(case.state.params)
    ]


def all_scopes(case: Case) -> Set:
    """The scopes with floating operations, as patterns."""
    args = case.state.params, case.batch, case.key(), counted(case.batch)
    loss_fn = make_loss_fn(case.config, case.graphdef)
    rows = jaxamp.explain(loss_fn, step_policy(case.policy, case.config))(*args).rows
    scopes = [row.scope for row in rows if row.scope and "float" in row.to_dtype]
    return tuple(dict.fromkeys(map(as_pattern, scopes)))


def as_pattern(scope: str) -> str:
    """A scope as a glob of `full=`, which holds no `,`, `|` and `=`.

    >>> as_pattern("attention/BTNH,BSNH->BNTS")
    'attention/BTNH?BSNH->BNTS'
    """
    return re.sub(r"[,|=*\[\]]", "?", scope)


def smallest(members: Set, enough: Callable[[Sequence[str]], bool]) -> Set:
    """A subset that is enough and of which no member can be left out; `members` are enough.

    >>> smallest(tuple("abcdefgh"), lambda some: {"b", "g"} <= set(some))
    ('b', 'g')
    """
    parts = 2
    while len(members) > 1:
        cuts = [members[k::parts] for k in range(parts)]
        rests = [tuple(m for m in members if m not in cut) for cut in cuts]
        found = next((some for some in (*cuts, *rests) if some and enough(some)), None)
        if found is not None:
            members, parts = found, max(2, min(parts - 1, len(found)))
        elif parts >= len(members):
            return members
        else:
            parts = min(2 * parts, len(members))
    return members
