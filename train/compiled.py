"""What is read from a program that is not run: memory, bytes, dtypes of matmuls, operations."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp.jaxprs import programs
from train.fit import peak_bytes


class Figures(NamedTuple):
    """Read from one compiled program.

    Attributes:
        peak_bytes: The most that is held at a time, arguments and results included.
        temp_bytes: Peak of temporary memory.
        accessed_bytes: Read and written in one call; None where the compiler does not say. A loop
            body counts once.
        float32_matmuls: Matmuls of two float32 operands.
    """

    peak_bytes: int
    temp_bytes: int
    accessed_bytes: float | None
    float32_matmuls: int


# The inputs of loss and gradients as shapes: parameters, and a batch of tokens and labels.
Shapes = tuple[Any, Any]


def compile_for(
    device: Any, fun: Callable, shapes: tuple[Any, ...], donated: tuple[int, ...] = ()
) -> Any:
    """`fun` compiled ahead of time for one `device`; `donated` arguments may be overwritten."""
    sharding = NamedSharding(Mesh([device], "d"), PartitionSpec())
    jitted = jax.jit(fun, in_shardings=sharding, out_shardings=sharding, donate_argnums=donated)
    return jitted.lower(*shapes).compile()


def figures_of(program: Any, platform: str) -> Figures:
    """The figures of a compiled program, and of the platform it is for."""
    try:
        cost = program.cost_analysis() or {}
    except jax.errors.JaxRuntimeError:  # the GPU compiler has none
        cost = {}
    stats = program.memory_analysis()
    return Figures(
        peak_bytes=peak_bytes(stats, platform),
        temp_bytes=stats.temp_size_in_bytes,
        accessed_bytes=cost.get("bytes accessed"),
        float32_matmuls=sum(1 for _ in float32_matmuls(program.as_text())),
    )


def primitive_counts(program: Any) -> Counter[str]:
    """How often each primitive is in a traced program; the body of a loop counts once.

    >>> program = jax.make_jaxpr(lambda x: jax.lax.map(jnp.sin, x).astype("bfloat16"))(jnp.ones(3))
    >>> sorted(primitive_counts(program).items())
    [('convert_element_type', 1), ('scan', 1), ('sin', 1)]
    """
    found: Counter[str] = Counter()
    waiting = [program]
    while waiting:
        for eqn in getattr(program := waiting.pop(), "jaxpr", program).eqns:
            found[eqn.primitive.name] += 1
            waiting.extend(programs(eqn))
    return found


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
