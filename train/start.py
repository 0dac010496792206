"""Where a run starts or goes on: the first state, or the newest whole checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxamp
from train.checkpoint import Checkpointer
from train.config import Config
from train.data import Corpus, train_batches
from train.mesh import data_part, state_shardings
from train.rollback import Log
from train.step import TrainState, init_state, structure


class Start(NamedTuple):
    """Where a run starts or goes on: the mesh, structure, state, the iterator over the data.

    `notes` say which, line by line; `log` has the incidents so far.
    """

    mesh: Mesh
    graphdef: nnx.GraphDef
    state: TrainState
    batches: Any
    checkpointer: Checkpointer
    notes: list[str]
    log: Log


def prepare(
    config: Config,
    corpus: Corpus,
    policy: jaxamp.Policy,
    workdir: Path,
    mesh: Mesh,
    log: Log,
) -> Start:
    """A fresh start, or with `resume` the newest whole checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another run, or all of them are damaged.
    """
    checkpointer = Checkpointer(workdir, config.keep_checkpoints, mesh)
    batches = train_batches(
        corpus, config.batch_size, config.seed, *data_part(mesh, config.batch_size)
    )
    graphdef, _ = structure(config, corpus.vocab_size, policy)
    restored, notes = None, []
    if config.resume:
        restored = checkpointer.restore(config, corpus.vocab_size, corpus.fingerprint)
        notes = restored.notes if restored else ["no checkpoint there, starting at step 0"]
    if restored is None:
        state = fresh_state(config, corpus, policy, mesh)
        return Start(mesh, graphdef, state, batches, checkpointer, notes, log)
    step = int(restored.state.step)
    batches.set_state(log.data_state(step) or restored.data_state)
    notes = [*notes, f"going on from step {step}"]
    return Start(mesh, graphdef, restored.state, batches, checkpointer, notes, log)


def fresh_state(config: Config, corpus: Corpus, policy: jaxamp.Policy, mesh: Mesh) -> TrainState:
    """The state before the first step, where the mesh wants it."""
    _, shapes = structure(config, corpus.vocab_size, policy)
    init = jax.jit(
        lambda: init_state(config, corpus.vocab_size, policy)[1],
        out_shardings=state_shardings(mesh, shapes),
    )
    return init()
