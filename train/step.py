"""One training step, in the order of the mathematics, and the evaluation step beside it.

cast -> forward -> scale -> backward -> unscale (float32)
     -> finite? -> clip -> update | skip -> adjust the scale
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxamp
from train.config import Config, OptimizerConfig
from train.mesh import constrain_like_parameters
from train.model import create, head, hidden
from train.monitors import monitors

IGNORE = -100
"""The label of a position that the loss does not count."""

Batch = Any  # {"tokens": int32[B, T], "labels": int32[B, T]}
Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that changes from step to step, but for the position in the data.

    Attributes:
        step: int32[], steps taken, skipped ones included.
        params: nested dict of arrays in the policy's param dtype.
        opt_state: of `make_optimizer`; holds the loss scale.
        key_data: uint32[...], the dropout key; a step uses `fold_in(key, step)`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key_data: jax.Array


def make_optimizer(
    config: OptimizerConfig, num_steps: int, policy: jaxamp.Policy
) -> optax.GradientTransformationExtraArgs:
    """AdamW behind a clip, run on finite gradients only."""
    scale = jaxamp.get_loss_scale(policy)
    return jaxamp.apply_if_finite(make_adamw(config, num_steps), loss_scale=scale)


def make_adamw(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW behind a clip, on whatever gradients it is given."""
    adamw = optax.adamw(
        make_schedule(config, num_steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decayed,
    )
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by number of updates: a linear warm-up, then constant or half a cosine."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(
            peak, max(num_steps - warmup, 1), config.final_learning_rate_fraction
        )
    # The first update is number 0 and would do nothing at a rate of 0: start one part up.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, after], [warmup])


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on: matrices; not norms and biases.

    By name, since the layers are stacked and a norm's scale has two axes there.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )


def init_state(
    config: Config, vocab_size: int, policy: jaxamp.Policy
) -> tuple[nnx.GraphDef, TrainState]:
    """The structure of the model and the state before the first step."""
    params_key, dropout_key = jax.random.split(jax.random.key(config.seed))
    graphdef, params = create(config.model, vocab_size, params_key, policy.compute_dtype)
    params = policy.cast_to_param(params)
    tx = make_optimizer(config.optimizer, config.num_steps, policy)
    state = TrainState(
        jnp.zeros([], jnp.int32), params, tx.init(params), jax.random.key_data(dropout_key)
    )
    return graphdef, state


def structure(
    config: Config, vocab_size: int, policy: jaxamp.Policy
) -> tuple[nnx.GraphDef, TrainState]:
    """`init_state` without computing anything: the shapes of the state."""
    return nnx.eval_shape(lambda: init_state(config, vocab_size, policy))


def cross_entropy(logits_BxTxV: jax.Array, labels_BxT: jax.Array) -> tuple[jax.Array, ...]:
    """Sums over the counted positions, in float32.

    Returns:
        `(nll, z2, count)`: the negative log likelihood in nats, log(Z)^2, both float32[], and the
        number of labels that are not -100, int32[].
    """
    logits_BxTxV = logits_BxTxV.astype(jnp.float32)
    counted_BxT = labels_BxT != IGNORE
    labels_BxTx1 = jnp.where(counted_BxT, labels_BxT, 0)[..., None]
    log_z_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
    nll_BxT = log_z_BxT - jnp.take_along_axis(logits_BxTxV, labels_BxTx1, axis=-1)[..., 0]
    total = lambda x_BxT: jnp.sum(jnp.where(counted_BxT, x_BxT, 0))  # noqa: E731
    return total(nll_BxT), total(jnp.square(log_z_BxT)), jnp.sum(counted_BxT)


def loss_sums(
    graphdef: nnx.GraphDef,
    params: Any,
    batch: Batch,
    dropout_key: jax.Array | None = None,
    chunk: int | None = None,
) -> tuple[jax.Array, ...]:
    """`cross_entropy` of the model on a batch, of `chunk` tokens of a row at a time.

    Neither pass holds logits [B, T, V] then: the backward pass computes the logits of a chunk again
    and adds its gradient of the head to that of the others, in float32. None: all tokens at once.
    """
    x_BxTxE = hidden(graphdef, params, batch["tokens"], dropout_key)
    if chunk is None:
        return cross_entropy(head(graphdef, params, x_BxTxE), batch["labels"])

    # XLA cannot merge the recomputed with the computed across the rounds of a loop.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sums(piece):
        x_BxCxE, labels_BxC = piece
        return cross_entropy(head(graphdef, params, x_BxCxE), labels_BxC)

    pieces = _cut(x_BxTxE, chunk, 0), _cut(batch["labels"], chunk, IGNORE)
    return tuple(jnp.sum(sums_N) for sums_N in jax.lax.map(sums, pieces))


def _cut(x_BxT: jax.Array, chunk: int, fill: int) -> jax.Array:
    """[B, T, ...] as [N, B, chunk, ...], the last chunk filled up."""
    batch, length, *rest = x_BxT.shape
    chunk = min(chunk, length)
    ends = [(0, 0), (0, -length % chunk)] + [(0, 0)] * len(rest)
    x_BxT = jnp.pad(x_BxT, ends, constant_values=fill)
    return x_BxT.reshape(batch, -1, chunk, *rest).swapaxes(0, 1)


def step_policy(policy: jaxamp.Policy, config: Config) -> jaxamp.Policy:
    """The policy of the training step: what of `model.remat` and the mesh is autocast's to do."""
    residuals = "compute" if config.model.remat == "islands" else policy.residuals
    reduce = "compute" if config.mesh.reduce_dtype == "compute" else policy.reduce
    return policy.replace(residuals=residuals, reduce=reduce)


def make_loss_fn(config: Config, graphdef: nnx.GraphDef) -> Callable:
    """The loss of a (micro)batch as a function of params.

    It is a sum over its positions divided by `count`, the counted positions of the whole batch, so
    that the losses and gradients of microbatches add up to those of the batch.
    """

    def loss_fn(params, batch, key, count):
        dropout_key = key if config.model.dropout else None
        nll, z2, _ = loss_sums(graphdef, params, batch, dropout_key, config.loss_chunk)
        return (nll + config.z_loss * z2) / count, nll / count

    return loss_fn


def make_train_step(config: Config, graphdef: nnx.GraphDef, policy: jaxamp.Policy) -> Callable:
    """`(state, batch) -> (state, metrics)`, jitted, the old state donated."""
    loss_fn = make_loss_fn(config, graphdef)
    remat_policy = step_policy(policy, config)
    tx = make_optimizer(config.optimizer, config.num_steps, policy)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        loss_scale = jaxamp.loss_scale(state.opt_state)
        grad_fn = functools.partial(
            jaxamp.value_and_grad(loss_fn, remat_policy, has_aux=True), loss_scale=loss_scale
        )
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), state.step)
        loss, grads = accumulate(grad_fn, state.params, batch, key, config.grad_accum_steps)
        grads = constrain_like_parameters(grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        assert isinstance(opt_state, jaxamp.ApplyIfFiniteState)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "train/loss": loss,
            "train/grad_norm": opt_state.grad_norm,
            "amp/loss_scale": jnp.asarray(loss_scale.loss_scale),
            "amp/skipped_steps": opt_state.skipped_steps,
            "amp/grads_finite": opt_state.grads_finite,
            "amp/at_floor": at_floor(loss_scale),
        }
        metrics |= monitors(
            state.step + 1, state.params, grads, updates, policy, metrics["amp/loss_scale"]
        )
        new_state = TrainState(state.step + 1, params, opt_state, state.key_data)
        return constrain_like_parameters(new_state), metrics

    return train_step


def accumulate(
    grad_fn: Callable, params: Any, batch: Batch, key: jax.Array, num_microbatches: int
) -> tuple[jax.Array, Any]:
    """Loss and float32 gradients of a batch, one microbatch after another.

    The loss scale is the same for all of them, and a bad microbatch makes the sum bad: the finite
    check that follows sees the whole window.
    """
    count = jnp.maximum(jnp.sum(batch["labels"] != IGNORE), 1)
    if num_microbatches == 1:
        (_, loss), grads = grad_fn(params, batch, key, count)
        return loss, grads

    def add(total, microbatch):
        (_, loss), grads = grad_fn(params, *microbatch, count)
        total_loss, total_grads = total
        grads = jax.tree.map(jnp.add, total_grads, constrain_like_parameters(grads))
        return (total_loss + loss, grads), None

    # Every so many rows: each device keeps the rows that it has.
    split = lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1)  # noqa: E731
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zeros = (jnp.zeros([]), constrain_like_parameters(zeros))
    microbatches = (jax.tree.map(split, batch), jax.random.split(key, num_microbatches))
    return jax.lax.scan(add, zeros, microbatches)[0]


def at_floor(loss_scale: jaxamp.LossScale) -> jax.Array:
    """Whether the scale cannot fall any further; bool[]."""
    least = getattr(loss_scale, "min_scale", loss_scale.loss_scale)
    return jnp.asarray(loss_scale.loss_scale <= least)


def make_eval_step(config: Config, graphdef: nnx.GraphDef, policy: jaxamp.Policy) -> Callable:
    """`(params, batch) -> (nll, count)`, sums over the counted positions, jitted."""

    @jax.jit
    def eval_step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        def sums(params, batch):
            return loss_sums(graphdef, params, batch, chunk=config.loss_chunk)

        nll, _, count = jaxamp.autocast(sums, policy)(params, batch)
        return nll, count

    return eval_step


def nonfinite_gradients(
    config: Config,
    graphdef: nnx.GraphDef,
    policy: jaxamp.Policy,
    state: TrainState,
    batch: Batch,
    step: int,
) -> list[str]:
    """Paths of the parameters whose gradients were not finite in `step`, the one of `batch`."""
    grad_fn = functools.partial(
        jaxamp.value_and_grad(
            make_loss_fn(config, graphdef), step_policy(policy, config), has_aux=True
        ),
        loss_scale=jaxamp.loss_scale(state.opt_state),
    )
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key_data), step - 1)
    add_up = functools.partial(accumulate, grad_fn, num_microbatches=config.grad_accum_steps)
    _, grads = jax.jit(add_up)(state.params, batch, key)
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if not jnp.isfinite(leaf).all()
    ]
