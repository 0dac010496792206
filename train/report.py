"""The report of finished or half-finished runs: `python -m train.report RUN...`.

Policies side by side, each with several seeds: what 16 bits cost in loss, and what they gave in
speed and memory, with no claim that the runs do not carry.
"""

import dataclasses
import json
import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from train.exits import exit_code, leave
from train.parse import parse_flags
from train.reports.conditions import BASE, Comparison, shared_settings
from train.reports.results import PolicyResult, Results, results
from train.reports.runs import ReportError, Run
from train.reports.verdict import Verdict, verdicts

if TYPE_CHECKING:
    from train.reports.pages import Section

PROG = "python -m train.report"
ABOUT = f"""Report training runs: a page (report.html), Markdown, JSON and charts. The runs are
grouped by policy and compared with {BASE}, or with the first policy where there is none. They must
be equal in all but policy and seed."""
TITLE = "Precision policies compared"
OWN = b"train.report"


@dataclasses.dataclass(frozen=True)
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories that train.run wrote."""
    output: Path = Path("report")
    """Directory that the report is written to."""
    tolerance: float = 0.02
    """Difference of final loss, in nats, that does not matter; set it before looking."""
    title: str = TITLE
    """What the page is called."""


def main(args: Sequence[str] | None = None) -> int:
    """Writes the report; the exit code is 2 for bad input."""
    given = sys.argv[1:] if args is None else args
    return exit_code(lambda: _report(given), "--output", "make room, or name another --output")


def _report(given: Sequence[str]) -> int:
    options = parse_flags(Options, given, PROG, ABOUT)
    if not options.runs:
        raise ReportError("no runs to report; give directories that train.run wrote")
    comparison = Comparison("Equal conditions", options.runs)
    command = shlex.join(["python", "-m", "train.report", *given])
    for verdict in write_report(
        [comparison], options.output, command, options.tolerance, options.title
    ):
        print(verdict.sentence)
    print(f"wrote {options.output / 'report.html'}")
    return 0


def write_report(
    comparisons: Sequence[Comparison],
    directory: Path,
    command: str,
    tolerance: float,
    title: str = TITLE,
) -> list[Verdict]:
    """Writes report.html, report.md, report.json and the charts; what they say of each policy.

    Everything is made before anything is written.

    Args:
        comparisons: Runs under equal conditions, one experiment each.
        directory: Made where it is not there; files of an older report in it are replaced.
        command: How the report was asked for, to be shown in it.
        tolerance: In nats, set before the runs were looked at.
        title: Of the page.

    Raises:
        ReportError: runs that cannot be compared, or a file in `directory` that is no report's.
    """
    from train.reports.charts import charts  # matplotlib: for those who want charts
    from train.reports.pages import Section, html, markdown

    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ReportError(f"tolerance {tolerance:g} must be a number of nats above 0")
    _check_directory(directory)
    found = [results(comparison) for comparison in comparisons]
    sections = [
        Section(one, verdicts(one, tolerance), charts(one, tolerance), _prefix(one, number))
        for number, one in enumerate(found)
    ]
    files = {
        "report.html": html(sections, title, command, tolerance).encode(),
        "report.md": markdown(sections, title, command, tolerance).encode(),
        "report.json": _json(sections, command, tolerance).encode(),
    }
    for section in sections:
        files |= section.files
    _write(directory, files)
    return [verdict for section in sections for verdict in section.verdicts]


def _prefix(one: Results, number: int) -> str:
    """Of the names of a comparison's charts; none for the first."""
    slug = re.sub(r"[^a-z0-9]+", "-", one.title.lower()).strip("-")
    return f"{number + 1}-{slug}-" if number else ""


def _json(sections: Sequence["Section"], command: str, tolerance: float) -> str:
    found = {
        "generator": OWN.decode(),
        "command": command,
        "tolerance": tolerance,
        "comparisons": [
            {
                "title": section.results.title,
                "base": section.results.base.policy,
                "equal": section.results.equal,
                "settings": shared_settings([r.group for r in section.results.policies]),
                "verdicts": [verdict._asdict() for verdict in section.verdicts],
                "policies": [_policy_json(result) for result in section.results.policies],
            }
            for section in sections
        ],
    }
    return json.dumps(found, indent=2) + "\n"


def _policy_json(result: PolicyResult) -> dict[str, Any]:
    parts = {
        "policy": result.policy,
        "runs": [_run_json(run) for run in result.runs],
        "eval_loss": result.eval_loss,
        "train_loss": result.train_loss,
        "difference": result.difference,
        "speed": result.speed,
        "memory": result.memory,
        "stability": result.stability,
    }
    return {name: _plain(part) for name, part in parts.items()}


def _run_json(run: Run) -> dict[str, Any]:
    return {
        "directory": str(run.path),
        "policy": run.config.policy,
        "seed": run.seed,
        "last_step": run.last_step,
        "figures": run.figures.model_dump(),
    }


def _plain(value: Any) -> Any:
    """As JSON's types, with the names of fields."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return value


def _check_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ReportError(f"--output {directory}: is a file; name a directory")
    for name in ("report.html", "report.md", "report.json"):
        _check_own(directory / name)


def _check_own(path: Path) -> None:
    if path.is_dir() or (path.exists() and OWN not in path.read_bytes()):
        raise ReportError(f"{path} was not written by train.report; name another --output")


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    for name in files:
        _check_own(directory / name)
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.png"):  # of an older report, which may have had more charts
        if old.name not in files and OWN in old.read_bytes():
            old.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)


if __name__ == "__main__":
    leave(main())
