"""The model: a pre-norm decoder-only Transformer, written as a plain float32 program.

Precision is not the model's business: `jaxamp.autocast` decides it from outside, op by op. One
place knows about dtypes, `train.attention`: its kernels demand operands of one dtype.

Parameters are a nested dict of arrays; those of the layers are stacked, `[n_layers, ...]`, under
`blocks`, and one traced layer is run n_layers times by `jax.lax.scan`, as a loop or not.

Shapes are in names: B batch, T tokens, S cached positions, E d_model, H heads, K key-value heads,
D head size, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from train.attention import SAVED, attend, causal_attention, target_device
from train.config import ModelConfig
from train.mesh import constrain

Params = dict[str, Any]
Cache = dict[str, jax.Array]


def create(
    config: ModelConfig, vocab_size: int, key: jax.Array, kernel_dtype: DTypeLike | None = None
) -> tuple[nnx.GraphDef, Params]:
    """The model's structure and fresh float32 parameters; also under jit and `jax.eval_shape`.

    `kernel_dtype` is what a flash kernel of attention is given: the policy's compute dtype. None:
    the dtype of the parameters.
    """
    dtype = None if kernel_dtype is None else jnp.dtype(kernel_dtype)
    graphdef, state = nnx.split(Transformer(config, vocab_size, nnx.Rngs(key), dtype))
    return graphdef, nnx.to_pure_dict(state)


def apply(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens_BxT: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Logits [B, T, V] in the dtype of `params`; dropout only when there is a key."""
    return head(graphdef, params, hidden(graphdef, params, tokens_BxT, dropout_key))


def hidden(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens_BxT: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """What the head turns into logits: the final norm's [B, T, E]."""
    return nnx.merge(graphdef, params).hidden(tokens_BxT, None, 0, dropout_key)[0]


def head(graphdef: nnx.GraphDef, params: Params, x_BxTxE: jax.Array) -> jax.Array:
    """Logits [B, T, V] of what `hidden` gives, or of some of its tokens."""
    return nnx.merge(graphdef, params).logits(x_BxTxE)


def init_cache(config: ModelConfig, batch: int, length: int, dtype: DTypeLike) -> Cache:
    """Room for `length` positions: zeros [L, B, S, K, D]; `dtype` is that of the parameters."""
    kv_heads = config.n_kv_heads or config.n_heads
    shape = (config.n_layers, batch, length, kv_heads, config.d_model // config.n_heads)
    return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}


def apply_with_cache(
    graphdef: nnx.GraphDef, params: Params, tokens_BxT: jax.Array, cache: Cache, position: ArrayLike
) -> tuple[jax.Array, Cache]:
    """Logits [B, T, V] of tokens that stand at `position` and after, and the cache that has them.

    The caller keeps position + T within the cache: XLA clamps a write that would leave it.
    """
    model = nnx.merge(graphdef, params)
    x_BxTxE, cache = model.hidden(tokens_BxT, cache, position, None)
    return model.logits(x_BxTxE), cache


def count_params(params: Params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class Transformer(nnx.Module):
    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs, kernel_dtype=None):
        self.config = config
        self.embed = nnx.Embed(vocab_size, config.d_model, embedding_init=_small, rngs=rngs)
        # Embed remembers the dtype it was made with and would lift 16-bit parameters to it.
        self.embed.dtype = None
        layer_keys = jax.random.split(rngs.params(), config.n_layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key), kernel_dtype))(layer_keys)
        self.norm = _norm(config, rngs)
        tied = config.tie_embeddings
        self.head = None if tied else _linear(config.d_model, vocab_size, rngs, _small)
        self.dropout = nnx.Dropout(config.dropout)

    def hidden(self, tokens_BxT, cache, position, dropout_key) -> tuple[jax.Array, Any]:
        embed_key, layer_keys = _split_for_layers(dropout_key, self.config.n_layers)
        with jax.named_scope("embed"):
            x_BxTxE = self.embed(tokens_BxT)
            x_BxTxE = self.dropout(x_BxTxE, deterministic=embed_key is None, rngs=embed_key)
            x_BxTxE = constrain(x_BxTxE, "residual")
        rotation = _rotation(self.config, position, tokens_BxT.shape[1])
        block_def, layers = nnx.split(self.blocks)

        def run_layer(x_BxTxE, layer):
            params, cache, key = layer
            block = nnx.merge(block_def, params)
            x_BxTxE, cache = block(x_BxTxE, rotation, cache, position, key)
            return constrain(x_BxTxE, "residual"), cache

        at_once = layers_at_once(self.config)
        run_layer = _recomputed(run_layer, self.config.remat, in_loop=at_once == 1)
        with jax.named_scope("blocks"):
            inputs = layers, cache, layer_keys
            x_BxTxE, cache = jax.lax.scan(run_layer, x_BxTxE, inputs, unroll=at_once)
        with jax.named_scope("norm"):
            return self.norm(x_BxTxE), cache

    def logits(self, x_BxTxE: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            head = self.embed.attend if self.head is None else self.head
            return constrain(head(x_BxTxE), "logits")


def layers_at_once(config: ModelConfig) -> int:
    """How many layers a round of the loop has: one, or all, which is no loop at all.

    On a CPU 4 to 16 layers take 0.6 to 0.9 of the time without the loop (docs/results.md); 2 or 4
    of more take as long as with it.
    """
    in_loop = config.scan_layers
    if in_loop is None:
        in_loop = config.remat != "none" or target_device().platform != "cpu"
    return 1 if in_loop else config.n_layers


def _recomputed(run_layer: Callable, remat: str, in_loop: bool) -> Callable:
    """The layer, of which the backward pass recomputes what `ModelConfig.remat` says."""
    if remat not in ("dots", "full"):  # islands are autocast's, see `train.step.step_policy`
        return run_layer
    policy = _dots if remat == "dots" else None
    # XLA cannot merge the recomputed with the computed across the rounds of a scan.
    return jax.checkpoint(run_layer, policy=policy, prevent_cse=not in_loop)


# Matmuls without batch dimensions: `dots_saveable` keeps the T x T logits of XLA's attention too.
# Of splash the result is kept, 16 MiB a layer at B 4, T 2048, E 1024, and the kernel runs once.
_dots = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(SAVED),
)


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, kernel_dtype):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs, kernel_dtype)
        self.feed_forward_norm = _norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxTxE, rotation, cache, position, dropout_key):
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        off = dropout_key is None
        with jax.named_scope("attention_norm"):
            y_BxTxE = self.attention_norm(x_BxTxE)
        with jax.named_scope("attention"):
            y_BxTxE, cache = self.attention(y_BxTxE, rotation, cache, position)
            x_BxTxE += self.dropout(y_BxTxE, deterministic=off, rngs=keys[0])
        with jax.named_scope("feed_forward_norm"):
            y_BxTxE = self.feed_forward_norm(x_BxTxE)
        with jax.named_scope("feed_forward"):
            y_BxTxE = self.feed_forward(y_BxTxE)
            x_BxTxE += self.dropout(y_BxTxE, deterministic=off, rngs=keys[1])
        return x_BxTxE, cache


class Attention(nnx.Module):
    """Causal self-attention; each key-value head serves n_heads / n_kv_heads queries."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, kernel_dtype):
        self.config = config
        self.kernel_dtype = kernel_dtype
        self.head_dim = config.d_model // config.n_heads
        kv_size = (config.n_kv_heads or config.n_heads) * self.head_dim
        self.query = _linear(config.d_model, config.d_model, rngs)
        self.key = _linear(config.d_model, kv_size, rngs)
        self.value = _linear(config.d_model, kv_size, rngs)
        self.out = _linear(config.d_model, config.d_model, rngs, _residual(config))

    def __call__(self, x_BxTxE, rotation, cache, position):
        value_BxTxKxD = self._heads(self.value(x_BxTxE))
        # RoPE leaves float32 where parameters are 16-bit, and the kernel demands one dtype.
        dtype = value_BxTxKxD.dtype
        query_BxTxHxD = _rotate(self._heads(self.query(x_BxTxE)), rotation).astype(dtype)
        key_BxTxKxD = _rotate(self._heads(self.key(x_BxTxE)), rotation).astype(dtype)
        if cache is None:
            operands = query_BxTxHxD, key_BxTxKxD, value_BxTxKxD
            y_BxTxHxD = causal_attention(*operands, self.config, self.kernel_dtype)
        else:
            cache = _write(cache, position, key=key_BxTxKxD, value=value_BxTxKxD)
            mask = _past(position, x_BxTxE.shape[1], cache["key"].shape[1])
            # cuDNN would turn the mask into a bias: nothing to gain for a few queries.
            y_BxTxHxD = attend(query_BxTxHxD, cache["key"], cache["value"], mask=mask)
        return self.out(y_BxTxHxD.reshape(x_BxTxE.shape)), cache

    def _heads(self, x):
        return x.reshape(*x.shape[:2], -1, self.head_dim)


class FeedForward(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        d_ff = config.feed_forward_size
        self.up = _linear(config.d_model, d_ff, rngs)
        self.gate = _linear(config.d_model, d_ff, rngs) if config.activation == "swiglu" else None
        self.down = _linear(d_ff, config.d_model, rngs, _residual(config))

    def __call__(self, x_BxTxE):
        if self.gate is None:
            return self.down(jax.nn.gelu(self.up(x_BxTxE)))
        return self.down(jax.nn.silu(self.gate(x_BxTxE)) * self.up(x_BxTxE))


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
    norm = nnx.RMSNorm if config.norm == "rmsnorm" else nnx.LayerNorm
    return norm(config.d_model, rngs=rngs)


# Small logits at the start, so that the first loss is log(V); tied or not.
_small = nnx.initializers.normal(0.02)
_fan_in = nnx.initializers.variance_scaling(1.0, "fan_in", "normal")


def _residual(config: ModelConfig) -> Callable:
    # 2 n_layers terms are added to the residual stream: together they have the variance of one.
    return nnx.initializers.variance_scaling(1 / (2 * config.n_layers), "fan_in", "normal")


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, kernel_init=_fan_in) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=kernel_init, rngs=rngs)


def _split_for_layers(key, n_layers: int):
    if key is None:
        return None, None
    keys = jax.random.split(key, n_layers + 1)
    return keys[0], keys[1:]


def _rotation(config: ModelConfig, position: ArrayLike, length: int):
    """Cosine and sine of RoPE's angles, float32[1, T, 1, D/2] under every policy.

    In bfloat16 an angle near 4095 would be off by up to 8; in float32 it is off by 2**-11 at most.
    """
    half = config.d_model // config.n_heads // 2
    frequencies = jnp.asarray(config.rope_theta ** -(np.arange(half) / half), np.float32)
    angles = jnp.outer(position + jnp.arange(length), frequencies)[None, :, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rotation):
    """Each pair (i, i + D/2) of the last axis turned by its angle (arXiv:2104.09864)."""
    cos, sin = rotation
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _write(cache: Cache, position: ArrayLike, **new_BxTxKxD: jax.Array) -> Cache:
    return {
        name: jax.lax.dynamic_update_slice(cache[name], new, (0, position, 0, 0))
        for name, new in new_BxTxKxD.items()
    }


def _past(position: ArrayLike, length: int, cached: int):
    """bool[1, 1, T, S]: the cached positions that each of `length` tokens may look at."""
    query_T = position + jnp.arange(length)
    return (jnp.arange(cached)[None, :] <= query_T[:, None])[None, None]
