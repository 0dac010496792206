"""Checkpoints on orbax: asynchronous, atomic, verified, the newest few and the best one kept.

A checkpoint holds the train state, and beside it the position in the data, the config and the
evaluation loss: a run that goes on has to know which one was the best. orbax renames a
checkpoint into place when it is whole, so one that was cut short is not there. What orbax does not
see is a bit that flipped on the disk: most of them come back as a wrong number without an error.
So the sum of all bits is written beside the state and compared after reading.
"""

import contextlib
import dataclasses
import gc
import json
import logging
import shutil
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import jaxamp
from train.checksum import checksum
from train.config import Config, MeshConfig
from train.distributed import is_writer, others_failed
from train.keep import NewestAndBest
from train.mesh import make_mesh, placed
from train.parse import load_json
from train.resume import CheckpointError, Saved, convert, refuse_other_run
from train.step import TrainState, structure

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Restored:
    """What comes back from the newest whole checkpoint.

    Attributes:
        state: As the current config wants it.
        data_state: Of the iterator over the data.
        notes: Lines for the user: what was skipped, what changed with the precision.
    """

    state: TrainState
    data_state: dict
    notes: list[str]


class Checkpointer:
    """Writes and reads the checkpoints under `workdir/checkpoints`."""

    def __init__(self, workdir: Path, keep: int | None, mesh: Mesh | None = None):
        """Keeps the newest `keep` and the best one; None: it only reads, and deletes nothing.

        With a mesh the state comes back as it lies there, else on one device.
        """
        _hush_orbax()
        self._mesh = mesh
        self._directory = (workdir / "checkpoints").resolve()
        self._eval_losses: dict[int, float | None] = {}
        if keep is None:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            kept = NewestAndBest(keep, self._eval_losses)
            options = ocp.CheckpointManagerOptions(preservation_policy=kept)
        self._manager = ocp.CheckpointManager(self._directory, options=options)
        if keep is not None:
            self._eval_losses |= {step: self._eval_loss(step) for step in self._manager.all_steps()}

    def save(
        self,
        state: TrainState,
        config: Config,
        vocab_size: int,
        data_state: dict,
        fingerprint: str,
        eval_loss: float | None,
    ) -> None:
        """Starts to write; the state may be donated as soon as this returns."""
        step = int(state.step)
        meta = {
            "format": FORMAT,
            "config": config.model_dump_json(),
            "vocab_size": vocab_size,
            "data_state": data_state,
            "fingerprint": fingerprint,
            "eval_loss": eval_loss,
            "checksum": int(checksum(state)),
        }
        text = json.dumps(meta)
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave({"text": text, "crc32": zlib.crc32(text.encode())}),
        )
        self._eval_losses[step] = eval_loss
        with self._one_line():
            self._manager.save(step, args=items)

    def check(self) -> None:
        """Raises what went wrong in the background since the last save."""
        with self._one_line():
            self._manager.check_for_errors()

    def wait(self) -> None:
        """Until the last save is on the disk."""
        with self._one_line():
            self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints on the disk."""
        return sorted(self._manager.all_steps())

    def set_aside_after(self, step: int) -> None:
        """Moves later checkpoints into `rolled-back`: training goes back to this one."""
        self._set_aside([later for later in self.steps if later > step], "rolled-back")

    def restore(self, config: Config, vocab_size: int, fingerprint: str) -> Restored | None:
        """The newest whole checkpoint, or None where there is none.

        Raises:
            CheckpointError: it is of another model or other data, or all of them are damaged.
        """
        self._remove_unfinished()
        steps, notes = sorted(self._manager.all_steps(), reverse=True), []
        for step in steps:
            try:
                meta, state = self._read(step)
            except Damaged as damage:
                notes.append(f"checkpoint {step} is damaged ({damage}) and set aside")
                continue
            saved = _config_of(step, meta)
            refuse_other_run(step, saved, meta, config, vocab_size, fingerprint)
            self._set_aside([later for later in steps if later > step], "damaged")
            state, changes = convert(state, saved, config)
            return Restored(state, meta["data_state"], notes + changes)
        if steps:
            raise CheckpointError(f"{self._directory}: every checkpoint is damaged; {notes[0]}")
        return None

    def load(self) -> Saved:
        """The newest whole checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            with contextlib.suppress(Damaged):
                meta, state = self._read(step)
                return Saved(step, _config_of(step, meta), meta, state)
        raise CheckpointError(f"{self._directory}: no whole checkpoint")

    def _read_meta(self, step: int) -> dict:
        with _as_damage():
            items = ocp.args.Composite(meta=ocp.args.JsonRestore())
            written = self._manager.restore(step, args=items)["meta"]
            if zlib.crc32(written["text"].encode()) != written["crc32"]:
                raise Damaged("its description is not what was written")
            return json.loads(written["text"])

    def _eval_loss(self, step: int) -> float | None:
        try:
            return self._read_meta(step).get("eval_loss")
        except Damaged:
            return None

    def _read(self, step: int) -> tuple[dict, TrainState]:
        meta = self._read_meta(step)
        target = abstract_state(_config_of(step, meta), meta["vocab_size"], self._mesh)
        with _as_damage():
            items = ocp.args.Composite(state=ocp.args.StandardRestore(target))
            state = self._manager.restore(step, args=items)["state"]
        if int(checksum(state)) != meta["checksum"]:
            raise Damaged("its numbers are not those that were written")
        return meta, state

    def _remove_unfinished(self) -> None:
        """What saves that were cut short have left, which nobody would read or delete."""
        for path in self._directory.glob("*.orbax-checkpoint-tmp*") if is_writer() else []:
            shutil.rmtree(path, ignore_errors=True)

    def _set_aside(self, steps: list[int], folder: str) -> None:
        aside = self._directory.parent / folder
        for step in steps if is_writer() else []:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(step), ignore_errors=True)
            (self._directory / str(step)).rename(aside / str(step))
        if steps:
            multihost_utils.sync_global_devices(f"{folder} checkpoints are set aside")
            self._manager.reload()

    @contextlib.contextmanager
    def _one_line(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if others_failed(error):
                raise
            full = "RESOURCE_EXHAUSTED" in str(error) or "No space left" in str(error)
            newest = self._newest_on_disk()
            raise CheckpointError(
                f"cannot write a checkpoint to {self._directory}: "
                f"{'the disk is full' if full else _first_line(error)}; the newest whole one is "
                f"{'none' if newest is None else f'of step {newest}'}; "
                "make room or mend the directory, then go on with --resume"
            ) from error

    def _newest_on_disk(self) -> int | None:
        names = [path.name for path in self._directory.glob("*") if path.name.isdigit()]
        return max(map(int, names), default=None)


class Damaged(Exception):
    """This checkpoint cannot be read; there may be another."""


@contextlib.contextmanager
def _as_damage() -> Iterator[None]:
    """Turns any error of reading into `Damaged`, and keeps orbax's other voices quiet."""
    message = None
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    except Exception as error:
        message = _first_line(error)
    finally:
        if message is not None:
            gc.collect()  # the coroutines that died with it speak up now, not later
        sys.unraisablehook = hook
    if message is not None:
        raise Damaged(message)


def _hush_orbax() -> None:
    """What goes wrong is said once, by our exceptions, and not by every thread of orbax as well."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if sys.unraisablehook is not _without_closed_loops:
        sys.unraisablehook = _without_closed_loops


def _without_closed_loops(unraisable: Any) -> None:
    # Reads and writes that fail answer to an event loop that their failure has closed.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def abstract_state(config: Config, vocab_size: int, mesh: Mesh | None = None) -> TrainState:
    """Shapes, dtypes and shardings of the train state of a config."""
    policy = jaxamp.get_policy(config.policy)
    _, shapes = structure(config, vocab_size, policy)
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1]) if mesh is None else mesh
    return placed(mesh, shapes)


def _config_of(step: int, meta: dict) -> Config:
    return load_json(meta["config"], f"the config in checkpoint {step}")


def load(workdir: Path) -> Saved:
    """The newest whole checkpoint of a run, on one device; nothing on the disk is changed.

    Raises:
        CheckpointError: no run is there, or it has no whole checkpoint.
    """
    if not (workdir / "checkpoints").is_dir():
        raise CheckpointError(f"{workdir}: no checkpoints there; give the directory of a run")
    checkpointer = Checkpointer(workdir, keep=None)
    try:
        return checkpointer.load()
    finally:
        checkpointer.close()
