"""mpx (`mixed-precision-for-JAX`) with Equinox: arguments are cast, norms and softmax are not."""

import equinox as eqx  # pyright: ignore[reportMissingImports]
import jax
import jax.numpy as jnp
import mpx  # pyright: ignore[reportMissingImports]
import optax
from serve import Step, Task, serve

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}


class Block(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    feed_forward_norm: eqx.nn.RMSNorm
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    gate: eqx.nn.Linear
    down: eqx.nn.Linear
    n_heads: int = eqx.field(static=True)

    def __init__(self, task: Task, k: int):
        self.n_heads = task.settings["n_heads"]
        for name, weight in task.layer(k).items():
            setattr(self, name, linear(weight) if weight.ndim == 2 else norm(weight))

    def __call__(self, x, rotation):
        x = x + self.attend(full(self.attention_norm, x), rotation)
        y = full(self.feed_forward_norm, x)
        hidden = jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        return x + jax.vmap(self.down)(hidden)

    def attend(self, x, rotation):
        heads = lambda f: jax.vmap(f)(x).reshape(len(x), self.n_heads, -1)  # noqa: E731
        query, key = rotate(heads(self.query), rotation), rotate(heads(self.key), rotation)
        logits = jnp.einsum("thd,shd->hts", query, key) / jnp.sqrt(query.shape[-1]).astype(x.dtype)
        logits = jnp.where(jnp.tri(len(x), dtype=bool)[None], logits, -jnp.inf)
        softmax = mpx.force_full_precision(jax.nn.softmax, logits.dtype)
        y = jnp.einsum("hts,shd->thd", softmax(logits), heads(self.value))
        return jax.vmap(self.out)(y.reshape(x.shape))


class Transformer(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.RMSNorm

    def __init__(self, task: Task):
        self.embed = eqx.nn.Embedding(weight=jnp.asarray(task.weights["embed/embedding"]))
        self.blocks = [Block(task, k) for k in range(task.settings["n_layers"])]
        self.norm = norm(task.weights["norm/scale"])

    def __call__(self, tokens, rotation):
        x = jax.vmap(self.embed)(tokens)
        for block in self.blocks:
            x = block(x, rotation)
        return full(self.norm, x) @ self.embed.weight.T


def linear(kernel) -> eqx.nn.Linear:
    layer = eqx.nn.Linear(*kernel.shape, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(kernel.T))


def norm(scale) -> eqx.nn.RMSNorm:
    layer = eqx.nn.RMSNorm(len(scale), eps=1e-6, use_bias=False)
    return eqx.tree_at(lambda layer: layer.weight, layer, jnp.asarray(scale))


def full(norm: eqx.nn.RMSNorm, x):
    return jax.vmap(mpx.force_full_precision(norm, x.dtype))(x)


def rotate(x, rotation):
    def in_float32(x):
        cos, sin = (angles[:, None] for angles in rotation)
        left, right = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    return mpx.force_full_precision(in_float32, x.dtype)(x)


def make(task: Task, compute: str) -> Step:
    mixed, settings = compute != "f32", task.settings
    if mixed:
        mpx.set_half_precision_datatype(DTYPES[compute])
    model, rotation = Transformer(task), task.rotation()
    tokens, labels = jnp.asarray(task.tokens), jnp.asarray(task.labels)
    adamw = optax.adamw(
        settings["learning_rate"],
        b1=settings["b1"],
        b2=settings["b2"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        mask=lambda params: jax.tree.map(lambda p: p.ndim == 2, params),
    )
    tx = optax.chain(optax.clip_by_global_norm(settings["max_grad_norm"]), adamw)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    scaling = mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1.0), period=2000)

    def mean_loss(model, tokens, labels):
        logits = jax.vmap(model, in_axes=(0, None))(tokens, rotation)
        losses = mpx.force_full_precision(
            optax.softmax_cross_entropy_with_integer_labels, jnp.float32
        )
        return jnp.mean(losses(logits, labels))

    @eqx.filter_jit(donate="all")
    def train_step(model, opt_state, scaling, tokens, labels):
        grad_fn = mpx.filter_value_and_grad(mean_loss, scaling=scaling, use_mixed_precision=mixed)
        loss, scaling, finite, grads = grad_fn(model, tokens, labels)
        model, opt_state = mpx.optimizer_update(model, tx, opt_state, grads, finite)
        return model, opt_state, scaling, loss

    state = (model, opt_state, scaling)

    def step() -> float:
        nonlocal state
        *state, loss = train_step(*state, jnp.copy(tokens), jnp.copy(labels))
        jax.block_until_ready(eqx.filter(state, eqx.is_array))
        return float(loss)

    return step


if __name__ == "__main__":
    serve(make)
