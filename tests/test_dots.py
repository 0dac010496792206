"""The matmul with gradients in the dtypes of its operands, against float32 on rounded numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxpr_search import dtypes

import jaxamp
from jaxamp.dots import rounded_dot

CASES = {  # shapes, and what lax.dot_general calls dimension_numbers
    "matrices": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "transposed": ((4, 3), (5, 4), (((0,), (1,)), ((), ()))),
    "batch": ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
    "mixed": ((3, 2, 4, 6), (6, 5, 4, 2), (((3, 2), (0, 2)), ((1,), (3,)))),
    "activations": ((2, 7, 4), (4, 5), (((2,), (0,)), ((), ()))),
    "vector": ((4,), (5, 4), (((0,), (1,)), ((), ()))),
}
AXES = [(0, None), (None, 1), (1, 0), (-1, -1)]


def rounded(x):
    """To bfloat16; its derivative is one."""
    return x + lax.stop_gradient(lax.reduce_precision(x, 8, 7) - x)


def pair(numbers):
    """The matmul, and the same in float32 on rounded operands, rounded too."""

    def ours(x, y):
        return rounded_dot(x, y, dimension_numbers=numbers, precision=None, dtype=jnp.bfloat16)

    theirs = lambda x, y: lax.dot_general(rounded(x), rounded(y), numbers)  # noqa: E731
    return ours, theirs


def operands(case, axes=(None, None), seed=0):
    rng = np.random.default_rng(seed)
    for shape, axis in zip(CASES[case][:2], axes, strict=True):
        x = rng.standard_normal(shape if axis is None else (7, *shape), np.float32)
        yield jnp.asarray(x if axis is None else np.moveaxis(x, 0, axis))


def near(x, y, eps):
    """Sums of at most 24 products of normal numbers, each below 20: one rounding of the sum."""
    assert x.shape == y.shape
    np.testing.assert_allclose(np.float32(x), y, rtol=eps, atol=24 * 20 * 2.0**-24)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradients(case, seed):
    ours, theirs = pair(CASES[case][2])
    x, y = operands(case, seed=seed)
    value, pullback = jax.vjp(ours, x, y)
    assert value.dtype == jnp.bfloat16
    near(value, theirs(x, y), 2.0**-8)
    cotangent = jnp.asarray(np.random.default_rng(9).standard_normal(value.shape), jnp.bfloat16)
    _, exact = jax.vjp(theirs, x, y)
    for got, want in zip(pullback(cotangent), exact(jnp.float32(cotangent)), strict=True):
        assert got.dtype == jnp.float32
        near(got, want, 2.0**-22)  # not rounded to 16 bits


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("axes", AXES)
def test_vmap_of_value_and_gradients(case, axes):
    ours, theirs = pair(CASES[case][2])
    x, y = operands(case, axes)
    near(jax.vmap(ours, axes)(x, y), jax.vmap(theirs, axes)(x, y), 2.0**-8)

    def gradients(fun):
        grad_fn = jax.grad(lambda x, y: jnp.sum(jnp.float32(fun(x, y))), (0, 1))
        return jax.jit(jax.vmap(grad_fn, axes))(x, y)

    for got, want in zip(gradients(ours), gradients(theirs), strict=True):
        near(got, want, 2.0**-22)


def test_vmap_of_a_gradient():
    """The gradient of each row's loss, under vmap."""
    loss = jaxamp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), "c=bf16")
    w, xs = jnp.eye(4), jnp.asarray(np.random.default_rng(0).standard_normal((3, 2, 4)), "f4")
    each = jnp.stack([jax.grad(loss)(w, x) for x in xs])
    np.testing.assert_allclose(jax.vmap(jax.grad(loss), (None, 0))(w, xs), each, rtol=2.0**-20)


def test_forward_mode_and_second_derivatives():
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    w, x = (jnp.asarray(v) for v in np.random.default_rng(0).standard_normal((2, 4, 4), np.float32))
    mixed = jaxamp.autocast(loss, "c=bf16")
    _, tangent = jax.jvp(mixed, (w, x), (w, x))
    _, exact = jax.jvp(loss, (w, x), (w, x))
    np.testing.assert_allclose(tangent, exact, rtol=0.1)
    np.testing.assert_allclose(jax.linearize(mixed, w, x)[1](w, x), tangent, rtol=2.0**-7)
    got, want = (jax.jit(jax.hessian(fun))(w, x) for fun in (mixed, loss))
    assert jnp.linalg.norm(got - want) < 8 * 2.0**-8 * jnp.linalg.norm(want)


def test_the_gradient_of_a_weight_is_its_accumulator():
    """257 ones add up to 257; bfloat16 has 256 and 258."""
    w, x = jnp.ones((2, 1)), jnp.ones((257, 2))
    loss = lambda w: jnp.sum(x @ w)  # noqa: E731
    assert jaxamp.grad(loss, "c=bf16")(w).tolist() == [[257]] * 2
    assert jaxamp.grad(loss, "c=bf16,reduce=compute")(w).tolist() == [[256]] * 2


def test_gradients_of_activations_stay_16_bit():
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))  # noqa: E731
    gradient = jax.grad(jaxamp.autocast(loss, "c=bf16"))
    assert sorted(found[2] for found in dtypes(gradient, jnp.eye(4), jnp.eye(4))) == [
        *["bfloat16"] * 2,  # forward, and the activation between the two
        *["float32"] * 3,  # forward, for the sum that reads it, and the weight, twice
    ]


def test_remat_sees_a_dot_general():
    loss = jaxamp.autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), "c=bf16")
    saved = jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable)
    recomputed = jax.checkpoint(loss, policy=jax.checkpoint_policies.nothing_saveable)
    count = lambda fun: len(dtypes(jax.grad(fun), jnp.eye(4), jnp.eye(4)))  # noqa: E731
    assert (count(saved), count(recomputed)) == (2, 3)
