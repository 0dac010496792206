"""`apply_if_finite`: an optax wrapper that skips a non-finite step whole."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax

from jaxamp.loss_scale import LossScale, NoOpLossScale, to_float32

GUARD = "apply_if_finite"
"""The name scope of the guard's operations: profiles show it, and `check_optimizer` reads it."""


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`: all that a checkpoint needs, every number a leaf.

    Attributes:
        inner_state: State of the inner transformation.
        loss_scale: The scale for the next backward pass.
        skipped_steps: int32[], steps skipped so far.
        consecutive_skips: int32[], steps skipped since the last finite one.
        grads_finite: bool[], whether the last gradients were finite; True before the first.
        grad_norm: float32[], global norm of the last gradients, inf or nan where they were.
    """

    inner_state: Any
    loss_scale: LossScale
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    grads_finite: jax.Array
    grad_norm: jax.Array


def apply_if_finite(
    inner: optax.GradientTransformation, loss_scale: LossScale | None = None
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on finite gradients, skips the step whole on others, adjusts the loss scale.

    With unscaled gradients g:

        grads_finite = isfinite(norm(g))                  in float32, over all leaves together
        finite:      updates, inner_state <- inner(g)
        not finite:  updates <- -0.0, inner_state as it was, both counters + 1
        always:      loss_scale <- loss_scale.adjust(grads_finite)

    A skipped step changes no bit of a parameter (p + -0.0 is p, for p = -0.0 too), nor of the
    moments, Adam's count or the position of a schedule. A bad update is never applied.

    `inner` sees float32 gradients and float32 parameters, so its moments are float32 even for
    16-bit parameters: Adam's eps of 1e-8 is zero in float16, and a bfloat16 second moment stops at
    half its value. Clipping belongs into `inner`: there it acts on unscaled gradients.

    Args:
        inner: Any optax transformation. Extra arguments of `update` are passed on to it.
        loss_scale: Where the scale starts, see `get_loss_scale`; None: no scaling.

    Returns:
        An optax transformation whose state is an `ApplyIfFiniteState`. Its updates are float32.

    >>> tx = apply_if_finite(optax.sgd(1.0))
    >>> state = tx.init(jnp.float32(1.0))
    >>> update, state = tx.update(jnp.float32(jnp.nan), state)
    >>> float(update), int(state.skipped_steps)
    (-0.0, 1)

    Departures: optax's `apply_if_finite` applies the non-finite update once it has seen more of
    them than its limit, and knows no loss scale. Here the caller decides when to stop, from
    `consecutive_skips`. Finite gradients whose norm overflows float32 (above 1.8e19) count as not
    finite: a clip by norm would turn them to zero.

    To accumulate microbatches, average their float32 gradients before `update`.
    `optax.MultiSteps` outside keeps a NaN for ever (it resets its sum by multiplying with zero);
    inside, it skips the one microbatch and not its window.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        return ApplyIfFiniteState(
            inner_state=inner.init(to_float32(params)),
            # Copied, so that a step that donates its state leaves ours alive for the next init.
            loss_scale=jax.tree.map(jnp.array, loss_scale or NoOpLossScale()),
            skipped_steps=jnp.zeros([], jnp.int32),
            consecutive_skips=jnp.zeros([], jnp.int32),
            grads_finite=jnp.ones([], bool),
            grad_norm=jnp.zeros([], jnp.float32),
        )

    @jax.named_scope(GUARD)
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        grads, params = to_float32((updates, params))
        grad_norm = jnp.asarray(optax.tree.norm(grads), jnp.float32)
        finite = jnp.isfinite(grad_norm)
        updates, inner_state = inner.update(grads, state.inner_state, params, **extra_args)
        updates = jax.tree.map(lambda u: jnp.where(finite, u, -jnp.zeros_like(u)), updates)
        skipped = jnp.asarray(~finite, jnp.int32)
        return updates, ApplyIfFiniteState(
            inner_state=_select(finite, inner_state, state.inner_state),
            loss_scale=state.loss_scale.adjust(finite),
            skipped_steps=state.skipped_steps + skipped,
            consecutive_skips=(state.consecutive_skips + 1) * skipped,
            grads_finite=finite,
            grad_norm=grad_norm,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def loss_scale(opt_state: Any) -> LossScale:
    """The loss scale inside an optimizer state, however deep.

    Args:
        opt_state: A state that holds one `ApplyIfFiniteState`: of `apply_if_finite` itself, of an
            `optax.chain` around it, or anything with such an `opt_state` attribute
            (`flax.training.train_state.TrainState`, `nnx.Optimizer`).

    Raises:
        ValueError: there is none, or more than one.

    >>> tx = optax.chain(apply_if_finite(optax.sgd(1.0)))
    >>> loss_scale(tx.init(jnp.float32(1.0)))
    NoOpLossScale()
    """
    opt_state = getattr(opt_state, "opt_state", opt_state)
    is_state = lambda node: isinstance(node, ApplyIfFiniteState)  # noqa: E731
    found = [node for node in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(node)]
    if len(found) != 1:
        raise ValueError(
            f"expected one apply_if_finite in the optimizer state, found {len(found)}; "
            "wrap the whole chain once: apply_if_finite(optax.chain(...))"
        )
    scale = found[0].loss_scale
    # nnx.Optimizer keeps each number in a Variable, which is a pytree of one array.
    leaves = jax.tree.leaves(scale)
    return jax.tree.unflatten(jax.tree.structure(scale, is_leaf=_is_field(scale)), leaves)


def _is_field(scale: LossScale):
    return lambda node: node is not scale


def _select(pred: jax.Array, new: Any, old: Any) -> Any:
    """`jmp.select_tree` that also takes Python numbers, as some optax states start with them."""
    new, old = (jax.tree.map(jnp.asarray, tree) for tree in (new, old))
    return jmp.select_tree(pred, new, old)
