"""`autocast`: its gradients, programs and times against other ways to compute in 16 bits."""

import dataclasses
import math
import statistics
from typing import Any, Literal, get_args

import jax

import jaxamp
from train import compiled, measures
from train.benchmarks.chip_model import CHIP, Chip, for_chip
from train.benchmarks.options import BenchmarkOptions, config_of
from train.chips import find_target
from train.config import Config
from train.data import Corpus, load
from train.figures import Figure, Report, Target, collect, ratio
from train.progress import note
from train.variants import Layers, Variant

ABOUT = """Measure autocast against float32, 16 bits by hand, jmp's cast of the whole tree, and the
floor (nothing rounded but the operands of matmuls): gradient errors and times on this CPU; memory,
bytes and matmuls of programs compiled for a TPU and a GPU that need not be here."""

Measure = Literal["errors", "float32", "compilations", "program", "tpu", "gpu", "tracing", "time"]
COMPUTE = ("bf16", "f16")
LEAN = "autocast, residuals=compute"
PLAIN_JMP = "jmp, plain layers"
ERRORS_WANTED = {"by hand": 0.70, "jmp": 0.42, PLAIN_JMP: 0.42, "floor": 1.2}
TRACED_LAYERS = 12


@dataclasses.dataclass(frozen=True)
class Options(BenchmarkOptions):
    measures: tuple[Measure, ...] = get_args(Measure)
    """Which measures to take; they are taken in this order, timing last."""
    seeds: int = 5
    """Initial parameters and orders of data over which a gradient error is the median."""
    training_steps: int = 20
    """Steps in float32 before gradients are compared."""
    repeats: int = 20
    """Pairs of runs over which a time is the median."""
    chip: Chip = CHIP
    unroll: bool = False
    """Layers of the chip's model one after another instead of in a loop; bytes accessed count the
    loop's body once."""


def measure(options: Options) -> Report:
    config = config_of(options)
    corpus = load(config.data, config.model.vocab_size)
    return collect(options.measures, _MEASURES, options, config, corpus)


def _errors(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    points = list(measures.trained(config, corpus, range(options.seeds), options.training_steps))
    for compute in COMPUTE:
        variants = measures.of_config(config, corpus, compute)
        loss_scale = jaxamp.get_loss_scale(jaxamp.get_policy(f"compute={compute}"))
        errors = measures.gradient_errors(variants, points, loss_scale)
        name = f"gradient error, {compute}"
        report.figures.append(
            Figure(name, "1e-3", {k: 1e3 * statistics.median(v) for k, v in errors.items()})
        )
        report.targets.extend(
            Target(f"{name}, of {other}", ratio(errors["autocast"], errors[other]), bound)
            for other, bound in ERRORS_WANTED.items()
            if not any(map(math.isnan, errors[other]))  # jmp's cast may not survive float16
        )


def _float32(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    plain = measures.of_config(config, corpus, "bf16")["float32"]
    differing = measures.differing_leaves(
        jax.value_and_grad(plain.loss_fn),
        jaxamp.value_and_grad(plain.loss_fn, "params=f32,compute=f32"),
        measures.small_point(config, corpus),
    )
    report.targets.append(Target("compute=f32: results that differ in a bit", differing, 0))


def _compilations(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    variants = measures.of_config(config, corpus, "bf16")
    point = measures.small_point(config, corpus)
    for jit in (True, False):
        name = f"programs compiled by a second call, {'jit' if jit else 'no jit'}"
        counts = {
            variant: measures.compilations_of_second_call(variants[variant], point, jit)
            for variant in ("float32", "autocast")
        }
        report.figures.append(Figure(name, "count", counts))
        more = counts["autocast"] - (0 if jit else counts["float32"])
        report.targets.append(Target(name if jit else f"{name}, beyond float32", more, 0))


def _tpu(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    device = find_target("v5e:2x2").devices[0]
    plain = _compile_all(*for_chip(options.chip, config, Layers(options.unroll)), device)
    variants, shapes = for_chip(options.chip, config, Layers(options.unroll, remat=True))
    pair = {name: variants[name] for name in ("by hand", "autocast")}
    remat = _compile_all(pair, shapes, device)
    _add_figures(report, "TPU v5e", plain)
    _add_figures(report, "TPU v5e, dots_saveable", remat)
    temp = {name: figures.temp_bytes for name, figures in plain.items()}
    moved = (plain["autocast"].accessed_bytes or 0) / (plain["by hand"].accessed_bytes or 1)
    again = remat["autocast"].temp_bytes / remat["by hand"].temp_bytes
    report.targets.extend(
        [
            Target("peak memory, of by hand", temp["autocast"] / temp["by hand"], 0.92),
            Target("peak memory, dots_saveable, of by hand", again, 0.65),
            Target(
                "peak memory, residuals=compute, of by hand", temp[LEAN] / temp["by hand"], 0.55
            ),
            Target(
                "peak memory, residuals=compute, of jmp", temp[LEAN] / temp["jmp"], 1.0, strict=True
            ),
            Target("bytes accessed, of by hand", moved, 0.92),
        ]
    )
    _add_matmul_targets(report, "TPU v5e", plain | {"autocast, remat": remat["autocast"]})


def _gpu(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    device = find_target("h100").devices[0]
    variants, shapes = for_chip(options.chip, config, Layers(options.unroll))
    pair = {name: variants[name] for name in ("by hand", "autocast")}
    figures = _compile_all(pair, shapes, device)
    _add_figures(report, "H100", figures)
    _add_matmul_targets(report, "H100", figures)


def _compile_all(
    variants: dict[str, Variant], shapes: compiled.Shapes, device: Any
) -> dict[str, compiled.Figures]:
    found = {}
    for name, variant in variants.items():
        note(f"  compiling {name}")
        program = compiled.compile_for(device, variant.value_and_grad(), shapes)
        found[name] = compiled.figures_of(program, device.platform)
    return found


def _add_figures(report: Report, chip: str, found: dict[str, compiled.Figures]) -> None:
    temp = {name: figures.temp_bytes / 2**30 for name, figures in found.items()}
    moved = {
        name: figures.accessed_bytes / 1e9
        for name, figures in found.items()
        if figures.accessed_bytes is not None
    }
    matmuls = {name: figures.float32_matmuls for name, figures in found.items()}
    report.figures.append(Figure(f"peak memory, {chip}", "GiB", temp))
    if moved:
        report.figures.append(Figure(f"bytes accessed, {chip}", "GB", moved))
    report.figures.append(Figure(f"float32 matmuls, {chip}", "count", matmuls))


def _add_matmul_targets(report: Report, chip: str, found: dict[str, compiled.Figures]) -> None:
    report.targets.extend(
        Target(f"float32 matmuls, {chip}, {name}", figures.float32_matmuls, 0)
        for name, figures in found.items()
        if name.startswith("autocast")
    )


def _program(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    point = measures.small_point(config, corpus)
    for remat in (False, True):
        variants = measures.of_config(config, corpus, "bf16", Layers(remat=remat))
        counts = {
            name: compiled.float32_dots(variant.value_and_grad(), *point)
            for name, variant in variants.items()
        }
        name = "float32 matmuls, StableHLO" + (", dots_saveable" if remat else "")
        report.figures.append(Figure(name, "count", counts))
        report.targets.append(Target(name, counts["autocast"], 0))


def _tracing(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    model = config.model.model_copy(update={"n_layers": TRACED_LAYERS})
    config = config.model_copy(update={"model": model})
    variants = measures.of_config(config, corpus, "bf16", Layers(unroll=True))
    chosen = [variants["float32"], variants["autocast"]]
    point = measures.small_point(config, corpus)
    seconds = measures.tracing_seconds(chosen, point, max(options.repeats // 4, 1))
    _add_seconds(report, f"tracing and lowering, {TRACED_LAYERS} layers", chosen, seconds)
    without, with_ = seconds
    report.targets.append(Target("tracing and lowering, of float32", ratio(with_, without), 1.5))


def _time(report: Report, options: Options, config: Config, corpus: Corpus) -> None:
    variants = measures.of_config(config, corpus, "bf16")
    chosen = [variants[name] for name in ("float32", "by hand", "jmp", "autocast")]
    point = measures.small_point(config, corpus)
    seconds = measures.step_seconds(chosen, point, options.repeats)
    _add_seconds(report, f"step on {measures.here()}, bf16", chosen, seconds)
    _, by_hand, _, autocast = seconds
    report.targets.append(Target("step time, of by hand", ratio(autocast, by_hand), 1.02))


def _add_seconds(report: Report, name: str, variants, seconds) -> None:
    medians = {v.name: statistics.median(s) for v, s in zip(variants, seconds, strict=True)}
    report.figures.append(Figure(name, "s", medians))


_MEASURES = {
    "errors": _errors,
    "float32": _float32,
    "compilations": _compilations,
    "program": _program,
    "tpu": _tpu,
    "gpu": _gpu,
    "tracing": _tracing,
    "time": _time,
}
