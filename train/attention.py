"""Causal attention by the kernel that the device has: XLA's, cuDNN's flash or Pallas's splash.

The one place of the model that knows about dtypes and devices: kernels demand operands of one
dtype, and flash kernels never hold the T x T logits. Shapes are in names as in `train.model`.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as pallas
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from train.config import ModelConfig
from train.mesh import BATCH

Kernel = Literal["xla", "cudnn", "splash"]

SAVED = "splash_attention"
"""The name, for remat policies, of what splash's backward pass needs of its forward pass."""

_FLASH: dict[str, Kernel] = {"tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}  # by platform
_LARGEST_BLOCK = 512  # 512 x 512 float32 logits are 1 MB of a TPU core's 16 MB of vector memory


def attention_implementation(
    config: ModelConfig, dtype: DTypeLike, device: Any = None, length: int | None = None
) -> tuple[Kernel, str]:
    """The attention kernel for operands of `dtype`, and why.

    Args:
        config: Its attention and head size.
        dtype: Of queries, keys and values.
        device: What the program is for; None: see `target_device`.
        length: Tokens in a sequence; None: a length that the kernel takes.

    Raises:
        ValueError: `config.attention` asks for a kernel that cannot run.
    """
    device = target_device() if device is None else device
    dtype, head_dim = jnp.dtype(dtype), config.d_model // config.n_heads
    asked = config.attention
    kernel = _FLASH.get(device.platform) if asked == "auto" else asked
    if kernel is None:
        return "xla", f"no flash kernel for {device.device_kind}: cuDNN needs NVIDIA, splash a TPU"
    obstacle = None
    if kernel == "cudnn":
        obstacle = _cudnn_obstacle(head_dim, dtype, device)
    elif kernel == "splash":
        obstacle = _splash_obstacle(length, dtype, device)
    if asked != "auto":
        if obstacle:
            raise ValueError(f"attention '{asked}' cannot run: {obstacle}; use 'auto' or 'xla'")
        return asked, "asked for by model.attention"
    if obstacle:
        return "xla", obstacle
    maker = "cuDNN" if kernel == "cudnn" else "Pallas"
    return kernel, f"{device.device_kind} has {maker}'s flash kernel for {dtype}"


def target_device() -> Any:
    """What the program that is being traced is for: the mesh that is set, else the first device.

    A mesh of devices that are not here, to compile for, says platform and kind alone.
    """
    here, there = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    return here if there is None or there.device_kind == here.device_kind else there


def _cudnn_obstacle(head_dim: int, dtype: jnp.dtype, device: Any) -> str | None:
    major = str(getattr(device, "compute_capability", "")).split(".")[0]
    if device.platform not in ("gpu", "cuda") or not major.isdigit():  # AMD's are like "gfx90a"
        return f"cuDNN needs an NVIDIA GPU that is here, and the device is {device.device_kind}"
    if int(major) < 8:
        return f"cuDNN needs compute capability 8.0, {device.device_kind} has less"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN needs 16-bit operands, not {dtype}"
    largest = 256 if int(major) >= 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN needs a head size that 8 divides, up to {largest}, not {head_dim}"
    return None


def _splash_obstacle(length: int | None, dtype: jnp.dtype, device: Any) -> str | None:
    # Any head size compiles for a v5e (8, 32, 64, 80, 128 and 256 were tried with jax 0.10.2).
    if device.platform != "tpu":
        return f"splash attention needs a TPU, and the device is {device.device_kind}"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"splash attention needs bfloat16 or float32 operands, not {dtype}"
    if length is not None and length % 128:
        return f"splash attention needs sequences of a multiple of 128 tokens, not {length}"
    return None


def causal_attention(
    query_BxTxHxD: jax.Array,
    key_BxTxKxD: jax.Array,
    value_BxTxKxD: jax.Array,
    config: ModelConfig,
    kernel_dtype: DTypeLike | None,
) -> jax.Array:
    """Attention of each token to itself and those before it: [B, T, H, D] in the values' dtype.

    A flash kernel gets operands in `kernel_dtype`, None: as they are. Its softmax is float32.
    """
    operands = query_BxTxHxD, key_BxTxKxD, value_BxTxKxD
    dtype = value_BxTxKxD.dtype
    kernel_dtype = dtype if kernel_dtype is None else kernel_dtype
    length = query_BxTxHxD.shape[1]
    kernel, _ = attention_implementation(config, kernel_dtype, length=length)
    if kernel == "splash":
        return splash(*operands, kernel_dtype).astype(dtype)
    demanded = kernel_dtype if kernel == "cudnn" else dtype
    operands = (x.astype(demanded) for x in operands)
    return attend(*operands, kernel=kernel, is_causal=True).astype(dtype)


def attend(query, key, value, kernel: Literal["xla", "cudnn"] = "xla", **masking: Any):
    """`jax.nn.dot_product_attention` in the dtype of the values; `masking` are its arguments."""
    dtype = value.dtype
    if dtype == jnp.float16 and target_device().platform not in ("gpu", "cuda", "rocm"):
        # For float16 JAX demands the dot F16_F16_F32, which CPUs and TPUs refuse at lowering.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    y = jax.nn.dot_product_attention(query, key, value, implementation=kernel, **masking)
    return y.astype(dtype)


def splash(
    query_BxTxHxD: jax.Array,
    key_BxTxKxD: jax.Array,
    value_BxTxKxD: jax.Array,
    dtype: DTypeLike,
    interpret: bool = False,
) -> jax.Array:
    """JAX's Pallas splash attention, [B, T, H, D] in `dtype`, which its operands are cast to.

    Under a mesh each device runs it on its rows and heads: XLA cannot cut a kernel by itself.

    Args:
        query_BxTxHxD: As it is: it is scaled by D**-0.5 here, which the kernel does not.
        key_BxTxKxD: K divides H, T is a multiple of 128.
        value_BxTxKxD: As the keys.
        dtype: bfloat16 or float32.
        interpret: Run on any device, slowly.
    """

    def kernel(*operands_BxTxHxD):
        operands_BxHxTxD = [x.swapaxes(1, 2) for x in operands_BxTxHxD]
        _, heads, length, _ = operands_BxHxTxD[0].shape
        run: Any = pallas.make_splash_mha(
            pallas.MultiHeadMask([pallas.CausalMask((length, length))] * heads),
            block_sizes=_block_sizes(length),
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        return jax.vmap(run)(*operands_BxHxTxD).swapaxes(1, 2)

    # Scaled before it is rounded, where it is float32: D**-0.5 is no power of two at D = 128.
    scaled_BxTxHxD = query_BxTxHxD * query_BxTxHxD.shape[-1] ** -0.5
    operands = (x.astype(dtype) for x in (scaled_BxTxHxD, key_BxTxKxD, value_BxTxKxD))
    return _by_rows_and_heads(kernel)(*operands)


def _block_sizes(length: int) -> pallas.BlockSizes:
    block = next(b for b in range(_LARGEST_BLOCK, 0, -128) if length % b == 0)
    return pallas.BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _by_rows_and_heads(kernel: Callable) -> Callable:
    if jax.sharding.get_abstract_mesh().empty:
        return kernel
    spec = PartitionSpec(BATCH, None, "tensor", None)
    # The kernel does not say on which axes its results vary, so that cannot be checked.
    return jax.shard_map(kernel, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
