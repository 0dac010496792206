"""Stability of a policy's runs: what was not finite, what was skipped, how a run ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from train.reports.conditions import Group
from train.reports.paired import Spread, median_and_range
from train.reports.runs import Run


@dataclass(frozen=True)
class Stability:
    """Counts over all seeds; None: not recorded.

    Attributes:
        steps: Recorded steps.
        bad_losses, bad_norms: Of them, those with a train loss or gradient norm that is not finite.
        skipped_steps: Updates that were left out.
        skipped_at_start: Of them, those before the first update: how a dynamic loss scale finds
            its place.
        loss_scale: `middle` is the last of the first seed; `low` and `high` are over all steps and
            seeds.
        grad_norm: Median of the finite ones, and their least and greatest.
        ended_badly: By seed, what was not finite at the end of the run and since when.
        unfinished: By seed, the last step of a run that has not done all of its steps.
    """

    steps: int
    bad_losses: int
    bad_norms: int | None
    skipped_steps: int | None
    skipped_at_start: int | None
    loss_scale: Spread | None
    grad_norm: Spread | None
    ended_badly: dict[int, str]
    unfinished: dict[int, int]


def stability(group: Group) -> Stability:
    runs = list(group.runs.values())
    norms = np.concatenate([run.values("train/grad_norm") for run in runs])
    scales = np.concatenate([run.values("amp/loss_scale") for run in runs])
    finite = norms[np.isfinite(norms)]
    last_scale = runs[0].values("amp/loss_scale")[-1:]
    return Stability(
        sum(len(run.values("train/loss")) for run in runs),
        sum(_bad(run.values("train/loss")) for run in runs),
        _bad(norms) if len(norms) else None,
        _total(runs, lambda skipped: int(skipped[-1])),
        _total(runs, _skipped_at_start),
        Spread(float(last_scale[0]), float(scales.min()), float(scales.max()), len(scales))
        if len(last_scale)
        else None,
        median_and_range(finite.tolist()) if len(finite) else None,
        {run.seed: end for run in runs if (end := bad_end(run)) is not None},
        {run.seed: run.last_step for run in runs if not run.finished},
    )


def _bad(values: np.ndarray) -> int:
    return int((~np.isfinite(values)).sum())


def _total(runs: Sequence[Run], count: Callable[[np.ndarray], int]) -> int | None:
    counters = [run.values("amp/skipped_steps") for run in runs]
    known = all(len(skipped) for skipped in counters)
    return sum(count(skipped) for skipped in counters) if known else None


def _skipped_at_start(skipped: np.ndarray) -> int:
    """Steps before the first one that was not skipped, from a counter of the skipped ones."""
    return int((skipped == np.arange(1, len(skipped) + 1)).cumprod().sum())


def bad_end(run: Run) -> str | None:
    """What is not finite at the end of a run, and since which step.

    A gradient norm counts only where the run is unfinished: an overflow at the last step is how a
    dynamic loss scale grows, but a run that training broke off ends with many.
    """
    names = ["train/loss", "eval/loss"] + ([] if run.finished else ["train/grad_norm"])
    for name in names:
        bad = ~np.isfinite(run.values(name))
        if len(bad) and bad[-1]:
            first = len(bad) - int(bad[::-1].cumprod().sum())
            return f"{name} from step {run.series[name].steps[first]} on"
    return None
