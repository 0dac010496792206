"""`--dry-run`: what a run would be, without running it: settings, mesh, shardings, memory."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

import jaxamp
from train.config import Config
from train.figures import aligned
from train.fit import Memory, attempt, of_vocabulary
from train.mesh import AXES, placed


def shown(config: Config, params: Any, vocab_size: int, policy: jaxamp.Policy, mesh: Mesh) -> str:
    """Settings as JSON, the mesh, a line per parameter, and what one device holds.

    Args:
        config: As it was resolved.
        params: Shapes of the parameters.
        vocab_size: Of the corpus.
        policy: Of the config.
        mesh: Where it would run.
    """
    memory = attempt(of_vocabulary(config, vocab_size), policy, mesh, 0).memory
    return "\n".join(
        [
            config.model_dump_json(indent=2),
            mesh_line(mesh),
            *aligned(_parameter_rows(mesh, params)),
            *_memory_lines(memory),
        ]
    )


def mesh_line(mesh: Mesh) -> str:
    """Axes and devices in words."""
    sizes = " x ".join(f"{name} {mesh.shape[name]}" for name in AXES)
    device = mesh.devices.flat[0]
    return f"mesh: {sizes} = {mesh.size} of {device.device_kind}"


def _parameter_rows(mesh: Mesh, params: Any) -> list[tuple[str, ...]]:
    rows = [("parameter", "shape", "dtype", "on the mesh", "bytes a device")]
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed(mesh, params)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        axes = ", ".join("-" if axis is None else str(axis) for axis in leaf.sharding.spec) or "all"
        held = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        rows.append((name, str(leaf.shape), str(leaf.dtype), axes, f"{held:,}"))
    return rows


def _memory_lines(memory: Memory) -> list[str]:
    sizes = {name: getattr(memory, name) for name in ("params", "moments", "activations", "peak")}
    lines = [f"  {name}: {size:,} bytes" for name, size in sizes.items()]
    return ["memory of one device, from the compiled train step:", *lines]
