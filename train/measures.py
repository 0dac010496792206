"""What `train.benchmark` measures on the machine it runs on: errors, times, compilations, bits."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxamp
from train.config import Config
from train.data import Corpus, train_batches
from train.step import init_state, make_train_step, structure
from train.variants import SCAN, Layers, Variant, make_variants

FLOAT32 = jaxamp.get_policy("float32")
# Each cast of a program happens: XLA would drop some between fused operations, for one variant more
# than for another and for one chip more than for another.
AS_WRITTEN = {"xla_allow_excess_precision": False}


def here() -> str:
    """What the programs that are run run on, in words."""
    return f"this {jax.devices()[0].platform.upper()}"


class Point(NamedTuple):
    """Parameters after some training, and the batch that follows."""

    params: Any
    batch: Any


def trained(config: Config, corpus: Corpus, seeds: range, num_steps: int) -> Iterator[Point]:
    """One point per seed of initial parameters and data order, after float32 training."""
    graphdef, _ = structure(config, corpus.vocab_size, FLOAT32)
    train_step = make_train_step(config, graphdef, FLOAT32)
    for seed in seeds:
        seeded = config.model_copy(update={"seed": seed})
        state = init_state(seeded, corpus.vocab_size, FLOAT32)[1]
        batches = iter(train_batches(corpus, config.batch_size, seed))
        for _ in range(num_steps):
            state, _ = train_step(state, next(batches))
        yield Point(state.params, next(batches))


def gradient_errors(
    variants: dict[str, Variant], points: list[Point], loss_scale: Any
) -> dict[str, list[float]]:
    """||g - g32|| / ||g32|| of each variant at each point, g32 at the highest matmul precision."""
    with jax.default_matmul_precision("highest"):
        exact = _gradients(variants["float32"], points, None)
    return {
        name: [
            _distance(grads, grads32)
            for grads, grads32 in zip(_gradients(variant, points, loss_scale), exact, strict=True)
        ]
        for name, variant in variants.items()
    }


def _gradients(variant: Variant, points: list[Point], loss_scale: Any) -> list[np.ndarray]:
    grad_fn = functools.partial(variant.value_and_grad(), loss_scale=loss_scale)
    compiled = jax.jit(grad_fn, compiler_options=AS_WRITTEN)
    return [_flat(compiled(*point)[1]) for point in points]


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]).astype(np.float64)


def _distance(x: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def step_seconds(variants: list[Variant], point: Point, repeats: int) -> list[list[float]]:
    """Wall time of loss and gradients, one list of `repeats` per variant, runs interleaved."""
    steps = [jax.jit(variant.value_and_grad()) for variant in variants]
    return interleaved([functools.partial(step, *point) for step in steps], repeats)


def interleaved(runs: Sequence[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Wall seconds of each, one list of `repeats` per run; every other round goes backwards.

    All are called once before. A run is over when what it returns is there.
    """
    for run in runs:
        jax.block_until_ready(run())
    seconds: list[list[float]] = [[] for _ in runs]
    for k in range(repeats):
        order = range(len(runs)) if k % 2 else reversed(range(len(runs)))
        for n in order:
            start = time.perf_counter()
            jax.block_until_ready(runs[n]())
            seconds[n].append(time.perf_counter() - start)
    return seconds


def tracing_seconds(variants: list[Variant], point: Point, repeats: int) -> list[list[float]]:
    """Processor time of tracing and lowering loss and gradients with cold caches, interleaved."""
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(repeats + 1):
        for variant, measured in zip(variants, seconds, strict=True):
            jax.clear_caches()
            start = time.process_time()
            jax.jit(variant.value_and_grad()).lower(*point)
            measured.append(time.process_time() - start)
    return [measured[1:] for measured in seconds]  # the first of all also loads modules


def compilations_of_second_call(variant: Variant, point: Point, jit: bool) -> int:
    """Programs that a second call compiles; without `jit` JAX compiles a scan's gradient anew."""
    grad_fn = jax.jit(variant.value_and_grad()) if jit else variant.value_and_grad()
    grad_fn(*point)
    with compilations() as compiled:
        grad_fn(*point)
    return len(compiled)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        del duration_secs, kwargs
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def differing_leaves(a: Callable, b: Callable, point: Point) -> int:
    """Leaves of two functions' results that differ in any bit."""
    pairs = zip(*(jax.tree.leaves(jax.jit(fun)(*point)) for fun in (a, b)), strict=True)
    return sum(np.asarray(x).tobytes() != np.asarray(y).tobytes() for x, y in pairs)


def small_point(config: Config, corpus: Corpus) -> Point:
    """The model before training and its first batch."""
    return next(trained(config, corpus, range(1), 0))


def of_config(
    config: Config, corpus: Corpus, compute: str, layers: Layers = SCAN
) -> dict[str, Variant]:
    """`make_variants` for a config."""
    graphdef, _ = structure(config, corpus.vocab_size, FLOAT32)
    return make_variants(config, graphdef, compute, layers)
