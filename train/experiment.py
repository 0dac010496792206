"""Runs that take turns: one experiment of `train.compare`, on one machine, in one process."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh
from tqdm import tqdm

import jaxamp
from train.config import Config
from train.data import Corpus
from train.loop import BadRun, Outcome, Programs, training
from train.metrics import MetricsWriter
from train.preemption import stop_signals
from train.recorded import compile_step, device_peaks, write_figures
from train.reports.runs import policy_name
from train.rollback import Log
from train.start import prepare
from train.workdir import write_config


@dataclass(frozen=True)
class Experiment:
    """Policies to train, each with its config and all with the same seeds.

    Attributes:
        title: For the report.
        folder: Of the runs.
        configs: By policy; policy, seed and workdir of a run are filled in.
        seeds: Of the runs.
        may_differ: Settings that are not the same for all policies.
        largest_batch_sizes: By policy, where they were looked for.
    """

    title: str
    folder: Path
    configs: Mapping[jaxamp.Policy, Config]
    seeds: Sequence[int]
    may_differ: tuple[str, ...] = ()
    largest_batch_sizes: Mapping[jaxamp.Policy, int] | None = None

    def workdir(self, policy: jaxamp.Policy, seed: int) -> Path:
        name = policy_name(str(policy))
        return self.folder / f"{''.join(c if c.isalnum() else '-' for c in name)}-{seed}"

    @property
    def workdirs(self) -> list[Path]:
        return [self.workdir(policy, seed) for policy in self.configs for seed in self.seeds]

    @property
    def is_done(self) -> bool:
        """Whether the last step of every run is saved."""
        return all(
            (self.workdir(policy, seed) / "checkpoints" / str(config.num_steps)).is_dir()
            for policy, config in self.configs.items()
            for seed in self.seeds
        )

    def config(self, policy: jaxamp.Policy, seed: int) -> Config:
        """Of one run, which goes on where an earlier start of it ended."""
        workdir = str(self.workdir(policy, seed))
        own = {"policy": str(policy), "seed": seed, "workdir": workdir, "resume": True}
        return self.configs[policy].model_copy(update=own)


def run_all(experiment: Experiment, corpus: Corpus, mesh: Mesh, command: str) -> str | None:
    """Trains all runs to their ends, those of a seed in turns; the signal that stopped them before.

    The policies of a seed are in memory together.

    Raises:
        CheckpointError: a checkpoint of an earlier start is of another run, or cannot be written.
        ConfigError: a step does not fit the device.
    """
    if experiment.is_done:
        return None
    compiled = {p: compile_step(c, corpus, p, mesh) for p, c in experiment.configs.items()}
    peaks = device_peaks(experiment.configs, compiled, corpus, mesh)
    for policy, step in compiled.items():
        largest = (experiment.largest_batch_sizes or {}).get(policy)
        workdirs = [experiment.workdir(policy, seed) for seed in experiment.seeds]
        write_figures(workdirs, step, mesh, peaks[policy], largest, command)
    programs = {policy: step.programs for policy, step in compiled.items()}
    steps = len(experiment.seeds) * sum(c.num_steps for c in experiment.configs.values())
    with tqdm(total=steps, unit="step", disable=None) as bar, stop_signals() as stopped:
        for seed in experiment.seeds:
            runs = {
                _label(policy, seed): _run(
                    experiment.config(policy, seed), corpus, policy, mesh, programs, bar, stopped
                )
                for policy in experiment.configs
            }
            with jax.set_mesh(mesh):
                stopped_by = take_turns(runs)
            if stopped_by:
                return stopped_by
    return None


def _run(
    config: Config,
    corpus: Corpus,
    policy: jaxamp.Policy,
    mesh: Mesh,
    programs: Mapping[jaxamp.Policy, Programs],
    bar: tqdm,
    stopped: Callable[[int], str | None],
) -> Iterator[Outcome]:
    workdir = Path(str(config.workdir))
    write_config(config, workdir)
    start = prepare(config, corpus, policy, workdir, mesh, Log(workdir))
    done = int(start.state.step)
    bar.update(done)
    report = _Report(workdir, done, bar, _label(policy, config.seed))
    return training(config, corpus, policy, workdir, start, programs[policy], report, stopped)


def take_turns(runs: Mapping[str, Iterator[Outcome]]) -> str | None:
    """Each trains until it pauses, then the next one; the signal that stopped them, or None."""
    waiting, stopped_by = dict(runs), None
    while waiting:
        for label, run in list(waiting.items()):
            try:
                stopped_by = next(run).stopped_by or stopped_by
            except StopIteration:
                del waiting[label]
            except BadRun as error:  # a result like any other: the report says so
                tqdm.write(f"{label}: {error}", file=sys.stderr)
                del waiting[label]
    return stopped_by


def _label(policy: jaxamp.Policy, seed: int) -> str:
    return f"{policy_name(str(policy))}, seed {seed}"


class _Report:
    """Metrics to the run's own files, progress to the bar of all.

    Without the memory that the process has held: it is that of several runs.
    """

    def __init__(self, workdir: Path, done: int, bar: tqdm, label: str):
        self._writer = MetricsWriter(workdir, done + 1)
        self._bar, self._label = bar, label

    def step(self, step: int, values: dict[str, float]) -> None:
        self._writer.write(step, values)
        self._bar.set_description(self._label, refresh=False)
        self._bar.update()
        if "eval/loss" in values:
            self.say(f"step {step}: eval loss {values['eval/loss']:.4f}")

    def say(self, line: str) -> None:
        tqdm.write(f"{self._label}: {line}", file=sys.stderr)

    def close(self) -> None:
        self._writer.close()
