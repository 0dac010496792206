"""How charts look: colours that colour-blind people can tell apart, light and dark, as SVG and PNG.

A chart is drawn about as wide as a phone shows it, so that its text stays as large as the page's.
"""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH, HEIGHT, LEGEND_ROW = 4.8, 3.1, 0.23
"""Inches; the legend's rows come on top of the height, so that they do not squeeze the plot."""
GENERATOR = "train.report"


class Theme(NamedTuple):
    """Colours: of text and the base, of the page, of lines, of other policies (Okabe and Ito's)."""

    ink: str
    paper: str
    muted: str
    grid: str
    policies: tuple[str, ...]
    parts: tuple[str, ...]


class Chart(NamedTuple):
    """One chart, drawn; `name` is its file's, `alt` what it shows, in words."""

    name: str
    caption: str
    alt: str
    light_svg: bytes
    dark_svg: bytes
    png: bytes
    inches: tuple[float, float]


Draw = Callable[[Axes, Theme], None]

LIGHT = Theme(
    ink="#1a1c1f",
    paper="#ffffff",
    muted="#5b6168",
    grid="#e3e5e8",
    policies=("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    parts=("#0072B2", "#56B4E9", "#E69F00", "#999999"),
)
DARK = Theme(
    ink="#e8eaed",
    paper="#1b1e22",
    muted="#a3a9b1",
    grid="#33383e",
    policies=("#56B4E9", "#E69F00", "#2cc79b", "#e293c0", "#F0E442", "#ff8a3d"),
    parts=("#3d9bd1", "#9bd3f5", "#E69F00", "#8a8f96"),
)

DASHES: list[Any] = ["-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 2))]
MARKERS = "osD^vPX"
HATCHES = ("", "////", "....", "xx")


def policy_style(index: int, theme: Theme) -> dict[str, Any]:
    """Of the policy with this index; the base, 0, has the colour of text."""
    colour = theme.ink if index == 0 else theme.policies[(index - 1) % len(theme.policies)]
    return {"color": colour, "linestyle": DASHES[index % len(DASHES)]}


def marker(index: int) -> str:
    return MARKERS[index % len(MARKERS)]


def chart(
    name: str, title: str, caption: str, alt: str, draw: Draw, height: float = HEIGHT
) -> Chart:
    """Draws for light and dark pages, and for a file; the same input gives the same bytes."""
    (light, inches), (dark, _), (png, _) = (
        _render(title, draw, height, theme, form)
        for theme, form in ((LIGHT, "svg"), (DARK, "svg"), (LIGHT, "png"))
    )
    return Chart(name, caption, alt, light, dark, png, inches)


def _render(
    title: str, draw: Draw, height: float, theme: Theme, form: str
) -> tuple[bytes, tuple[float, float]]:
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's own style is for the user's charts
        for name, value in _settings(theme).items():
            mpl.rcParams[name] = value
        figure = Figure(layout="constrained")
        figure.suptitle(title, x=0.02, ha="left", fontsize=12.5, fontweight="bold")
        axes = figure.add_subplot()
        draw(axes, theme)
        inches = WIDTH, round(height + _legend(figure, axes) * LEGEND_ROW, 2)
        figure.set_size_inches(inches)
        buffer = io.BytesIO()
        metadata = (
            {"Date": None, "Creator": GENERATOR} if form == "svg" else {"Software": GENERATOR}
        )
        figure.savefig(buffer, format=form, metadata=metadata, transparent=form == "svg", dpi=180)
    return buffer.getvalue(), inches


def _legend(figure: Figure, axes: Axes) -> int:
    """Draws it under the plot; how many rows it has."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return 0
    longest = max(map(len, labels))
    columns = min(len(labels), 1 if longest > 24 else 2 if longest > 9 else 4)
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    return -(-len(labels) // columns)


def _settings(theme: Theme) -> dict[Any, Any]:
    muted = ("axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return {
        "svg.hashsalt": GENERATOR,
        "svg.fonttype": "path",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "lines.linewidth": 1.6,
        "hatch.linewidth": 0.7,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "legend.fontsize": 10.5,
        "legend.columnspacing": 1.2,
        "text.color": theme.ink,
        **dict.fromkeys(muted, theme.muted),
    }
