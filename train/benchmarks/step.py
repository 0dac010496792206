"""`step`: the whole training step: loss, gradients, finite check, clip, AdamW, loss scale."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import optax

import jaxamp
from train import compiled, measures
from train.benchmarks.chip_model import CHIP, Chip, for_chip
from train.benchmarks.options import BenchmarkOptions, config_of
from train.chips import find_target, peak_flops
from train.config import Config
from train.data import load
from train.figures import Figure, Report, Target, collect, ratio
from train.fit import peak_bytes
from train.flops import model_flops_per_token
from train.progress import note
from train.step import make_adamw
from train.variants import Layers, Variant

ABOUT = """Measure the whole training step in float32, by hand, with jmp and under autocast, and
what the guard (jaxamp.apply_if_finite) and its dynamic loss scale add to one with a plain optax
chain: times here; bytes and memory of programs compiled for a TPU v5e that need not be here."""

Measure = Literal["tpu", "time"]
Compute = Literal["bf16", "f16"]
TF32, EXACT = "float32, tf32", "float32, exact"
GUARDED, SCALED = "autocast, guard", "autocast, guard and scale"
BASES = ("float32", "by hand", "autocast")


@dataclasses.dataclass(frozen=True)
class Options(BenchmarkOptions):
    measures: tuple[Measure, ...] = get_args(Measure)
    """Which measures to take."""
    compute: tuple[Compute, ...] = get_args(Compute)
    """The 16-bit dtypes of the times; the programs for a TPU are in bfloat16."""
    repeats: int = 40
    """Rounds over which a time is the median; each takes a step with every variant."""
    chip: Chip = CHIP
    unroll: bool = False
    """Layers of the chip's model one after another instead of in a loop; bytes accessed count the
    loop's body once."""


def measure(options: Options) -> Report:
    return collect(options.measures, _MEASURES, options, config_of(options))


class Step:
    """A compiled step that keeps its state from call to call.

    Attributes:
        peak_bytes: The most that it holds, as the compiler says.
    """

    def __init__(self, variant: Variant, tx: Any, params: Any, batch: Any):
        # Copied: a step gives away its parameters, and all steps start from the same.
        self._state = (jax.tree.map(jax.numpy.copy, params), tx.init(params))
        self._batch = batch
        jitted = jax.jit(make_step(variant, tx), donate_argnums=(0, 1))
        self._program = jitted.lower(*self._state, batch).compile()
        stats = self._program.memory_analysis()
        self.peak_bytes = peak_bytes(stats, jax.devices()[0].platform)

    def __call__(self) -> jax.Array:
        *self._state, loss = self._program(*self._state, self._batch)
        return jax.block_until_ready((self._state, loss))[1]


def make_step(variant: Variant, tx: Any) -> Callable:
    """`(params, opt_state, batch) -> (params, opt_state, loss)`."""
    grad_fn = variant.value_and_grad()

    def step(params, opt_state, batch):
        guarded = isinstance(opt_state, jaxamp.ApplyIfFiniteState)
        scale = jaxamp.loss_scale(opt_state) if guarded else None
        loss, grads = grad_fn(params, batch, loss_scale=scale)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def whole_steps(
    variants: dict[str, Variant], config: Config, platform: str
) -> dict[str, tuple[Variant, Any]]:
    """Name, variant and optimizer of each step; only the last two have a guard.

    On a GPU, where float32 is what XLA makes of it, there are two more that say how to multiply.
    """
    plain = make_adamw(config.optimizer, config.num_steps)
    guard = jaxamp.apply_if_finite
    steps = {name: (variants[name], plain) for name in ("float32", "by hand", "jmp", "autocast")}
    if platform == "gpu":
        steps |= {
            name: (_multiplying(variants["float32"], precision), plain)
            for name, precision in ((TF32, "tensorfloat32"), (EXACT, "highest"))
        }
    return steps | {
        GUARDED: (variants["autocast"], guard(plain)),
        SCALED: (variants["autocast"], guard(plain, jaxamp.DynamicLossScale())),
    }


def _multiplying(variant: Variant, precision: str) -> Variant:
    def loss_fn(params, batch):
        with jax.default_matmul_precision(precision):
            return variant.loss_fn(params, batch)

    return variant._replace(loss_fn=loss_fn)


def _tpu(report: Report, options: Options, config: Config) -> None:
    device = find_target("v5e").devices[0]
    variants, (params, batch) = for_chip(options.chip, config, Layers(options.unroll))
    found = {}
    for name, (variant, tx) in whole_steps(variants, config, device.platform).items():
        note(f"  compiling {name}")
        shapes = (params, jax.eval_shape(tx.init, params), batch)
        program = compiled.compile_for(device, make_step(variant, tx), shapes, donated=(0, 1))
        found[name] = compiled.figures_of(program, device.platform)
    moved = {name: figures.accessed_bytes or math.nan for name, figures in found.items()}
    gib = lambda name: {k: getattr(v, name) / 2**30 for k, v in found.items()}  # noqa: E731
    report.figures.extend(
        [
            Figure("bytes accessed, TPU v5e", "GB", {k: v / 1e9 for k, v in moved.items()}),
            Figure("peak memory, TPU v5e", "GiB", gib("peak_bytes")),
            Figure("temporaries, TPU v5e", "GiB", gib("temp_bytes")),
        ]
    )
    report.targets.extend(
        Target(f"bytes accessed, TPU v5e, {name}, of none", moved[name] / moved["autocast"], 1.002)
        for name in (GUARDED, SCALED)
    )


def _time(report: Report, options: Options, config: Config) -> None:
    corpus = load(config.data, config.model.vocab_size)
    params, batch = measures.small_point(config, corpus)
    tokens = batch["tokens"].size
    flops = tokens * model_flops_per_token(params, config.model, batch["tokens"].shape[1])
    for compute in options.compute:
        variants = measures.of_config(config, corpus, compute)
        steps = {
            name: Step(variant, tx, params, batch)
            for name, (variant, tx) in whole_steps(variants, config, jax.default_backend()).items()
        }
        found = measures.interleaved(list(steps.values()), options.repeats)
        seconds = dict(zip(steps, found, strict=True))
        name = f"step on {measures.here()}, {compute}"
        medians = {step: statistics.median(times) for step, times in seconds.items()}
        of = {
            base: {step: ratio(times, seconds[base]) for step, times in seconds.items()}
            for base in BASES
        }
        memory = {step: steps[step].peak_bytes / 2**20 for step in steps}
        speed = {step: tokens / median for step, median in medians.items()}
        report.figures.append(Figure(name, "s", medians))
        report.figures.extend(Figure(f"{name}, of {base}", "1", of[base]) for base in BASES)
        report.figures.append(Figure(f"{name}, tokens a second", "1/s", speed))
        report.figures.append(Figure(f"{name}, peak memory", "MiB", memory))
        utilization = _utilization(flops, medians, compute)
        if utilization:
            report.figures.append(Figure(f"{name}, MFU", "1", utilization))
        report.targets.append(Target(f"{name}, of by hand", of["by hand"]["autocast"], 1.02))
        report.targets.extend(
            Target(f"{name}, {step}, of none", of["autocast"][step], 1.01)
            for step in (GUARDED, SCALED)
        )


def _utilization(flops: int, seconds: dict[str, float], compute: str) -> dict[str, float]:
    """Model FLOPs utilization of each step, where the peak of the device is known."""
    found = {}
    for name, median in seconds.items():
        dtype = (
            "float32"
            if name.startswith("float32")
            else jaxamp.get_policy(f"compute={compute}").compute_dtype
        )
        peak = peak_flops(jax.devices()[0].device_kind, dtype)
        if peak and name != EXACT:  # no table has the peak of exact float32
            found[name] = flops / median / peak
    return found


_MEASURES = {"tpu": _tpu, "time": _time}
