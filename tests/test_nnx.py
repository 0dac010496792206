import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxpr_search import equations

import jaxamp
from jaxamp import nnx as jaxamp_nnx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.body:
            x = jax.nn.silu(layer(x))
        return self.head(self.drop(self.norm(x)))


def loss_fn(net, x, *, y):
    return jnp.mean((net(x) - y) ** 2)


def problem(seed=0):
    x = jax.random.normal(jax.random.key(seed), (32, 8))
    return Net(nnx.Rngs(seed)), x, jnp.sum(x, 1, keepdims=True)


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # Flax's bias and BatchNorm need it
        yield


@pytest.mark.parametrize("policy", ["compute=bf16", "compute=f16"])
@pytest.mark.slow
def test_batch_norm_statistics_and_counters_arrive_back(policy):
    mixed, x, y = problem()
    plain, *_ = problem()
    value, grads = jaxamp_nnx.value_and_grad(loss_fn, policy)(mixed, x, y=y, loss_scale=256.0)
    true_value, true_grads = nnx.value_and_grad(lambda net, x: loss_fn(net, x, y=y))(plain, x)
    assert mixed.norm.mean[...].dtype == jnp.float32
    np.testing.assert_allclose(mixed.norm.mean[...], plain.norm.mean[...], atol=1e-3)
    np.testing.assert_allclose(mixed.norm.var[...], plain.norm.var[...], rtol=1e-3)
    assert (mixed.norm.mean[...] != 0).all()
    assert mixed.drop.rngs.count[...] == plain.drop.rngs.count[...] == 1
    assert value.dtype == jnp.float32 and abs(value - true_value) < 0.05 * true_value
    assert jax.tree.structure(grads) == jax.tree.structure(true_grads)
    for got, true in zip(jax.tree.leaves(grads), jax.tree.leaves(true_grads), strict=True):
        # 4 layers forward and backward, 4 roundings each
        assert got.dtype == jnp.float32
        assert jnp.linalg.norm(got - true) < 32 * 2.0**-8 * jnp.linalg.norm(true) + 1e-5


def test_linen_batch_norm():
    class Linen(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))

    x = jax.random.normal(jax.random.key(0), (32, 8))
    net = Linen()
    variables = net.init(jax.random.key(1), x)
    apply = lambda v, x: net.apply(v, x, mutable=["batch_stats"])  # noqa: E731
    _, got = jaxamp.autocast(apply, "compute=bf16")(variables, x)
    _, true = apply(variables, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_it_trains_under_jit():
    net, x, y = problem()
    optimizer = nnx.Optimizer(net, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, x, y):
        value, grads = jaxamp_nnx.value_and_grad(loss_fn, "compute=bf16")(net, x, y=y)
        optimizer.update(net, grads)
        return value

    values = [step(net, optimizer, x, y) for _ in range(30)]
    assert values[-1] < 0.7 * values[0]
    assert net.drop.rngs.count[...] == 30


def test_scopes_are_module_paths_and_calls_are_restored():
    net, x, _ = problem()
    before = nnx.Linear.__call__, Net.__call__
    seen = []

    def fun(net, x):
        out = net(x)
        return out

    def traced(x):
        return jaxamp_nnx.autocast(fun, "compute=bf16")(net, x)

    graphdef, state = nnx.split(net)
    program = jax.make_jaxpr(
        lambda state, x: jaxamp_nnx.autocast(fun, "compute=bf16")(nnx.merge(graphdef, state), x)
    )(state, x)
    # A matmul that gives its float32 sum is inside a custom_jvp, which has the scope.
    names = ("dot_general", "custom_jvp_call")
    dots = [e for e in equations(program) if e.primitive.name in names]
    seen = dict.fromkeys(str(e.source_info.name_stack) for e in dots)
    assert [scope for scope in seen if scope] == ["body/0", "body/1", "head"]
    assert (nnx.Linear.__call__, Net.__call__) == before
    assert "__call__" not in nnx.List.__dict__
    with pytest.raises(ZeroDivisionError):
        jaxamp_nnx.autocast(lambda net: net(x) / (1 // 0), "compute=bf16")(net)
    assert (nnx.Linear.__call__, Net.__call__) == before


@pytest.mark.parametrize("glob", ["head", "*/head", "head/kernel", "net/head/*"])
def test_full_by_module_path(glob):
    net, x, _ = problem()
    graphdef, state = nnx.split(net)
    policy = jaxamp.get_policy("c=bf16").replace(full=[glob])
    fun = lambda net, x: net(x)  # noqa: E731
    program = jax.make_jaxpr(
        lambda state, x: jaxamp_nnx.autocast(fun, policy)(nnx.merge(graphdef, state), x)
    )(state, x)
    dots = [e for e in equations(program) if e.primitive.name == "dot_general"]
    low = [e.invars[0].aval.dtype.name for e in dots]
    assert low == ["bfloat16", "bfloat16", "float32"]


def test_has_aux_several_modules_and_output_dtype():
    a, x, _ = problem(0)
    b, *_ = problem(1)

    def fun(pair, x, other, flag):
        assert flag is True
        out = pair["net"](x) * other(x)
        return jnp.mean(out), {"out": out, "name": None}

    grad_fn = jaxamp_nnx.value_and_grad(fun, "p=f32,c=bf16,o=bf16", argnums=(2,), has_aux=True)
    (value, aux), (grads,) = grad_fn({"net": a}, x, b, True)
    assert aux["out"].dtype == jnp.bfloat16 and value.dtype == jnp.float32
    assert grads["head"]["kernel"][...].dtype == jnp.float32
    assert b.head.kernel[...].dtype == jnp.float32
    assert a.drop.rngs.count[...] == b.drop.rngs.count[...] == 1


def test_no_module_there():
    with pytest.raises(TypeError, match="argument 1 is ArrayImpl, not an nnx.Module"):
        jaxamp_nnx.value_and_grad(loss_fn, "c=bf16", argnums=1)(*problem())
