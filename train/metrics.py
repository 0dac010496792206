"""What a run measures, written as `metrics.jsonl` and as TensorBoard event files."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends one JSON object a step, and the same numbers for TensorBoard.

    A number that is not finite is written as Python's `json` does, `NaN` or `Infinity`.
    """

    def __init__(self, workdir: Path, first_step: int):
        """Opens the files; drops what an interrupted run wrote at `first_step` and after."""
        path = workdir / "metrics.jsonl"
        _keep_before(path, first_step)
        self._lines = path.open("a", buffering=1)
        # It logs a warning for every NaN, which is a number that we mean to show.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._lines.close()
        self._events.close()


def _keep_before(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        # A kill may have cut the last line.
        if line.endswith("\n") and json.loads(line)["step"] < first_step:
            kept.append(line)
    rest = path.with_suffix(".tmp")
    rest.write_text("".join(kept))
    rest.replace(path)
