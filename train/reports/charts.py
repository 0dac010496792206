"""The charts of a comparison, in the order in which they are read."""

import functools
import textwrap
from collections.abc import Sequence, Sized

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from train.reports.chart_style import HATCHES, Chart, Theme, chart, marker, policy_style
from train.reports.curves import Curve, bad_steps, curve, difference_curve, thinned
from train.reports.results import Results
from train.reports.tables import unit_of

DIFFERENCE_POINTS = 40
BAND = "Line: mean over seeds; band: least to greatest seed."


def charts(results: Results, tolerance: float) -> list[Chart]:
    """Those for which something was recorded; those of losses only under equal settings."""
    by_step = [_difference(results, tolerance), *_losses(results)] if results.equal else []
    drawn = [*by_step, _scale(results), _grad_norm(results), _step_time(results), _memory(results)]
    return [one for one in drawn if one is not None]


def _difference(results: Results, tolerance: float) -> Chart | None:
    base, *others = results.policies
    train = {
        k: line
        for k, other in enumerate(others, 1)
        if (line := difference_curve(other, base, "train/loss", DIFFERENCE_POINTS))
    }
    if not train:
        return None
    evals = {k: difference_curve(results.policies[k], base, "eval/loss") for k in train}

    def draw(axes: Axes, theme: Theme) -> None:
        axes.axhspan(-tolerance, tolerance, color=theme.muted, alpha=0.12, linewidth=0)
        axes.axhline(0, color=theme.ink, linewidth=0.9)
        for bound in (-tolerance, tolerance):
            axes.axhline(bound, color=theme.muted, linewidth=0.9, linestyle=(0, (2, 2)))
        for k, line in train.items():
            _line(axes, line, k, theme, _name(results, k))
        for k, line in evals.items():
            if line is not None:
                _points(axes, line, k, theme)
        _label(axes, f"loss - loss of {base.policy} (nats)")

    width = next(iter(train.values())).width
    caption = (
        f"Loss less that of {base.policy}, seed by seed: same data, same initial parameters. "
        f"Line and band: train loss, {_mean_of(width)}, mean and range over seeds; points and "
        f"bars: eval loss, mean and range. Shaded: the tolerance of ±{tolerance:g} nats."
    )
    ends = [
        f"{_name(results, k)} {line.mean[-1]:+.4f} at step {line.steps[-1]:g}"
        for k, line in train.items()
    ]
    alt = f"Difference of train loss to {base.policy} over steps, in nats. {'; '.join(ends)}."
    return chart("loss-difference", f"Loss less that of {base.policy}", caption, alt, draw)


def _losses(results: Results) -> list[Chart | None]:
    return [
        _over_steps(results, "train/loss", "train-loss", "Train loss", "train loss (nats)"),
        _over_steps(results, "eval/loss", "eval-loss", "Eval loss", "eval loss (nats)"),
    ]


def _grad_norm(results: Results) -> Chart | None:
    title = "Gradient norm before the clip"
    return _over_steps(results, "train/grad_norm", "grad-norm", title, "gradient norm", "log")


def _over_steps(
    results: Results, metric: str, name: str, title: str, label: str, scale: str = "linear"
) -> Chart | None:
    lines = {
        k: line for k, result in enumerate(results.policies) if (line := curve(result.runs, metric))
    }
    if not lines:
        return None
    bad = {k: bad_steps(results.policies[k].runs, metric) for k in lines}

    def draw(axes: Axes, theme: Theme) -> None:
        if scale == "log":
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
        for k, line in lines.items():
            _line(axes, line, k, theme, _name(results, k), marks=len(line.steps) <= 30)
            _crosses(axes, bad[k], k, theme)
        _label(axes, label)

    width = max(line.width for line in lines.values())
    caption = f"{BAND} {_mean_of(width).capitalize()}."
    if any(len(steps) for steps in bad.values()):
        caption += " Crosses on top: a seed was not finite; the line has a gap there."
    alt = f"{title} over steps. " + "; ".join(map(functools.partial(_ends, results), lines.items()))
    return chart(name, title, caption, f"{alt}.", draw)


def _ends(results: Results, item: tuple[int, Curve]) -> str:
    k, line = item
    return f"{_name(results, k)} from {line.mean[0]:.4g} to {line.mean[-1]:.4g}"


def _scale(results: Results) -> Chart | None:
    """Every seed by itself: a mean of scales is no scale."""
    scaled = [
        (k, result)
        for k, result in enumerate(results.policies)
        if any((run.values("amp/loss_scale") != 1).any() for run in result.runs)
    ]
    if not scaled:
        return None

    def draw(axes: Axes, theme: Theme) -> None:
        axes.set_yscale("log", base=2)
        for k, result in scaled:
            recorded = [run for run in result.runs if "amp/loss_scale" in run.series]
            for number, run in enumerate(recorded):
                label = None if number else _name(results, k)
                steps, scales = thinned(*run.series["amp/loss_scale"])
                axes.step(steps, scales, where="post", label=label, **policy_style(k, theme))
        _pad_powers_of_two(axes)
        _label(axes, "loss scale")

    alt = "Loss scale over steps, logarithmic. " + "; ".join(
        f"{_name(results, k)} ends at {result.stability.loss_scale.middle:g}"
        for k, result in scaled
        if result.stability.loss_scale is not None
    )
    caption = "A line for each seed; policies that use no loss scale are left out."
    return chart("loss-scale", "Loss scale", caption, f"{alt}.", draw)


def _step_time(results: Results) -> Chart | None:
    timed = [(k, r) for k, r in enumerate(results.policies) if r.speed.step_seconds is not None]
    if not timed:
        return None
    times = {k: [run.values("perf/step_seconds") * 1e3 for run in r.runs] for k, r in timed}

    def draw(axes: Axes, theme: Theme) -> None:
        for k, seeds in times.items():
            colour = policy_style(k, theme)["color"]
            line, thick = ({"color": colour, "linewidth": width} for width in (1.6, 3))
            axes.boxplot(
                np.concatenate(seeds), positions=[k], widths=0.45, whis=(5, 95), showfliers=False,
                orientation="horizontal", manage_ticks=False,
                boxprops=line, whiskerprops=line, capprops=line, medianprops=thick,
            )  # fmt: skip
            medians = [float(np.median(seed)) for seed in seeds if len(seed)]
            axes.plot(medians, [k + 0.36] * len(medians), marker(k), color=colour, markersize=5)
        _rows(axes, results, list(times))
        axes.set_xlim(left=0)
        axes.set_xlabel("time of a step (ms)")

    caption = (
        "Box: quartiles, thick line: median, whiskers: 5 to 95 %, over the steps of all seeds; "
        "marks below: the median of each seed. Without compilation, evaluation and saving."
    )
    medians = [
        f"{r.policy} {r.speed.step_seconds.middle * 1e3:.4g}"
        for _, r in timed
        if r.speed.step_seconds
    ]
    alt = f"Time of a step, median in milliseconds: {'; '.join(medians)}."
    return chart("step-time", "Time of a step", caption, alt, draw, _rows_height(timed))


def _memory(results: Results) -> Chart | None:
    parts = {k: found for k, r in enumerate(results.policies) if (found := r.memory.compiled.parts)}
    if not parts:
        return None
    unit, size = unit_of(max(sum(found.values()) for found in parts.values()))

    def draw(axes: Axes, theme: Theme) -> None:
        rows, left = list(parts), np.zeros(len(parts))
        for number, name in enumerate(next(iter(parts.values()))):
            sizes = np.array([found[name] / size for found in parts.values()])
            axes.barh(
                rows, sizes, 0.5, left, label=name, color=theme.parts[number],
                hatch=HATCHES[number], edgecolor=theme.paper, linewidth=0.8,
            )  # fmt: skip
            left = left + sizes
        for k, total in zip(rows, left, strict=True):
            axes.annotate(
                f"{total:.3g}", (total, k), (5, 0), textcoords="offset points", va="center"
            )
        _rows(axes, results, rows)
        axes.set_xlim(0, left.max() * 1.14)
        axes.set_xlabel(f"memory of a step ({unit})")

    totals = [f"{_name(results, k)} {sum(p.values()) / size:.3g} {unit}" for k, p in parts.items()]
    alt = f"Memory of a compiled step: {'; '.join(totals)}."
    caption = "Peak of one device in one step as the compiler plans it, by what fills it."
    return chart("memory", "Memory of a step", caption, alt, draw, _rows_height(parts))


def _line(
    axes: Axes, line: Curve, index: int, theme: Theme, label: str, *, marks: bool = False
) -> None:
    style = policy_style(index, theme)
    shape = {"marker": marker(index), "markersize": 4.5} if marks else {}
    axes.plot(line.steps, line.mean, label=label, **style, **shape)
    axes.fill_between(line.steps, line.low, line.high, color=style["color"], alpha=0.2, linewidth=0)


def _points(axes: Axes, line: Curve, index: int, theme: Theme) -> None:
    bars = np.stack([line.mean - line.low, line.high - line.mean])
    axes.errorbar(
        line.steps, line.mean, np.maximum(bars, 0), fmt=marker(index), markersize=5.5, capsize=3,
        color=policy_style(index, theme)["color"], elinewidth=1.3,
    )  # fmt: skip


def _crosses(axes: Axes, steps: np.ndarray, index: int, theme: Theme) -> None:
    if not len(steps):
        return
    height = np.full(len(steps), 1.0 - 0.03 * index)
    axes.plot(
        steps, height, "x", color=policy_style(index, theme)["color"], markersize=5,
        transform=axes.get_xaxis_transform(), clip_on=False,
        in_layout=False,
    )  # fmt: skip


def _rows(axes: Axes, results: Results, rows: Sequence[int]) -> None:
    axes.set_yticks(rows, [_wrapped(results.policies[k].policy) for k in rows])
    axes.set_ylim(max(rows) + 0.6, min(rows) - 0.6)
    axes.grid(visible=False, axis="y")


def _rows_height(rows: Sized) -> float:
    return 1.3 + 0.55 * len(rows)


def _label(axes: Axes, label: str) -> None:
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _pad_powers_of_two(axes: Axes) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)


def _name(results: Results, index: int) -> str:
    return results.policies[index].policy


def _mean_of(width: int) -> str:
    return "every value is a point" if width == 1 else f"a point is the mean of {width} steps"


def _wrapped(name: str) -> str:
    return "\n".join(textwrap.wrap(name.replace(",", ", "), 16, break_long_words=False))
