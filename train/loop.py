"""The loop: data in, steps, metrics one step late, evaluation, checkpoints, a clean end."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

import jaxamp
from train.bundle import Moment, NotKept, begin_diagnosis, write_bundle
from train.checkpoint import CheckpointError
from train.chips import peak_flops
from train.config import Config
from train.data import Corpus, eval_batches
from train.distributed import ending_with_the_others, is_writer, say
from train.flops import model_flops_per_token
from train.incidents import Incident, Watch
from train.mesh import data_part, global_batch
from train.metrics import Report, RunReport, rows_before
from train.monitors import known as known_monitors
from train.preemption import stop_signals
from train.profile import Profiler
from train.progress import Meter
from train.rollback import Response, RollBack, response
from train.start import Start, prepare
from train.step import (
    TrainState,
    make_eval_step,
    make_train_step,
    nonfinite_gradients,
)
from train.workdir import write_config


class BadRun(Exception):
    """The run does not go on after an incident of this kind. The message says what was seen."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the numbers of its last step, and the signal that stopped it."""

    step: int
    metrics: dict[str, float]
    state: TrainState
    graphdef: nnx.GraphDef
    stopped_by: str | None


class Programs(NamedTuple):
    """The jitted steps of a config and policy; runs with other seeds can share them."""

    train_step: Callable
    eval_step: Callable


def train(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, workdir: Path, start: Start
) -> Outcome:
    """Trains until `num_steps` or a signal; saves on the way and at the end.

    Raises:
        BadRun: an incident at which `on_incident` stops, or cannot do what it says.
        CheckpointError: a checkpoint cannot be written.
    """
    with stop_signals() as stopped, jax.set_mesh(start.mesh):
        while True:
            programs = Programs(
                make_train_step(config, start.graphdef, policy),
                make_eval_step(config, start.graphdef, policy),
            )
            first_step = int(start.state.step)
            report = RunReport(workdir, config.num_steps, first_step) if is_writer() else None
            pieces = training(config, corpus, policy, workdir, start, programs, report, stopped)
            with contextlib.suppress(RollBack):
                return deque(pieces, maxlen=1).pop()
            policy = jaxamp.get_policy(config.fallback_policy or policy)
            config = config.model_copy(update={"policy": str(policy), "resume": True})
            if is_writer():
                write_config(config, workdir)
            start = prepare(config, corpus, policy, workdir, start.mesh, start.log)
            for note in start.notes:
                say(f"rollback: {note}")


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
    mesh, graphdef, state, batches, checkpointer, _, log = start
    first_step = int(state.step)
    meter = _meter(config, policy, mesh, state.params)
    profiler = Profiler(config.profile_window if report else range(0), workdir, meter.pause)
    rows = rows_before(workdir, first_step + 1)
    watch, values = Watch(config.max_bad_steps, rows), rows[-1] if rows else {}
    kept: set[str] = set()
    pending = stopped_by = None

    def finish(pending: tuple[int, Any, Any], *, evaluate: bool) -> dict[str, float]:
        """Waits for a step that was sent to the device, and reports it."""
        step, metrics, batch = pending
        metrics = jax.device_get(known_monitors(step, metrics))
        values = {name: value.item() for name, value in metrics.items()}
        grads_finite, floor = (bool(values.pop(f"amp/{n}")) for n in ("grads_finite", "at_floor"))
        values["monitor/grad_norm_spikes"] = watch.norm_spikes(values["train/grad_norm"])
        values |= meter.lap()
        if evaluate:
            values["eval/loss"] = evaluation(programs.eval_step, state.params, corpus, config, mesh)
            meter.pause()
        if report:
            report.step(step, values)
            if not grads_finite and floor and "floor" not in kept:
                kept.add("floor")
                report.say(_first_skip(step, policy))
        incident = watch.look(step, values, grads_finite, floor)
        if incident:
            respond(incident, batch)
        return values

    def respond(incident: Incident, batch: Any) -> None:
        """Keeps what is needed to look into it, the first time, and does what the settings say."""
        if config.on_incident == "skip" and incident.kind in kept:
            return
        kept.add(incident.kind)
        meter.pause()
        checkpointer.wait()
        answer = response(incident, config, checkpointer.steps, log)
        position = batches.get_state()
        moment = Moment(config, state, batch, position, corpus.vocab_size, corpus.fingerprint)
        bundle = keep(incident, answer, moment)
        if answer.to_step is not None:
            checkpointer.set_aside_after(answer.to_step)
        fallback = config.fallback_policy if answer.action == "rollback" else None
        after = str(jaxamp.get_policy(fallback or policy))
        entry = {"policy_after": after, "data_state": position, "bundle": bundle}
        log.add(incident, answer, str(policy), **entry)
        if answer.action == "rollback":
            raise RollBack
        if answer.action == "stop":
            leaves = []
            if incident.kind != "spike":
                leaves = nonfinite_gradients(config, graphdef, policy, state, batch, incident.step)
            raise BadRun(incident.kind, _stopped(incident, answer, bundle, leaves, config))

    def keep(incident: Incident, answer: Response, moment: Moment) -> str | None:
        """Writes the bundle and has it diagnosed; its path, None where it cannot be written."""
        words = f"incident at step {incident.step}: {incident.message}; {answer}"
        try:
            bundle = write_bundle(workdir, incident, answer.action, moment, mesh)
        except (OSError, CheckpointError) as error:
            if jax.process_count() > 1 and not isinstance(error, NotKept):
                raise  # the others wait for it
            if report:
                report.say(f"{words}; nothing is kept of it: {error}")
            return None
        if report:
            report.say(f"{words}; kept in {bundle}")
            try:
                begin_diagnosis(bundle)
            except OSError as error:
                report.say(f"the incident is not diagnosed: {error}")
        return str(bundle)

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
                # Bad steps in a row push out no good checkpoint.
                if last or (saves and not watch.bad_steps.count):
                    save(values.get("eval/loss"))
                if stopped_by:
                    break
                if pending is None:
                    yield Outcome(step, values, state, graphdef, None)
            checkpointer.wait()
    except BadRun as bad:
        if bad.kind != "spike":  # that state is no good, and the bundle has it
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


def _meter(config: Config, policy: jaxamp.Policy, mesh: Mesh, params: Any) -> Meter:
    tokens = config.batch_size * config.data.seq_len
    flops = model_flops_per_token(params, config.model, config.data.seq_len)
    peak = peak_flops(mesh.devices.flat[0].device_kind, policy.compute_dtype)
    return Meter(tokens, flops, None if peak is None else peak * mesh.size)


def _has_scale(policy: jaxamp.Policy) -> bool:
    return not isinstance(jaxamp.get_loss_scale(policy), jaxamp.NoOpLossScale)


def _first_skip(step: int, policy: jaxamp.Policy) -> str:
    return (
        f"warning: step {step}: gradients are not finite in {policy.compute_dtype}, "
        + ("at the lowest loss scale" if _has_scale(policy) else "where no loss scale is to blame")
        + "; the step is skipped and counted, as any other bad one will be"
    )


def _stopped(
    incident: Incident,
    answer: Response,
    bundle: str | None,
    leaves: list[str],
    config: Config,
) -> str:
    shown = ", ".join(leaves[:5]) + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
    if incident.kind == "spike":
        state = "its updates were applied, and that state is not saved as a checkpoint"
    else:
        state = (
            f"gradients not finite in {shown or 'nothing'} on a second look; no bad update was "
            "applied and the state is saved"
        )
    look = f"python -m train.diagnose {bundle}, " if bundle else ""
    in_float32 = jaxamp.get_policy(config.policy).compute_dtype == "float32"
    others = ["another --seed" if in_float32 else "--policy float32"]
    others += ["--on-incident rollback"] if config.on_incident != "rollback" else []
    return (
        f"step {incident.step}: {incident.message}; {answer}; {state}; try {look}a lower "
        f"--optimizer.learning-rate, {', '.join(others)}, or look at the data of that step"
    )
