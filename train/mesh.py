"""Devices in a grid, and one table that says how each array of a run lies on it.

The axes are `data` (copies of the parameters), `fsdp` (parameters, moments and batch are cut) and
`tensor` (heads, feed-forward and vocabulary are cut). Everything else is JAX's: one program, whose
collectives the compiler puts in.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config import Config, ConfigError, MeshConfig

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")

# The end of a parameter's path -> the axis of each of its dimensions; L layers, E d_model, F
# feed-forward, H heads, D head size, V vocabulary. Moments end alike. What is not here, norms and
# scalars such as the loss scale, is on every device.
_PARAMETERS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed/embedding", ("tensor", "fsdp")),  # VE
    (r"head/kernel", ("fsdp", "tensor")),  # EV
    (r"attention/(query|key|value)/kernel", (None, "fsdp", "tensor")),  # L E HD
    (r"attention/out/kernel", (None, "tensor", "fsdp")),  # L HD E
    (r"feed_forward/(up|gate)/kernel", (None, "fsdp", "tensor")),  # L E F
    (r"feed_forward/down/kernel", (None, "tensor", "fsdp")),  # L F E
)

# By name, as `constrain` is given it. The batch comes first in all of them.
_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "residual": (BATCH, None, None),  # BTE
    "logits": (BATCH, None, "tensor"),  # BTV
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The grid of `devices`, default all of them, also those of other processes.

    Raises:
        ConfigError: the sizes do not multiply up to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(config, len(devices))
    if devices[0].platform == "tpu" and len(devices) > 1:
        types = (AxisType.Auto,) * len(AXES)  # neighbours in the grid are neighbours on the wire
        return jax.make_mesh(sizes, AXES, types, devices=devices)
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def _sizes(config: MeshConfig, count: int) -> tuple[int, ...]:
    given = {name: getattr(config, name) for name in AXES}
    shown = ", ".join(f"{name} {size}" for name, size in given.items())
    free = [name for name, size in given.items() if size == -1]
    if len(free) > 1 or 0 in given.values():
        raise ConfigError(f"mesh {shown}: sizes are 1 or more, and one of them may be -1")
    product = int(np.prod([size for size in given.values() if size != -1]))
    plural = "device" if count == 1 else "devices"
    if free and count % product:
        raise ConfigError(
            f"mesh {shown}: {count} {plural} cannot be divided by {product}; "
            "make the sizes multiply up to the number of devices"
        )
    sizes = tuple(count // product if size == -1 else size for size in given.values())
    if int(np.prod(sizes)) != count:
        raise ConfigError(
            f"mesh {shown} has {product} places for {count} {plural}; "
            "make the sizes multiply up to it, or set one of them to -1"
        )
    return sizes


def check_fits(config: Config, mesh: Mesh) -> None:
    """Raises `ConfigError` where the mesh cannot cut what it has to cut of this config."""
    tensor, batch = mesh.shape["tensor"], mesh.shape["data"] * mesh.shape["fsdp"]
    model = config.model
    heads = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads or model.n_heads}
    for name, count in (heads | {"feed-forward size": model.feed_forward_size}).items():
        if count % tensor:
            raise ConfigError(
                f"mesh.tensor {tensor} does not divide {name} {count}; choose a divisor of it"
            )
    rows = config.batch_size // config.grad_accum_steps
    if rows % batch:
        raise ConfigError(
            f"batch_size {config.batch_size} in {config.grad_accum_steps} microbatches gives "
            f"{rows} rows, which do not divide among mesh.data x mesh.fsdp = {batch} devices; "
            f"use {_fewer(config, batch)}a batch_size that is a multiple of "
            f"{batch * config.grad_accum_steps}"
        )


def microbatches(config: Config, parts: int) -> int | None:
    """The most microbatches, no more than asked for, whose rows so many parts can share."""
    counts = range(1, config.grad_accum_steps + 1)
    return max((k for k in counts if config.batch_size % (k * parts) == 0), default=None)


def _fewer(config: Config, parts: int) -> str:
    count = microbatches(config, parts)
    return f"--grad-accum-steps {count}, or " if count else ""


def state_shardings(mesh: Any, state: Any) -> Any:
    """The sharding of each leaf of a train state, or of its parameters or gradients alone."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), state
    )


def placed(mesh: Mesh, state: Any) -> Any:
    """The shapes of a train state, each with its sharding: to compile for, or to restore to."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        state_shardings(mesh, state),
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of tokens and labels [B, T]."""
    return NamedSharding(mesh, PartitionSpec(BATCH, None))


def constrain(x: jax.Array, name: str) -> jax.Array:
    """`x`, an activation of the table, laid out on the mesh that is set; as it is without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    axes = _dividing(_ACTIVATIONS[name], x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes))


def constrain_like_parameters(tree: Any) -> Any:
    """A tree with the paths of the parameters, laid out as they are on the mesh that is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, state_shardings(mesh, tree))


def data_part(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """(k, n): this process reads part k of the n parts into which processes divide each batch.

    Processes that hold the same rows, as with a tensor axis over both, read the same part.
    """
    sharding = batch_sharding(mesh)
    rows = sharding.addressable_devices_indices_map((batch_size, 1)).values()
    starts = [row[0].indices(batch_size)[0] for row in rows]  # type: ignore[index]
    stops = [row[0].indices(batch_size)[1] for row in rows]  # type: ignore[index]
    size = max(stops) - min(starts)
    return min(starts) // size, batch_size // size


def global_batch(mesh: Mesh, batch: Any, batch_size: int) -> Any:
    """The batch of all processes from this one's rows."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (batch_size, *x.shape[1:])),
        batch,
    )


def _spec(path: Any, shape: Sequence[int], mesh: Any) -> PartitionSpec:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for end, axes in _PARAMETERS:
        if re.search(rf"(^|/){end}$", name):
            return PartitionSpec(*_dividing(axes, shape, mesh))
    return PartitionSpec()


def _dividing(axes: Sequence[Any], shape: Sequence[int], mesh: Any) -> list[Any]:
    """The axes, without those that do not divide their dimension: 257 bytes on 2 devices."""

    def size(axis: Any) -> int:
        names = axis if isinstance(axis, tuple) else (axis,)
        return int(np.prod([mesh.shape[name] for name in names if name]))

    return [
        axis if axis and length % size(axis) == 0 else None
        for axis, length in zip(axes, shape, strict=True)
    ]
