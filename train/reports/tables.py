"""The tables of a report, as text: results by policy, how the runs were made, what is measured."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from train.reports.conditions import shared_settings
from train.reports.paired import Spread
from train.reports.results import PolicyResult, Results
from train.reports.runs import Run
from train.reports.verdict import Verdict, decimals, device, signless_zero

MISSING = "not recorded"


class Table(NamedTuple):
    """`rows` by group: the name of a measure, and its value for each column."""

    columns: list[str]
    groups: dict[str, list[list[str]]]


def results_table(results: Results, verdicts: list[Verdict], tolerance: float) -> Table:
    """A column for each policy, the base first."""
    outcomes = {verdict.policy: verdict.outcome for verdict in verdicts}
    columns = [_column(result, results, outcomes, tolerance) for result in results.policies]
    groups = {
        group: [[name, *(column[group][name] for column in columns)] for name in rows]
        for group, rows in columns[0].items()
    }
    return Table([result.policy for result in results.policies], groups)


def _column(
    result: PolicyResult, results: Results, outcomes: dict[str, Any], tolerance: float
) -> dict[str, dict[str, str]]:
    seeds = {
        "seeds": ", ".join(map(str, result.group.runs)),
        "batch size": str(result.group.first.config.batch_size),
        "steps": _steps(result),
    }
    return {
        "Runs": seeds,
        "Loss (nats a token)": _loss(result, results, outcomes, tolerance),
        "Speed": _speed(result, is_base=result is results.base),
        "Memory of one device": _memory(result, is_base=result is results.base),
        "Stability": _stability(result),
    }


def _steps(result: PolicyResult) -> str:
    num_steps = result.group.first.config.num_steps
    stopped = result.stability.unfinished
    where = ", ".join(f"seed {seed} at {step}" for seed, step in stopped.items())
    return f"{num_steps}" + (f" (stopped: {where})" if stopped else "")


def _loss(
    result: PolicyResult, results: Results, outcomes: dict[str, Any], tolerance: float
) -> dict[str, str]:
    difference, places = result.difference, decimals(tolerance)
    interval = difference.interval if difference else None
    number = lambda x: signless_zero(x, places)  # noqa: E731
    if result is results.base:
        mean = bounds = found = "base"
    else:
        mean = "not compared" if interval is None else number(interval.mean)
        bounds, found = "none", outcomes[result.policy]
    if interval is not None and interval.low is not None and interval.high is not None:
        bounds = f"{number(interval.low)} to {number(interval.high)}"
    return {
        "final eval loss": _ranged(result.eval_loss, lambda x: f"{x:.4f}"),
        "final train loss": _ranged(result.train_loss, lambda x: f"{x:.4f}"),
        "difference to base": mean,
        "95 % interval": bounds,
        f"verdict at {tolerance:g}": found,
    }


def _speed(result: PolicyResult, is_base: bool) -> dict[str, str]:
    speed, interval = result.speed, result.speed.to_base_interval
    times = lambda x: f"{x:.2f}"  # noqa: E731
    bounds = "none"
    if interval is not None and interval.low is not None and interval.high is not None:
        bounds = f"{times(interval.low)} to {times(interval.high)}"
    return {
        "step time, quartiles (ms)": _ranged(speed.step_seconds, lambda x: f"{x * 1e3:.4g}"),
        "tokens a second": _ranged(speed.tokens_per_second, lambda x: f"{x:,.0f}"),
        "speed to base": "base" if is_base and speed.to_base else _ranged(speed.to_base, times),
        "its 95 % interval": "base" if is_base and speed.to_base else bounds,
        "compilation (s)": _ranged(speed.compile_seconds, lambda x: f"{x:.1f}"),
        "MFU": _known(speed.mfu, lambda x: f"{x:.3f}"),
        "FLOPs a step, compiled": _known(result.group.first.figures.flops, lambda x: f"{x:.4g}"),
        "bytes accessed a step, compiled": _known(
            result.group.first.figures.bytes_accessed, readable
        ),
    }


def _memory(result: PolicyResult, is_base: bool) -> dict[str, str]:
    memory, compiled = result.memory, result.memory.compiled
    to_base = lambda x: "base" if is_base and x else _known(x, lambda x: f"{x:.2f}")  # noqa: E731
    return {
        "compiled peak": _known(compiled.peak_bytes, readable),
        "compiled peak to base": to_base(memory.to_base),
        "compiled: params": _known(compiled.params_bytes, readable),
        "compiled: moments": _known(compiled.moments_bytes, readable),
        "compiled: activations": _known(compiled.activations_bytes, readable),
        "compiled: other": _known(compiled.other_bytes, readable),
        "device peak": _known(memory.device_peak_bytes, readable),
        "device peak to base": to_base(memory.device_to_base),
        "largest batch size": _known(result.group.first.figures.largest_batch_size, str),
    }


def _stability(result: PolicyResult) -> dict[str, str]:
    found = result.stability
    scale = found.loss_scale
    return {
        "losses not finite": f"{found.bad_losses} of {found.steps} steps",
        "gradient norms not finite": _known(found.bad_norms, lambda n: f"{n} of {found.steps}"),
        "skipped steps": _known(found.skipped_steps, str),
        "of them before the first update": _known(found.skipped_at_start, str),
        "last loss scale": "none"
        if scale and scale.low == scale.high == 1
        else _ranged(scale, lambda x: f"{x:g}"),
        "gradient norm, median": _ranged(found.grad_norm, lambda x: f"{x:.3g}"),
        "ended badly": "; ".join(f"seed {s}: {what}" for s, what in found.ended_badly.items())
        or "no",
    }


def _known(value: Any, form: Callable[[Any], str]) -> str:
    return MISSING if value is None else form(value)


def _ranged(spread: Spread | None, form: Callable[[float], str]) -> str:
    if spread is None:
        return MISSING
    if not math.isfinite(spread.middle):
        return "not finite"
    middle, low, high = form(spread.middle), form(spread.low), form(spread.high)
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def readable(size: float) -> str:
    """Bytes in the unit in which they are read best.

    >>> readable(3 * 2**29), readable(100)
    ('1.50 GiB', '100 bytes')
    """
    unit, power = unit_of(size)
    return f"{size:.0f} bytes" if power == 1 else f"{size / power:.2f} {unit}"


def unit_of(size: float) -> tuple[str, int]:
    """The binary unit in which a number of bytes is read best, and its bytes.

    >>> unit_of(3e9)
    ('GiB', 1073741824)
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 2**power:
            return unit, 2**power
    return "bytes", 1


def runs_table(results: Results) -> list[dict[str, str]]:
    """How the runs were made; those that were made alike together."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in (run for result in results.policies for run in result.runs):
        groups.setdefault(tuple(_made(run).values()), []).append(run)
    return [{"runs": _names(runs)} | _made(runs[0]) for runs in groups.values()]


def _made(run: Run) -> dict[str, str]:
    figures = run.figures
    return {
        "directory": str(run.path.parent),
        "device": device(run) if figures.device or figures.device_kind else MISSING,
        "commit": figures.commit or MISSING,
        "versions": ", ".join(f"{n} {v}" for n, v in figures.versions.items()) or MISSING,
        "command": figures.command or MISSING,
    }


def _names(runs: list[Run]) -> str:
    return ", ".join(f"{run.path.name} ({run.policy}, seed {run.seed})" for run in runs)


def conditions(results: Results) -> str:
    """What the runs have in common, in one line."""
    config = results.base.group.first.config
    model, data = config.model, config.data
    batches = dict.fromkeys(str(r.group.first.config.batch_size) for r in results.policies)
    kinds = {device(run) for result in results.policies for run in result.runs}
    return (
        f"{model.n_layers} layers, d_model {model.d_model}, {data.seq_len} tokens a sequence, "
        f"batch {' / '.join(batches)}, {config.num_steps} steps, "
        f"on {' / '.join(sorted(kinds))}"
    )


def settings_text(results: Results) -> str:
    """The settings that all runs share, one a line."""
    shared = shared_settings([result.group for result in results.policies])
    return "\n".join(f"{name} = {value}" for name, value in shared.items())


def notes(results: Results) -> list[str]:
    """What a reader should know before the numbers are believed."""
    runs = [run for result in results.policies for run in result.runs]
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.figures.versions):
        values = {run.figures.versions.get(name, MISSING) for run in runs}
        if len(values) > 1:
            found.append(f"The runs were made with different versions of {name}: "
                         f"{', '.join(sorted(values))}.")  # fmt: skip
    commits = {run.figures.commit or MISSING for run in runs}
    if len(commits) > 1:
        found.append(f"The runs were made from different commits: {', '.join(sorted(commits))}.")
    for result in results.policies[1:]:
        odd = set(result.group.runs) ^ set(results.base.group.runs)
        if odd and results.equal:
            numbers = ", ".join(map(str, sorted(odd)))
            found.append(f"Seeds without a pair in {result.policy}'s differences: {numbers}.")
    if not all(result.eval_loss for result in results.policies):
        found.append("A run has no eval loss; where a pair has none, train losses are compared.")
    return found


DEFINITIONS = {
    "final eval loss": "the last eval/loss of a run, in nats a token; mean over seeds, and range",
    "final train loss": "mean of train/loss over the last tenth of a run's steps; mean over seeds, "
    "and range",
    "difference to base": "final loss less that of the base's run of the same seed, both at the "
    "last step that all these runs have evaluated (for train losses: reached); mean over seeds",
    "95 % interval": "Student's t over the paired differences, mean +- t(0.975; n - 1) s / "
    "sqrt(n); none from one seed. Each policy's interval stands alone: it is not widened for the "
    "number of policies",
    "verdict": "within: the whole interval lies inside +-tolerance; beyond: the whole interval "
    "lies outside; undecided: it straddles a bound, or one seed gives none; diverged: a run ends "
    "with a loss that is not finite, or breaks off at such a gradient norm. The tolerance means "
    "something only if it was set before the runs were looked at",
    "step time": "perf/step_seconds, from the end of one step to the end of the next; steps with "
    "compilation, evaluation or saving in them have none. Median and quartiles over the steps of "
    "all seeds",
    "tokens a second, speed to base": "batch size x sequence length / median step time of a run; "
    "median over seeds, and range. To base: the ratio of two runs of one seed; its interval is "
    "Student's over the logarithms, and where it covers 1 no difference was seen",
    "compilation": "seconds to lower and compile the train step; in no step time",
    "compiled peak": "most bytes that the compiled step holds at once on one device, its state "
    "included, as the compiler says",
    "device peak": "most bytes that the runtime has counted on a device (not on a CPU)",
    "skipped steps": "updates that were left out since the gradients were not finite. With a "
    "dynamic loss scale those before the first update are how the scale finds its place",
    "loss scale": "factor on the loss in the backward pass: the last one of the first seed, and "
    "the range over all steps and seeds",
    "gradient norm": "global norm of the unscaled float32 gradients, before the clip; median and "
    "range of the finite ones",
}
