"""What is tried out for a diagnosis: gradients under a precision, a few steps of training."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxamp
from train.data import IGNORE, Batch
from train.enquiry.case import Case
from train.step import make_loss_fn, make_optimizer, make_train_step, step_policy


class Gradient(NamedTuple):
    """Of a whole batch: the loss in nats, the unscaled float32 gradients and their global norm."""

    loss: float
    norm: float
    grads: Any

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.norm))


class Training(NamedTuple):
    """A few steps of training.

    Attributes:
        losses: float64[N], in nats, that of each step before its update.
        norms: float64[N], of the gradients before the clip.
        skipped: Steps whose gradients were not finite.
        step_seconds: Median time of a step.
    """

    losses: np.ndarray
    norms: np.ndarray
    skipped: int
    step_seconds: float


def gradient_fn(case: Case, policy: jaxamp.Policy) -> Callable[..., Gradient]:
    """`(params, batch, key) -> Gradient` under a policy, at the loss scale of the case."""
    config, state = case.under(policy)
    loss_fn = make_loss_fn(config, case.graphdef)
    scale = jaxamp.loss_scale(state.opt_state)
    grad_fn = jaxamp.value_and_grad(loss_fn, step_policy(policy, config), has_aux=True)

    @jax.jit
    def compute(params, batch, key):
        (_, loss), grads = grad_fn(params, batch, key, counted(batch), loss_scale=scale)
        return loss, optax.tree.norm(grads), grads

    def gradient(params: Any, batch: Batch, key: jax.Array) -> Gradient:
        loss, norm, grads = compute(policy.cast_to_param(params), batch, key)
        return Gradient(float(loss), float(norm), grads)

    return gradient


def counted(batch: Batch) -> jax.Array:
    """How many labels the loss counts; 1 where there are none, as the training step has it."""
    return jnp.maximum(jnp.sum(jnp.asarray(batch["labels"]) != IGNORE), 1)


def update_of(case: Case, grads: Any) -> Any:
    """What the optimizer adds to the parameters for these gradients."""
    tx = make_optimizer(case.config.optimizer, case.config.num_steps, case.policy)
    return jax.jit(tx.update)(grads, case.state.opt_state, case.state.params)[0]


def training_fn(case: Case, policy: jaxamp.Policy, rate: float = 1.0) -> Callable[[Case], Training]:
    """`(case) -> Training` by the training step, with `rate` times the learning rate.

    The case that is trained has the settings of this one, and may be another step.
    """
    config, _ = case.under(policy)
    peak = config.optimizer.learning_rate * rate
    optimizer = config.optimizer.model_copy(update={"learning_rate": peak})
    config = config.model_copy(update={"optimizer": optimizer})
    step = make_train_step(config, case.graphdef, policy)

    def training(case: Case) -> Training:
        state = jax.tree.map(jnp.copy, case.under(policy)[1])  # the step takes it for itself
        seen, laps = [], []
        for batch in (case.batch, *case.following):
            before = time.perf_counter()
            state, metrics = step(state, batch)
            seen.append(jax.device_get(metrics))
            laps.append(time.perf_counter() - before)
        column = lambda name: np.array([float(values[name]) for values in seen])  # noqa: E731
        return Training(
            losses=column("train/loss"),
            norms=column("train/grad_norm"),
            skipped=int(np.count_nonzero(column("amp/grads_finite") == 0)),
            step_seconds=float(np.median(laps)),
        )

    return training


def losses_without_updates(case: Case, gradient: Callable[..., Gradient]) -> np.ndarray:
    """float64[N], what the losses of a training would be if the parameters stayed as they are."""
    batches = (case.batch, *case.following)
    return np.array(
        [gradient(case.state.params, b, case.key(k)).loss for k, b in enumerate(batches)]
    )


def in_float32(policy: jaxamp.Policy) -> jaxamp.Policy:
    """The same policy without 16 bits."""
    full = {"param_dtype": jnp.float32, "compute_dtype": jnp.float32, "output_dtype": jnp.float32}
    return policy.replace(**full, full=(), residuals="float32", reduce="float32")
