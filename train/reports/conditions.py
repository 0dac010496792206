"""Equal conditions: which runs may stand side by side, and which settings they share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import Config
from train.reports.runs import ReportError, Run, read_run

BASE = "float32"

# Policy and seed, which differ by design, and what neither the loss at a step, the time of a step
# nor its memory depends on.
FREE = {
    "config", "policy", "seed", "workdir", "resume", "explain", "dry_run", "profile_steps",
    "eval_every_steps", "checkpoint_every_steps", "keep_checkpoints", "max_bad_steps",
    "sample_prompt", "sample_tokens", "distributed",
}  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Runs under equal conditions: several policies, each with several seeds.

    Attributes:
        title: What is compared, a few words.
        runs: Directories of `train.run`.
        may_differ: Settings, by dotted key, that may differ from policy to policy: `batch_size`
            where each one has its largest. Where they do, losses are not compared.
    """

    title: str
    runs: Sequence[Path]
    may_differ: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """The runs of one policy, by seed."""

    policy: str
    runs: dict[int, Run]

    @property
    def first(self) -> Run:
        return next(iter(self.runs.values()))


def groups(comparison: Comparison) -> list[Group]:
    """The runs by policy, the base first: float32 where it is there, else the first.

    Raises:
        ReportError: a run cannot be read, is there twice, or differs in more than it may.
    """
    runs = [read_run(Path(path)) for path in comparison.runs]
    if not runs:
        raise ReportError("no runs to report")
    by_policy: dict[str, dict[int, Run]] = {}
    for run in runs:
        same = by_policy.setdefault(run.policy, {}).setdefault(run.seed, run)
        if same is not run:
            raise ReportError(
                f"two runs of {run.policy} with seed {run.seed}: {same.path}, {run.path}; "
                "give each seed once"
            )
    found = [Group(policy, dict(sorted(seeds.items()))) for policy, seeds in by_policy.items()]
    for group in found:
        _check_equal(list(group.runs.values()), ())
    _check_equal(runs, comparison.may_differ)
    return sorted(found, key=lambda group: group.policy != BASE)


def have_equal_settings(found: Sequence[Group]) -> bool:
    """Whether the losses can be compared: nothing but policy and seed differs."""
    return not _differing([run for group in found for run in group.runs.values()], ())


def settings(config: Config) -> dict[str, Any]:
    """The settings that a comparison needs equal, by dotted key."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(exclude=FREE).items():
        inner = value if isinstance(value, dict) else {"": value}
        flat |= {f"{name}.{key}".rstrip("."): one for key, one in inner.items()}
    return flat


def shared_settings(found: Sequence[Group]) -> dict[str, Any]:
    runs = [run for group in found for run in group.runs.values()]
    differing = _differing(runs, ())
    return {name: v for name, v in settings(runs[0].config).items() if name not in differing}


def _check_equal(runs: Sequence[Run], may_differ: tuple[str, ...]) -> None:
    differing = _differing(runs, may_differ)
    if not differing:
        return
    shown = "; ".join(f"{name} {_values(pairs)}" for name, pairs in list(differing.items())[:3])
    more = f"; and {', '.join(list(differing)[3:])}" if len(differing) > 3 else ""
    raise ReportError(f"runs under unequal conditions: {shown}{more}; report them separately")


def _differing(
    runs: Sequence[Run], may_differ: tuple[str, ...]
) -> dict[str, list[tuple[Any, Path]]]:
    """By setting, each value that there is, with the first run that has it."""
    rows = [(_conditions(run), run.path) for run in runs]
    differing = {}
    for name in dict.fromkeys(name for row, _ in rows for name in row):
        pairs = [(row[name], path) for row, path in rows if name in row]
        first_of = {repr(value): (value, path) for value, path in reversed(pairs)}
        if len(first_of) > 1 and name not in may_differ:
            differing[name] = list(first_of.values())[::-1]
    return differing


def _conditions(run: Run) -> dict[str, Any]:
    """Settings and, where it was recorded, the device."""
    figures = run.figures
    device = {"device": figures.device, "device_kind": figures.device_kind}
    return settings(run.config) | {name: v for name, v in device.items() if v is not None}


def _values(pairs: Sequence[tuple[Any, Path]]) -> str:
    return ", ".join(f"{value} ({path})" for value, path in pairs)
