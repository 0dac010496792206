import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxpr_search import equations

import jaxamp

PLAIN, COMPUTE = "compute=bf16", "compute=bf16,residuals=compute"


def block(x, w):
    y = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    a = jax.nn.softmax(y @ w)
    return x + jax.nn.silu(a @ w) @ w


def stack(x, ws, wrap=lambda f: f, scan=True):
    if scan:
        return jnp.sum(lax.scan(lambda x, w: (wrap(block)(x, w), None), x, ws)[0])
    for k in range(ws.shape[0]):
        x = wrap(block)(x, ws[k])
    return jnp.sum(x)


def problem():
    x, ws = (jax.random.normal(jax.random.key(k), s) for k, s in ((0, (16, 32)), (1, (3, 32, 32))))
    return x, ws / 32**0.5


def saved_bytes(fun, *args):
    """Bytes kept for the backward pass, by dtype; the float32 arguments may be among them."""
    avals = jax.eval_shape(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]), *args)
    sizes = {}
    for aval in avals:
        sizes[aval.dtype.name] = sizes.get(aval.dtype.name, 0) + aval.size * aval.dtype.itemsize
    return sizes


wraps = {
    "none": lambda f: f,
    "checkpoint": jax.checkpoint,
    "dots": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
}


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("wrap", wraps)
def test_gradients_are_near(scan, wrap):
    """3 layers, forward and backward, 8 roundings each."""
    x, ws = problem()
    fun = functools.partial(stack, wrap=wraps[wrap], scan=scan)
    true = jax.grad(fun, 1)(x, ws)
    got = jax.jit(jax.grad(jaxamp.autocast(fun, COMPUTE), 1))(x, ws)
    assert jnp.linalg.norm(got - true) < 3 * 2 * 8 * 2.0**-8 * jnp.linalg.norm(true)
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("scan", [True, False])
def test_float32_islands_are_not_saved(scan):
    x, ws = problem()
    fun = functools.partial(stack, scan=scan)
    plain = saved_bytes(jaxamp.autocast(fun, PLAIN), x, ws)
    compute = saved_bytes(jaxamp.autocast(fun, COMPUTE), x, ws)
    arguments = 4 * (x.size + ws.size)
    activation = 4 * 3 * x.size  # one float32 activation per layer
    assert plain["float32"] > 2 * activation  # the norm's and the softmax's
    # One number per row, and in the scan the residual stream between its rounds.
    assert compute["float32"] - arguments < (activation if scan else activation / 2)
    assert compute["bfloat16"] < plain["bfloat16"] / 2  # what the matmuls read and gave


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_xla_may_merge_what_is_recomputed_only_across_rounds(unroll):
    def loss(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (block(x, w), None), x, ws, unroll=unroll)[0])

    x, ws = problem()
    program = jax.make_jaxpr(jaxamp.autocast(loss, COMPUTE))(ws, x)
    (scan,) = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    inside = [eqn.params for eqn in equations(scan.params["jaxpr"])]
    merged = [not params["prevent_cse"] for params in inside if "prevent_cse" in params]
    assert merged and set(merged) == {unroll == 1}


def test_a_users_checkpoint_is_respected():
    """Nothing but its inputs is saved of a checkpointed block."""
    x, ws = problem()
    fun = functools.partial(stack, wrap=jax.checkpoint)
    alone = saved_bytes(jaxamp.autocast(fun, PLAIN), x, ws)
    assert saved_bytes(jaxamp.autocast(fun, COMPUTE), x, ws) == alone


def test_the_value_is_that_of_the_forward_pass_alone():
    x, ws = problem()
    mixed = jaxamp.autocast(stack, COMPUTE)
    np.testing.assert_allclose(jax.value_and_grad(mixed)(x, ws)[0], mixed(x, ws), rtol=2.0**-8)


def test_effects_happen_once(capfd):
    def fun(x):
        y = jnp.tanh(x @ x)
        jax.debug.print("seen")
        return jnp.sum(jnp.exp(y))

    jax.block_until_ready(jax.grad(jaxamp.autocast(fun, COMPUTE))(jnp.eye(3)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 1
