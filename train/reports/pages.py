"""A report as a page and as Markdown: one file each, which need nothing else to be read."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from train.reports import tables
from train.reports.chart_style import GENERATOR, Chart
from train.reports.results import Results
from train.reports.verdict import Verdict

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Section:
    """One comparison, ready to be shown; `prefix` is that of its charts' files."""

    results: Results
    verdicts: list[Verdict]
    charts: list[Chart]
    prefix: str

    @property
    def files(self) -> dict[str, bytes]:
        return {f"{self.prefix}{chart.name}.png": chart.png for chart in self.charts}


def html(sections: Sequence[Section], title: str, command: str, tolerance: float) -> str:
    """The whole page; pictures lie in it."""
    return render(
        "report.html.jinja",
        sections=sections,
        title=title,
        command=command,
        tolerance=tolerance,
        generator=GENERATOR,
        tables=tables,
    )


def render(template: str, **values: Any) -> str:
    """A page of this directory, with the style that all of them have."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["data_uri"] = _data_uri
    text = (HERE / template).read_text(encoding="utf-8")
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return environment.from_string(text).render(style=style, **values)


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def markdown(sections: Sequence[Section], title: str, command: str, tolerance: float) -> str:
    """The verdict first, then tables, charts by their files, and how the runs were made."""
    lines = [verdict.sentence + "  " for section in sections for verdict in section.verdicts]
    lines += ["", f"# {title}", "", f"<!-- {GENERATOR} -->", ""]
    for section in sections:
        lines += _section(section, tolerance)
    lines += ["## What is measured", ""]
    lines += [f"- **{name}**: {text}." for name, text in tables.DEFINITIONS.items()]
    return "\n".join([*lines, "", "Made by", "", f"    {command}", ""])


def _section(section: Section, tolerance: float) -> list[str]:
    results = section.results
    table = tables.results_table(results, section.verdicts, tolerance)
    made = tables.runs_table(results)
    rows = [row for group in table.groups.values() for row in group]
    return [
        f"## {_cell(results.title)}",
        "",
        tables.conditions(results) + ".",
        "",
        *(f"Note: {note}" for note in tables.notes(results)),
        "",
        *_table(["", *table.columns], rows),
        "",
        *(f"![{c.alt}]({section.prefix}{c.name}.png)\n" for c in section.charts),
        *_table(list(made[0]), [list(row.values()) for row in made]),
        "",
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
