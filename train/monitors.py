"""What is watched while a model trains: small numbers that say early that precision is lost.

Jitted into the training step; `docs/running.md` says what they cost.
"""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import jaxamp

T = TypeVar("T")

EVERY = 10
"""Steps from one look to the next."""


def monitors(
    step: jax.Array, params: Any, grads: Any, updates: Any, policy: jaxamp.Policy, scale: jax.Array
) -> dict[str, jax.Array]:
    """float32[] by name, two for each top-level module of the parameters.

    `monitor/underflow/MODULE` is the share of its gradients that are zero or, times the loss scale,
    below the smallest normal number of the compute dtype; rows of an embedding whose token did not
    occur are among them. `monitor/update_ratio/MODULE` is ||update|| / ||parameters||, zero in a
    step that is skipped. There is no underflow where nothing has 16 bits.

    All are NaN but in every tenth step: they read everything that the optimizer reads once more.

    Args:
        step: int32[], counted from 1.
        params: Before the update, a dict of modules.
        grads: Unscaled, float32.
        updates: What is added to the parameters.
        policy: Of the step.
        scale: float32[], the loss scale that the step ran at.
    """
    look = functools.partial(_look, params, grads, updates, policy, scale)
    nothing = {name: jnp.float32(jnp.nan) for name in jax.eval_shape(look)}
    return jax.lax.cond(step % EVERY == 0, look, lambda: nothing)


def known(step: int, metrics: Mapping[str, T]) -> dict[str, T]:
    """The metrics of a step without the monitors that did not look."""
    return {k: v for k, v in metrics.items() if step % EVERY == 0 or not k.startswith("monitor/")}


def _look(params, grads, updates, policy, scale) -> dict[str, jax.Array]:
    found = {}
    for module in params:
        size = jnp.maximum(norm(params[module]), jnp.finfo(jnp.float32).tiny)
        found[f"monitor/update_ratio/{module}"] = norm(updates[module]) / size
        if policy.compute_dtype != jnp.float32:
            least = jnp.finfo(policy.compute_dtype).smallest_normal.astype(jnp.float32)
            found[f"monitor/underflow/{module}"] = share_below(grads[module], least / scale)
    return found


def norm(tree: Any) -> jax.Array:
    """Of all numbers together, in float32; float32[].

    Not `optax.tree.norm`, which adds up in the dtype of the tree, and after a cast traces 82
    equations more in the step of the default config.
    """
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def share_below(tree: Any, least: jax.Array) -> jax.Array:
    """The share of numbers of a size less than `least`; float32[]."""
    leaves = jax.tree.leaves(tree)
    below = [jnp.sum(jnp.abs(leaf) < least, dtype=jnp.float32) for leaf in leaves]
    return jnp.sum(jnp.stack(below)) / sum(leaf.size for leaf in leaves)
