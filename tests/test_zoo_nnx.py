"""Every layer class of flax.nnx that has parameters."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import EPS, check, distance, generic, is_float, normal

import jaxamp.nnx

nnx = pytest.importorskip("flax.nnx", reason="the zoo needs flax")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # Flax adds biases [D] to [B, D]
        yield


X = normal(0, 4, 8)
SEQUENCE = normal(1, 2, 5, 8)
IMAGE = normal(2, 2, 6, 6, 4)
CAUSAL = jnp.tril(jnp.ones((1, 1, 5, 5), bool))

# A dense layer: its two operands, the result, the bias. A norm after it keeps float32 inside and
# its affine part rounds once or twice; two float32 operands do not round.
DENSE = 4
NORM = 2


def after_linear(make):
    return lambda rngs: nnx.Sequential(nnx.Linear(8, 8, rngs=rngs), make(rngs))


def recurrent(cell):
    return lambda rngs: nnx.RNN(cell(8, 8, rngs=rngs), rngs=rngs)


# A cell rounds per step: the operands and results of its matmuls, 2 sums, gate, product, sum, tanh,
# product. 5 steps.
CELL = 5 * (DENSE + 7)

# Projection in (DENSE), scale, q k^T (operands are rounded already: 1), softmax's result cast to
# the compute dtype (1), its product with v (1), projection out (DENSE).
ATTENTION = 2 * DENSE + 4

# name: (make, inputs, roundings)
LAYERS = {
    "Linear": (lambda r: nnx.Linear(8, 8, rngs=r), (X,), DENSE),
    "LinearGeneral": (
        lambda r: nnx.LinearGeneral((2, 4), (4, 2), axis=(-2, -1), rngs=r),
        (X.reshape(4, 2, 4),),
        DENSE,
    ),
    "Einsum": (lambda r: nnx.Einsum("bi,ij->bj", (8, 8), (8,), rngs=r), (X,), DENSE),
    "Conv": (lambda r: nnx.Conv(4, 8, (3, 3), rngs=r), (IMAGE,), DENSE),
    "ConvTranspose": (
        lambda r: nnx.ConvTranspose(4, 8, (3, 3), strides=(2, 2), rngs=r),
        (IMAGE,),
        DENSE,
    ),
    "LoRA": (lambda r: nnx.LoRA(8, 2, 8, base_module=nnx.Linear(8, 8, rngs=r), rngs=r), (X,), 6),
    "LoRALinear": (lambda r: nnx.LoRALinear(8, 8, lora_rank=2, rngs=r), (X,), 6),
    "PReLU": (after_linear(lambda r: nnx.PReLU()), (X,), DENSE + 1),
    "BatchNorm": (after_linear(lambda r: nnx.BatchNorm(8, rngs=r)), (X,), DENSE + NORM),
    "LayerNorm": (after_linear(lambda r: nnx.LayerNorm(8, rngs=r)), (X,), DENSE + NORM),
    "RMSNorm": (after_linear(lambda r: nnx.RMSNorm(8, rngs=r)), (X,), DENSE + NORM),
    "GroupNorm": (after_linear(lambda r: nnx.GroupNorm(8, 2, rngs=r)), (IMAGE @ jnp.eye(4, 8),), 6),
    "InstanceNorm": (after_linear(lambda r: nnx.InstanceNorm(8, rngs=r)), (SEQUENCE,), 6),
    # The power iteration multiplies four times by the kernel and takes the norm of the result.
    "SpectralNorm": (
        lambda r: nnx.SpectralNorm(nnx.Linear(8, 8, rngs=r), rngs=r),
        (X,),
        DENSE + 4 * 3,
    ),
    "WeightNorm": (lambda r: nnx.WeightNorm(nnx.Linear(8, 8, rngs=r), rngs=r), (X,), DENSE + 1),
    "MultiHeadAttention": (
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r),
        (SEQUENCE,),
        ATTENTION,
    ),
    "LSTMCell": (recurrent(nnx.LSTMCell), (SEQUENCE,), CELL),
    "OptimizedLSTMCell": (recurrent(nnx.OptimizedLSTMCell), (SEQUENCE,), CELL),
    "GRUCell": (recurrent(nnx.GRUCell), (SEQUENCE,), CELL),
    "SimpleCell": (recurrent(nnx.SimpleCell), (SEQUENCE,), CELL),
    "RNN": (
        lambda r: nnx.RNN(nnx.GRUCell(8, 8, rngs=r), reverse=True, keep_order=True, rngs=r),
        (SEQUENCE,),
        CELL,
    ),
    "Bidirectional": (
        lambda r: nnx.Bidirectional(
            nnx.RNN(nnx.LSTMCell(8, 8, rngs=r), rngs=r),
            nnx.RNN(nnx.GRUCell(8, 8, rngs=r), rngs=r),
            rngs=r,
        ),
        (SEQUENCE,),
        CELL,
    ),
    "Sequential": (
        lambda r: nnx.Sequential(nnx.Linear(8, 8, rngs=r), jax.nn.gelu, nnx.Linear(8, 8, rngs=r)),
        (X,),
        2 * DENSE + 8,  # gelu: a cube, 2 sums, 3 products, tanh, and the last product
    ),
    "Dropout": (
        after_linear(lambda r: nnx.Dropout(0.5, rngs=r)),
        (X,),
        DENSE + 1,
    ),
}
# Without parameters, and without a call of their own.
OTHERS = {"Module", "Dict", "List", "RNNCellBase"}
# Their own tests below.
BELOW = {"Embed", "RoPE"}


def test_every_layer_is_listed():
    found = {
        name
        for name, value in vars(nnx).items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }
    assert found | {"RoPE"} == {*LAYERS, *OTHERS, *BELOW}  # RoPE is new in Flax 0.12.12


def split(make, seed=0):
    graphdef, params, rest = nnx.split(make(nnx.Rngs(seed)), nnx.Param, ...)
    return graphdef, generic(params), rest


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    make, inputs, roundings = LAYERS[name]
    graphdef, params, rest = split(make)

    def fun(params, rest, *inputs):
        return nnx.merge(graphdef, params, rest, copy=True)(*inputs)

    check(fun, params, rest, *inputs, roundings=roundings)


@pytest.mark.parametrize("mask", ["causal", "bias", "cross", "none"])
def test_attention(mask):
    graphdef, params, rest = split(
        lambda r: nnx.MultiHeadAttention(2, 8, decode=False, rngs=r, use_bias=mask != "bias")
    )

    def fun(params, x, other):
        layer = nnx.merge(graphdef, params, rest, copy=True)
        if mask == "cross":
            return layer(x, other)
        return layer(x, mask=CAUSAL if mask == "causal" else None)

    check(fun, params, SEQUENCE, normal(5, 2, 7, 8), roundings=ATTENTION)


def test_embed():
    """Rows are taken in float32; a gradient is a float32 sum of rows; `attend` is a matmul."""
    graphdef, params, rest = split(lambda r: nnx.Embed(11, 8, rngs=r))
    ids = jnp.array([[1, 10, 1], [0, 3, 3]])
    look_up = lambda params: nnx.merge(graphdef, params, rest)(ids)  # noqa: E731
    check(look_up, params, roundings=0, low=False)
    tied = lambda params: nnx.merge(graphdef, params, rest).attend(look_up(params))  # noqa: E731
    check(tied, params, roundings=3)


@pytest.mark.skipif(not hasattr(nnx, "RoPE"), reason="this Flax has no nnx.RoPE")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # RoPE reads `.value` itself
@pytest.mark.parametrize("cached", [True, False])
def test_rope(cached):
    """Angles and their tables stay float32: dense, two products with them, their sum."""
    rope = nnx.RoPE(embedding_size=8, max_seq_len=5) if cached else nnx.RoPE()
    graphdef, params, rest = split(lambda r: nnx.Sequential(nnx.Linear(8, 8, rngs=r), rope))

    def fun(params):
        return nnx.merge(graphdef, params, rest, copy=True)(normal(1, 2, 2, 5, 8))

    check(fun, params, roundings=DENSE + 2)


@pytest.mark.parametrize("policy", EPS)
def test_decode_cache(policy):
    """Five tokens, one after the other: the cache stays float32, and is what float32 writes."""
    layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache(SEQUENCE.shape)
    graphdef, state = nnx.split(layer)

    def decode(state, tokens):
        layer = nnx.merge(graphdef, state, copy=True)
        outs = [layer(tokens[:, k : k + 1]) for k in range(5)]
        return jnp.concatenate(outs, 1), nnx.state(layer, nnx.Cache)

    got, cache = jaxamp.autocast(decode, policy)(state, SEQUENCE)
    true, true_cache = decode(state, SEQUENCE)
    assert distance(got, true) <= ATTENTION * EPS[policy]
    assert distance(cache, true_cache) <= DENSE * EPS[policy]

    def decode_scan(state, tokens):
        def body(state, token):
            layer = nnx.merge(graphdef, state, copy=True)
            return (nnx.state(layer)), layer(token[:, None])

        return jax.lax.scan(body, state, jnp.swapaxes(tokens, 0, 1))

    got = jaxamp.autocast(decode_scan, policy)(state, SEQUENCE)
    assert distance(got, decode_scan(state, SEQUENCE)) <= ATTENTION * EPS[policy]


@pytest.mark.parametrize("policy", EPS)
def test_batch_norm_statistics(policy):
    """Two steps of training, then evaluation: statistics as float32 keeps them, within 1e-3."""

    def run(call):
        net = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
        for seed in (0, 1):
            call(net, normal(seed, 64, 8))
        net.eval()
        return call(net, X), net.layers[1].mean[...], net.layers[1].var[...]

    call = lambda net, x: net(x)  # noqa: E731
    out, mean, var = run(jaxamp.nnx.autocast(call, policy))
    true_out, true_mean, true_var = run(call)
    assert mean.dtype == var.dtype == jnp.float32
    np.testing.assert_allclose(mean, true_mean, atol=1e-3)
    np.testing.assert_allclose(var, true_var, atol=1e-3)
    assert distance(out, true_out) <= (DENSE + NORM) * EPS[policy]
    assert all(is_float(leaf) for leaf in (out, mean, var))
