"""The loop: data in, steps, metrics one step late, evaluation, checkpoints, a clean end."""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxamp
from train.checkpoint import Checkpointer
from train.chips import peak_flops
from train.config import Config
from train.data import Corpus, eval_batches, train_batches
from train.distributed import ending_with_the_others, is_writer
from train.flops import model_flops_per_token
from train.mesh import data_part, global_batch, state_shardings
from train.metrics import MetricsWriter, memory_metrics
from train.preemption import stop_signals
from train.profile import Profiler
from train.progress import Meter, Progress
from train.step import (
    TrainState,
    init_state,
    make_eval_step,
    make_train_step,
    nonfinite_gradients,
)


class BadRun(Exception):
    """The run cannot go on: gradients stay non-finite. The message says what was seen."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the numbers of its last step, and the signal that stopped it."""

    step: int
    metrics: dict[str, float]
    state: TrainState
    graphdef: nnx.GraphDef
    stopped_by: str | None


class Report(Protocol):
    """What the one process that writes does with the numbers of a step."""

    def step(self, step: int, values: dict[str, float]) -> None: ...
    def say(self, line: str) -> None: ...
    def close(self) -> None: ...


class _Report:
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


class BadSteps:
    """Counts non-finite steps in a row at the lowest loss scale.

    A bad step above the floor is how a dynamic scale finds its place, and is not counted. Without
    a scale every step is at the floor.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0

    def are_too_many(self, grads_finite: bool, at_floor: bool) -> bool:
        self.count = 0 if grads_finite else self.count + int(at_floor)
        return self.count >= self.limit


class Start(NamedTuple):
    """Where a run starts or goes on: the mesh, structure, state, the iterator over the data.

    `notes` say which, line by line.
    """

    mesh: Mesh
    graphdef: nnx.GraphDef
    state: TrainState
    batches: Any
    checkpointer: Checkpointer
    notes: list[str]


class Programs(NamedTuple):
    """The jitted steps of a config and policy; runs with other seeds can share them."""

    train_step: Callable
    eval_step: Callable


def prepare(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, workdir: Path, mesh: Mesh
) -> Start:
    """A fresh start, or with `resume` the newest whole checkpoint.

    Raises:
        CheckpointError: the checkpoint is of another run, or all of them are damaged.
    """
    checkpointer = Checkpointer(workdir, config.keep_checkpoints, mesh)
    batches = train_batches(
        corpus, config.batch_size, config.seed, *data_part(mesh, config.batch_size)
    )
    graphdef, _ = structure(config, corpus, policy)
    restored, notes = None, []
    if config.resume:
        restored = checkpointer.restore(config, corpus.vocab_size, corpus.fingerprint)
        notes = restored.notes if restored else ["no checkpoint there, starting at step 0"]
    if restored is None:
        state = fresh_state(config, corpus, policy, mesh)
        return Start(mesh, graphdef, state, batches, checkpointer, notes)
    batches.set_state(restored.data_state)
    notes = [*notes, f"going on from step {int(restored.state.step)}"]
    return Start(mesh, graphdef, restored.state, batches, checkpointer, notes)


def train(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, workdir: Path, start: Start
) -> Outcome:
    """Trains until `num_steps` or a signal; saves on the way and at the end.

    Raises:
        BadRun: `max_bad_steps` non-finite steps in a row at the lowest loss scale.
        CheckpointError: a checkpoint cannot be written.
    """
    programs = Programs(
        make_train_step(config, start.graphdef, policy),
        make_eval_step(config, start.graphdef, policy),
    )
    report = _Report(workdir, config.num_steps, int(start.state.step)) if is_writer() else None
    with stop_signals() as stopped, jax.set_mesh(start.mesh):
        pieces = training(config, corpus, policy, workdir, start, programs, report, stopped)
        return deque(pieces, maxlen=1).pop()


def training(
    config: Config,
    corpus: Corpus,
    policy: jaxamp.Policy,
    workdir: Path,
    start: Start,
    programs: Programs,
    report: Report | None,
    stopped: Callable[[int], str | None],
) -> Iterator[Outcome]:
    """`train` in pieces: it pauses whenever nothing is in flight, after an evaluation or a save.

    The last outcome is that of the run; the state of one before is gone with the next piece.
    """
    mesh, graphdef, state, batches, checkpointer, _ = start
    first_step = int(state.step)
    meter = _meter(config, policy, mesh, state.params)
    profiler = Profiler(config.profile_window if report else range(0), workdir, meter.pause)
    bad_steps = BadSteps(config.max_bad_steps)
    values = _last_metrics(workdir)
    pending = stopped_by = None

    def finish(pending: tuple[int, Any, Any], *, evaluate: bool) -> dict[str, float]:
        """Waits for a step that was sent to the device, and reports it."""
        step, metrics, batch = pending
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        grads_finite, floor = values.pop("amp/grads_finite"), values.pop("amp/at_floor")
        values |= meter.lap()
        if evaluate:
            values["eval/loss"] = evaluation(programs.eval_step, state.params, corpus, config, mesh)
            meter.pause()
        if report:
            report.step(step, values)
            if not grads_finite and values["amp/skipped_steps"] == 1 and not _has_scale(policy):
                report.say(_first_skip(step, policy))
        if bad_steps.are_too_many(grads_finite, floor):
            leaves = nonfinite_gradients(config, graphdef, policy, state, batch, step)
            raise BadRun(_too_many_bad_steps(step, values, bad_steps.limit, leaves, policy))
        return values

    def save(eval_loss: float | None) -> None:
        position = batches.get_state()
        checkpointer.save(state, config, corpus.vocab_size, position, corpus.fingerprint, eval_loss)
        meter.pause()

    try:
        with ending_with_the_others():
            for step in range(first_step + 1, config.num_steps + 1):
                batch = global_batch(mesh, next(batches), config.batch_size)
                state, metrics = profiler.run(step, programs.train_step, state, batch)
                if pending is not None:
                    values = finish(pending, evaluate=False)
                checkpointer.check()
                pending = (step, metrics, batch)
                stopped_by = stopped(step)
                last = step == config.num_steps or stopped_by is not None
                evaluate = step % config.eval_every_steps == 0 or step == config.num_steps
                saves = step % config.checkpoint_every_steps == 0 or last
                if evaluate or saves:
                    values, pending = finish(pending, evaluate=evaluate), None
                if saves:
                    save(values.get("eval/loss"))
                if stopped_by:
                    break
                if pending is None:
                    yield Outcome(step, values, state, graphdef, None)
            checkpointer.wait()
    except BadRun:
        save(None)
        checkpointer.wait()
        raise
    finally:
        profiler.close(state)
        if report:
            report.close()
        checkpointer.close()
    yield Outcome(int(state.step), values | meter.average, state, graphdef, stopped_by)


def evaluation(eval_step: Any, params: Any, corpus: Corpus, config: Config, mesh: Mesh) -> float:
    """Mean negative log likelihood of the held-out tokens, in nats."""
    size = config.batch_size
    batches = eval_batches(corpus, size, config.eval_batches, *data_part(mesh, size))
    sums = [eval_step(params, global_batch(mesh, batch, size)) for batch in batches]
    nll, count = (sum(float(x) for x in column) for column in zip(*sums, strict=True))
    return nll / count


def fresh_state(config: Config, corpus: Corpus, policy: jaxamp.Policy, mesh: Mesh) -> TrainState:
    """The state before the first step, where the mesh wants it."""
    _, shapes = structure(config, corpus, policy)
    init = jax.jit(
        lambda: init_state(config, corpus.vocab_size, policy)[1],
        out_shardings=state_shardings(mesh, shapes),
    )
    return init()


def structure(config: Config, corpus: Corpus, policy: jaxamp.Policy):
    """The module structure, and the shapes of the state."""
    return nnx.eval_shape(lambda: init_state(config, corpus.vocab_size, policy))


def _meter(config: Config, policy: jaxamp.Policy, mesh: Mesh, params: Any) -> Meter:
    tokens = config.batch_size * config.data.seq_len
    flops = model_flops_per_token(params, config.model, config.data.seq_len)
    peak = peak_flops(mesh.devices.flat[0].device_kind, policy.compute_dtype)
    return Meter(tokens, flops, None if peak is None else peak * mesh.size)


def _last_metrics(workdir: Path) -> dict[str, float]:
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1]) if lines else {}


def _has_scale(policy: jaxamp.Policy) -> bool:
    return not isinstance(jaxamp.get_loss_scale(policy), jaxamp.NoOpLossScale)


def _first_skip(step: int, policy: jaxamp.Policy) -> str:
    return (
        f"warning: step {step}: gradients are not finite in {policy.compute_dtype}, where no loss "
        "scale is to blame; the step is skipped and counted, and so are those to come"
    )


def _too_many_bad_steps(
    step: int, values: dict[str, float], limit: int, leaves: list[str], policy: jaxamp.Policy
) -> str:
    shown = ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
    return (
        f"step {step}: gradients were not finite {limit} times in a row at the lowest loss scale "
        f"({values['amp/loss_scale']:g}); loss {values['train/loss']:g}; not finite in "
        f"{shown or 'nothing on a second look'}; no bad update was applied and the state is saved; "
        "try a lower --optimizer.learning-rate, "
        + ("--policy float32" if policy.compute_dtype != "float32" else "another --seed")
        + ", or look at the data of that step"
    )
