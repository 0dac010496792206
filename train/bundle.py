"""What is kept of an incident, laid out like a run: `python -m train.diagnose BUNDLE` looks at it.

`python -m train.bundle BUNDLE` writes the diagnosis into it. The trainer starts that as a process
of its own, on the CPU, and does not wait: it must neither hold the training up nor take it down.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.checkpoint import Checkpointer
from train.config import Config
from train.distributed import is_writer
from train.incidents import Incident
from train.machine.versions import versions
from train.mesh import data_part
from train.step import TrainState
from train.workdir import write_config, write_whole

_ROWS = 200  # of metrics.jsonl
_PROCESSOR_SECONDS = 3600  # for a diagnosis


class Moment(NamedTuple):
    """Where a run was when something was seen: the state is after the newest step that was sent.

    `batch` is the one of the incident's step, over all processes.
    """

    config: Config
    state: TrainState
    batch: Any
    data_state: dict
    vocab_size: int
    fingerprint: str


def write_bundle(
    workdir: Path, incident: Incident, action: str, moment: Moment, mesh: Mesh
) -> Path:
    """Writes `incidents/step-NUMBER`, whole or not at all; all processes take part."""
    bundle = _free(workdir / "incidents", f"step-{incident.step:06d}")
    part = bundle.with_name(f".{bundle.name}")
    with _failing_together():
        if is_writer():
            for rest in bundle.parent.glob(".step-*"):  # a kill has left it
                shutil.rmtree(rest)
            part.mkdir(parents=True)
    with _failing_together():
        _write_batch(part, moment, mesh)
        if is_writer():
            _write_words(part, workdir, incident, action, moment)
    config, state, _, data_state, vocab_size, fingerprint = moment
    checkpointer = Checkpointer(part, keep=1, mesh=mesh)
    checkpointer.save(state, config, vocab_size, data_state, fingerprint, None)
    checkpointer.wait()
    checkpointer.close()
    with _failing_together():
        if is_writer():
            part.rename(bundle)
    return bundle


class NotKept(OSError):
    """A bundle that cannot be written, as all processes know."""


@contextlib.contextmanager
def _failing_together() -> Iterator[None]:
    """What one process cannot write is raised in all of them: none is left to wait for it."""
    error = None
    try:
        yield
    except OSError as raised:
        error = raised
    failed = np.atleast_1d(multihost_utils.process_allgather(np.array(error is not None)))
    if error is not None:
        raise NotKept(str(error)) from error
    if failed.any():
        raise NotKept(f"process {failed.argmax()} could not write it")


def _write_batch(part: Path, moment: Moment, mesh: Mesh) -> None:
    """This process's rows; processes that hold the same write the same."""
    tokens, labels = (_own_rows(moment.batch[name]) for name in ("tokens", "labels"))
    rows, _ = data_part(mesh, moment.config.batch_size)
    np.savez(part / f"batch-{rows}.npz", tokens=tokens, labels=labels)


def _write_words(
    part: Path, workdir: Path, incident: Incident, action: str, moment: Moment
) -> None:
    """The settings, the newest metrics, and what was seen where."""
    write_config(moment.config, part)
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (part / "metrics.jsonl").write_text("".join(lines[-_ROWS:]))
    about = incident._asdict() | {
        "action": action,
        "policy": moment.config.policy,
        "checkpoint": int(moment.state.step),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "versions": versions(),
        "command": " ".join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_whole(part / "incident.json", json.dumps(about, indent=2))


def _free(folder: Path, name: str) -> Path:
    """After a rollback a step may come, and go wrong, again."""
    names = [name, *(f"{name}-{k}" for k in range(2, 100))]
    return next(folder / name for name in names if not (folder / name).exists())


def _own_rows(array: Any) -> np.ndarray:
    """This process's rows of a global batch; copies of them are on several devices."""
    if not isinstance(array, jax.Array):
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def begin_diagnosis(bundle: Path) -> None:
    """Starts to write `diagnosis.txt`, `.json` and `.html` into a bundle; it outlives the run."""
    with (bundle / "diagnosis.txt").open("w") as text:
        subprocess.Popen(
            [sys.executable, "-m", "train.bundle", str(bundle)],
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )


def main(args: Sequence[str]) -> int:
    """`python -m train.bundle BUNDLE`."""
    from train import diagnose  # it imports the trainer, which imports this

    bundle = Path(args[0])
    _yield_to_others()
    outputs = {"--json": bundle / "diagnosis.json", "--report": bundle / "diagnosis.html"}
    return diagnose.main([str(bundle), *(f"{flag}={path}" for flag, path in outputs.items())])


def _yield_to_others() -> None:
    """Last in line for a processor, first to go where memory runs out, and not for ever."""
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_SECONDS, _PROCESSOR_SECONDS))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
