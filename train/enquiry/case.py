"""What is to be diagnosed: a state, the batch of its next step, and what the run wrote down."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxamp
from train.checkpoint import load as load_checkpoint
from train.config import Config, MeshConfig
from train.data import Batch, Corpus, DataError, load, train_batches
from train.exits import InputError
from train.mesh import make_mesh
from train.reports.runs import Series, read_run
from train.resume import Saved, convert, refuse_other_run
from train.start import fresh_state
from train.step import TrainState, structure

FOLLOWING = 19
"""Batches after the one that is diagnosed."""


class CaseError(InputError):
    """What was given cannot be diagnosed, in one line for the user."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One step of a run.

    Attributes:
        source: Where it is from, in words.
        config: The settings.
        policy: The precision.
        graphdef: The structure of the model.
        vocab_size: Rows of the embedding.
        state: Before the step, on one device.
        step: Its number, from 1.
        batch: tokens and labels, int32[B, T].
        following: The batches after it; none where the data cannot be read.
        series: What the run wrote into metrics.jsonl, by name.
        notes: Lines for the user.
    """

    source: str
    config: Config
    policy: jaxamp.Policy
    graphdef: nnx.GraphDef
    vocab_size: int
    state: TrainState
    step: int
    batch: Batch
    following: Sequence[Batch]
    series: Mapping[str, Series]
    notes: tuple[str, ...]

    def key(self, steps_later: int = 0) -> jax.Array:
        """The dropout key, as the training step makes it."""
        key = jax.random.wrap_key_data(self.state.key_data)
        return jax.random.fold_in(key, self.step - 1 + steps_later)

    def recorded(self, name: str) -> float | None:
        """What the run wrote down for this step."""
        series = self.series.get(name)
        known = series is not None and self.step in series.steps
        return float(series.at(np.array([self.step]))[0]) if series and known else None

    def under(self, policy: jaxamp.Policy) -> tuple[Config, TrainState]:
        """Settings and state as a resume with another precision has them."""
        config = self.config.model_copy(update={"policy": str(policy)})
        return config, convert(self.state, self.config, config)[0]


def of_config(config: Config, policy: jaxamp.Policy) -> Case:
    """The first step of a run that has not begun.

    Raises:
        DataError: the data cannot be read.
    """
    corpus = load(config.data, config.model.vocab_size)
    batches = train_batches(corpus, config.batch_size, config.seed)
    batch, *following = itertools.islice(batches, 1 + FOLLOWING)
    state = fresh_state(config, corpus, policy, one_device())
    source = f"the first step of {config.config or 'the default config'}"
    graphdef, _ = structure(config, corpus.vocab_size, policy)
    return Case(
        source, config, policy, graphdef, corpus.vocab_size, state, 1, batch, following, {}, ()
    )


def of_run(path: Path, config: Config, policy: jaxamp.Policy) -> Case:
    """The newest incident of a run, or what comes next after its newest checkpoint.

    Args:
        path: Of a run, or of an incident in it.
        config: Its settings, as they are to be now.
        policy: That of `config`.

    Raises:
        InputError: files are missing or damaged, or are those of another run.
    """
    incident = _incident(path)
    saved = load_checkpoint(path)
    corpus, notes = _corpus(config, needed=incident is None)
    meta = saved.meta
    vocab_size = corpus.vocab_size if corpus else config.model.vocab_size or meta["vocab_size"]
    fingerprint = corpus.fingerprint if corpus else meta["fingerprint"]
    refuse_other_run(saved.step, saved.config, meta, config, vocab_size, fingerprint)
    state, changes = convert(saved.state, saved.config, config)
    following = _after(saved, corpus, config)
    series = _series(path)
    if incident is None:
        batch, *following = following
        step, source = saved.step + 1, f"{path}, checkpoint {saved.step}, the batch that comes next"
    else:
        batch, step, following = _batch(path), incident["step"], following[:FOLLOWING]
        source = f"{path}, the very batch of step {step}: {incident.get('message', '')}"
        if saved.step > step:
            notes.append(f"parameters and optimizer are those after step {saved.step}")
        state = state._replace(step=jnp.int32(step - 1))
    graphdef, _ = structure(config, vocab_size, policy)
    case = Case(
        source, config, policy, graphdef, vocab_size, state, step, batch, following, series,
        (*notes, *changes),
    )  # fmt: skip
    return dataclasses.replace(case, state=_at_scale(state, case.recorded("amp/loss_scale")))


def newest_incident(run: Path) -> Path:
    """The newest incident of a run; the run itself where it has none, or is one."""
    files = (run / "incidents").glob("step-*/incident.json")
    # step-000123, and step-000123-2 where it went wrong again after a rollback.
    number = lambda path: [int(part) for part in path.name.split("-")[1:]]  # noqa: E731
    return max((file.parent for file in files), key=number, default=run)


def one_device() -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def _incident(path: Path) -> dict[str, Any] | None:
    file = path / "incident.json"
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found["step"], int) and found["step"] > 0:
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise CaseError(f"{file}: damaged, it names no step; give the run or another incident")


def _corpus(config: Config, needed: bool) -> tuple[Corpus | None, list[str]]:
    """What an incident has of its own need not be read again."""
    try:
        return load(config.data, config.model.vocab_size), []
    except DataError as error:
        if needed:
            raise
        return None, [f"the data cannot be read here, so no other batch is looked at: {error}"]


def _after(saved: Saved, corpus: Corpus | None, config: Config) -> list[Batch]:
    """The batches after a checkpoint."""
    if corpus is None:
        return []
    batches = train_batches(corpus, config.batch_size, config.seed)
    batches.set_state(saved.meta["data_state"])
    return list(itertools.islice(batches, 1 + FOLLOWING))


def _batch(path: Path) -> Batch:
    """The rows of all processes, in order."""
    files = sorted(path.glob("batch-*.npz"), key=lambda file: (len(file.name), file.name))
    if not files:
        raise CaseError(f"{path}: no batch-0.npz there; give the run or another incident")
    parts = [_rows(file) for file in files]
    if len({part["tokens"].shape[1] for part in parts}) > 1:
        raise CaseError(f"{path}: its batch files have rows of different lengths; they are damaged")
    return {name: np.concatenate([part[name] for part in parts]) for name in ("tokens", "labels")}


def _rows(file: Path) -> Batch:
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ("tokens", "labels")}
    except Exception as error:  # whatever zip files and numpy raise
        raise CaseError(f"{file}: damaged ({_first_line(error)}); give another incident") from None
    shapes = {array.shape for array in found.values()}
    integers = all(np.issubdtype(array.dtype, np.integer) for array in found.values())
    if len(shapes) > 1 or len(shapes.pop()) != 2 or not integers:
        raise CaseError(f"{file}: damaged, tokens and labels must be two int32[rows, T]")
    return {name: array.astype(np.int32) for name, array in found.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _series(path: Path) -> Mapping[str, Series]:
    metrics = path / "metrics.jsonl"
    return read_run(path).series if metrics.exists() and metrics.stat().st_size else {}


def _at_scale(state: TrainState, used: float | None) -> TrainState:
    """With the loss scale of the step itself: a bad step has lowered the one in the state."""
    scale = jaxamp.loss_scale(state.opt_state)
    if used is None or not isinstance(scale, jaxamp.DynamicLossScale):
        return state
    scale = dataclasses.replace(scale, loss_scale=jnp.float32(used))
    return state._replace(opt_state=state.opt_state._replace(loss_scale=scale))
