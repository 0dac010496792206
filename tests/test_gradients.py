"""`value_and_grad`: JAX's own, in mixed precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import DynamicLossScale

SEEDS = range(3)


def problem(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"w": jax.random.normal(keys[0], (8, 4)), "b": jax.random.normal(keys[1], (4,))}
    return params, jax.random.normal(keys[2], (16, 8))


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean(jnp.square(hidden))


@pytest.mark.parametrize("seed", SEEDS)
def test_float32_is_jax_itself(seed):
    params, x = problem(seed)
    ours = jaxamp.value_and_grad(loss_fn, "float32")(params, x)
    theirs = jax.value_and_grad(loss_fn)(params, x)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_power_of_two_changes_no_bit(policy, seed):
    params, x = problem(seed)
    grad_fn = jax.jit(jaxamp.value_and_grad(loss_fn, policy))
    plain, scaled = grad_fn(params, x), grad_fn(params, x, loss_scale=2.0**12)
    jax.tree.map(np.testing.assert_array_equal, plain, scaled)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("policy", "eps"), [("mixed_bfloat16", 2.0**-8), ("mixed_float16", 2.0**-11)]
)
def test_near_float32_and_in_float32(policy, eps, seed):
    """Ten roundings on the way, each of at most eps of its number.

    Forward: x, w, their product, the bias, tanh, its square, the mean. Backward: the cotangents of
    the square, of tanh, and the product with x.
    """
    params, x = problem(seed)
    value, grads = jaxamp.value_and_grad(loss_fn, policy)(params, x, loss_scale=2.0**8)
    true_value, true_grads = jax.value_and_grad(loss_fn)(params, x)
    np.testing.assert_allclose(value, true_value, rtol=10 * eps)
    for name, grad in grads.items():
        error = np.linalg.norm(grad - true_grads[name]) / np.linalg.norm(true_grads[name])
        assert grad.dtype == jnp.float32 and 0 < error < 10 * eps


def test_the_function_sees_its_own_dtypes_and_gradients_the_params_shape():
    def fun(params, x, *, ids, flag):
        assert params["w"].dtype == x.dtype == jnp.float32
        assert ids.dtype == jnp.int32 and flag is True
        return jnp.sum(params["w"][ids] * x[0, 0])

    params, x = problem(0)
    grads = jaxamp.grad(fun, "mixed_bfloat16")(params, x, ids=jnp.arange(3), flag=True)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, params)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))


def test_float16_params_give_float32_gradients():
    grad = jaxamp.grad(lambda w: jnp.sum(w * w), "f16")(jnp.full(3, 2, jnp.float16), loss_scale=8.0)
    assert grad.dtype == jnp.float32 and (grad == 4).all()


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_argnums_and_aux(argnums):
    params, x = problem(1)
    fun = lambda p, x: (loss_fn(p, x), {"mean": jnp.mean(x), "n": 3})  # noqa: E731
    (value, aux), grads = jaxamp.value_and_grad(fun, "mixed_float16", argnums, True)(params, x)
    (_, _), true_grads = jax.value_and_grad(fun, argnums, True)(params, x)
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    assert aux["mean"].dtype == jnp.float32 and aux["n"] == 3 and value.dtype == jnp.float32
    only, aux = jaxamp.grad(fun, "mixed_float16", argnums, True)(params, x)
    jax.tree.map(np.testing.assert_array_equal, only, grads)


def test_the_value_is_the_unscaled_one_even_when_the_scaled_one_overflows():
    """fastai#3048 in small: nothing of the scale is seen in the logged loss."""
    value, grad = jaxamp.value_and_grad(lambda w: w * 1e30, "float32")(
        jnp.float32(1.0), loss_scale=2.0**100
    )
    assert value == np.float32(1e30) and not np.isfinite(grad)


def test_a_nan_loss_is_not_hidden():
    value, grad = jaxamp.value_and_grad(lambda w: jnp.log(w - 2), "mixed_bfloat16")(
        jnp.float32(1.0)
    )
    assert np.isnan(value) and grad == -1.0


def test_scale_object_of_this_library_of_jmp_or_a_number():
    import jmp

    grad_fn = jaxamp.grad(lambda w: w * w, "mixed_float16")
    for scale in (8.0, DynamicLossScale(8.0), jmp.DynamicLossScale(jnp.float32(8.0)), None):
        assert grad_fn(jnp.float32(3.0), loss_scale=scale) == 6.0


def test_second_call_compiles_nothing():
    params, x = problem(0)
    grad_fn = jax.jit(jaxamp.value_and_grad(loss_fn, "mixed_float16"))
    for scale in (8.0, 16.0):
        grad_fn(params, x, loss_scale=DynamicLossScale(scale))
    assert grad_fn._cache_size() == 1


def test_under_vmap_and_scan():
    params, x = problem(2)
    grad_fn = jaxamp.grad(loss_fn, "mixed_bfloat16")
    xs = jnp.stack([x, 2 * x])
    vmapped = jax.vmap(grad_fn, (None, 0))(params, xs)
    scanned = jax.lax.scan(lambda c, x: (c, grad_fn(params, x)), None, xs)[1]
    for a, b in zip(jax.tree.leaves(vmapped), jax.tree.leaves(scanned), strict=True):
        np.testing.assert_allclose(a, b, rtol=2.0**-6, atol=1e-4)  # two sums, each in another order


def test_docstring_and_name_survive():
    assert jaxamp.value_and_grad(loss_fn, "float32").__name__ == "loss_fn"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxamp.grad(3, "float32"), TypeError, "expected a function, got int"),
        (
            lambda: jaxamp.grad(lambda loss_scale: loss_scale, "float32"),
            ValueError,
            "parameter named loss_scale",
        ),
        (
            lambda: jaxamp.grad(lambda w: w, "float32")(jnp.ones(3)),
            TypeError,
            "scalar-output functions",
        ),
        (lambda: jaxamp.grad(lambda w: w, "float32")(3), TypeError, "real- or complex-valued"),
        (
            lambda: jaxamp.grad(lambda w: w, "float32", has_aux=True)(1.0),
            TypeError,
            "returns a pair",
        ),
        (lambda: jaxamp.grad(lambda w: w, "compute=f17"), ValueError, "unknown dtype 'f17'"),
        (
            lambda: jaxamp.grad(lambda w: w, "float32")(1.0, loss_scale=3.0),
            ValueError,
            "power of two",
        ),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
