"""`autocast` and `value_and_grad` for functions that take Flax NNX modules.

An NNX module is mutable and its scopes have no names. Here the function runs on a copy made from
the module's state; what it changes (BatchNorm statistics, dropout counters) is written back into
the module, in the dtype that it had; and each submodule's call is a name scope, so that
`full=*/head` and profiles find it by its path. Linen, Haiku, Equinox and plain functions need
nothing of this. The only file of the library that imports Flax.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from flax import nnx

from jaxamp import autocast as _autocast
from jaxamp import gradients
from jaxamp.autocast import cast_outputs
from jaxamp.policy import get_policy


def autocast(fun: Callable, policy: str | jmp.Policy) -> Callable:
    """`jaxamp.autocast` for a function with NNX modules among its arguments, anywhere in them.

    Args:
        fun: Takes modules, arrays and anything else; may change the modules' variables.
        policy: A policy or its string.

    Returns:
        A function with the same arguments and results. Variables that `fun` changed are changed in
        the modules that were passed.

    >>> from flax import nnx
    >>> net = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(0)))
    >>> y = autocast(lambda net, x: net(x), "compute=bf16")(net, jnp.arange(8.0).reshape(2, 4))
    >>> y.dtype, net.layers[1].mean[...].dtype, bool((net.layers[1].mean[...] != 0).any())
    (dtype('float32'), dtype('float32'), True)
    """
    policy = get_policy(policy)
    # The modules' state is among the results of what runs; `output` is for those of `fun`.
    inside = policy.replace(output_dtype=jnp.float32)

    @functools.wraps(fun)
    def autocast_fun(*args, **kwargs):
        parts = _take_apart(args, kwargs)
        graphdef, state = nnx.split(parts.root)

        @functools.wraps(fun)
        def pure(modules, others):
            copy = nnx.merge(graphdef, modules)
            out = _call(fun, parts, copy, others)
            return out, nnx.state(copy)

        out, new = _autocast(pure, inside)(state, parts.others)
        _write_back(parts.root, new)
        return cast_outputs(out, policy)

    return autocast_fun


def value_and_grad(
    fun: Callable,
    policy: str | jmp.Policy,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
) -> Callable:
    """`jaxamp.value_and_grad` with respect to the parameters of NNX modules.

    Args:
        fun: Its first result is the loss.
        policy: A policy or its string.
        argnums: Positions of the modules to differentiate with respect to: their `nnx.Param`, or
            what an `nnx.DiffState` says.
        has_aux: `fun` returns `(loss, aux)`.

    Returns:
        A function `(*args, loss_scale=None, **kwargs) -> (value, grads)`; with `has_aux` it gives
        `((value, aux), grads)`. Gradients are an `nnx.State`, float32 and unscaled, or a tuple of
        them, as `nnx.Optimizer.update` wants them.

    Raises:
        TypeError: there is no module at one of `argnums`.

    >>> from flax import nnx
    >>> net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda net, x: jnp.sum(net(x))
    >>> value, grads = value_and_grad(loss, "c=f16")(net, jnp.ones((3, 2)), loss_scale=8.0)
    >>> grads["kernel"][...]
    Array([[3.],
           [3.]], dtype=float32)
    """
    policy = get_policy(policy)
    inside = policy.replace(output_dtype=jnp.float32)
    several = isinstance(argnums, Sequence)
    wrt = [_diff_state(one) for one in (argnums if several else (argnums,))]

    @functools.wraps(fun)
    def value_and_grad_fun(*args, loss_scale=None, **kwargs):
        parts = _take_apart(args, kwargs)
        at = [_position(parts, args, one.argnum) for one in wrt]
        chosen = [nnx.filterlib.to_predicate(one.filter) for one in wrt]

        def is_chosen(path, value):
            index, path = (0, path) if parts.is_single else (path[0], path[1:])
            pairs = zip(at, chosen, strict=True)
            return any(index == k and matches(path, value) for k, matches in pairs)

        graphdef, params, rest = nnx.split(parts.root, is_chosen, ...)

        @functools.wraps(fun)
        def pure(modules, rest, others):
            copy = nnx.merge(graphdef, modules, rest)
            out = _call(fun, parts, copy, others)
            loss, aux = out if has_aux else (out, None)
            return loss, (aux, nnx.state(copy))

        grad_fn = gradients.value_and_grad(pure, inside, has_aux=True)
        (value, (aux, new)), grads = grad_fn(params, rest, parts.others, loss_scale=loss_scale)
        _write_back(parts.root, new)
        each = tuple(grads if parts.is_single else grads[k] for k in at)
        value = (value, cast_outputs(aux, policy)) if has_aux else value
        return value, (each if several else each[0])

    return value_and_grad_fun


class _Parts(NamedTuple):
    """Arguments taken apart: the distinct modules, and the rest with `None` in their places."""

    modules: tuple[nnx.Module, ...]
    places: dict[int, int]  # leaf -> index into modules
    others: list[Any]
    treedef: Any

    @property
    def is_single(self) -> bool:
        return len(self.modules) == 1

    @property
    def root(self) -> Any:
        """What is split and merged: a single module by itself, so that paths begin inside it."""
        return self.modules[0] if self.is_single else self.modules


def _is_module(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Module)


def _take_apart(args: tuple, kwargs: dict) -> _Parts:
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_module)
    distinct = {id(leaf): leaf for leaf in leaves if _is_module(leaf)}
    index = {key: k for k, key in enumerate(distinct)}
    places = {k: index[id(leaf)] for k, leaf in enumerate(leaves) if _is_module(leaf)}
    others = [None if k in places else leaf for k, leaf in enumerate(leaves)]
    return _Parts(tuple(distinct.values()), places, others, treedef)


def _call(fun: Callable, parts: _Parts, copy: Any, others: list[Any]) -> Any:
    copies = (copy,) if parts.is_single else copy
    leaves = [copies[parts.places[k]] if k in parts.places else x for k, x in enumerate(others)]
    args, kwargs = jax.tree.unflatten(parts.treedef, leaves)
    with _scopes(copies):
        return fun(*args, **kwargs)


def _write_back(root: Any, new: Any) -> None:
    """New values of variables, in the dtypes of the old ones."""
    old = dict(nnx.to_flat_state(nnx.state(root)))

    def kept_dtype(path, variable):
        before = old.get(path)
        value = variable[...] if isinstance(variable, nnx.Variable) else variable
        if before is None or not hasattr(value, "dtype") or value.dtype == before[...].dtype:
            return variable
        return variable.replace(value.astype(before[...].dtype))

    flat = [(path, kept_dtype(path, variable)) for path, variable in nnx.to_flat_state(new)]
    nnx.update(root, nnx.from_flat_state(flat))


def _diff_state(one: int | nnx.DiffState) -> nnx.DiffState:
    return one if isinstance(one, nnx.DiffState) else nnx.DiffState(one, nnx.Param)


def _position(parts: _Parts, args: tuple, argnum: int) -> int:
    for k, module in enumerate(parts.modules):
        if argnum < len(args) and module is args[argnum]:
            return k
    given = type(args[argnum]).__name__ if argnum < len(args) else "nothing"
    raise TypeError(
        f"jaxamp.nnx.value_and_grad: argument {argnum} is {given}, not an nnx.Module; for arrays "
        "use jaxamp.value_and_grad"
    )


# Module paths as name scopes.

_patching = threading.RLock()


@contextlib.contextmanager
def _scopes(modules: Sequence[nnx.Module]) -> Iterator[None]:
    """While tracing, calls of submodules are name scopes: their paths in their module.

    Python looks `__call__` up on the class, so it is the classes that are wrapped, and restored.
    """
    paths = {
        id(module): "/".join(map(str, path)) for root in modules for path, module in _inside(root)
    }
    classes = {type(module) for root in modules for _, module in _inside(root) if callable(module)}
    active: list[str] = [""]
    with _patching, contextlib.ExitStack() as stack:
        for cls in classes:
            stack.callback(_restore, cls, cls.__dict__.get("__call__"))
            cls.__call__ = _scoped(cls.__call__, paths, active)
        yield


def _inside(root: nnx.Module) -> list[tuple[tuple, nnx.Module]]:
    return list(nnx.iter_modules(root))


def _restore(cls: type, call: Callable | None) -> None:
    if call is None:
        del cls.__call__
    else:
        cls.__call__ = call


def _scoped(call: Callable, paths: dict[int, str], active: list[str]) -> Callable:
    @functools.wraps(call)
    def scoped_call(self, *args, **kwargs):
        path = paths.get(id(self), "")
        name = path.removeprefix(active[-1] + "/") if active[-1] else path
        if not path or path == active[-1]:
            return call(self, *args, **kwargs)
        active.append(path)
        try:
            with jax.named_scope(name):
                return call(self, *args, **kwargs)
        finally:
            active.pop()

    return scoped_call
