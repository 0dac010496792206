"""The model: a pre-norm decoder-only Transformer, written as a plain float32 program.

Precision is not the model's business: it runs in whatever dtype its parameters have, and a policy
(`jaxamp.Policy`) decides that from outside. Two places do know about dtypes: RoPE's angles are
float32 under every policy, and so queries and keys are cast back before the attention kernel.

Parameters are a nested dict of arrays; those of the layers are stacked, `[n_layers, ...]`, under
`blocks`, and one traced layer is run n_layers times by `jax.lax.scan`.

Shapes are in names: B batch, T tokens, S cached positions, E d_model, H heads, K key-value heads,
D head size, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from train.config import ModelConfig

Params = dict[str, Any]
Cache = dict[str, jax.Array]
Kernel = Literal["xla", "cudnn"]


def create(config: ModelConfig, vocab_size: int, key: jax.Array) -> tuple[nnx.GraphDef, Params]:
    """The model's structure and fresh float32 parameters; also under jit and `jax.eval_shape`."""
    graphdef, state = nnx.split(Transformer(config, vocab_size, nnx.Rngs(key)))
    return graphdef, nnx.to_pure_dict(state)


def apply(
    graphdef: nnx.GraphDef,
    params: Params,
    tokens_BxT: jax.Array,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Logits [B, T, V] in the dtype of `params`; dropout only when there is a key."""
    return nnx.merge(graphdef, params)(tokens_BxT, dropout_key=dropout_key)


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
    return nnx.merge(graphdef, params).extend(tokens_BxT, cache, position)


def count_params(params: Params) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def attention_implementation(
    config: ModelConfig, dtype: DTypeLike, device: Any = None
) -> tuple[Kernel, str]:
    """The attention kernel for operands of `dtype`, and why.

    Raises:
        ValueError: `config.attention` is 'cudnn' and cuDNN's kernel cannot run.
    """
    device = jax.devices()[0] if device is None else device
    obstacle = _cudnn_obstacle(config.d_model // config.n_heads, jnp.dtype(dtype), device)
    if config.attention == "cudnn" and obstacle:
        raise ValueError(f"attention 'cudnn' cannot run: {obstacle}; use 'auto' or 'xla'")
    if config.attention != "auto":
        return config.attention, "asked for by model.attention"
    if obstacle:
        return "xla", obstacle
    return "cudnn", f"{device.device_kind} has cuDNN's flash kernel for {jnp.dtype(dtype)}"


def _cudnn_obstacle(head_dim: int, dtype: jnp.dtype, device: Any) -> str | None:
    major = str(getattr(device, "compute_capability", "")).split(".")[0]
    if device.platform not in ("gpu", "cuda") or not major.isdigit():  # AMD's are like "gfx90a"
        return f"cuDNN needs an NVIDIA GPU, and the device is {device.device_kind}"
    if int(major) < 8:
        return f"cuDNN needs compute capability 8.0, {device.device_kind} has less"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN needs 16-bit operands, not {dtype}"
    largest = 256 if int(major) >= 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN needs a head size that 8 divides, up to {largest}, not {head_dim}"
    return None


class Transformer(nnx.Module):
    def __init__(self, config: ModelConfig, vocab_size: int, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(vocab_size, config.d_model, embedding_init=_small, rngs=rngs)
        # Embed remembers the dtype it was made with and would lift 16-bit parameters to it.
        self.embed.dtype = None
        layer_keys = jax.random.split(rngs.params(), config.n_layers)
        self.blocks = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(layer_keys)
        self.norm = _norm(config, rngs)
        tied = config.tie_embeddings
        self.head = None if tied else _linear(config.d_model, vocab_size, rngs, _small)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, tokens_BxT: jax.Array, *, dropout_key: jax.Array | None = None) -> jax.Array:
        logits_BxTxV, _ = self._forward(tokens_BxT, None, 0, dropout_key)
        return logits_BxTxV

    def extend(
        self, tokens_BxT: jax.Array, cache: Cache, position: ArrayLike
    ) -> tuple[jax.Array, Cache]:
        return self._forward(tokens_BxT, cache, position, None)

    def _forward(self, tokens_BxT, cache, position, dropout_key) -> tuple[jax.Array, Any]:
        embed_key, layer_keys = _split_for_layers(dropout_key, self.config.n_layers)
        x_BxTxE = self.dropout(
            self.embed(tokens_BxT), deterministic=embed_key is None, rngs=embed_key
        )
        rotation = _rotation(self.config, position, tokens_BxT.shape[1])
        block_def, layers = nnx.split(self.blocks)

        def run_layer(x_BxTxE, layer):
            params, cache, key = layer
            return nnx.merge(block_def, params)(x_BxTxE, rotation, cache, position, key)

        x_BxTxE, cache = jax.lax.scan(run_layer, x_BxTxE, (layers, cache, layer_keys))
        x_BxTxE = self.norm(x_BxTxE)
        head = self.embed.attend if self.head is None else self.head
        return head(x_BxTxE), cache


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.feed_forward = FeedForward(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxTxE, rotation, cache, position, dropout_key):
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        off = dropout_key is None
        y_BxTxE, cache = self.attention(self.attention_norm(x_BxTxE), rotation, cache, position)
        x_BxTxE += self.dropout(y_BxTxE, deterministic=off, rngs=keys[0])
        y_BxTxE = self.feed_forward(self.feed_forward_norm(x_BxTxE))
        x_BxTxE += self.dropout(y_BxTxE, deterministic=off, rngs=keys[1])
        return x_BxTxE, cache


class Attention(nnx.Module):
    """Causal self-attention; each key-value head serves n_heads / n_kv_heads queries."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.config = config
        self.head_dim = config.d_model // config.n_heads
        kv_size = (config.n_kv_heads or config.n_heads) * self.head_dim
        self.query = _linear(config.d_model, config.d_model, rngs)
        self.key = _linear(config.d_model, kv_size, rngs)
        self.value = _linear(config.d_model, kv_size, rngs)
        self.out = _linear(config.d_model, config.d_model, rngs, _residual(config))

    def __call__(self, x_BxTxE, rotation, cache, position):
        value_BxTxKxD = self._heads(self.value(x_BxTxE))
        # RoPE leaves float32, and the kernel demands one dtype.
        dtype = value_BxTxKxD.dtype
        query_BxTxHxD = _rotate(self._heads(self.query(x_BxTxE)), rotation).astype(dtype)
        key_BxTxKxD = _rotate(self._heads(self.key(x_BxTxE)), rotation).astype(dtype)
        if cache is None:
            kernel, _ = attention_implementation(self.config, dtype)
            y_BxTxHxD = _attend(query_BxTxHxD, key_BxTxKxD, value_BxTxKxD, kernel, is_causal=True)
        else:
            cache = _write(cache, position, key=key_BxTxKxD, value=value_BxTxKxD)
            mask = _past(position, x_BxTxE.shape[1], cache["key"].shape[1])
            # cuDNN would turn the mask into a bias: nothing to gain for a few queries.
            y_BxTxHxD = _attend(query_BxTxHxD, cache["key"], cache["value"], "xla", mask=mask)
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


def _attend(query, key, value, kernel: Kernel, **masking: Any):
    dtype = value.dtype
    if dtype == jnp.float16 and jax.default_backend() != "gpu":
        # For float16 JAX demands the dot F16_F16_F32, which CPUs and TPUs refuse at lowering.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    y = jax.nn.dot_product_attention(query, key, value, implementation=kernel, **masking)
    return y.astype(dtype)


def _write(cache: Cache, position: ArrayLike, **new_BxTxKxD: jax.Array) -> Cache:
    return {
        name: jax.lax.dynamic_update_slice(cache[name], new, (0, position, 0, 0))
        for name, new in new_BxTxKxD.items()
    }


def _past(position: ArrayLike, length: int, cached: int):
    """bool[1, 1, T, S]: the cached positions that each of `length` tokens may look at."""
    query_T = position + jnp.arange(length)
    return (jnp.arange(cached)[None, :] <= query_T[:, None])[None, None]
