"""The flags that every benchmark has, what they may be, and the config that they name."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from train.benchmarks.chip_model import CHIP
from train.config import Config, ConfigError
from train.parse import describe, load_toml


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """Those that every benchmark has."""

    config: str | None = None
    """TOML file with the model, data and optimizer; None: the default ones of train.run."""
    json: Path = Path("benchmark.json")
    """File that the figures are written to."""


def check(options: Any) -> None:
    """Every count is at least 1, the model can be, and the file can be written.

    Raises:
        ConfigError: one line that names the flag.
    """
    for flag, count in _counts(options, "--"):
        if count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}")
    try:
        getattr(options, "chip", CHIP).of(Config())
    except ValidationError as error:
        raise ConfigError(f"--chip: {describe(error)}") from None
    if not options.json.parent.is_dir():
        raise ConfigError(f"--json {options.json}: no such directory")


def _counts(options: Any, prefix: str) -> Iterable[tuple[str, int]]:
    for field in dataclasses.fields(options):
        value, flag = getattr(options, field.name), prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(value):
            yield from _counts(value, f"{flag}.")
        for count in value if isinstance(value, tuple) else (value,):
            if isinstance(count, int) and not isinstance(count, bool):
                yield flag, count


def config_of(options: BenchmarkOptions) -> Config:
    """The config that is measured: one batch a step, and nothing random in it."""
    config = load_toml(options.config) if options.config else Config()
    model = config.model.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"model": model, "grad_accum_steps": 1})
