"""Flax's `DynamicScale`, as its examples have it, around a model that is cast by hand."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax.training.dynamic_scale import DynamicScale
from jax_task import batch_of, params_of, repeated, variant_of
from serve import Step, Task, serve


def make(task: Task, compute: str) -> Step:
    loss_fn, tx = variant_of(task, "by hand", compute)
    scale = None if compute == "f32" else DynamicScale(scale=2.0**15)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        params, opt_state, scale = state
        if scale is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        else:
            scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        if scale is not None:
            select = functools.partial(jnp.where, finite)
            new = jax.tree.map(select, new, (params, opt_state))
        return (*new, scale), loss

    params = params_of(task)
    return repeated(train_step, (params, tx.init(params), scale), batch_of(task))


if __name__ == "__main__":
    serve(make)
