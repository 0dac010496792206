"""Every layer class of flax.linen that has parameters."""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import EPS, check, distance, generic, normal

import jaxamp

nn = pytest.importorskip("flax.linen", reason="the zoo needs flax")

pytestmark = [
    pytest.mark.slow,
    # Raised by Flax of itself, for its own deprecated names.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # Flax adds biases [D] to [B, D]
        yield


X = normal(0, 4, 8)
SEQUENCE = normal(1, 2, 5, 8)
IMAGE = normal(2, 2, 6, 6, 4)
CAUSAL = jnp.tril(jnp.ones((1, 1, 5, 5), bool))

# Counted as for flax.nnx, in test_zoo_nnx.py.
DENSE = 4
NORM = 2
CELL = 5 * (DENSE + 7)
ATTENTION = 2 * DENSE + 4


def after_dense(layer):
    return nn.Sequential([nn.Dense(8), layer])


# name: (module, inputs, roundings)
LAYERS = {
    "Dense": (nn.Dense(8), (X,), DENSE),
    "DenseGeneral": (
        nn.DenseGeneral((4, 2), axis=(-2, -1)),
        (X.reshape(4, 2, 4),),
        DENSE,
    ),
    "Einsum": (nn.Einsum((8, 8), "bi,ij->bj"), (X,), DENSE),
    "Conv": (nn.Conv(8, (3, 3)), (IMAGE,), DENSE),
    "ConvLocal": (nn.ConvLocal(8, (3, 3)), (IMAGE,), DENSE),
    "ConvTranspose": (nn.ConvTranspose(8, (3, 3), strides=(2, 2)), (IMAGE,), DENSE),
    "PReLU": (after_dense(nn.PReLU()), (X,), DENSE + 1),
    "BatchNorm": (after_dense(nn.BatchNorm(use_running_average=False)), (X,), DENSE + NORM),
    "LayerNorm": (after_dense(nn.LayerNorm()), (X,), DENSE + NORM),
    "RMSNorm": (after_dense(nn.RMSNorm()), (X,), DENSE + NORM),
    "GroupNorm": (after_dense(nn.GroupNorm(2)), (IMAGE,), DENSE + NORM),
    "InstanceNorm": (after_dense(nn.InstanceNorm()), (SEQUENCE,), DENSE + NORM),
    "WeightNorm": (nn.WeightNorm(nn.Dense(8)), (X,), DENSE + 1),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(2),
        (SEQUENCE, normal(5, 2, 7, 8)),
        ATTENTION,
    ),
    "MultiHeadAttention": (nn.MultiHeadAttention(2), (SEQUENCE,), ATTENTION),
    "SelfAttention": (nn.SelfAttention(2), (SEQUENCE, CAUSAL), ATTENTION),
    "LSTMCell": (nn.RNN(nn.LSTMCell(8)), (SEQUENCE,), CELL),
    "OptimizedLSTMCell": (nn.RNN(nn.OptimizedLSTMCell(8)), (SEQUENCE,), CELL),
    "GRUCell": (nn.RNN(nn.GRUCell(8)), (SEQUENCE,), CELL),
    "MGUCell": (nn.RNN(nn.MGUCell(8)), (SEQUENCE,), CELL),
    "SimpleCell": (nn.RNN(nn.SimpleCell(8)), (SEQUENCE,), CELL),
    "ConvLSTMCell": (
        nn.RNN(nn.ConvLSTMCell(8, (3, 3))),
        (normal(3, 2, 5, 4, 4, 4),),
        CELL,
    ),
    "RNN": (nn.RNN(nn.GRUCell(8), reverse=True, keep_order=True), (SEQUENCE,), CELL),
    "Bidirectional": (
        nn.Bidirectional(nn.RNN(nn.LSTMCell(8)), nn.RNN(nn.GRUCell(8))),
        (SEQUENCE,),
        CELL,
    ),
    # A dense, gelu (a cube, 2 sums, 3 products, tanh, the last product), a dense.
    "Sequential": (nn.Sequential([nn.Dense(8), jax.nn.gelu, nn.Dense(8)]), (X,), 2 * DENSE + 8),
    "Dropout": (after_dense(nn.Dropout(0.5, deterministic=False)), (X,), DENSE + 1),
}
OTHERS = {"Module", "RNNCellBase"}
BELOW = {
    "Embed",
    "SpectralNorm",
    "Fp8DotGeneralOp",
    "Fp8DotGeneral",
    "Fp8DirectDotGeneralOp",
    "NANOOFp8DotGeneralOp",
    "Fp8Einsum",
}


def test_every_layer_is_listed():
    found = {
        name
        for name, value in vars(nn).items()
        if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    assert found == {*LAYERS, *OTHERS, *BELOW}


def init(module, *inputs, **kwargs):
    variables = dict(module.init(jax.random.key(0), *inputs, **kwargs))
    params = generic(variables.pop("params"))
    return params, variables


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    module, inputs, roundings = LAYERS[name]
    params, rest = init(module, *inputs)

    def fun(params, rest, key):
        mutable = list(rest)
        return module.apply(
            {"params": params, **rest}, *inputs, mutable=mutable, rngs={"dropout": key}
        )

    check(fun, params, rest, jax.random.key(1), roundings=roundings)


def test_spectral_norm():
    """The power iteration multiplies four times by the kernel and takes the norm of the result."""
    module = nn.SpectralNorm(nn.Dense(8))
    params, rest = init(module, X, update_stats=False)

    def fun(params, rest):
        return module.apply(
            {"params": params, **rest}, X, update_stats=True, mutable=["batch_stats"]
        )

    check(fun, params, rest, roundings=DENSE + 4 * 3)


def test_embed():
    module = nn.Embed(11, 8)
    ids = jnp.array([[1, 10, 1], [0, 3, 3]])
    params, _ = init(module, ids)
    look_up = lambda params: module.apply({"params": params}, ids)  # noqa: E731
    check(look_up, params, roundings=0, low=False)
    tied = lambda params: module.apply({"params": params}, look_up(params), method="attend")  # noqa: E731
    check(tied, params, roundings=3)


@pytest.mark.parametrize(
    "name", ["Fp8DotGeneralOp", "Fp8DotGeneral", "Fp8DirectDotGeneralOp", "NANOOFp8DotGeneralOp"]
)
@pytest.mark.parametrize("policy", EPS)
def test_fp8_dense(name, policy):
    """The program quantises by itself: E4M3 keeps 4 bits, 2^-4 per operand, forward."""
    module = nn.Dense(16, dot_general_cls=getattr(nn, name))
    x = normal(0, 16, 16)
    variables = module.init(jax.random.key(0), x)

    def fun(variables, x):
        return module.apply(variables, x, mutable=["_overwrite_with_gradient"])[0]

    loss = lambda *args: jnp.mean(fun(*args) ** 2)  # noqa: E731
    got, grads = jaxamp.value_and_grad(loss, policy)(variables, x)
    assert np.isfinite(float(got)) and all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)
    )
    out = jaxamp.autocast(fun, policy)(variables, x)
    assert distance(out, fun(variables, x)) <= 2 * 2.0**-4 + DENSE * EPS[policy]


@pytest.mark.parametrize("policy", EPS)
def test_fp8_einsum(policy):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax warns that the class may go
        module = nn.Einsum((16, 16), "bi,ij->bj", use_bias=False)
        x = normal(0, 16, 16)
        fp8 = nn.Fp8Einsum()
        variables = fp8.init(jax.random.key(0), "bi,ij->bj", x, normal(1, 16, 16))
    del module
    fun = lambda variables, x, w: fp8.apply(variables, "bi,ij->bj", x, w)  # noqa: E731
    w = normal(1, 16, 16)
    out = jaxamp.autocast(fun, policy)(variables, x, w)
    assert distance(out, fun(variables, x, w)) <= 2 * 2.0**-4 + DENSE * EPS[policy]


@pytest.mark.parametrize("policy", EPS)
def test_decode_cache(policy):
    module = nn.MultiHeadDotProductAttention(2, decode=True)
    variables = module.init(jax.random.key(0), SEQUENCE, SEQUENCE)

    def decode(variables, tokens):
        params, cache = variables["params"], variables["cache"]

        def body(cache, token):
            token = token[:, None]
            out, new = module.apply(
                {"params": params, "cache": cache}, token, token, mutable=["cache"]
            )
            return new["cache"], out

        return jax.lax.scan(body, cache, jnp.swapaxes(tokens, 0, 1))

    got = jaxamp.autocast(decode, policy)(variables, SEQUENCE)
    assert distance(got, decode(variables, SEQUENCE)) <= ATTENTION * EPS[policy]


@pytest.mark.parametrize("policy", EPS)
def test_batch_norm_in_training_and_evaluation(policy):
    def module(train):
        return after_dense(nn.BatchNorm(use_running_average=not train))

    variables = module(True).init(jax.random.key(0), X)

    def run(apply):
        state = variables
        for seed in (0, 1):
            _, new = apply(state, normal(seed, 64, 8), True)
            state = {**state, **new}
        return apply(state, X, False)[0], state["batch_stats"]

    def apply(variables, x, train):
        return module(train).apply(variables, x, mutable=["batch_stats"])

    out, stats = run(jaxamp.autocast(apply, policy))
    true_out, true_stats = run(apply)
    for got, true in zip(jax.tree.leaves(stats), jax.tree.leaves(true_stats), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, true, atol=1e-3)
    assert distance(out, true_out) <= (DENSE + NORM) * EPS[policy]


def test_lifted_transforms():
    """nn.scan over layers with nn.remat inside, and nn.vmap."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(8)(jax.nn.relu(nn.LayerNorm()(x))), None

    stacked = nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    params, _ = init(stacked, X, None)
    fun = lambda params: stacked.apply({"params": params}, X, None)  # noqa: E731
    # 3 blocks: norm, relu, dense, residual.
    check(fun, params, roundings=3 * (NORM + 1 + DENSE + 1))

    heads = nn.vmap(
        nn.Dense,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=None,
        axis_size=3,
    )(8)
    params, _ = init(heads, X)
    check(lambda params: heads.apply({"params": params}, X), params, roundings=DENSE)
