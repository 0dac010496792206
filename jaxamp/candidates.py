"""Policies with more in float32, to try against a fault: the smallest change first."""

import glob
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxamp.interpret import Run
from jaxamp.policy import Policy
from jaxamp.problem import Problem
from jaxamp.record import Record
from jaxamp.rules import RULES

MOST_PATTERNS = 4


class Candidate(NamedTuple):
    """What to try: as it is written, what it does in words, and the policy with it."""

    setting: str
    advice: str
    policy: Policy


def places(problem: Problem) -> Iterator[Candidate]:
    """One rule taken back that the policy changed, or one place in float32."""
    name = _primitive(problem)
    if name in dict(problem.policy.rules):
        yield _with_rule(problem, name, "policy.rules took it from float32")
    for pattern in patterns(problem)[:MOST_PATTERNS]:
        yield in_float32(problem, [pattern])


def everywhere(problem: Problem) -> Iterator[Candidate]:
    """The operation in float32 wherever it is."""
    name = _primitive(problem)
    is_low = RULES.get(name) in ("matmul", "follow", "guarded")
    if is_low and name not in dict(problem.policy.rules):
        yield _with_rule(problem, name, f"every {name} in float32")


def in_float32(problem: Problem, found: Sequence[str]) -> Candidate:
    """Patterns added to the policy's."""
    policy = problem.policy.replace(full=(*problem.policy.full, *found))
    advice = "keep these in float32" if found[1:] else "keep that in float32"
    return Candidate(f"full={'|'.join(found)}", advice, policy)


def _primitive(problem: Problem) -> str:
    record = problem.cause.record
    return record.eqn.primitive.name if record else ""


def _with_rule(problem: Problem, name: str, advice: str) -> Candidate:
    rules = {**dict(problem.policy.rules), name: "full"}
    return Candidate(f"rules={name}:full", advice, problem.policy.replace(rules=rules))


def patterns(problem: Problem) -> list[str]:
    """For `full=`: the nearest first; without those that a policy's string cannot hold."""
    record = problem.cause.record
    found = dict.fromkeys(_patterns(problem, record) if record else ())
    return [pattern for pattern in found if not set(pattern) & set(",|")]


def _patterns(problem: Problem, record: Record) -> Iterator[str]:
    """Scopes of the operation and of where its numbers were lost, around them, what it reads."""
    scopes = [made.site.scope for made in (record, problem.lost) if made]
    while any(scopes):
        yield from (glob.escape(scope) for scope in scopes if scope)
        scopes = [scope.rpartition("/")[0] for scope in scopes]
    read = [-1 - maker for maker in _arguments(problem.run, record)]
    for at in sorted(read, key=lambda at: at not in problem.weights):
        yield glob.escape(problem.call.paths[at])


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
