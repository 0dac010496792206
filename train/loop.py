"""The loop: data in, steps, metrics one step late, evaluation, checkpoints, a clean end."""

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from tqdm import tqdm

import jaxamp
from train.checkpoint import Checkpointer
from train.config import Config
from train.data import Corpus, eval_batches, train_batches
from train.metrics import MetricsWriter
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


@dataclass
class Meter:
    """Tokens a second, of steps alone: compilation, evaluation and saving are not counted."""

    tokens_per_step: int
    seconds: float = 0.0
    steps: int = 0
    since: float | None = None

    def lap(self) -> float | None:
        """Ends a step; its tokens a second, None for one that had other things in it."""
        now, since = time.perf_counter(), self.since
        self.since = now
        if since is None:
            return None
        self.seconds += now - since
        self.steps += 1
        return self.tokens_per_step / (now - since)

    def pause(self) -> None:
        self.since = None

    @property
    def average(self) -> float | None:
        return self.tokens_per_step * self.steps / self.seconds if self.steps else None


@dataclass
class Progress:
    """A bar on a terminal; elsewhere a line now and then. On stderr, stdout is for results."""

    num_steps: int
    first_step: int
    bar: tqdm = field(init=False)
    speed: float = math.nan

    def __post_init__(self):
        self.bar = tqdm(
            total=self.num_steps, initial=self.first_step, unit="step", disable=None, leave=True
        )

    def show(self, step: int, values: dict[str, float]) -> None:
        self.speed = values.get("perf/tokens_per_second", self.speed)
        shown = {
            "loss": f"{values['train/loss']:.3f}",
            "tok/s": f"{self.speed:,.0f}",
            "scale": f"{values['amp/loss_scale']:g}",
            "skipped": f"{values['amp/skipped_steps']:g}",
        }
        if "eval/loss" in values:
            self.say(f"step {step}: eval loss {values['eval/loss']:.4f}")
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and step % max(self.num_steps // 10, 1) == 0:
            words = ", ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self.num_steps}: {words}", file=sys.stderr)

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


class Start(NamedTuple):
    """Where a run starts or goes on: structure, state, the iterator over the data."""

    graphdef: nnx.GraphDef
    state: TrainState
    batches: Any
    checkpointer: Checkpointer


def prepare(config: Config, corpus: Corpus, policy: jaxamp.Policy, workdir: Path) -> Start:
    """A fresh start, or with `resume` the newest whole checkpoint; says which.

    Raises:
        CheckpointError: the checkpoint is of another run, or all of them are damaged.
    """
    checkpointer = Checkpointer(workdir, config.keep_checkpoints)
    batches = train_batches(corpus, config.batch_size, config.seed)
    graphdef, _ = structure(config, corpus, policy)
    restored = None
    if config.resume:
        restored = checkpointer.restore(config, corpus.vocab_size, corpus.fingerprint)
        for note in restored.notes if restored else ["no checkpoint there, starting at step 0"]:
            print(f"resume: {note}")
    if restored is None:
        init = jax.jit(lambda: init_state(config, corpus.vocab_size, policy)[1])
        return Start(graphdef, init(), batches, checkpointer)
    batches.set_state(restored.data_state)
    print(f"resume: going on from step {int(restored.state.step)}")
    return Start(graphdef, restored.state, batches, checkpointer)


def train(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, workdir: Path, start: Start
) -> Outcome:
    """Trains until `num_steps` or a signal; saves on the way and at the end.

    Raises:
        BadRun: `max_bad_steps` non-finite steps in a row at the lowest loss scale.
        CheckpointError: a checkpoint cannot be written.
    """
    graphdef, state, batches, checkpointer = start
    train_step = make_train_step(config, graphdef, policy)
    eval_step = make_eval_step(graphdef, policy)
    first_step = int(state.step)
    writer = MetricsWriter(workdir, first_step + 1)
    progress = Progress(config.num_steps, first_step)
    meter = Meter(config.batch_size * config.data.seq_len)
    bad_steps = BadSteps(config.max_bad_steps)
    values = _last_metrics(workdir)
    pending = None

    def finish(pending: tuple[int, Any, Any], *, evaluate: bool) -> dict[str, float]:
        """Waits for a step that was sent to the device, and reports it."""
        step, metrics, batch = pending
        values = {name: value.item() for name, value in jax.device_get(metrics).items()}
        grads_finite, floor = values.pop("amp/grads_finite"), values.pop("amp/at_floor")
        speed = meter.lap()
        if speed is not None:
            values["perf/tokens_per_second"] = speed
        if evaluate:
            values["eval/loss"] = evaluation(eval_step, state.params, corpus, config)
            meter.pause()
        writer.write(step, values)
        progress.show(step, values)
        if not grads_finite and values["amp/skipped_steps"] == 1 and not _has_scale(policy):
            progress.say(_first_skip(step, policy))
        if bad_steps.are_too_many(grads_finite, floor):
            leaves = nonfinite_gradients(config, graphdef, policy, state, batch)
            raise BadRun(_too_many_bad_steps(step, values, bad_steps.limit, leaves, policy))
        return values

    def save(eval_loss: float | None) -> None:
        position = batches.get_state()
        checkpointer.save(state, config, corpus.vocab_size, position, corpus.fingerprint, eval_loss)
        meter.pause()

    try:
        with _signals() as received:
            for step in range(first_step + 1, config.num_steps + 1):
                batch = next(batches)
                state, metrics = train_step(state, batch)
                if pending is not None:
                    values = finish(pending, evaluate=False)
                checkpointer.check()
                pending = (step, metrics, batch)
                last = step == config.num_steps or bool(received)
                evaluate = step % config.eval_every_steps == 0 or step == config.num_steps
                saves = step % config.checkpoint_every_steps == 0 or last
                if evaluate or saves:
                    values, pending = finish(pending, evaluate=evaluate), None
                if saves:
                    save(values.get("eval/loss"))
                if received:
                    break
            checkpointer.wait()
    except BadRun:
        save(None)
        checkpointer.wait()
        raise
    finally:
        progress.close()
        writer.close()
        checkpointer.close()
    if meter.average is not None:
        values = values | {"perf/tokens_per_second": meter.average}
    return Outcome(int(state.step), values, state, graphdef, received[0] if received else None)


def evaluation(eval_step: Any, params: Any, corpus: Corpus, config: Config) -> float:
    """Mean negative log likelihood of the held-out tokens, in nats."""
    sums = [
        eval_step(params, batch)
        for batch in eval_batches(corpus, config.batch_size, config.eval_batches)
    ]
    nll, count = (sum(float(x) for x in column) for column in zip(*sums, strict=True))
    return nll / count


def structure(config: Config, corpus: Corpus, policy: jaxamp.Policy):
    """The module structure, and the shapes of the state."""
    return nnx.eval_shape(lambda: init_state(config, corpus.vocab_size, policy))


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the signals received inside. The first asks for a clean end, a second insists."""
    received: list[str] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
