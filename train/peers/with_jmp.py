"""jmp with optax, as jmp's README has it: the whole tree of parameters is cast."""

import functools

import jax
import jax.numpy as jnp
import jmp
import optax
from jax_task import batch_of, params_of, repeated, variant_of
from serve import Step, Task, serve


def make(task: Task, compute: str) -> Step:
    loss_fn, tx = variant_of(task, "jmp", compute)
    scaled = compute == "f16"
    loss_scale = jmp.DynamicLossScale(jnp.float32(2.0**15)) if scaled else jmp.NoOpLossScale()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, batch):
        params, opt_state, loss_scale = state

        def scaled_loss(params):
            loss = loss_fn(params, batch)
            return loss_scale.scale(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(params)
        grads = loss_scale.unscale(grads)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = (optax.apply_updates(params, updates), new_opt_state)
        if scaled:
            finite = jmp.all_finite(grads)
            loss_scale = loss_scale.adjust(finite)
            new = jmp.select_tree(finite, new, (params, opt_state))
        return (*new, loss_scale), loss

    params = params_of(task)
    return repeated(train_step, (params, tx.init(params), loss_scale), batch_of(task))


if __name__ == "__main__":
    serve(make)
