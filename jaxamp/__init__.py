"""Mixed-precision training for JAX and Flax that needs no dtype in the model.

The step, in its ten words:

    cast -> forward -> scale -> backward -> unscale (float32)
         -> finite? -> clip -> update | skip -> adjust the scale

    policy.py      Policy: which dtype is used where; its grammar, presets, and `auto`
    loss_scale.py  NoOp / Static / Dynamic loss scale
    rules.py       the op table: how autocast treats each primitive, and why
    autocast.py    autocast: a float32 program in, a mixed-precision program out
                     decide.py, carries.py, operations.py (plan)
                     emit.py, derivatives.py, dots.py (emit)
                     plans.py, jaxprs.py, scopes.py (full_precision), residuals.py
    explain.py     explain: what was decided and why; stops.py (casts that cut a gradient)
    check.py       check_optimizer: what loses or hides 16-bit gradients in an optimizer
    diagnose.py    diagnose: where a step makes NaN or Inf, and where its precision goes
                     interpret.py, operate.py, record.py (runs),
                     blame.py, problem.py, remedies.py (NaN and Inf),
                     census.py (ranges), sensitivity.py (errors), diagnosis.py (the report)
    nnx.py         autocast and value_and_grad for functions of Flax NNX modules
    gradients.py   value_and_grad: cast, forward, scale, backward, unscale
    optimizer.py   apply_if_finite: finite? clip and update, or skip whole; adjust the scale

Example:
    >>> import jax, jax.numpy as jnp, optax, jaxamp
    >>> policy = jaxamp.get_policy("params=f32,compute=f16")
    >>> tx = jaxamp.apply_if_finite(
    ...     optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-2)),
    ...     loss_scale=jaxamp.get_loss_scale(policy),
    ... )
    >>> def loss_fn(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> @jax.jit
    ... def train_step(params, opt_state, batch):
    ...     grad_fn = jaxamp.value_and_grad(loss_fn, policy)
    ...     loss, grads = grad_fn(params, batch, loss_scale=jaxamp.loss_scale(opt_state))
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state, loss
    >>> params = {"w": jnp.zeros((4, 1))}
    >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.full((8, 1), 0.5)}
    >>> params, opt_state, loss = train_step(params, tx.init(params), batch)
    >>> float(loss), params["w"].dtype, float(jaxamp.loss_scale(opt_state).loss_scale)
    (0.25, dtype('float32'), 32768.0)
"""

from jaxamp.autocast import autocast
from jaxamp.check import check_optimizer
from jaxamp.diagnose import diagnose
from jaxamp.diagnosis import Diagnosis
from jaxamp.explain import Explanation, explain
from jaxamp.gradients import grad, value_and_grad
from jaxamp.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    get_loss_scale,
    to_float32,
)
from jaxamp.optimizer import ApplyIfFiniteState, apply_if_finite, loss_scale
from jaxamp.policy import Policy, auto_policy, get_policy
from jaxamp.scopes import full_precision

__all__ = [
    "ApplyIfFiniteState",
    "Diagnosis",
    "DynamicLossScale",
    "Explanation",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "apply_if_finite",
    "auto_policy",
    "autocast",
    "check_optimizer",
    "diagnose",
    "explain",
    "full_precision",
    "get_loss_scale",
    "get_policy",
    "grad",
    "loss_scale",
    "to_float32",
    "value_and_grad",
]
