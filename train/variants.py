"""The Transformer of `train` in five precisions: the competitors that `train.benchmark` measures.

    float32    `train.model`, as it is
    jmp        `train.model` on parameters that `jmp` has cast, the whole tree at once
    autocast   `train.model` under `jaxamp.autocast`
    by hand    written out below the way a careful engineer does it: Flax's `dtype=` on every layer
    floor      written out below, nothing rounded but the operands of the matmuls
    jmp, plain layers
               written out below with no float32 inside but the loss, on parameters that `jmp` has
               cast; the layers that `train.model` is made of go to float32 by themselves

All take the same float32 parameters and compute the same function. Shapes are in names as in
`train.model`; G queries share a key-value head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from flax import nnx

import jaxamp
from train import model
from train.config import Config, ModelConfig
from train.step import IGNORE, cross_entropy

LossFn = Callable[[Any, Any], jax.Array]


class Variant(NamedTuple):
    """One way to run the model.

    Attributes:
        name: For the table.
        loss_fn: `(params, batch) -> loss`, float32[].
        policy: What autocast does to it; "float32" leaves it as it is written.
    """

    name: str
    loss_fn: LossFn
    policy: str

    def value_and_grad(self) -> Callable:
        """`(params, batch, *, loss_scale=None) -> (loss, float32 gradients)`."""
        return jaxamp.value_and_grad(self.loss_fn, self.policy)


class Layers(NamedTuple):
    """How the layers follow each other.

    Attributes:
        unroll: Each is traced by itself; else they are the rounds of a `jax.lax.scan`.
        remat: The backward pass recomputes all but the results of matmuls (`dots_saveable`).
    """

    unroll: bool = False
    remat: bool = False

    def run(self, layer: Callable, x: jax.Array, params: Any, at_once: int = 1) -> jax.Array:
        """`x = layer(x, p)` for each `p` of params that are stacked along their first axis.

        `at_once` of them are one round of the scan; one is, where there is something to recompute.
        """
        if self.remat:
            save = jax.checkpoint_policies.dots_saveable
            layer = jax.checkpoint(layer, policy=save, prevent_cse=self.unroll)
        if not self.unroll:
            at_once = 1 if self.remat else at_once
            return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params, unroll=at_once)[0]
        for k in range(jax.tree.leaves(params)[0].shape[0]):
            x = layer(x, jax.tree.map(lambda leaf, k=k: leaf[k], params))
        return x


SCAN = Layers()


def make_variants(
    config: Config, graphdef: nnx.GraphDef, compute: str, layers: Layers = SCAN
) -> dict[str, Variant]:
    """All of them by name, for compute dtype "bf16" or "f16".

    Args:
        config: Its model and z_loss; there is no dropout.
        graphdef: Of `train.model.create`.
        compute: The 16-bit dtype.
        layers: How they follow each other.
    """
    policy = jaxamp.get_policy(f"compute={compute}")
    dtype = policy.compute_dtype

    def apply(params, tokens):
        return model_apply(graphdef, params, tokens, layers)

    def on_cast_tree(apply):
        cast = jmp.Policy(jnp.float32, dtype, jnp.float32).cast_to_compute
        return lambda params, tokens: apply(cast(params), tokens)

    def written_out(how):
        return lambda params, tokens: forward(config.model, params, tokens, how, layers)

    def variant(name, apply, policy="float32"):
        return Variant(name, _loss_fn(apply, config.z_loss), policy)

    variants = [
        variant("float32", apply),
        variant("by hand", written_out(by_hand(dtype))),
        variant("jmp", on_cast_tree(apply)),
        variant("jmp, plain layers", on_cast_tree(written_out(plain(dtype)))),
        variant("autocast", apply, str(policy)),
        variant("autocast, residuals=compute", apply, str(policy.replace(residuals="compute"))),
        variant("floor", written_out(floor(dtype))),
    ]
    return {variant.name: variant for variant in variants}


def _loss_fn(apply: Callable, z_loss: float) -> LossFn:
    def loss_fn(params, batch):
        nll, z2, _ = cross_entropy(apply(params, batch["tokens"]), batch["labels"])
        return (nll + z_loss * z2) / jnp.maximum(jnp.sum(batch["labels"] != IGNORE), 1)

    return loss_fn


def model_apply(
    graphdef: nnx.GraphDef, params: Any, tokens_BxT: jax.Array, layers: Layers
) -> jax.Array:
    """`train.model.apply` on the modules of `train.model`, with a say in how layers follow."""
    if layers == SCAN:
        return model.apply(graphdef, params, tokens_BxT)
    whole = nnx.merge(graphdef, params)
    rotation = model._rotation(whole.config, 0, tokens_BxT.shape[1])
    block_def, blocks = nnx.split(whole.blocks)

    def layer(x_BxTxE, params):
        return nnx.merge(block_def, params)(x_BxTxE, rotation, None, 0, None)[0]

    x_BxTxE = layers.run(layer, whole.embed(tokens_BxT), blocks)
    head = whole.embed.attend if whole.head is None else whole.head
    return head(whole.norm(x_BxTxE))


class Precision(NamedTuple):
    """What the written-out model does to numbers.

    Attributes:
        narrow: To the dtype of activations and of the residual stream.
        widen: To the dtype of norms, rotations and the softmax.
        dot: An einsum of two operands.
    """

    narrow: Callable[[jax.Array], jax.Array]
    widen: Callable[[jax.Array], jax.Array]
    dot: Callable[[str, jax.Array, jax.Array], jax.Array]


def by_hand(dtype: Any) -> Precision:
    """Weights cast where they are used, activations kept in `dtype`: what Flax's `dtype=` does."""
    narrow = _to(dtype)
    return Precision(
        narrow, _to(jnp.float32), lambda terms, x, y: jnp.einsum(terms, narrow(x), narrow(y))
    )


def plain(dtype: Any) -> Precision:
    """All in `dtype`; parameters are expected in it."""
    return Precision(_to(dtype), lambda x: x, jnp.einsum)


def floor(dtype: Any) -> Precision:
    """Float32, but for the operands of matmuls, forward and backward, which are rounded to `dtype`.

    No policy that multiplies in `dtype` can be more exact.
    """
    same = lambda x: x  # noqa: E731
    return Precision(same, same, lambda terms, x, y: _rounded_dot(terms, dtype, x, y))


def _to(dtype: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x.astype(dtype)


def _rounded_dot(terms: str, dtype: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    rounded = lambda x: x.astype(dtype).astype(jnp.float32)  # noqa: E731

    @jax.custom_vjp
    def dot(x, y):
        return jnp.einsum(terms, rounded(x), rounded(y))

    def forward(x, y):
        return jax.vjp(lambda x, y: jnp.einsum(terms, x, y), rounded(x), rounded(y))

    dot.defvjp(forward, lambda pullback, out: pullback(rounded(out)))
    return dot(x, y)


def forward(
    config: ModelConfig,
    params: Any,
    tokens_BxT: jax.Array,
    how: Precision,
    layers: Layers = SCAN,
) -> jax.Array:
    """Logits [B, T, V] of the model of `train.model`, written out with every cast in sight."""
    rotation = model._rotation(config, 0, tokens_BxT.shape[1])
    table_VxE = params["embed"]["embedding"]
    # Rows are taken before they are cast: their gradients add up in float32.
    x_BxTxE = how.narrow(table_VxE[tokens_BxT])

    def block(x_BxTxE, layer):
        y_BxTxE = _norm(config, layer["attention_norm"], x_BxTxE, how)
        x_BxTxE += _attention(config, layer["attention"], y_BxTxE, rotation, how)
        y_BxTxE = _norm(config, layer["feed_forward_norm"], x_BxTxE, how)
        return x_BxTxE + _feed_forward(layer["feed_forward"], y_BxTxE, how)

    x_BxTxE = layers.run(block, x_BxTxE, params["blocks"], model.layers_at_once(config))
    x_BxTxE = _norm(config, params["norm"], x_BxTxE, how)
    head_ExV = table_VxE.T if config.tie_embeddings else params["head"]["kernel"]
    return how.dot("bte,ev->btv", x_BxTxE, head_ExV)


def _norm(config: ModelConfig, params: Any, x_BxTxE: jax.Array, how: Precision) -> jax.Array:
    """Float32 inside: statistics, scale and bias."""
    x_BxTxE = how.widen(x_BxTxE)
    if config.norm == "layernorm":
        x_BxTxE -= jnp.mean(x_BxTxE, axis=-1, keepdims=True)
    x_BxTxE *= jax.lax.rsqrt(jnp.mean(jnp.square(x_BxTxE), axis=-1, keepdims=True) + 1e-6)
    x_BxTxE *= params["scale"][None, None]
    return how.narrow(x_BxTxE + params["bias"][None, None] if "bias" in params else x_BxTxE)


def _attention(config: ModelConfig, params: Any, x_BxTxE, rotation, how: Precision) -> jax.Array:
    """The rotation and the softmax in float32."""
    head_dim = config.d_model // config.n_heads
    heads = config.n_kv_heads or config.n_heads

    def project(name):
        x = how.dot("bte,ef->btf", x_BxTxE, params[name]["kernel"])
        return x.reshape(*x.shape[:2], -1, head_dim)

    query, key = (
        how.narrow(model._rotate(how.widen(project(name)), rotation)) for name in ("query", "key")
    )
    query_BxTxKxGxD = query.reshape(*query.shape[:2], heads, -1, head_dim)
    logits = how.dot("btkgd,bskd->bkgts", query_BxTxKxGxD, key)
    logits = how.widen(logits)
    past_TxT = jnp.tri(x_BxTxE.shape[1], dtype=bool)
    logits = jnp.where(past_TxT[None, None, None], logits * head_dim**-0.5, -jnp.inf)
    weights = how.narrow(jax.nn.softmax(logits, axis=-1))
    y_BxTxKxGxD = how.dot("bkgts,bskd->btkgd", weights, project("value"))
    return how.dot("bte,ef->btf", y_BxTxKxGxD.reshape(x_BxTxE.shape), params["out"]["kernel"])


def _feed_forward(params: Any, x_BxTxE: jax.Array, how: Precision) -> jax.Array:
    up = how.dot("bte,ef->btf", x_BxTxE, params["up"]["kernel"])
    if "gate" in params:
        hidden = jax.nn.silu(how.dot("bte,ef->btf", x_BxTxE, params["gate"]["kernel"])) * up
    else:
        hidden = jax.nn.gelu(up)
    return how.dot("btf,fe->bte", hidden, params["down"]["kernel"])
