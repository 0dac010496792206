"""Which powers of two a step's numbers have, by scope, beside what float16 can hold."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

import jaxamp
from jaxamp.census import Numbers
from train.reports.chart_style import Chart, Theme, chart

NARROW = ("float16", "bfloat16")
EDGES = {-24: "least", -14: "least normal", 16: "overflow"}
"""Of float16, as powers of two."""
ENDS = (-48, 40)
"""Of the picture: the least number that a mask adds has 2^127."""
SHOWN = (0.01, 0.99)
BIAS = 127

Ranges = Mapping[str, Mapping[bool, Numbers]]


def range_charts(diagnosis: jaxamp.Diagnosis) -> list[Chart]:
    """Of the forward and the backward pass."""
    scale = f"times the loss scale 2^{np.log2(diagnosis.loss_scale):g}"
    roles = {"activation": "Activations", "gradient": f"Gradients, {scale}"}
    found = {role: _ranges(diagnosis, role) for role in roles}
    return [_chart(role, roles[role], ranges) for role, ranges in found.items() if ranges]


def _ranges(diagnosis: jaxamp.Diagnosis, role: str) -> Ranges:
    """By scope, those held in 16 bits (True) and in float32 apart; weights' gradients left out."""
    found: dict[str, dict[bool, Numbers]] = {}
    for tensor in diagnosis.tensors:
        if tensor.role == role and tensor.where and tensor.numbers.exponent_range:
            scope, narrow = tensor.scope or "outside of any scope", tensor.dtype in NARROW
            parts = found.setdefault(scope, {})
            parts[narrow] = parts[narrow] + tensor.numbers if narrow in parts else tensor.numbers
    return found


def _chart(role: str, title: str, ranges: Ranges) -> Chart:
    def draw(axes: Axes, theme: Theme) -> None:
        box = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.5}
        for row, (scope, parts) in enumerate(ranges.items()):
            axes.text(ENDS[0], row - 0.22, scope, fontsize=9, va="bottom", bbox=box)
            for narrow, numbers in parts.items():
                _bars(axes, row + 0.2 * narrow, numbers, theme.policies[narrow])
        for edge in EDGES:
            axes.axvline(edge, color=theme.ink, linewidth=0.9, linestyle=(0, (3, 2)))
        for label, k in (("held in float32", 0), ("held in 16 bits", 1)):
            axes.plot([], [], color=theme.policies[k], linewidth=5, label=label)
        axes.set_xlim(*ENDS)
        axes.set_ylim(len(ranges) - 0.5, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xticks([-40, *EDGES, 32], [f"$2^{{{k}}}$" for k in (-40, *EDGES, 32)])
        axes.grid(visible=False, axis="y")

    edges = ", ".join(f"2^{edge} ({name})" for edge, name in EDGES.items())
    caption = (
        "Powers of two of the magnitudes in float32, by scope. Thick: from the 1st to the 99th "
        "percentile of what is not zero, thin: all; what is wider ends at the edge. Dashed: "
        f"float16's {edges}. bfloat16 has the range of float32."
    )
    alt = f"{title} by scope: {'; '.join(map(_ends, ranges, ranges.values()))}."
    return chart(f"ranges-{role}", title, caption, alt, draw, height=1.4 + 0.44 * len(ranges))


def _bars(axes: Axes, at: float, numbers: Numbers, colour: str) -> None:
    low, high = numbers.exponent_range or (0, 0)
    axes.plot([low, high + 1], [at, at], color=colour, linewidth=1.2, solid_capstyle="butt")
    axes.plot(_middle(numbers), [at, at], color=colour, linewidth=5, solid_capstyle="butt")


def _middle(numbers: Numbers) -> list[float]:
    """From the 1st to the 99th percentile of the magnitudes that are not zero."""
    counts = numbers.exponents[:-1].astype(np.float64)
    counts[0] -= numbers.zeros
    shares = np.cumsum(counts) / counts.sum()
    first, last = (int(np.searchsorted(shares, share)) for share in SHOWN)
    return [first - BIAS, last - BIAS + 1]


def _ends(scope: str, parts: Mapping[bool, Numbers]) -> str:
    found = [numbers.exponent_range for numbers in parts.values() if numbers.exponent_range]
    return f"{scope} 2^{min(low for low, _ in found)} to 2^{max(high for _, high in found)}"
