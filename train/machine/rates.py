"""What each dtype is worth on a device: measured matmuls, elementwise bandwidth, subnormals."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.chips import peak_flops
from train.figures import ratio

BASE = "float32"


class Rate(NamedTuple):
    """One row of measurements.

    Attributes:
        name: Dtype and precision.
        seconds: Median time of one call.
        per_second: Operations (two for each multiply-add) or bytes a second.
        ratio: Speed as a multiple of float32's, median over rounds that were run side by side.
        error: ||c - c64|| / ||c64|| against the product of the float32 operands in float64; None
            where there is no product.
        peak: Operations a second as the maker says; None where it is not known.
    """

    name: str
    seconds: float
    per_second: float
    ratio: float
    error: float | None = None
    peak: float | None = None


class Size(NamedTuple):
    """How much is measured.

    Attributes:
        side: Of the square matrices.
        calls: Matmuls from one look at the clock to the next.
        elements: Of the elementwise arrays.
        budget_seconds: For the timed rounds of one row.
    """

    side: int
    calls: int
    elements: int
    budget_seconds: float


CPU = Size(side=512, calls=10, elements=2**25, budget_seconds=1.0)
ACCELERATOR = Size(side=4096, calls=10, elements=2**27, budget_seconds=1.0)
MOST_ROUNDS = 15
ROWS = 16  # of a product that are compared with float64


def size_for(device: Any) -> Size:
    return CPU if device.platform == "cpu" else ACCELERATOR


def matmuls(device: Any, size: Size) -> tuple[list[Rate], list[str]]:
    """Square matmuls of normal numbers: (rows, one line for each kind that the device refuses).

    float32 is asked for without a precision, so that its error shows what that comes to here.
    """
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, size.side, size.side), np.float32)
    exact = a[:ROWS].astype(np.float64) @ b.astype(np.float64)
    runs, errors, refused = {}, {}, []
    for name, (dtype, precision) in _kinds(device).items():
        try:
            call = _matmul(device, a, b, dtype, precision)
            product = np.asarray(call()[:ROWS].astype(jnp.float32), np.float64)
        except Exception as error:  # each backend raises what it likes
            refused.append(f"{name}: refused by {device.device_kind} ({_first_line(error)})")
            continue
        errors[name] = float(np.linalg.norm(product - exact) / np.linalg.norm(exact))
        runs[name] = _repeated(call, size.calls)
    work = 2 * size.side**3
    return [
        row._replace(
            seconds=row.seconds / size.calls,
            per_second=work * size.calls / row.seconds,
            error=errors[row.name],
            peak=peak_flops(device.device_kind, row.name) if row.name in _DTYPES else None,
        )
        for row in _timed(runs, size.budget_seconds)
    ], refused


def elementwise(device: Any, size: Size) -> list[Rate]:
    """x + 1 in place: bytes read and written a second; the ratio is of elements, not of bytes."""
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    arrays = {
        dtype: jax.device_put(jnp.ones(size.elements, dtype), device)
        for dtype in ("float32", "bfloat16")
    }

    def step(dtype: str) -> None:
        arrays[dtype] = jax.block_until_ready(add(arrays[dtype]))

    runs = {dtype: functools.partial(step, dtype) for dtype in arrays}
    return [
        row._replace(per_second=2 * arrays[row.name].nbytes / row.seconds)
        for row in _timed(runs, size.budget_seconds)
    ]


def subnormals(device: Any) -> dict[str, str]:
    """By dtype: whether numbers below the least normal one are kept or flushed to zero."""
    multiply = jax.jit(lambda x, y: x * y)
    found = {}
    for dtype in _DTYPES:
        info = jnp.finfo(dtype)
        word = np.uint32 if info.bits == 32 else np.uint16
        # From bits: the processor may be told to flush what numpy computes, too.
        least = np.array(1 << info.nmant, word).view(info.dtype)
        half = np.array(1 << (info.nmant - 1), word).view(info.dtype)
        place = lambda x: jax.device_put(x, device)  # noqa: E731
        made = multiply(place(least), place(np.array(0.5, info.dtype)))
        read = multiply(place(half), place(np.array(2, info.dtype)))
        flushed = {"made": made, "read": read}
        flushed = [how for how, x in flushed.items() if not np.asarray(x).view(word)]
        found[dtype] = f"flushed to zero when {' and '.join(flushed)}" if flushed else "kept"
    return found


_DTYPES = ("float32", "bfloat16", "float16")


def _kinds(device: Any) -> dict[str, tuple[str, Any]]:
    kinds: dict[str, tuple[str, Any]] = {BASE: ("float32", None)}
    kinds["float32, highest"] = ("float32", jax.lax.Precision.HIGHEST)
    if device.platform == "gpu":
        kinds["float32, tf32"] = ("float32", jax.lax.DotAlgorithmPreset.TF32_TF32_F32)
    return kinds | {"bfloat16": ("bfloat16", None), "float16": ("float16", None)}


def _matmul(device: Any, a: Any, b: Any, dtype: str, precision: Any) -> Callable[[], jax.Array]:
    multiply = jax.jit(lambda x, y: jnp.matmul(x, y, precision=precision))
    x, y = (jax.device_put(jnp.asarray(m, dtype), device) for m in (a, b))
    return lambda: multiply(x, y)


def _repeated(call: Callable[[], jax.Array], times: int) -> Callable[[], None]:
    def run() -> None:
        jax.block_until_ready([call() for _ in range(times)])

    return run


def _timed(runs: Mapping[str, Callable[[], None]], budget_seconds: float) -> list[Rate]:
    """Rows with times; each round runs all that have time left, one after another."""
    for run in runs.values():
        run()  # compiles
    rounds = {
        name: max(1, min(MOST_ROUNDS, int(budget_seconds / _seconds(run))))
        for name, run in runs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(MOST_ROUNDS):
        for name, run in runs.items():
            if number < rounds[name]:
                times[name].append(_seconds(run))
    return [_row(name, times[name], times.get(BASE, times[name])) for name in runs]


def _row(name: str, times: Sequence[float], base: Sequence[float]) -> Rate:
    both = min(len(times), len(base))
    return Rate(name, median(times), 0.0, ratio(base[:both], times[:both]))


def _seconds(run: Callable[[], None]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__
