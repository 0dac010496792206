"""Reading jaxprs: the only file that touches `jax.extend.core`, and what differs between versions.

The names of params are those of jax 0.10 to 0.12. `shard_map_p`, `pallas_call_p` and others are
not exported, so primitives are recognised by name.
"""

import functools
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

CALLS = {  # name -> the param with the program, whose inputs and outputs are those of the equation
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "shard_map": "jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
}
INLINED = ("closed_call", "core_call", "call", "eval_jaxpr")
REMATS = ("remat", "remat2", "checkpoint")


Primitive = jex_core.Primitive


def opened(program: Any) -> tuple[Any, Sequence[Any]]:
    """A `Jaxpr` or `ClosedJaxpr` as (jaxpr, values of its constvars)."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def called(eqn: Any) -> Any:
    """The program inside an equation of `CALLS`."""
    return eqn.params[CALLS[eqn.primitive.name]]


def is_literal(atom: Any) -> bool:
    """Whether the operand of an equation is a literal rather than a variable."""
    return isinstance(atom, jex_core.Literal)


def literal(atom: Any) -> Any:
    """The value of a literal, in its dtype."""
    dtype = dtype_of(atom)
    if dtype is None or dtype == jax.dtypes.float0:  # a key, or the tangent of an integer
        return atom.val
    return np.asarray(atom.val).astype(dtype)[()]


def dtype_of(atom: Any) -> Any:
    """Numpy dtype of a variable that holds an array; None for keys, references and tokens."""
    aval = atom.aval
    if not isinstance(aval, jax.core.ShapedArray):
        return None
    return aval.dtype if isinstance(aval.dtype, np.dtype) else None


def is_float32(atom: Any) -> bool:
    """Whether the trace has a float32 array there: the only dtype that autocast narrows."""
    return dtype_of(atom) == np.float32


def is_inexact(atom: Any) -> bool:
    """Whether the trace has a floating or complex array there, of any width."""
    dtype = dtype_of(atom)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """(number of constants, number of carries) of a scan; jax 0.11 moved them into `ft_in`."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def trace(fun: Callable, *avals: Any) -> Any:
    """The closed jaxpr of `fun`, without the precision that JAX gives matmuls by default.

    That one is meant for float32 matmuls, and which these are is not known yet.
    """
    with jax.default_matmul_precision(None):
        return jax.make_jaxpr(fun)(*avals)


def default_precision() -> Any:
    """What `jax_default_matmul_precision` comes to as a param of a matmul; None where not set."""
    config: Any = jax.config  # does not say which settings it has
    return _as_param(config.jax_default_matmul_precision)


@functools.cache
def _as_param(default: str | None) -> Any:
    with jax.default_matmul_precision(default):
        (eqn,) = jax.make_jaxpr(lambda x: jax.lax.dot(x, x))(np.ones((1, 1), np.float32)).eqns
    return eqn.params["precision"]


def bind(eqn: Any, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """Bind the equation's primitive to new operands, with some params changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changes})
    outs = eqn.primitive.bind(*operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


@functools.lru_cache(maxsize=64)
def in_float32(jaxpr: Any) -> Any:
    """A jaxpr of numbers of one dtype, of float32 ones."""
    fun = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(jaxpr, ()))
    return jax.make_jaxpr(fun)(*(np.float32(0) for _ in jaxpr.invars)).jaxpr


def bind_remembered(eqn: Any, operands: Sequence[Any], **changes: Any) -> list[Any]:
    """`bind` for a primitive without programs inside.

    JAX linearises an inlined jit once per shape, and a bare primitive at each of its uses, which is
    most of the time that tracing a gradient takes.
    """
    if not inlines_at_once():
        return bind(eqn, operands, **changes)
    params = tuple(sorted({**eqn.params, **changes}.items()))
    try:
        call = _remembered(eqn.primitive, params)
    except TypeError:  # a param that is not hashable
        return bind(eqn, operands, **changes)
    outs = call(*operands)
    return list(outs) if eqn.primitive.multiple_results else [outs]


@functools.cache
def inlines_at_once() -> bool:
    """Whether tracing an inlined jit leaves no equation `jit` behind; jax 0.12 does leave one."""
    program = jax.make_jaxpr(jax.jit(lambda x: x + x, inline=True))(np.float32(0))
    return program.eqns[0].primitive.name == "add"


@functools.lru_cache(maxsize=4096)
def _remembered(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable:
    return jax.jit(lambda *operands: primitive.bind(*operands, **dict(params)), inline=True)


def scope_of(eqn: Any) -> str:
    """The name scopes of an equation, within its own jaxpr.

    Transforms wrap the names they meet, as in `transpose(jvp(layer))/mul`; the layer is meant.
    """
    return "/".join(inner_scopes(str(eqn.source_info.name_stack)))


def inner_scopes(stack: str) -> list[str]:
    """The names of a name stack, out of what wraps them.

    >>> inner_scopes("net/transpose(jvp(head))/mul")
    ['net', 'head', 'mul']
    """
    parts = (part.rsplit("(", 1)[-1].rstrip(")") for part in stack.split("/"))
    return [part for part in parts if part]


def where(eqn: Any) -> str:
    """`file:line:column (function)` of the user's line behind an equation."""
    return source_info_util.summarize(eqn.source_info)


def users_line(eqn: Any) -> str:
    """Like `where`, but of the code that called an installed library, if one made the equation."""
    line = where(eqn)
    if not is_installed(line):
        return line
    for frame in eqn.source_info.traceback.frames:
        if is_users(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}: ({frame.function_name})"
    return line


def is_users(file: str) -> bool:
    """Whether a file is neither of an installed library nor of this one."""
    return not file.startswith((*_INSTALLED, _HERE))


def is_installed(file: str) -> bool:
    """Whether a file is of Python itself or of an installed library."""
    return file.startswith(_INSTALLED)


_PATHS = sysconfig.get_paths()
_INSTALLED = tuple({_PATHS[kind] for kind in ("stdlib", "purelib", "platlib")})
_HERE = os.path.dirname(__file__)


def programs(eqn: Any) -> Iterator[Any]:
    """All programs among the params of an equation."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                yield item


class Node(NamedTuple):
    """One equation of a `flat_graph`; values are numbered, literals are -1."""

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    has_matmul: bool


def flat_graph(program: Any, is_matmul: Callable[[str], bool]) -> tuple[list[Node], range, list]:
    """The data flow of a program with its calls inlined: (nodes, inputs, outputs).

    Loops and branches stay single nodes, which have a matmul if there is one anywhere inside.
    """
    nodes: list[Node] = []
    count = 0

    def fresh() -> int:
        nonlocal count
        count += 1
        return count - 1

    def walk(jaxpr: Any, ins: Sequence[int]) -> list[int]:
        ids: dict[Any, int] = dict(zip(jaxpr.invars, ins, strict=True))
        read = lambda atom: -1 if is_literal(atom) else ids.setdefault(atom, -1)  # noqa: E731
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            if eqn.primitive.name in CALLS:
                outs = walk(opened(called(eqn))[0], operands)
            else:
                outs = [fresh() for _ in eqn.outvars]
                nodes.append(Node(eqn.primitive.name, tuple(operands), tuple(outs), matmul_in(eqn)))
            ids.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def matmul_in(eqn: Any) -> bool:
        if is_matmul(eqn.primitive.name):
            return True
        return any(matmul_in(e) for p in programs(eqn) for e in opened(p)[0].eqns)

    jaxpr = opened(program)[0]
    inputs = range(len(jaxpr.invars))
    count = len(jaxpr.invars)
    return nodes, inputs, walk(jaxpr, inputs)
