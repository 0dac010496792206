"""What the runs of a comparison came to: for each policy its loss, speed, memory and stability."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from train.reports.conditions import Comparison, Group, groups, have_equal_settings
from train.reports.paired import (
    Interval,
    Spread,
    mean_and_range,
    median_and_range,
    quartiles,
    ratio_interval,
    t_interval,
    window,
)
from train.reports.runs import MemoryFigures, Run
from train.reports.stability import Stability, stability


@dataclass(frozen=True)
class Difference:
    """Final loss less that of the base, in nats, by seed; all at the same `step`.

    Attributes:
        metric: `eval/loss`, or `train/loss` where a run has no other.
        step: The last step that all of the paired runs have.
        by_seed: The seeds that both policies have.
        interval: Of the mean; None where a difference is not finite.
    """

    metric: str
    step: int
    by_seed: dict[int, float]
    interval: Interval | None


@dataclass(frozen=True)
class Speed:
    """Of the steps that have nothing else in them; None: not recorded.

    Attributes:
        step_seconds: Quartiles over the steps of all seeds.
        tokens_per_second: Median and range over seeds of a run's tokens a step / median seconds.
        to_base: Median and range over paired seeds of the ratio of tokens a second.
        to_base_interval: Of the mean of its logarithm over seeds, as a ratio again; `mean` is the
            geometric one.
        compile_seconds: Median and range over seeds.
        mfu: Model FLOPs utilization, median over the steps of all seeds.
    """

    step_seconds: Spread | None
    tokens_per_second: Spread | None
    to_base: Spread | None
    to_base_interval: Interval | None
    compile_seconds: Spread | None
    mfu: float | None


@dataclass(frozen=True)
class Memory:
    """Of one device; None: not recorded.

    Attributes:
        compiled: What the compiler says, the largest of the seeds.
        device_peak_bytes: What the runtime counted, the largest of the seeds.
        to_base, device_to_base: Ratios of the peaks.
    """

    compiled: MemoryFigures
    device_peak_bytes: float | None
    to_base: float | None
    device_to_base: float | None


@dataclass(frozen=True)
class PolicyResult:
    """All that is known of one policy; `difference` is None for the base and what has no pair."""

    group: Group
    eval_loss: Spread | None
    train_loss: Spread
    difference: Difference | None
    speed: Speed
    memory: Memory
    stability: Stability

    @property
    def policy(self) -> str:
        return self.group.policy

    @property
    def runs(self) -> list[Run]:
        return list(self.group.runs.values())


@dataclass(frozen=True)
class Results:
    """One comparison; the first of `policies` is the base."""

    title: str
    policies: list[PolicyResult]
    equal: bool
    """Whether settings are equal, so that losses can be compared."""

    @property
    def base(self) -> PolicyResult:
        return self.policies[0]


def results(comparison: Comparison) -> Results:
    """Reads and compares.

    Raises:
        ReportError: a run cannot be read, or the runs do not belong side by side.
    """
    found = groups(comparison)
    equal = have_equal_settings(found)
    return Results(comparison.title, [_result(group, found[0], equal) for group in found], equal)


def _result(group: Group, base: Group, equal: bool) -> PolicyResult:
    runs = list(group.runs.values())
    ends = [run.series["eval/loss"].values[-1] for run in runs if "eval/loss" in run.series]
    return PolicyResult(
        group,
        mean_and_range(ends) if len(ends) == len(runs) else None,
        mean_and_range([final_train_loss(run, run.last_step) for run in runs]),
        difference(group, base) if equal and group is not base else None,
        _speed(group, base),
        _memory(group, base),
        stability(group),
    )


def final_train_loss(run: Run, step: int) -> float:
    """Mean over the last tenth of the steps up to `step`."""
    losses = run.series["train/loss"].until(step)
    return float(np.mean(losses[-window(len(losses)) :]))


def pairs(group: Group, base: Group) -> dict[int, tuple[Run, Run]]:
    """By seed, the run and that of the base; seeds that only one of them has are left out."""
    return {s: (run, base.runs[s]) for s, run in group.runs.items() if s in base.runs}


def difference(group: Group, base: Group) -> Difference | None:
    """Of the final losses, all at the last step that every paired run has."""
    paired = pairs(group, base)
    runs = [run for pair in paired.values() for run in pair]
    if not runs:
        return None
    eval_steps = common_steps(runs, "eval/loss")
    if len(eval_steps):
        metric, step = "eval/loss", int(eval_steps[-1])
        final = lambda run: float(run.series[metric].at(eval_steps[-1:])[0])  # noqa: E731
    else:
        metric, step = "train/loss", min(run.last_step for run in runs)
        final = lambda run: final_train_loss(run, step)  # noqa: E731
    by_seed = {seed: _minus(final(run), final(other)) for seed, (run, other) in paired.items()}
    finite = bool(np.isfinite(list(by_seed.values())).all())
    return Difference(metric, step, by_seed, t_interval(list(by_seed.values())) if finite else None)


def common_steps(runs: Sequence[Run], name: str) -> np.ndarray:
    """The steps at which each of the runs has the metric; int64[N]."""
    if not all(name in run.series for run in runs):
        return np.empty(0, np.int64)
    steps = runs[0].series[name].steps
    for run in runs[1:]:
        steps = np.intersect1d(steps, run.series[name].steps)
    return steps


def _minus(a: float, b: float) -> float:
    return a - b if np.isfinite(a) and np.isfinite(b) else float("nan")


def _speed(group: Group, base: Group) -> Speed:
    runs = list(group.runs.values())
    seconds = np.concatenate([run.values("perf/step_seconds") for run in runs])
    speeds = [speed for run in runs if (speed := _tokens_per_second(run)) is not None]
    compiling = [t for run in runs if (t := run.figures.compile_seconds) is not None]
    utilization = np.concatenate([run.values("perf/mfu") for run in runs])
    paired = [
        (speed, other)
        for pair in pairs(group, base).values()
        for speed, other in [map(_tokens_per_second, pair)]
    ]
    ratios = [a / b for a, b in paired if a is not None and b is not None]
    return Speed(
        quartiles(seconds) if len(seconds) else None,
        median_and_range(speeds) if speeds else None,
        median_and_range(ratios) if ratios else None,
        ratio_interval(ratios) if ratios else None,
        median_and_range(compiling) if compiling else None,
        float(np.median(utilization)) if len(utilization) else None,
    )


def _tokens_per_second(run: Run) -> float | None:
    seconds = run.values("perf/step_seconds")
    return run.tokens_per_step / float(np.median(seconds)) if len(seconds) else None


def _memory(group: Group, base: Group) -> Memory:
    compiled, base_compiled = _compiled(group), _compiled(base)
    peak, base_peak = _device_peak(group), _device_peak(base)
    return Memory(
        compiled,
        peak,
        _ratio(compiled.peak_bytes, base_compiled.peak_bytes),
        _ratio(peak, base_peak),
    )


def _compiled(group: Group) -> MemoryFigures:
    """Of the run with the greatest peak."""
    memories = [run.figures.memory for run in group.runs.values()]
    return max(memories, key=lambda memory: memory.peak_bytes or 0)


def _device_peak(group: Group) -> float | None:
    peaks = [
        run.values("perf/peak_memory_bytes").max(initial=0) or None
        if run.figures.device_peak_bytes is None
        else run.figures.device_peak_bytes
        for run in group.runs.values()
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
