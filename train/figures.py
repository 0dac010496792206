"""What a benchmark found: figures, targets met or missed, measures skipped; as a table or JSON."""

import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from train.chips import NoCompiler
from train.progress import note


class Figure(NamedTuple):
    """One quantity of several variants, `values` in `unit` by the name of the variant."""

    name: str
    unit: str
    values: Mapping[str, float]


class Target(NamedTuple):
    """A value that has to be at most `bound`, or below it where `strict`."""

    name: str
    value: float
    bound: float
    strict: bool = False

    @property
    def passed(self) -> bool:
        return self.value < self.bound if self.strict else self.value <= self.bound


class Report(NamedTuple):
    """All that was found.

    Attributes:
        figures: What was measured.
        targets: What it has to be.
        skipped: One line for each measure that was not taken: its name and why.
    """

    figures: list[Figure]
    targets: list[Target]
    skipped: list[str]


def collect(names: Iterable[str], measures: dict[str, Callable[..., None]], *args: Any) -> Report:
    """The report of the named measures, in the order of the table, each called with a report and
    `args`; one whose compiler is not installed is skipped, with the line that says so."""
    report, names = Report([], [], []), set(names)
    for name, measure in measures.items():
        if name not in names:
            continue
        note(f"measuring {name} ...")
        try:
            measure(report, *args)
        except NoCompiler as error:
            report.skipped.append(f"{name}: {error}")
    return report


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios of values that were measured side by side."""
    return statistics.median(a / b for a, b in zip(values, others, strict=True))


def render(report: Report) -> str:
    """The report as aligned text: the figures, the targets, what was skipped."""
    names = list(dict.fromkeys(name for figure in report.figures for name in figure.values))
    figures = [
        [figure.name, figure.unit, *(_number(figure.values.get(name)) for name in names)]
        for figure in report.figures
    ]
    targets = [
        [
            target.name,
            _number(target.value),
            f"{'<' if target.strict else '<='} {target.bound:g}",
            "pass" if target.passed else "MISS",
        ]
        for target in report.targets
    ]
    parts = []
    if figures:
        parts.append(_table([["figure", "unit", *names], *figures]))
    if targets:
        parts.append(_table([["target", "measured", "wanted", ""], *targets]))
    if report.skipped:
        parts.append("\n".join(f"skipped {line}" for line in report.skipped))
    return "\n\n".join(parts)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = aligned(rows)
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; the first column to the left, the others to the right.

    >>> aligned([["a", "10"], ["bcd", "2"]])
    ['a    10', 'bcd   2']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows]


def _line(row: Iterable[str], widths: Iterable[int]) -> str:
    first, *rest = (
        cell.rjust(width) if k else cell.ljust(width)
        for k, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *rest]).rstrip()


def to_json(report: Report, options: dict[str, Any]) -> dict[str, Any]:
    """The report as JSON's types, with what it was measured with."""
    return {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "options": options,
        "figures": [figure._asdict() for figure in report.figures],
        "targets": [target._asdict() | {"passed": target.passed} for target in report.targets],
        "skipped": report.skipped,
    }
