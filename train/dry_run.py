"""`--dry-run`: what a run would be, without running it: settings, mesh, shardings, memory."""

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jaxamp
from train.config import Config
from train.mesh import AXES, batch_sharding, state_shardings
from train.step import TrainState, make_train_step


def shown(
    config: Config, graphdef: nnx.GraphDef, state: TrainState, policy: jaxamp.Policy, mesh: Mesh
) -> str:
    """Settings as JSON, the mesh, a line per parameter, and what one device holds.

    Args:
        config: As it was resolved.
        graphdef: Of the model.
        state: Shapes of the train state.
        policy: Of the config.
        mesh: Where it would run.
    """
    return "\n".join(
        [
            config.model_dump_json(indent=2),
            mesh_line(mesh),
            *_parameter_lines(mesh, state.params),
            *_memory_lines(config, graphdef, state, policy, mesh),
        ]
    )


def mesh_line(mesh: Mesh) -> str:
    """Axes and devices in words."""
    sizes = " x ".join(f"{name} {mesh.shape[name]}" for name in AXES)
    device = mesh.devices.flat[0]
    return f"mesh: {sizes} = {mesh.size} of {device.device_kind}"


def _parameter_lines(mesh: Mesh, params: Any) -> list[str]:
    rows = [("parameter", "shape", "dtype", "on the mesh", "bytes a device")]
    shardings = jax.tree.leaves(state_shardings(mesh, {"params": params}))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = ", ".join("-" if axis is None else str(axis) for axis in sharding.spec) or "all"
        rows.append((name, str(leaf.shape), str(leaf.dtype), axes, f"{_held(leaf, sharding):,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]


def _held(leaf: Any, sharding: Any) -> int:
    """Bytes of a leaf on one device."""
    return math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _memory_lines(config, graphdef, state, policy, mesh) -> list[str]:
    shardings = state_shardings(mesh, state)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
    ids = jax.ShapeDtypeStruct(
        (config.batch_size, config.data.seq_len), np.int32, sharding=batch_sharding(mesh)
    )
    step = make_train_step(config, graphdef, policy)
    with jax.set_mesh(mesh):
        program = step.lower(jax.tree.map(place, state, shardings), {"tokens": ids, "labels": ids})
        memory = program.compile().memory_analysis()
    held = lambda tree, s: sum(jax.tree.leaves(jax.tree.map(_held, tree, s)))  # noqa: E731
    sizes = {
        "params": held(state.params, shardings.params),
        "optimizer": held(state.opt_state, shardings.opt_state),
        "activations and other temporaries": memory.temp_size_in_bytes,
    }
    lines = [f"  {name}: {size:,} bytes" for name, size in sizes.items()]
    return ["memory of one device, from the compiled train step:", *lines]
