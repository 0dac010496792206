"""Policies side by side: `python -m train.compare --policies float32 mixed_bfloat16 --seeds 3`.

One question: what does a precision do, when nothing else differs. Every policy trains with the same
model, data, seeds, batch and length; the runs of a seed take turns, so that what the machine does
meanwhile hits all alike. The report (`train.report`) judges by a tolerance that is set beforehand.
"""

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from pydantic import BaseModel, ConfigDict, ValidationError

import jaxamp
from train.config import Config, ConfigError
from train.data import load, train_batches
from train.exits import exit_code, leave
from train.experiment import Experiment, run_all
from train.largest_batch import with_largest_batches
from train.mesh import check_fits, make_mesh
from train.parse import describe, parse, parse_policy
from train.report import write_report
from train.reports.conditions import Comparison
from train.reports.runs import policy_name
from train.run import check_policy, loss_and_shapes, precision_line
from train.workdir import refuse_existing, write_whole

PROG = "python -m train.compare"
POLICIES = ("float32", "mixed_bfloat16")
ABOUT = """Train a config with several precision policies under equal conditions, and write a report
of what they cost and give. All flags of train.run but --policy, and these:
--policies POLICY ...: the first float32 one is the base; default: float32 mixed_bfloat16.
--seeds N: runs of each policy, with seeds from --seed on; default 3.
--tolerance NATS: difference of final loss that does not matter; default 0.02. It is set before the
runs and stays.
--also-largest-batch: a second experiment: the speed of each policy at the largest batch that fits.
--memory-gib SIZE: what a device may use, for the largest batch; default: all that it has."""


class Settings(BaseModel):
    """What a comparison is; written to `compare.json` before the first step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policies: tuple[str, ...] = POLICIES
    seeds: int = 3
    tolerance: float = 0.02
    also_largest_batch: bool = False
    memory_gib: float | None = None
    command: str = ""
    """How it was asked for."""
    config: Config = Config()


def main(args: Sequence[str] | None = None) -> int:
    """Trains and reports; the exit code is 0 whatever the verdict, 2 for bad input."""
    given = sys.argv[1:] if args is None else args
    return exit_code(lambda: _compare(given), "the comparison's directory", "go on with --resume")


def _compare(args: Sequence[str]) -> int:
    settings, workdir = _settings(args)
    config = settings.config
    mesh = make_mesh(config.mesh)
    check_fits(config, mesh)
    corpus = load(config.data, config.model.vocab_size)
    train_batches(corpus, config.batch_size, config.seed)  # an impossible batch size fails here
    policies = [jaxamp.get_policy(name) for name in settings.policies]
    for policy in policies:
        check_policy(policy, *loss_and_shapes(config, corpus, policy))
    write_whole(workdir / "compare.json", settings.model_dump_json(indent=2))
    print(f"data: {corpus.description}")
    for policy in policies:
        print(precision_line(policy))
    seeds = range(config.seed, config.seed + settings.seeds)
    experiments = [
        Experiment("Equal conditions", workdir / "runs", {p: config for p in policies}, seeds)
    ]
    if settings.also_largest_batch:
        folder = workdir / "largest-batch"
        experiments = with_largest_batches(
            experiments[0], folder, corpus, mesh, settings.memory_gib
        )
    for experiment in experiments:
        stopped_by = run_all(experiment, corpus, mesh, settings.command)
        if stopped_by:
            print(
                f"stopped by {stopped_by}, all runs are saved; go on with: "
                f"{PROG} --workdir {workdir} --resume"
            )
            return 0
    comparisons = [Comparison(e.title, e.workdirs, e.may_differ) for e in experiments]
    for verdict in write_report(comparisons, workdir, settings.command, settings.tolerance):
        print(verdict.sentence)
    print(f"wrote {workdir / 'report.html'}")
    return 0


def _settings(args: Sequence[str]) -> tuple[Settings, Path]:
    """What is to be compared, and in which directory."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--also-largest-batch", action="store_true")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--resume", action="store_true")
    try:
        own, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if own.resume:
        return _resumed(own.workdir, args), own.workdir
    config = parse(rest, PROG, ABOUT)
    if any(flag.partition("=")[0] == "--policy" for flag in rest):
        raise ConfigError("--policy: name what to compare with --policies")
    settings = Settings(
        policies=_distinct(own.policies),
        seeds=own.seeds,
        tolerance=own.tolerance,
        also_largest_batch=own.also_largest_batch,
        memory_gib=own.memory_gib,
        command=shlex.join(["python", "-m", "train.compare", *args]),
        config=config,
    )
    _check(settings)
    name = Path(config.config).stem if config.config else "tiny"
    workdir = own.workdir or Path("runs") / f"compare-{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (workdir / "compare.json").exists():
        raise ConfigError(
            f"--workdir {workdir} holds a comparison; go on with it by --resume, or name another"
        )
    refuse_existing(workdir)
    return settings, workdir


def _distinct(policies: Sequence[str]) -> tuple[str, ...]:
    """Their names, each once."""
    names = [policy_name(str(parse_policy(policy, "--policies"))) for policy in policies]
    again = [name for name in names if names.count(name) > 1]
    if again:
        raise ConfigError(f"--policies: {again[0]} is there twice; give each once")
    return tuple(names)


def _check(settings: Settings) -> None:
    config = settings.config
    if len(settings.policies) < 2:
        raise ConfigError("--policies: two or more are needed to compare")
    if settings.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {settings.seeds}")
    for name in ("tolerance", "memory_gib"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0, got {value}")
    if settings.memory_gib is not None and not settings.also_largest_batch:
        raise ConfigError("--memory-gib is for --also-largest-batch")
    if config.on_incident == "rollback":
        raise ConfigError(
            "--on-incident rollback: runs that go back see other data than those that do not, and "
            "cannot be compared; take skip or stop"
        )
    one_run = {
        "--explain": config.explain,
        "--dry-run": config.dry_run,
        "--profile-steps": config.profile_steps is not None,
        "--distributed": jax.process_count() > 1
        or config.distributed.auto
        or config.distributed.coordinator is not None,
    }
    for flag, given in one_run.items():
        if given:
            raise ConfigError(f"{flag} is for one run; use train.run")


def _resumed(workdir: Path | None, args: Sequence[str]) -> Settings:
    """As it was started: a tolerance that is changed after a look is none."""
    if workdir is None:
        raise ConfigError("--resume needs --workdir: the comparison to go on with")
    others = [flag for flag in args if flag not in ("--resume", "--workdir", str(workdir))]
    others = [flag for flag in others if flag != f"--workdir={workdir}"]
    if others:
        raise ConfigError(
            f"--resume goes on with the comparison as it was started; leave out {others[0]}"
        )
    path = workdir / "compare.json"
    if not path.is_file():
        raise ConfigError(f"--workdir {workdir}: no comparison there; start it without --resume")
    try:
        return Settings.model_validate_json(path.read_text())
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe(error)}") from None


if __name__ == "__main__":
    leave(main())
