"""Runs with something planted in them: a changed checkpoint, an incident with its batch."""

import json
import shutil

import jax
import numpy as np

from train.checkpoint import Checkpointer, load


def plant(run, workdir, change):
    """A copy of a run whose newest checkpoint, and only one, is changed."""
    saved = load(run)
    workdir.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(run / name, workdir / name)
    _save(workdir, saved, change(saved.state))
    return workdir


def scaled(*path, by):
    """A change of one array of the parameters."""

    def change(state):
        params = jax.tree_util.tree_map_with_path(
            lambda at, x: x * by if tuple(key.key for key in at) == path else x, state.params
        )
        return state._replace(params=params)

    return change


def incident(run, batch, parts=1, kind="nan"):
    """A bundle of the step after the newest checkpoint, as the trainer writes it."""
    saved = load(run)
    step = saved.step + 1
    folder = run / "incidents" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        shutil.copy(run / name, folder / name)
    for k in range(parts):
        rows = {name: np.split(array, parts)[k] for name, array in batch.items()}
        np.savez(folder / f"batch-{k}.npz", **rows)
    told = {"kind": kind, "step": step, "message": "gradients are not finite"}
    (folder / "incident.json").write_text(json.dumps(told))
    _save(folder, saved, saved.state)
    return folder


def _save(workdir, saved, state):
    checkpointer = Checkpointer(workdir, 1)
    meta = saved.meta
    position = meta["data_state"], meta["fingerprint"], None
    checkpointer.save(state, saved.config, meta["vocab_size"], *position)
    checkpointer.wait()
    checkpointer.close()
