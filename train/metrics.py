"""What a run measures, written as `metrics.jsonl` and as TensorBoard event files."""

import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from train.progress import Progress

# Generated from protocol buffers while it is imported, so a type checker sees no names in it.
Event: Any = getattr(event_pb2, "Event")  # noqa: B009
SessionLog: Any = getattr(event_pb2, "SessionLog")  # noqa: B009
Summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009


class MetricsWriter:
    """Appends one JSON object a step, and the same numbers for TensorBoard.

    A number that is not finite is written as Python's `json` does, `NaN` or `Infinity`. Both files
    are written by the caller's thread: tensorboardX's own `SummaryWriter` writes from another, and
    when that one dies of a full disk, the run hangs.
    """

    def __init__(self, workdir: Path, first_step: int):
        """Opens the files; drops what an interrupted run wrote at `first_step` and after."""
        path = workdir / "metrics.jsonl"
        _keep_before(path, first_step)
        self._lines = path.open("a", buffering=1)
        (workdir / "tensorboard").mkdir(exist_ok=True)
        self._events = EventsWriter(str(workdir / "tensorboard" / "events"))
        start = SessionLog(status=SessionLog.START)
        self._events.write_event(Event(step=first_step, session_log=start))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write(json.dumps({"step": step, **values}) + "\n")
        summary = Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])
        self._events.write_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._events.flush()

    def close(self) -> None:
        self._lines.close()
        self._events.close()


class Report(Protocol):
    """What the one process that writes does with the numbers of a step."""

    def step(self, step: int, values: dict[str, float]) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class RunReport:
    """`metrics.jsonl`, TensorBoard and a progress bar."""

    def __init__(self, workdir: Path, num_steps: int, first_step: int):
        self._writer = MetricsWriter(workdir, first_step + 1)
        self._progress = Progress(num_steps, first_step)
        self.say = self._progress.say

    def step(self, step: int, values: dict[str, float]) -> None:
        values = values | memory_metrics()
        self._writer.write(step, values)
        self._progress.show(step, values)

    def close(self) -> None:
        self._progress.close()
        self._writer.close()


def rows_before(workdir: Path, first_step: int) -> list[dict[str, float]]:
    """The newest rows of `metrics.jsonl` from before `first_step`."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    # A kill may have cut the last line.
    rows = (json.loads(line) for line in reversed(lines) if line.endswith("\n"))
    before = itertools.islice((row for row in rows if row["step"] < first_step), _LAST)
    return list(before)[::-1]


_LAST = 1000  # the 64 finite ones that `train.incidents` looks at are among them


def memory_metrics() -> dict[str, float]:
    """`peak_memory` as a metric; nothing where it is not counted."""
    peak = peak_memory()
    return {} if peak is None else {"perf/peak_memory_bytes": peak}


def peak_memory() -> int | None:
    """The most bytes that a device of this process has held; None on a CPU: it counts none."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((peak for stat in stats if (peak := stat.get("peak_bytes_in_use"))), default=None)


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
