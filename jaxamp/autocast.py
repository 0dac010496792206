"""`autocast`: a float32 program in, a mixed-precision program out, op by op.

The function is traced once in its original dtypes, so that every float32 program works, planned
(`decide.py`) and emitted anew (`emit.py`). The model code names no dtype.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jmp
import numpy as np

from jaxamp import jaxprs, residuals, scopes
from jaxamp.decide import make_plan
from jaxamp.emit import emit
from jaxamp.plans import Info, Plan
from jaxamp.policy import Policy, get_policy


def autocast(fun: Callable, policy: str | jmp.Policy) -> Callable:
    """`fun` in mixed precision: the same arguments, the same results, fewer bits in between.

    For each operation, from its operands:

        matmul     computes in `compute_dtype`, unless precision=HIGHEST or an outer product
        full       computes in float32: exp, log, sums, norms, softmax, linear algebra, FFT ...
        the rest   follows the widest operand that descends from a matmul

    Parameters, other inputs and constants are like Python scalars: float32 until they meet such an
    operand, when they take its dtype, at each use anew. So gradients with respect to them are
    float32, and add up in float32. `jaxamp.rules` has the whole table, `jaxamp.explain` shows what
    was decided.

    Args:
        fun: Any function that `jax.jit` could trace, with arrays, keys, None and static values in
            any pytree, by position or keyword. Python scalars among its arguments stay what they
            are; only arrays are traced.
        policy: A policy or its string. `param_dtype` is not applied here.

    Returns:
        A function that works like `fun` under and over `jit`, `grad`, `vmap`, `jax.checkpoint`,
        `shard_map` and itself. Results that `fun` gives in float32 come in `output_dtype`; all
        others keep their dtype: integers, keys, complex, float64, and what `fun` itself makes
        16-bit. With `compute=f32` it is `fun` itself but for that last cast. A function without
        float32 arrays passes through unchanged.

    Raises:
        ValueError: the policy computes in float64, asks for `matmul`, which is not built yet, or
            has a pattern in `full` that matches nothing.
        TypeError: `fun` is not callable.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.mean(jax.nn.softmax(x @ w))
    >>> mixed = autocast(loss, "params=f32,compute=bf16")
    >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
    >>> jax.grad(mixed)(w, x).dtype
    dtype('float32')
    >>> "bf16[2,4]" in str(jax.make_jaxpr(mixed)(w, x))  # x, for x @ w
    True
    """
    if not callable(fun):
        raise TypeError(f"autocast takes a function, got {type(fun).__name__}: {fun!r}")
    policy = _checked(get_policy(policy))

    @functools.wraps(fun)
    def autocast_fun(*args, **kwargs):
        if policy.compute_dtype == np.float32:
            return cast_outputs(fun(*args, **kwargs), policy)
        call = trace_call(fun, args, kwargs)
        plan = plan_call(call, policy)
        return call.restore(_cast_float32(emit(plan, call.arrays, residuals.mode_of(plan)), plan))

    return autocast_fun


def _checked(policy: Policy) -> Policy:
    if policy.compute_dtype == np.float64:
        raise ValueError(f"policy {str(policy)!r}: autocast narrows float32; compute=f64 widens it")
    if policy.matmul is not None:
        raise ValueError(f"policy {str(policy)!r}: matmul= is not built yet; leave it out")
    return policy


class Call(NamedTuple):
    """A traced call.

    Attributes:
        program: Closed jaxpr of the function of the arrays alone.
        arrays: The arrays among the arguments, in order.
        paths: Where each is, as `params/head/kernel`, below the name of its argument.
        restore: Output arrays -> what the function returns.
    """

    program: Any
    arrays: Sequence[Any]
    paths: Sequence[str]
    restore: Callable


def trace_call(fun: Callable, args: tuple, kwargs: dict) -> Call:
    """Trace `fun` for these arguments in their own dtypes; what is no array is left to Python."""
    named, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs))
    leaves = [leaf for _, leaf in named]
    at = [k for k, leaf in enumerate(leaves) if _is_array(leaf)]
    returned: dict[str, Any] = {}

    @functools.wraps(fun)  # so that errors of tracing name it, with its file and line
    def of_arrays(*arrays):
        filled = list(leaves)
        for k, array in zip(at, arrays, strict=True):
            filled[k] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        outs, returned["tree"] = jax.tree.flatten(fun(*args, **kwargs))
        returned["static"] = [None if _is_result(out) else out for out in outs]
        return [out for out in outs if _is_result(out)]

    arrays = [leaves[k] for k in at]
    try:
        program = jaxprs.trace(of_arrays, *arrays)
    except jax.errors.JAXTypeError as error:
        error.add_note(
            "autocast traces its function as jax.jit does: its arrays have no values yet"
        )
        raise

    def restore(outs):
        outs = iter(outs)
        static = returned["static"]
        filled = [next(outs) if value is None else value for value in static]
        return jax.tree.unflatten(returned["tree"], filled)

    names = _argument_names(fun, args)
    return Call(program, arrays, [_path(names, named[k][0]) for k in at], restore)


def plan_call(call: Call, policy: Policy) -> Plan:
    """The plan of a traced call; `policy.full` has to match something in it."""
    # `params/head/kernel` is found below its argument too, as `head/kernel`.
    both = [(path, path.partition("/")[2]) for path in call.paths]
    matches = [[m for path in pair for m in scopes.matching(policy.full, path)] for pair in both]
    infos = [Info(pinned=bool(match)) for match in matches]
    plan = make_plan(call.program, infos, policy)
    if policy.full:
        plan.scopes.matched.update(*matches)
        scopes.check_all_matched(plan.scopes, call.paths)
    return plan


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _is_result(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _argument_names(fun: Callable, args: tuple) -> list[str]:
    """Names of the positional arguments, for people: numbers where there are none."""
    try:
        names = list(inspect.signature(fun).bind_partial(*args).signature.parameters)
    except (TypeError, ValueError):
        names = []
    return [names[k] if k < len(names) else str(k) for k in range(len(args))]


def _path(names: Sequence[str], keys: tuple) -> str:
    """`params/head/kernel` for the leaf at `keys` of `(args, kwargs)`."""
    rest = jax.tree_util.keystr(keys[2:], simple=True, separator="/")
    first = str(keys[1].key if keys[0].idx == 1 else names[keys[1].idx])
    return f"{first}/{rest}" if rest else first


def _cast_float32(outs: Sequence[Any], plan: Plan) -> list[Any]:
    dtype = plan.policy.output_dtype
    pairs = zip(outs, plan.jaxpr.outvars, strict=True)
    return [_cast(out, dtype) if jaxprs.is_float32(var) else out for out, var in pairs]


def cast_outputs(tree: Any, policy: Policy) -> Any:
    """`tree` with its float32 arrays in the policy's output dtype."""

    def cast(leaf):
        is_float32 = _is_array(leaf) and leaf.dtype == np.float32
        return _cast(leaf, policy.output_dtype) if is_float32 else leaf

    return jax.tree.map(cast, tree)


def _cast(value: Any, dtype: Any) -> Any:
    if getattr(value, "dtype", None) == dtype:
        return value
    return jax.lax.convert_element_type(value, dtype)
