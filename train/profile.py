"""`--profile-steps`: a trace of some steps in `workdir/profile`, for XProf or Perfetto."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


class Profiler:
    """Traces the steps of a window, and nothing else.

    The trace is `plugins/profile/TIME/HOST.xplane.pb` for XProf and `HOST.trace.json.gz` for
    Perfetto, with each step under its number. The scopes of the model are in the first one; an op
    of the second one is looked up by its name in `train_step.hlo.txt`, the compiled program, whose
    `op_name` is the scope. A run that is killed inside the window leaves no trace.
    """

    def __init__(self, window: range, workdir: Path, pause: Callable[[], None]):
        """`pause` is told when a step has more to do than to train."""
        self.window = window
        self.folder = workdir / "profile"
        self.pause = pause
        self._tracing = False

    def run(self, step: int, train_step: Any, state: Any, batch: Any) -> Any:
        """`train_step(state, batch)`, the step that has this number, in the trace or outside it."""
        if step in self.window and not self._tracing:
            self._start(train_step, state, batch)
        elif step not in self.window and self._tracing:
            self._stop(state)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            return train_step(state, batch)

    def close(self, state: Any) -> None:
        """Ends a trace whose window is longer than the run."""
        if self._tracing:
            self._stop(state)

    def _start(self, train_step: Any, state: Any, batch: Any) -> None:
        self.pause()
        self.folder.mkdir(exist_ok=True)
        # No second compilation: JAX hands out what it runs.
        program = train_step.lower(state, batch).compile().as_text()
        (self.folder / "train_step.hlo.txt").write_text(program)
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # each Python call would drown the ops
        jax.profiler.start_trace(self.folder, profiler_options=options)
        self._tracing = True

    def _stop(self, state: Any) -> None:
        self.pause()
        self._tracing = False
        try:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
        except RuntimeError as error:  # a full disk, say: no reason to stop training
            first = (str(error) or type(error).__name__).splitlines()[0]
            print(f"warning: the trace was not written to {self.folder}: {first}", file=sys.stderr)
