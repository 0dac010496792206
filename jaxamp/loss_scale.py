"""Loss scales: multiply the loss so that float16 gradients do not vanish, then divide them.

float16 holds nothing below 2^-24. A gradient of 2^-26 is zero in it; with the loss multiplied by
2^15 it is 2^-11, and after the division in float32 it is 2^-26 again. Powers of two only: then the
detour changes no bit of a number that stays in range.

The interface is jmp's (`scale`, `unscale`, `adjust`, `loss_scale`). What jmp's classes get wrong is
said at each of ours, and shown in `tests/test_loss_scale.py`.
"""

import dataclasses
import math
from typing import Any, Self, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import jmp
import numpy as np

from jaxamp.policy import get_policy

T = TypeVar("T")

SMALLEST, LARGEST = 2.0**-126, 2.0**126
"""Bounds of every scale: both S and 1/S are normal float32 numbers."""

# A pytree is rebuilt through its constructor, with whatever a tree_map made of the leaves. This
# static field tells the two apart: numbers from a user are checked, leaves are taken as they are.
_CHECKED: Any = dataclasses.field(
    default=False, repr=False, compare=False, kw_only=True, metadata={"static": True}
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No scaling: for bfloat16 and float32, whose range needs none.

    >>> NoOpLossScale().unscale(jnp.ones(2, jnp.bfloat16)).dtype
    dtype('float32')
    """

    @property
    def loss_scale(self) -> np.float32:
        """float32[], always 1."""
        return np.float32(1)

    def scale(self, tree: T) -> T:
        """`tree` with its floating leaves in float32."""
        return _times(tree, None)

    def unscale(self, tree: T) -> T:
        """`tree` with its floating leaves in float32."""
        return _times(tree, None)

    def adjust(self, grads_finite: Any) -> Self:
        """Itself: there is nothing to adjust."""
        del grads_finite
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A scale that never changes.

    jmp's is an empty pytree: a jitted step bakes the number in and a checkpoint loses it. Here it
    is a leaf.

    Attributes:
        loss_scale: float32[], a power of two within [2^-126, 2^126].

    >>> StaticLossScale(1024.0).scale(jnp.float16(10.0))
    Array(10240., dtype=float32)
    """

    loss_scale: Any
    checked: bool = _CHECKED

    def __post_init__(self):
        if not self.checked:
            _set(self, loss_scale=_power_of_two("loss_scale", self.loss_scale))

    def scale(self, tree: T) -> T:
        """`tree` times the scale, in float32. Integers, bools and keys are left alone."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """`tree` divided by the scale, in float32. Integers, bools and keys are left alone."""
        return _times(tree, 1 / jnp.asarray(self.loss_scale, jnp.float32))

    def adjust(self, grads_finite: Any) -> Self:
        """Itself: the scale is static."""
        del grads_finite
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """The largest scale that keeps gradients finite, found by trying.

    After a step with scale S and n consecutive finite steps before it:

        finite:      n <- n + 1
                     if n = growth_interval: S <- S * growth_factor, n <- 0, h <- hysteresis
        not finite:  n <- 0, h <- max(h - 1, 0)
                     if h = 0: S <- S * backoff_factor
        always:      S <- clip(S, min_scale, max_scale)

    Every number is a leaf of the pytree, so jit, checkpoints and sharding see all of it.

    Attributes:
        loss_scale: float32[], S; clipped to the bounds, at construction too.
        growth_factor: float32[], at least 1.
        backoff_factor: float32[], in (0, 1].
        growth_interval: int32[], finite steps in a row before S grows.
        min_scale: float32[], lower bound; may be below 1.
        max_scale: float32[], upper bound.
        hysteresis: int32[], bad steps before S falls; refilled when S grows, not before.
        finite_steps: int32[], n.
        hysteresis_left: int32[], h.

    >>> scale = DynamicLossScale(1024.0, growth_interval=1)
    >>> scale.adjust(True).loss_scale, scale.adjust(False).loss_scale
    (Array(2048., dtype=float32), Array(512., dtype=float32))

    References:
        Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740. Growth at the n-th
        step and hysteresis as in Megatron-LM.

    Departures: jmp loses its floor at every `jit` and inherits the dtype of the number it is given;
    flax's `DynamicScale` and DeepSpeed grow one step later.

    Raises:
        ValueError: a scale, bound or factor that is not a power of two, or a count below 1.
    """

    loss_scale: Any = 2.0**15
    _: dataclasses.KW_ONLY
    growth_factor: Any = 2.0
    backoff_factor: Any = 0.5
    growth_interval: Any = 2000
    min_scale: Any = 1.0
    max_scale: Any = 2.0**24
    hysteresis: Any = 1
    finite_steps: Any = 0
    hysteresis_left: Any = None
    checked: bool = _CHECKED

    def __post_init__(self):
        if not self.checked:
            _set(self, **self._checked_fields())

    def _checked_fields(self) -> dict[str, jax.Array]:
        fields = {
            name: _power_of_two(name, getattr(self, name))
            for name in ("loss_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
        }
        for name in ("growth_interval", "hysteresis"):
            fields[name] = _count(name, getattr(self, name), least=1)
        fields["finite_steps"] = _count("finite_steps", self.finite_steps, least=0)
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        fields["hysteresis_left"] = _count("hysteresis_left", left, least=0)
        low, high = fields["min_scale"], fields["max_scale"]
        if _known(low, high) and low > high:
            raise ValueError(f"min_scale {low} is above max_scale {high}")
        if _known(fields["growth_factor"]) and fields["growth_factor"] < 1:
            raise ValueError(f"growth_factor must be at least 1, got {self.growth_factor}")
        if _known(fields["backoff_factor"]) and fields["backoff_factor"] > 1:
            raise ValueError(f"backoff_factor must be at most 1, got {self.backoff_factor}")
        return fields | {"loss_scale": jnp.clip(fields["loss_scale"], low, high)}

    def scale(self, tree: T) -> T:
        """`tree` times the scale, in float32. Integers, bools and keys are left alone."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """`tree` divided by the scale, in float32. Integers, bools and keys are left alone."""
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> Self:
        """The scale for the next step.

        Args:
            grads_finite: bool[] or a Python bool: whether all gradients of this step were finite.
        """
        finite = jnp.asarray(grads_finite, bool)
        grown = finite & (self.finite_steps + 1 >= self.growth_interval)
        left = jnp.where(finite, self.hysteresis_left, jnp.maximum(self.hysteresis_left - 1, 0))
        backed_off = ~finite & (left == 0)
        factor = jnp.where(grown, self.growth_factor, jnp.float32(1))
        factor = jnp.where(backed_off, self.backoff_factor, factor)
        # The clip comes from outside float32's range too: 2^126 * 4 is inf, and inf is clipped.
        next_scale = jnp.clip(self.loss_scale * factor, self.min_scale, self.max_scale)
        return dataclasses.replace(
            self,
            loss_scale=next_scale,
            finite_steps=jnp.where(finite & ~grown, self.finite_steps + 1, 0),
            hysteresis_left=jnp.where(grown, self.hysteresis, left),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def get_loss_scale(policy: "str | jmp.Policy") -> LossScale:
    """The loss scale that a policy needs: dynamic where float16 is computed or kept, else none.

    >>> float(get_loss_scale("mixed_float16").loss_scale), get_loss_scale("mixed_bfloat16")
    (32768.0, NoOpLossScale())
    """
    policy = get_policy(policy)
    has_float16 = jnp.float16 in (policy.param_dtype, policy.compute_dtype)
    return DynamicLossScale() if has_float16 else NoOpLossScale()


def to_float32(tree: T) -> T:
    """`tree` with floating leaves narrower than float32 widened to it; the rest left alone.

    jmp's `cast_to_full` narrows float64 as well, and skips Python floats.
    """
    return _times(tree, None)


def _times(tree: T, factor: Any) -> T:
    def multiply(leaf):
        dtype = jax.dtypes.result_type(leaf) if not hasattr(leaf, "dtype") else leaf.dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            return leaf
        wide = dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)
        wide_leaf = jnp.asarray(leaf, wide)
        return wide_leaf if factor is None else wide_leaf * jnp.asarray(factor, wide)

    return jax.tree.map(multiply, tree)


def _set(frozen: Any, **fields: Any) -> None:
    for name, value in (fields | {"checked": True}).items():
        object.__setattr__(frozen, name, value)


def _known(*values: Any) -> bool:
    return not any(isinstance(value, jax.core.Tracer) for value in values)


def _power_of_two(name: str, value: Any) -> jax.Array:
    if not _known(value):
        return jnp.array(value, jnp.float32)
    number = float(value)
    if not number > 0 or (math.isfinite(number) and math.frexp(number)[0] != 0.5):
        raise ValueError(
            f"{name} must be a positive power of two (it then rounds nothing), got {number:g}"
        )
    return jnp.array(min(max(number, SMALLEST), LARGEST), jnp.float32)


def _count(name: str, value: Any, least: int) -> jax.Array:
    if _known(value) and (int(value) != value or value < least):
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value}")
    return jnp.array(value, jnp.int32)
