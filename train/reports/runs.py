"""A run as it lies on disk: its settings, its metrics, and what was measured beside them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import jaxamp
from jaxamp.policy import PRESETS
from train.config import Config, ConfigError
from train.exits import InputError
from train.parse import describe, load_json

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ReportError(InputError):
    """Runs that cannot be reported, in one line for the user."""


class MemoryFigures(BaseModel):
    """Bytes of one device in one step, as the compiler says."""

    model_config = ConfigDict(frozen=True)

    peak_bytes: Amount | None = None
    params_bytes: Amount | None = None
    moments_bytes: Amount | None = None
    activations_bytes: Amount | None = None
    other_bytes: Amount | None = None

    @property
    def parts(self) -> dict[str, float] | None:
        """What fills the peak, by name; None unless all of it is known."""
        named = {
            "params": self.params_bytes,
            "moments": self.moments_bytes,
            "activations": self.activations_bytes,
            "other": self.other_bytes,
        }
        known = {name: size for name, size in named.items() if size is not None}
        return known if len(known) == len(named) else None


class Figures(BaseModel):
    """`figures.json`, which `train.compare` writes; None: not recorded."""

    model_config = ConfigDict(frozen=True)

    device: str | None = None
    device_kind: str | None = None
    versions: dict[str, str] = {}
    commit: str | None = None
    command: str | None = None
    compile_seconds: Amount | None = None
    memory: MemoryFigures = MemoryFigures()
    flops: Amount | None = None
    bytes_accessed: Amount | None = None
    device_peak_bytes: Amount | None = None
    largest_batch_size: int | None = None


class Series(NamedTuple):
    """One metric: `values`, float64[N], at `steps`, int64[N], increasing."""

    steps: np.ndarray
    values: np.ndarray

    def at(self, steps: np.ndarray) -> np.ndarray:
        """The values at `steps`, all of which there must be."""
        found = np.searchsorted(self.steps, steps)
        assert np.array_equal(self.steps[found], steps)
        return self.values[found]

    def until(self, step: int) -> np.ndarray:
        return self.values[self.steps <= step]


@dataclass(frozen=True)
class Run:
    """One run; `policy` is the preset's name where it is one.

    A metric that was not recorded in a step is not in its series; one that was not finite is.
    """

    path: Path
    config: Config
    policy: str
    series: Mapping[str, Series]
    figures: Figures

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def last_step(self) -> int:
        return int(self.series["train/loss"].steps[-1])

    @property
    def finished(self) -> bool:
        return self.last_step >= self.config.num_steps

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch_size * self.config.data.seq_len

    def values(self, name: str) -> np.ndarray:
        """All recorded values; float64[0] where there are none."""
        return self.series[name].values if name in self.series else np.empty(0)


def read_run(path: Path) -> Run:
    """The run in a directory.

    Raises:
        ReportError: no run, no metrics, or files that are not what `train.run` writes.
    """
    if not path.is_dir():
        raise ReportError(f"{path}: no such run; give a directory that train.run wrote")
    settings = _text(path / "config.json", "no config.json, so it is no run of train.run")
    metrics = _text(path / "metrics.jsonl", "no metrics: metrics.jsonl is missing")
    try:
        config = load_json(settings, str(path / "config.json"))
    except ConfigError as error:
        raise ReportError(str(error)) from None
    series = _series(metrics, path / "metrics.jsonl")
    return Run(path, config, policy_name(config.policy), series, _figures(path))


def policy_name(policy: str) -> str:
    """A preset's name where it is one.

    >>> policy_name("params=f32,compute=bf16,output=f32")
    'mixed_bfloat16'
    >>> policy_name("compute=bf16,full=head")
    'compute=bf16,full=head'
    """
    parsed = jaxamp.get_policy(policy)
    parts = str(parsed).split(",")
    short = ",".join(part for part in parts if part not in ("params=f32", "output=f32"))
    names = [name for name in (*PRESETS, short) if name and jaxamp.get_policy(name) == parsed]
    return names[0] if names else str(parsed)


def _text(path: Path, missing: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ReportError(f"{path.parent}: {missing}") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path}: not text") from None


def _figures(path: Path) -> Figures:
    file = path / "figures.json"
    if not file.exists():
        return Figures()
    try:
        return Figures.model_validate_json(_text(file, "no figures.json"))
    except ValidationError as error:
        raise ReportError(f"{file}: {describe(error)}") from None


def _series(text: str, where: Path) -> dict[str, Series]:
    rows = _rows(text, where)
    if not rows:
        raise ReportError(f"{where.parent}: no metrics: metrics.jsonl is empty")
    names = sorted({name for row in rows for name in row} - {"step"})
    columns = {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}
    return {
        name: Series(np.array([s for s, _ in pairs], np.int64), np.array([v for _, v in pairs]))
        for name, pairs in columns.items()
    }


def _rows(text: str, where: Path) -> list[dict[str, Any]]:
    rows, step = [], 0
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines) and not line.endswith("\n"):
                break  # a step that was being written when the run was cut off
            raise ReportError(f"{where}: line {number} is not JSON") from None
        step = _checked(row, step, f"{where}: line {number}")
        rows.append({name: v if name == "step" else float(v) for name, v in row.items()})
    return rows


def _checked(row: Any, step_before: int, where: str) -> int:
    """The step of a row, which has a loss and comes after `step_before`."""
    if not isinstance(row, dict) or not {"step", "train/loss"} <= set(row):
        raise ReportError(f"{where} has no step or no train/loss")
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ReportError(f"{where}: {name} is not a number, got {value!r}")
    if not isinstance(row["step"], int) or row["step"] <= step_before:
        raise ReportError(f"{where}: step {row['step']} comes after step {step_before}")
    return row["step"]
