"""The loss scales, with every row of the "Loss scale" table of cases from public reports."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest

import jaxamp
from jaxamp import DynamicLossScale, NoOpLossScale, StaticLossScale

pytestmark = pytest.mark.usefixtures("strict_promotion")


def log2_path(scale, steps):
    """log2 of the scale after each step; `O` is an overflow, `.` a finite step."""
    path = []
    for step in steps:
        scale = scale.adjust(step == ".")
        path.append(int(np.log2(scale.loss_scale)))
    return path


def assert_same_leaves(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# --- the table of cases


def test_case_endless_overflow():
    """NVIDIA/apex#834: 200 inf-gradient steps from 2^16 with floor 1, then one clean step."""
    tx = jaxamp.apply_if_finite(optax.sgd(0.1), DynamicLossScale(2.0**16))
    params, state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    update = jax.jit(tx.update)
    for _ in range(200):
        updates, state = update(jnp.float32(jnp.inf), state, params)
        params = optax.apply_updates(params, updates)
    assert state.loss_scale.loss_scale == 1.0
    assert np.asarray(params).tobytes() == np.float32(1.0).tobytes()
    updates, state = update(jnp.float32(2.0), state, params)
    np.testing.assert_allclose(optax.apply_updates(params, updates), 0.8, rtol=1e-7)


def test_case_floor_survives_jit():
    """google-deepmind/jmp#44: three bad steps under jit from 256, floor 128."""

    def three_bad_steps(scale):
        adjust, seen = jax.jit(lambda s: s.adjust(jnp.array(False))), []
        for _ in range(3):
            scale = adjust(scale)
            seen.append(float(scale.loss_scale))
        return seen

    assert three_bad_steps(DynamicLossScale(256.0, min_scale=128.0)) == [128.0, 128.0, 128.0]
    with jax.numpy_dtype_promotion("standard"):  # what jmp does: its floor is back at 1
        lost = jmp.DynamicLossScale(jnp.float32(256), min_loss_scale=jnp.float32(128))
        assert three_bad_steps(lost) == [128.0, 64.0, 32.0]


def test_case_floor_below_one():
    """jmp#18, keras-team/tf-keras#644: floor 2^-10, 20 bad steps from 1."""
    assert log2_path(DynamicLossScale(1.0, min_scale=2.0**-10), "O" * 20)[-1] == -10


@pytest.mark.parametrize("max_scale", [2.0**126, jnp.inf])
def test_case_growth_to_inf(max_scale):
    """pytorch#98828, google/flax#2547: scale 2^126, growth each step."""
    scale = DynamicLossScale(2.0**126, growth_interval=1, max_scale=max_scale)
    for _ in range(5):
        scale = scale.adjust(True)
    assert np.isfinite(scale.loss_scale)
    inverse = scale.unscale(jnp.float32(1.0))
    assert inverse != 0 and np.isfinite(inverse)


def test_case_float16_scale_object():
    """jmp#47: constructed with float16(2**15), two growths."""
    scale = DynamicLossScale(np.float16(2**15), growth_interval=1).adjust(True).adjust(True)
    assert scale.loss_scale == 131072.0 and scale.loss_scale.dtype == jnp.float32


@pytest.mark.parametrize("kind", [StaticLossScale, DynamicLossScale])
def test_case_float16_loss(kind):
    """pytorch#98691: a float16 loss of 10 at scale 65536 is 655360, not inf."""
    scaled = kind(65536.0).scale(jnp.float16(10.0))
    assert scaled == 655360.0 and scaled.dtype == jnp.float32


def test_case_gradients_at_a_growth_step():
    """mpx: unscaled by the scale that was used, not by the grown one."""
    scale = DynamicLossScale(1024.0, growth_interval=1)
    tx = jaxamp.apply_if_finite(optax.sgd(0.1), scale)
    grad_fn = jaxamp.value_and_grad(lambda w: w * w, "mixed_float16")
    state = tx.init(jnp.float32(3.0))
    value, grad = grad_fn(jnp.float32(3.0), loss_scale=jaxamp.loss_scale(state))
    _, state = tx.update(grad, state)
    assert (value, grad, jaxamp.loss_scale(state).loss_scale) == (9.0, 6.0, 2048.0)


def test_case_exact_count():
    """Growth at the 4th of 4 finite steps; after an overflow the count starts anew."""
    assert log2_path(DynamicLossScale(2.0**16, growth_interval=4), "....") == [16, 16, 16, 17]
    path = log2_path(DynamicLossScale(2.0**16, growth_interval=4), "O....")
    assert path == [15, 15, 15, 15, 16]


def test_case_hysteresis():
    """Megatron: hysteresis 2 is refilled by growth only."""
    scale = DynamicLossScale(2.0**16, growth_interval=4, hysteresis=2)
    assert log2_path(scale, "OO.O....") == [16, 15, 15, 14, 14, 14, 14, 15]


def test_case_small_float16_gradients():
    """keras#19244: a true gradient of 2^-26 survives with scale 2^15 and is 0 without."""

    def loss_fn(w):
        return jnp.sum(w @ jnp.ones((2, 1))) * 2.0**-26

    grad_fn, w = jaxamp.grad(loss_fn, "mixed_float16"), jnp.ones((1, 2))
    assert (grad_fn(w, loss_scale=DynamicLossScale(2.0**15)) == 2.0**-26).all()
    assert (grad_fn(w) == 0.0).all()


# --- what holds for all of them


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(64.0), DynamicLossScale(64.0)])
def test_unscale_undoes_scale(scale):
    tree = {"a": jax.random.normal(jax.random.key(0), (5,)), "i": jnp.arange(3), "b": True}
    back = scale.unscale(scale.scale(tree))
    assert_same_leaves(jax.tree.map(jnp.asarray, back), jax.tree.map(jnp.asarray, tree))
    half = scale.unscale(scale.scale(jnp.ones(2, jnp.bfloat16)))
    assert half.dtype == jnp.float32 and (half == 1).all()
    assert scale.unscale({"none": None, "key": jax.random.key(0)})["key"] == jax.random.key(0)


@pytest.mark.parametrize("scale", [NoOpLossScale(), StaticLossScale(64.0), DynamicLossScale(64.0)])
def test_is_a_pytree_and_jit_sees_every_number(scale):
    leaves = jax.tree.leaves(scale)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in leaves)
    assert_same_leaves(jax.jit(lambda s: s)(scale), scale)
    marked = jax.tree.map(lambda leaf: 0, scale)  # in_axes and label trees must survive
    assert jax.tree.leaves(marked) == [0] * len(leaves)


def test_second_step_compiles_nothing():
    adjust = jax.jit(lambda s, f: s.adjust(f))
    scale = DynamicLossScale(growth_interval=1)
    for finite in (True, False, True):
        scale = adjust(scale, jnp.array(finite))
    assert adjust._cache_size() == 1


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_python_model(seed):
    """The rule of the docstring, in Python numbers, over random overflows."""
    rng = np.random.default_rng(seed)
    interval, hysteresis = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    low, high = 2.0 ** int(rng.integers(-3, 4)), 2.0 ** int(rng.integers(8, 14))
    scale = DynamicLossScale(
        64.0, growth_interval=interval, hysteresis=hysteresis, min_scale=low, max_scale=high
    )
    s, n, h = 64.0, 0, hysteresis
    step = jax.jit(lambda s, f: s.adjust(f))
    for finite in rng.random(60) < 0.7:
        if finite:
            n += 1
            if n == interval:
                s, n, h = s * 2, 0, hysteresis
        else:
            n, h = 0, max(h - 1, 0)
            if h == 0:
                s *= 0.5
        s = min(max(s, low), high)
        scale = step(scale, bool(finite))
        assert (scale.loss_scale, scale.finite_steps, scale.hysteresis_left) == (s, n, h)


def test_start_is_clipped_to_the_bounds():
    assert DynamicLossScale(2.0**30).loss_scale == 2.0**24
    assert DynamicLossScale(1.0, min_scale=8.0).loss_scale == 8.0


def test_usable_where_jmp_is():
    """jmp's own loop, from its docstring, with our object in it."""
    scale = DynamicLossScale(jnp.asarray(2.0**15))
    grads = scale.unscale({"w": scale.scale(jnp.ones(3))})
    scale = scale.adjust(jmp.all_finite(grads))
    assert scale.loss_scale == 2.0**15 and NoOpLossScale().loss_scale == 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"loss_scale": 1000.0}, "loss_scale must be a positive power of two.*1000"),
        ({"loss_scale": 0.0}, "positive power of two"),
        ({"loss_scale": float("nan")}, "positive power of two"),
        ({"growth_factor": 1.5}, "growth_factor must be a positive power of two"),
        ({"growth_factor": 0.5}, "growth_factor must be at least 1"),
        ({"backoff_factor": 2.0}, "backoff_factor must be at most 1"),
        ({"growth_interval": 0}, "growth_interval must be a whole number of at least 1"),
        ({"growth_interval": 1.5}, "growth_interval must be a whole number"),
        ({"hysteresis": 0}, "hysteresis must be"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale 8.0 is above max_scale 4.0"),
    ],
)
def test_bad_numbers_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**kwargs)


def test_get_loss_scale():
    assert isinstance(jaxamp.get_loss_scale("params=f16"), DynamicLossScale)
    assert isinstance(jaxamp.get_loss_scale("float32"), NoOpLossScale)
