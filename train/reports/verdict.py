"""The verdict: one sentence for each policy, which says no more than the runs do."""

import math
from typing import Literal, NamedTuple

from train.reports.paired import Interval, covers, outcome
from train.reports.results import Difference, PolicyResult, Results
from train.reports.runs import Run

Kind = Literal["within", "beyond", "undecided", "diverged", "not compared", "base"]

BASE, DIVERGED, NOT_COMPARED = "base", "diverged", "not compared"


class Verdict(NamedTuple):
    """What is said of one policy.

    Attributes:
        comparison: The title of the comparison.
        policy, base: Names.
        outcome: within, beyond or undecided (`train.reports.paired.outcome`); diverged: a run
            ended with numbers that are not finite; not compared: no pair of finite losses under
            equal conditions; base: there is nothing beside it.
        sentence: All of it, in words.
    """

    comparison: str
    policy: str
    base: str
    outcome: Kind
    sentence: str


def verdicts(results: Results, tolerance: float) -> list[Verdict]:
    """One for each policy but the base; for the base too where it is alone or ended badly."""
    base, *others = results.policies
    shown = ([base] if not others or base.stability.ended_badly else []) + others
    return [_verdict(result, results, tolerance) for result in shown]


def _verdict(result: PolicyResult, results: Results, tolerance: float) -> Verdict:
    base = results.base
    if result is base:
        bad = _ended_badly(result)
        found, loss, rest = (DIVERGED, bad, []) if bad else (BASE, _alone(result), [])
    else:
        found, loss = _loss(result, results, tolerance)
        rest = [_memory(result), _speed(result, base)]
    clauses = [loss, *_unfinished(result, base), *rest]
    sentence = "; ".join(clause for clause in clauses if clause) + "."
    return Verdict(results.title, result.policy, base.policy, found, sentence)


def _alone(result: PolicyResult) -> str:
    name, loss = ("train", result.train_loss)
    if result.eval_loss is not None:
        name, loss = ("eval", result.eval_loss)
    return (
        f"{result.policy} is alone, nothing to compare it with: {name} loss {loss.middle:.4f} "
        f"({seeds(loss.count)})"
    )


def _loss(result: PolicyResult, results: Results, tolerance: float) -> tuple[Kind, str]:
    base, difference = results.base, result.difference
    if bad := _ended_badly(result):
        return DIVERGED, bad
    names = f"{result.policy} and {base.policy}"
    if not results.equal:
        batches = f"batch {batch_size(result)} and {batch_size(base)}"
        return NOT_COMPARED, f"{names} ({batches}): losses are not compared under unequal settings"
    if difference is None:
        return NOT_COMPARED, f"{names} are not compared: they have no seed in common"
    if doubtful := sorted(set(difference.by_seed) & set(base.stability.ended_badly)):
        which = ", ".join(map(str, doubtful))
        return NOT_COMPARED, f"{names} are not compared: {base.policy} diverged, seed {which}"
    if difference.interval is None:
        bad = [str(s) for s, d in difference.by_seed.items() if not math.isfinite(d)]
        where = f"{difference.metric} of seed {', '.join(bad)}"
        return NOT_COMPARED, f"{names} are not compared: {where} is not finite in one of them"
    return _compared(result.policy, base.policy, difference, difference.interval, tolerance)


def _compared(
    policy: str, base: str, difference: Difference, interval: Interval, tolerance: float
) -> tuple[Kind, str]:
    number = lambda x: signless_zero(x, decimals(tolerance))  # noqa: E731
    metric = difference.metric.replace("/", " ")
    if difference.metric == "train/loss":
        metric += " (the runs have no eval loss in common)"
    mean, low, high, count = interval
    if low is None or high is None:
        words = (
            f"{policy} and {base} at {tolerance:g} nats: undecided, since one seed gives no "
            f"interval; {metric} differs by {number(mean)}"
        )
        return "undecided", words
    found = outcome(interval, tolerance)
    bounds = f"95 % interval {number(low)} to {number(high)}, {seeds(count)}"
    if covers(low, high, 0):
        seen = f"no difference in {metric} seen (mean {number(mean)}, {bounds})"
    else:
        side = "higher" if mean > 0 else "lower"
        seen = f"{metric} {side} by {number(abs(mean))} ({bounds})"
    opening = {
        "within": f"{policy} matches {base} within {tolerance:g} nats",
        "beyond": f"{policy} is beyond {tolerance:g} nats of {base}",
        "undecided": f"{policy} and {base} at {tolerance:g} nats: undecided, more seeds needed",
    }[found]
    return found, f"{opening}: {seen}"


def _ended_badly(result: PolicyResult) -> str:
    bad = result.stability.ended_badly
    if not bad:
        return ""
    which = ", ".join(f"seed {seed}: {what}" for seed, what in bad.items())
    return (
        f"{result.policy} diverged in {len(bad)} of {seeds(len(result.runs))} (not finite: {which})"
    )


def _unfinished(result: PolicyResult, base: PolicyResult) -> list[str]:
    """Where a loss is not that of the last step, the step that it is of."""
    num_steps = result.group.first.config.num_steps
    difference = None if result.stability.ended_badly else result.difference
    if difference is not None and difference.step < num_steps:
        return [f"this is at step {difference.step} of {num_steps}"]
    stopped = result.stability.unfinished | base.stability.unfinished
    return [f"stopped at step {min(stopped.values())} of {num_steps}"] if stopped else []


def _memory(result: PolicyResult) -> str:
    memory = result.memory
    if memory.to_base is not None:
        return f"{memory.to_base:.2f} of the memory"
    if memory.device_to_base is not None:
        return f"{memory.device_to_base:.2f} of the memory (peak of the device)"
    return "memory not recorded"


def _speed(result: PolicyResult, base: PolicyResult) -> str:
    ratio, interval = result.speed.to_base, result.speed.to_base_interval
    if ratio is None or interval is None:
        return "speed not recorded for a pair of seeds"
    where = device(result.group.first)
    if interval.low is None or interval.high is None:
        return f"{ratio.middle:.2f} times the speed on {where} (one seed)"
    bounds = f"{ratio.low:.2f} to {ratio.high:.2f}, {seeds(ratio.count)}"
    if covers(interval.low, interval.high, 1):
        return f"no difference in speed seen on {where} ({ratio.middle:.2f} times, {bounds})"
    return f"{ratio.middle:.2f} times the speed on {where} ({bounds})"


def device(run: Run) -> str:
    """The device, with its kind where that says more.

    A run that does not say it was on a device that is not recorded.
    """
    name, kind = run.figures.device, run.figures.device_kind
    if name and kind and kind != name:
        return f"{name} ({kind})"
    return name or kind or "a device that is not recorded"


def batch_size(result: PolicyResult) -> int:
    return result.group.first.config.batch_size


def seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def decimals(tolerance: float) -> int:
    """So many that a hundredth of the tolerance is seen.

    >>> decimals(0.02), decimals(1)
    (4, 3)
    """
    return max(3, 2 - math.floor(math.log10(tolerance)))


def signless_zero(x: float, places: int) -> str:
    """A number with so many decimals; 0.0000 has no sign.

    >>> signless_zero(-1e-9, 4), signless_zero(-0.25, 2)
    ('0.0000', '-0.25')
    """
    text = f"{x:.{places}f}"
    return text.lstrip("-") if float(text) == 0 else text
