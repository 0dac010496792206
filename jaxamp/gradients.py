"""`value_and_grad` and `grad`: cast, forward, scale, backward, unscale to float32."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp

from jaxamp.autocast import autocast, cast_outputs
from jaxamp.loss_scale import NoOpLossScale, StaticLossScale, to_float32
from jaxamp.policy import get_policy


def value_and_grad(
    fun: Callable,
    policy: str | jmp.Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable:
    """`jax.value_and_grad` in mixed precision.

    The function that comes back takes what `fun` takes and a keyword `loss_scale`. It differs from
    JAX's in three ways:

      * `fun` runs under `policy`;
      * its loss, in float32, is multiplied by `loss_scale` before the backward pass;
      * the gradients come back unscaled *by the very scale that was used*, in float32 whatever the
        dtype of the argument; the value comes back as it was before scaling, in float32, so that an
        overflow of the scaled loss does not hide it.

    Args:
        fun: Its first result is the loss, a floating scalar.
        policy: A policy or its string, see `get_policy`.
        argnums: As in `jax.value_and_grad`.
        has_aux: As in `jax.value_and_grad`; what of aux is float32 comes back in the
            policy's output dtype.
        holomorphic: As in `jax.value_and_grad`.
        allow_int: As in `jax.value_and_grad`.

    Returns:
        A function `(*args, loss_scale=None, **kwargs) -> (value, grads)`; with `has_aux` it gives
        `((value, aux), grads)`. `loss_scale` is one of this library or of jmp, a number, or None.

    Raises:
        ValueError: the policy asks for something that is not built yet, or `fun` has a parameter
            named `loss_scale`.
        TypeError: `fun` is not callable, or not differentiable as `jax.grad` wants it.

    >>> grad_fn = value_and_grad(lambda w: w * w, "mixed_float16")
    >>> grad_fn(jax.numpy.float32(3.0), loss_scale=1024.0)
    (Array(9., dtype=float32), Array(6., dtype=float32))
    """
    check_callable(fun)
    policy = get_policy(policy)
    # The loss stays float32 until it is scaled; `output` is for what else comes back.
    mixed = autocast(fun, policy.replace(output_dtype=jnp.float32))

    @functools.wraps(fun)
    def value_and_grad_fun(*args, loss_scale=None, **kwargs):
        scale = as_loss_scale(loss_scale)

        def scaled_loss(*args, **kwargs):
            loss, aux = split_aux(mixed(*args, **kwargs), has_aux)
            loss = to_float32(loss)
            return scale.scale(loss), (loss, cast_outputs(aux, policy))

        grad_fn = jax.grad(scaled_loss, argnums, True, holomorphic, allow_int)
        grads, (loss, aux) = grad_fn(*args, **kwargs)
        grads = scale.unscale(to_float32(grads))
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad_fun


def grad(
    fun: Callable,
    policy: str | jmp.Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable:
    """`jax.grad` in mixed precision: `value_and_grad` without the value.

    Returns:
        A function `(*args, loss_scale=None, **kwargs) -> grads`, or `(grads, aux)` with `has_aux`.

    >>> grad(lambda w: w * w, "mixed_bfloat16")(jax.numpy.float32(3.0))
    Array(6., dtype=float32)
    """
    both = value_and_grad(fun, policy, argnums, has_aux, holomorphic, allow_int)

    @functools.wraps(fun)
    def grad_fun(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def as_loss_scale(loss_scale: Any) -> Any:
    """A loss scale object from one, from a number, or from None."""
    if loss_scale is None:
        return NoOpLossScale()
    return loss_scale if hasattr(loss_scale, "unscale") else StaticLossScale(loss_scale)


def split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """What the function gave as (loss, aux)."""
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(
            "value_and_grad with has_aux=True needs a function that returns a pair (loss, aux), "
            f"got {type(result).__name__}"
        )
    return result


def check_callable(fun: Callable) -> None:
    """It is a function without a parameter that is ours."""
    if not callable(fun):
        raise TypeError(f"expected a function, got {type(fun).__name__}: {fun!r}")
    try:
        names = inspect.signature(fun).parameters
    except (TypeError, ValueError):  # builtins have none
        return
    if "loss_scale" in names:
        raise ValueError(
            "the function to differentiate has a parameter named loss_scale, which value_and_grad "
            "takes for itself; rename it"
        )
