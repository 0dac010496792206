"""Flags and settings that change numbers, or how fast they are computed, and what each does.

Sources: JAX's configuration options, XLA's own `XLA_FLAGS=--help`, DeepRec's and MONAI's
pages on TF32.
"""

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One that is set: its name, its value and what it does."""

    name: str
    value: str
    effect: str


_CONFIG = {  # name: (JAX's default, what another value does)
    "jax_default_matmul_precision": (
        None,
        "the precision of float32 matmuls and convolutions that ask for none",
    ),
    "jax_enable_x64": (False, "Python and numpy numbers may become 64-bit arrays"),
    "jax_numpy_dtype_promotion": ("standard", "strict: arithmetic that mixes dtypes raises"),
    "jax_debug_nans": (False, "a NaN raises at once, so a bad step cannot be skipped"),
    "jax_debug_infs": (False, "an Inf raises at once, so a bad step cannot be skipped"),
    "jax_disable_jit": (False, "operations run one by one: slow, each result is rounded"),
    "jax_default_prng_impl": ("threefry2x32", "a seed gives other random numbers"),
    "jax_threefry_partitionable": (True, "a seed gives other random numbers"),
}
_XLA = {
    "xla_allow_excess_precision": "true (the default): results may stay wider than their dtype",
    "xla_cpu_enable_fast_math": "true: less accurate, and with the honor flags false no NaN or Inf "
    "for the guard to see",
    "xla_cpu_fast_math_honor_nans": "false, with fast math: operations may not give NaN",
    "xla_cpu_fast_math_honor_infs": "false, with fast math: operations may not give Inf",
    "xla_cpu_fast_math_honor_division": "false, with fast math: x / y is x times 1 / y",
    "xla_cpu_fast_math_honor_functions": "false, with fast math: functions are approximated",
    "xla_cpu_enable_fast_min_max": "true: min and max may lose a NaN",
    "xla_gpu_enable_fast_min_max": "true: min and max lose a NaN",
    "xla_cpu_enable_platform_dependent_math": "true: results differ from CPU to CPU",
    "xla_cpu_max_isa": "no newer instructions: below AVX512_BF16 and AMX no bfloat16 ones",
    "xla_cpu_strict_dot_conv_math": "true: float16 matmuls are not run in float32, mostly slower",
    "xla_gpu_ftz": "true: generated code flushes subnormal numbers to zero",
    "xla_gpu_deterministic_ops": "true: the same numbers from run to run",
    "xla_gpu_exclude_nondeterministic_ops": "true: no operation that differs from run to run",
    "xla_gpu_enable_triton_gemm": "whether Triton's matmuls are used beside the library's",
    "xla_gpu_autotune_level": "0: kernels are not chosen by measuring them",
    "xla_backend_optimization_level": "how much the code is optimised: the times below too",
    "xla_disable_hlo_passes": "passes of the compiler are left out",
}
_ENVIRONMENT = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "XLA optimises little: the times below too",
    "NVIDIA_TF32_OVERRIDE": "0: NVIDIA's libraries use no TF32, whatever the program asks for",
}
_FLAG_LISTS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def settings(config: Any, environment: Mapping[str, str]) -> list[Setting]:
    """What is set otherwise than by default in JAX, and what the environment gives to others.

    Args:
        config: `jax.config`.
        environment: `os.environ`.
    """
    found = []
    for name, (default, effect) in _CONFIG.items():
        value = getattr(config, name, default)  # a JAX that does not have it has its default
        if value != default:
            found.append(Setting(name.upper(), str(value), effect))
    for name, effect in _ENVIRONMENT.items():
        if name in environment:
            found.append(Setting(name, environment[name], effect))
    for name in _FLAG_LISTS:
        found += _flags(name, environment.get(name, ""))
    return found


def _flags(where: str, text: str) -> list[Setting]:
    found, others = [], []
    for part in shlex.split(text):
        name, _, value = part.lstrip("-").partition("=")
        if name in _XLA:
            found.append(Setting(f"{where} {name}", value or "true", _XLA[name]))
        else:
            others.append(part)
    if others:
        found.append(Setting(where, " ".join(others), "not known to change numbers"))
    return found
