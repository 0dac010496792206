"""What the benchmarks share: options and checks, the config, the model for chips, the loop."""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from train import compiled, measures
from train.chips import NoCompiler
from train.config import Config, ConfigError
from train.figures import Report
from train.parse import load_toml
from train.variants import Layers, Variant, make_variants


@dataclasses.dataclass(frozen=True)
class Options:
    """Those that every benchmark has."""

    config: str | None = None
    """TOML file with the model, data and optimizer; None: the default ones of train.run."""
    json: Path = Path("benchmark.json")
    """File that the figures are written to."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """The model that is compiled for chips that are not here; its attention is not fused."""

    n_layers: int = 8
    d_model: int = 1024
    n_heads: int = 16
    seq_len: int = 1024
    batch_size: int = 8
    vocab_size: int = 32768
    unroll: bool = False
    """Layers one after another instead of in a loop; bytes accessed count the loop's body once."""

    def of(self, config: Config) -> Config:
        """The config with the sizes of this model; without `unroll`, which it cannot say."""
        sizes = {name: getattr(self, name) for name in ("n_layers", "d_model", "n_heads")}
        sizes |= {"vocab_size": self.vocab_size, "n_kv_heads": None, "d_ff": None}
        return config.model_copy(
            update={
                "batch_size": self.batch_size,
                "model": config.model.model_copy(update=sizes),
                "data": config.data.model_copy(update={"seq_len": self.seq_len}),
            }
        )


CHIP = Chip()


def check(options: Any) -> None:
    """Every count is at least 1, the model can be, and the file can be written.

    Raises:
        ConfigError: one line that names the flag.
    """
    for flag, count in _counts(options, "--"):
        if count < 1:
            raise ConfigError(f"{flag} must be at least 1, got {count}")
    chip = getattr(options, "chip", CHIP)
    if chip.d_model % (2 * chip.n_heads):
        raise ConfigError(
            f"--chip.d-model {chip.d_model} must be an even multiple of "
            f"--chip.n-heads {chip.n_heads} (RoPE)"
        )
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


def config_of(options: Options) -> Config:
    """The config that is measured: one batch a step, and nothing random in it."""
    config = load_toml(options.config) if options.config else Config()
    model = config.model.model_copy(update={"dropout": 0.0})
    return config.model_copy(update={"model": model, "grad_accum_steps": 1})


def take(names: Iterable[str], measures_: dict[str, Callable[..., None]], *args: Any) -> Report:
    """The report of the named measures, in the order of the table, each called with a report and
    `args`; one whose compiler is not installed is skipped, with the line that says so."""
    report, names = Report([], [], []), set(names)
    for name, measure in measures_.items():
        if name not in names:
            continue
        say(f"measuring {name} ...")
        try:
            measure(report, *args)
        except NoCompiler as error:
            report.skipped.append(f"{name}: {error}")
    return report


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def here() -> str:
    """What the programs that are run run on, in words."""
    return f"this {jax.devices()[0].platform.upper()}"


def for_chip(
    chip: Chip, config: Config, remat: bool = False
) -> tuple[dict[str, Variant], compiled.Shapes]:
    """The variants of the chip's model in bfloat16, and the shapes of its parameters and batch."""
    graphdef, state = measures.structure(chip.of(config), chip.vocab_size)
    variants = make_variants(chip.of(config), graphdef, "bf16", Layers(chip.unroll, remat))
    del variants["floor"]  # it is about errors, and multiplies in float32
    return variants, (state.params, compiled.batch_shapes(chip.batch_size, chip.seq_len))
