"""How long a step takes at least on a chip: by its arithmetic, its memory or its network."""

import math
from typing import Any, NamedTuple

from jax.typing import DTypeLike

import jaxamp
from jaxamp import jaxprs
from train.chips import Chip


class Roofline(NamedTuple):
    """Seconds of one step if nothing but one thing mattered; the largest of them is the limit."""

    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def limit(self) -> str:
        return ("compute", "memory", "network")[self.index(self.seconds)]


def roofline(
    chip: Chip, policy: jaxamp.Policy, flops: float, accessed_bytes: float, sent_bytes: float
) -> Roofline | None:
    """Of one chip's share of a step; None for a chip whose speed is not in the table.

    All matmuls are taken to run in the policy's compute dtype, and all links to be used.
    """
    peak = _peak(chip, policy.compute_dtype)
    if peak is None:
        return None
    return Roofline(
        flops / peak, accessed_bytes / chip.memory_bandwidth, sent_bytes / chip.interconnect
    )


def _peak(chip: Chip, dtype: DTypeLike) -> float | None:
    return chip.flops.get(str(dtype), chip.flops.get("float32"))  # a TPU multiplies no float16


def matmul_flops(program: Any, devices: int) -> float:
    """FLOPs of the matmuls of a traced program on each of so many devices.

    A multiplication and an addition are two, loops count as often as they run, and what the
    backward pass recomputes counts again. A branch counts as its dearest; a loop of unknown length
    counts once; a kernel as it says itself, else each of its grid's points, also a masked one.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((8, 8))
    >>> step = lambda c, _: (c @ x, None)
    >>> program = jax.make_jaxpr(lambda: jax.lax.scan(step, x, None, length=3))()
    >>> matmul_flops(program, devices=2) == 3 * 2 * 8**3 / 2
    True
    """
    return sum(_flops(eqn, devices) for eqn in jaxprs.opened(program)[0].eqns)


def _flops(eqn: Any, devices: int) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name in ("dot_general", "rounded_dot"):
        (summed, _), _ = params["dimension_numbers"]
        contracted = math.prod(eqn.invars[0].aval.shape[axis] for axis in summed)
        return 2 * _elements(eqn.outvars[0]) * contracted / devices
    if name == "conv_general_dilated":
        features = eqn.invars[1].aval.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * _elements(eqn.outvars[0]) * _elements(eqn.invars[1]) / features / devices
    if name == "pallas_call" and getattr(params.get("cost_estimate"), "flops", None):
        return params["cost_estimate"].flops / devices
    # The program inside shard_map or of one grid point is that of one device or point.
    inside = 1 if name == "shard_map" else devices
    costs = [matmul_flops(program, inside) for program in jaxprs.programs(eqn)]
    if name == "cond":
        return max(costs, default=0.0)
    times = params.get("length", 1) if name == "scan" else 1
    if name == "pallas_call":
        times = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return times * sum(costs)


def _elements(var: Any) -> int:
    return math.prod(var.aval.shape)
