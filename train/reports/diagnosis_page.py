"""What `train.diagnose` found, as one file that needs nothing else to be read."""

import jaxamp
from jaxamp.diagnosis import range_rows
from train.diagnose import Diagnosed
from train.reports.pages import render
from train.reports.range_chart import range_charts


def html(result: Diagnosed, command: str) -> str:
    """The whole page; pictures lie in it."""
    diagnosis = result.diagnosis
    return render(
        "diagnosis.html.jinja",
        title=f"Diagnosis of step {result.case.step}",
        result=result,
        found=result.verdict,
        charts=range_charts(diagnosis) if diagnosis else [],
        tables=_tables(diagnosis) if diagnosis else {},
        command=command,
    )


def _tables(diagnosis: jaxamp.Diagnosis) -> dict[str, list[tuple[str, ...]]]:
    """By heading; the first row is that of the columns."""
    title = "Range by scope, and shares that a cast makes zero/subnormal/overflow"
    found = {title: _ranges(diagnosis)}
    if diagnosis.contributions:
        rows = [
            (one.scope, f"{one.error_without:.3g}", f"{one.removed:.0%}", f"{one.loss:.6g}")
            for one in diagnosis.contributions
        ]
        head = ("held in float32", "gradient error left", "takes away", "loss")
        found[f"What makes the gradient error of {diagnosis.error:.3g}"] = [head, *rows]
    if diagnosis.frozen:
        rows = [(one.path, one.dtype, f"{one.share:.1%}") for one in diagnosis.frozen]
        found["Weights that do not move"] = [("weight", "dtype", "updates lost to rounding"), *rows]
    return found


def _ranges(diagnosis: jaxamp.Diagnosis) -> list[tuple[str, ...]]:
    scopes = diagnosis.by_scope()
    head = ("range of", "scope", "held in", "2^min..2^max", "zero", *scopes[0].numbers.casts)
    short = lambda dtypes: dtypes.replace("float", "f").replace("|", ", ")  # noqa: E731
    rows = [(role, scope, short(held), *more) for role, scope, held, *more in range_rows(scopes)]
    return [head, *rows]
