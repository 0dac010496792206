"""What a program compiled for a chip that is not here will do: memory, bytes, dtypes of matmuls."""

import os
import re
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.variants import Variant

# Each says no more to libtpu than which chip to compile for: it looks for none.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


# XLA's GpuTargetConfigProto, from the data sheet of the H100 SXM and the CUDA programming guide's
# table for compute capability 9.0.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 13 }
dnn_version_info { major: 9 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 85899345920
  memory_bandwidth: 3350000000000
  l2_cache_size: 52428800
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


class NoCompiler(RuntimeError):
    """The compiler of a chip is not installed; one line that says how to install it."""


class Figures(NamedTuple):
    """Read from one compiled program.

    Attributes:
        temp_bytes: Peak of temporary memory.
        accessed_bytes: Read and written in one call; None where the compiler does not say. A loop
            body counts once.
        float32_matmuls: Matmuls of two float32 operands.
    """

    temp_bytes: int
    accessed_bytes: float | None
    float32_matmuls: int


# The inputs of loss and gradients as shapes: parameters, and a batch of tokens and labels.
Shapes = tuple[Any, Any]


def tpu_device() -> Any:
    """A TPU v5e to compile for, without having one.

    Raises:
        NoCompiler: libtpu is not installed, or does not start.
    """
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    except Exception as error:  # plugin and libtpu each raise what they like
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoCompiler(
            f"no TPU compiler, install it with: pip install 'jax[tpu]=={version('jax')}' ({reason})"
        ) from None


def h100_device() -> Any:
    """An NVIDIA H100 to compile for, without having one.

    Raises:
        NoCompiler: the CUDA plugin or nvcc is not installed, or does not start.
    """
    try:
        return topologies.get_topology_desc(
            platform="cuda", target_config=_H100, topology="1x1x1"
        ).devices[0]
    except Exception as error:  # as above
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoCompiler(
            "no CUDA compiler, install it with: pip install "
            f"jax-cuda13-plugin=={version('jax')} nvidia-cuda-nvcc ({reason})"
        ) from None


def compile_for(device: Any, fun: Callable, shapes: Shapes) -> Any:
    """`fun` compiled ahead of time for one `device`."""
    sharding = NamedSharding(Mesh([device], "d"), PartitionSpec())
    return jax.jit(fun, in_shardings=sharding, out_shardings=sharding).lower(*shapes).compile()


def figures_of(variant: Variant, device: Any, shapes: Shapes) -> Figures:
    """The figures of a variant's loss and gradients on `device`."""
    program = compile_for(device, variant.value_and_grad(), shapes)
    try:
        cost = program.cost_analysis() or {}
    except jax.errors.JaxRuntimeError:  # the GPU compiler has none
        cost = {}
    return Figures(
        temp_bytes=program.memory_analysis().temp_size_in_bytes,
        accessed_bytes=cost.get("bytes accessed"),
        float32_matmuls=sum(1 for _ in float32_matmuls(program.as_text())),
    )


def batch_shapes(batch_size: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as shapes."""
    shape = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    return {"tokens": shape, "labels": shape}


_RESULT = re.compile(r"^\s*(?:ROOT )?%?(\S+) = (\w+)\[")
_MATMUL = re.compile(r" (?:dot|convolution)\(([^)]*)\)")
_GEMM = re.compile(r' custom-call\(([^)]*)\).*custom_call_target="__cublas')


def float32_matmuls(hlo_text: str) -> Iterator[str]:
    """The lines of an HLO text that multiply two float32 matrices; there a TPU's matmul is a
    `convolution` and a GPU's may be a call of cuBLAS.

    >>> list(float32_matmuls('''
    ... a = f32[2,2]{1,0} parameter(0)
    ... b = bf16[2,2]{1,0} parameter(1)
    ... c = f32[2,2]{1,0} dot(a, b), lhs_contracting_dims={1}
    ... d = f32[2,2]{1,0} dot(a, c), lhs_contracting_dims={1}'''))
    ['d = f32[2,2]{1,0} dot(a, c), lhs_contracting_dims={1}']
    """
    lines = hlo_text.splitlines()
    dtypes = {found[1]: found[2] for line in lines if (found := _RESULT.match(line))}
    for line in lines:
        found = _MATMUL.search(line) or _GEMM.search(line)
        if found and [_dtype(operand, dtypes) for operand in _operands(found[1])] == ["f32"] * 2:
            yield line.strip()


def _operands(text: str) -> list[str]:
    return re.sub(r"[\[{][^\]}]*[\]}]", "", text).split(",")[:2]


def _dtype(operand: str, dtypes: dict[str, str]) -> str | None:
    return dtypes.get(operand.split()[-1].lstrip("%"))


def float32_dots(fun: Callable, *args: Any) -> int:
    """How many matmuls of two float32 operands a program for a TPU has before it is compiled.

    For a CPU autocast writes some as matmuls of float32 numbers that are rounded to 16 bits.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 2))
    >>> float32_dots(jnp.dot, x, x), float32_dots(jnp.dot, *[x.astype("bfloat16")] * 2)
    (1, 0)
    """
    program = jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",))
    stablehlo_text = program.as_text()
    of_float32 = r"tensor<(?:\d+x)*f32>"
    return len(re.findall(rf"dot_general .*: \({of_float32}, {of_float32}\) ->", stablehlo_text))
