"""`trace`: what it takes to trace, lower and compile the train step, and what comes out."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jaxamp
from train import compiled, measures
from train.benchmarks.options import BenchmarkOptions, config_of
from train.config import Config
from train.data import Corpus, load
from train.figures import Figure, Report, Target, ratio
from train.progress import note
from train.start import structure
from train.step import init_state, make_train_step

ABOUT = """Measure the time to trace, lower and compile the train step of train.run in float32 and
under autocast at several depths, the operations in its programs, and that a second call compiles
nothing."""

POLICIES = {"float32": "float32", "autocast": "compute=bf16"}
STAGES = ("tracing", "lowering", "compiling")


@dataclasses.dataclass(frozen=True)
class Options(BenchmarkOptions):
    depths: tuple[int, ...] = (4, 8, 16)
    """Numbers of layers; they are the rounds of one loop."""
    repeats: int = 5
    """Times that each program is made, with cold caches; times are medians."""


class Made(NamedTuple):
    """One train step: processor seconds of each stage, and operations by what they are."""

    seconds: tuple[float, ...]
    operations: dict[str, int]


def measure(options: Options) -> Report:
    report = Report([], [], [])
    config = config_of(options)
    corpus = load(config.data, config.model.vocab_size)
    batch = measures.small_point(config, corpus).batch
    for depth in options.depths:
        model = config.model.model_copy(update={"n_layers": depth})
        _add(report, config.model_copy(update={"model": model}), corpus, batch, options.repeats)
    return report


def _add(report: Report, config: Config, corpus: Corpus, batch: Any, repeats: int) -> None:
    layers = f"{config.model.n_layers} layers"
    made: dict[str, list[Made]] = {name: [] for name in POLICIES}
    # The first of all also loads modules.
    for k in range(repeats + 1):
        note(f"{layers}, {k} of {repeats}")
        for name, policy in POLICIES.items():
            made[name].append(make(config, corpus, policy, batch))
    kept = {name: found[1:] for name, found in made.items()}
    for k, stage in enumerate(STAGES):
        medians = {name: statistics.median(m.seconds[k] for m in kept[name]) for name in kept}
        report.figures.append(Figure(f"{stage}, {layers}", "s", medians))
    without, with_ = ([sum(m.seconds) for m in kept[name]] for name in POLICIES)
    name = f"tracing, lowering and compiling, {layers}, of float32"
    report.targets.append(Target(name, ratio(with_, without), 1.5))
    for what in made["float32"][0].operations:
        counts = {name: found[0].operations[what] for name, found in kept.items()}
        report.figures.append(Figure(f"{what}, {layers}", "count", counts))
    again = compilations_of_second_call(config, corpus, POLICIES["autocast"], batch)
    report.targets.append(Target(f"programs that a second call compiles, {layers}", again, 0))


def make(config: Config, corpus: Corpus, policy: str, batch: Any) -> Made:
    """Makes a step with cold caches."""
    chosen = jaxamp.get_policy(policy)
    graphdef, state = structure(config, corpus.vocab_size, chosen)
    step = make_train_step(config, graphdef, chosen)
    jax.clear_caches()
    seconds, results = [], []
    stages: tuple[Callable[[], Any], ...] = (
        lambda: step.trace(state, batch),
        lambda: results[0].lower(),
        lambda: results[1].compile(),
    )
    for stage in stages:
        start = time.process_time()
        results.append(stage())
        seconds.append(time.process_time() - start)
    traced, lowered, program = results
    primitives = compiled.primitive_counts(traced.jaxpr)
    operations = {
        "equations": primitives.total(),
        "converts in them": primitives["convert_element_type"],
        "StableHLO operations": lowered.as_text().count(" = stablehlo."),
        "HLO instructions": sum(" = " in line for line in program.as_text().splitlines()),
    }
    return Made(tuple(seconds), operations)


def compilations_of_second_call(config: Config, corpus: Corpus, policy: str, batch: Any) -> int:
    """Programs that are compiled when a step is taken for the second time."""
    step, state = _step(config, corpus, policy)
    state, _ = step(state, batch)
    with measures.compilations() as found:
        step(state, batch)
    return len(found)


def _step(config: Config, corpus: Corpus, policy: str) -> tuple[Any, Any]:
    chosen = jaxamp.get_policy(policy)
    graphdef, state = init_state(config, corpus.vocab_size, chosen)
    return make_train_step(config, graphdef, chosen), state
