"""What is watched in the step, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from train.monitors import EVERY, known, monitors


def trees(seed):
    """Parameters, gradients over many magnitudes with zeros among them, and updates."""
    rng = np.random.default_rng(seed)

    def tree(draw):
        return {"a": {"x": draw((3, 5)), "y": draw((7,))}, "b": {"z": draw((2, 4))}}

    def gradient(shape):
        sizes = np.exp2(rng.uniform(-40, 2, shape)) * rng.choice([-1, 0, 1], shape)
        return sizes.astype(np.float32)

    def normal(shape):
        return rng.normal(size=shape).astype(np.float32)

    return tree(normal), tree(gradient), tree(normal)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("compute, scale", [("float16", 2.0**15), ("bfloat16", 1.0)])
def test_monitors_against_numpy_in_float64(seed, compute, scale):
    params, grads, updates = trees(seed)
    policy = jaxamp.get_policy(f"mixed_{compute}")
    found = jax.jit(lambda *args: monitors(EVERY, *args[:3], policy, args[3]))(
        params, grads, updates, jnp.float32(scale)
    )
    least = float(jnp.finfo(compute).smallest_normal)
    for module in params:
        g, p, u = (flat(tree[module]).astype(float) for tree in (grads, params, updates))
        # A count over a size: exact but for one rounding in float32.
        share = np.mean(np.abs(g) * scale < least)
        np.testing.assert_allclose(found[f"monitor/underflow/{module}"], share, rtol=2**-23)
        # Sums of at most 22 squares, two roots and a quotient, each a rounding of 2^-24.
        ratio = np.linalg.norm(u) / np.linalg.norm(p)
        np.testing.assert_allclose(found[f"monitor/update_ratio/{module}"], ratio, rtol=2**-18)
    assert len(found) == 4


def test_without_16_bits_there_is_no_underflow_and_a_skipped_step_has_no_update():
    params, grads, updates = trees(0)
    nothing = jax.tree.map(lambda x: -np.zeros_like(x), updates)
    found = monitors(EVERY, params, grads, nothing, jaxamp.get_policy("float32"), jnp.float32(1))
    assert {name: float(value) for name, value in found.items()} == {
        "monitor/update_ratio/a": 0,
        "monitor/update_ratio/b": 0,
    }


def test_they_look_in_every_tenth_step():
    params, grads, updates = trees(0)
    policy = jaxamp.get_policy("mixed_bfloat16")
    found = monitors(EVERY + 1, params, grads, updates, policy, jnp.float32(1))
    assert np.isnan(list(found.values())).all()
    assert known(EVERY + 1, found | {"train/loss": 1.0}) == {"train/loss": 1.0}
    assert known(EVERY, found) == found
