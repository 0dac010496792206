"""Public models from packages, under autocast; zoo.py says what is asked of them."""

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import EPS, check, distance, generic, normal

import jaxamp

pytestmark = [
    pytest.mark.slow,
    # Packages warn of what they use of Python, numpy and JAX, at import and when called.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # all of these packages rely on it
        yield


def package(name):
    return pytest.importorskip(name, reason=f"{name} is in the extra `zoo`", exc_type=ImportError)


X = normal(0, 4, 8)
SEQUENCE = normal(1, 2, 5, 8)
IMAGE = normal(2, 2, 16, 16, 3)
IMAGES = normal(3, 8, 16, 16, 3)  # a batch norm of two numbers gives their signs
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])

DENSE = 4  # two operands, the result, the bias
NORM = 2  # scale and offset; inside it is float32
GELU = 8  # a cube, 2 sums, 3 products, tanh, the last product
CELL = (
    DENSE + 7
)  # a step of a recurrent cell: its matmul, 2 sums, gate, product, sum, tanh, product
ATTENTION = 2 * DENSE + 4  # in, scores, scale, softmax's result, product with v, out
BLOCK = ATTENTION + 2 * DENSE + 2 * NORM + GELU + 2  # a Transformer block with its two residuals


# Flax.


@pytest.mark.parametrize("train", [True, False])
def test_resnet18(train):
    models = package("flaxmodels")
    net = models.ResNet18(output="logits", pretrained=None, normalize=False, num_classes=10)
    variables = net.init(jax.random.key(0), IMAGES, train=False)
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}

    def fun(params, rest):
        out = net.apply({"params": params, **rest}, IMAGES, train=train, mutable=["batch_stats"])
        return out

    # 8 blocks of two convolutions (3 roundings each), norms, relus and a residual; first and last.
    check(fun, params, rest, roundings=8 * (2 * (3 + NORM + 1) + 1) + 3 + NORM + 1 + DENSE)


def test_mamba2_language_model():
    mamba = package("mamba2_jax")
    from flax import nnx

    config = dataclasses.replace(
        mamba.Mamba2Config.tiny(), vocab_size=50, hidden_size=32, chunk_size=4
    )
    graphdef, params, rest = nnx.split(
        mamba.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def fun(params):
        out = nnx.merge(graphdef, params, rest, copy=True)(TOKENS, labels=TOKENS)
        return out["logits"], out["loss"]

    # 2 blocks: norm, projection, convolution and silu, gates, chunk products (4 matmuls), gated
    # norm, projection, residual; the head. Its einsums of three and four operands multiply by
    # exp(dt A), float32: the backward pass of two of them, per block, is a float32 matmul.
    roundings = 2 * (NORM + 3 + DENSE + 2 + 4 * 3 + 4 + NORM + 3 + 1) + 3
    check(fun, params, roundings=roundings, float32_matmuls=4)


def test_lstm_language_model():
    nn = package("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(11, 8)
            h = embed(tokens)
            for _ in range(2):
                h = nn.RNN(nn.OptimizedLSTMCell(8))(h)
            return embed.attend(nn.LayerNorm()(h))

    optax = package("optax")
    model = Model()
    params = generic(model.init(jax.random.key(0), TOKENS))

    def fun(params):
        logits = model.apply(params, TOKENS)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]), logits

    check(fun, params, roundings=2 * 6 * CELL + NORM + 3)


# Equinox.


def equinox_net(module):
    """(fun of parameters, parameters) for an Equinox module."""
    eqx = package("equinox")
    params, static = eqx.partition(module, eqx.is_inexact_array)
    return eqx, generic(params), lambda params: eqx.combine(params, static)


def test_equinox_vision_transformer():
    models = package("equimo.models")
    vit = models.VisionTransformer(
        img_size=16,
        in_channels=3,
        dim=32,
        patch_size=8,
        num_heads=4,
        depths=[2],
        num_classes=10,
        key=jax.random.key(0),
    )
    _, params, combine = equinox_net(vit)
    image = IMAGE[0].transpose(2, 0, 1)
    fun = lambda params: combine(params)(image, key=jax.random.key(1), inference=True)  # noqa: E731
    # Patches, position, 2 blocks, norm, head.
    check(fun, params, roundings=DENSE + 1 + 2 * BLOCK + NORM + DENSE)


@pytest.mark.parametrize("name", ["mlp", "conv", "gru", "lstm", "attention", "norms", "embedding"])
def test_equinox_layers(name):
    eqx = package("equinox")
    key = jax.random.key(0)
    image = IMAGE[0].transpose(2, 0, 1)
    nn = eqx.nn

    def scan(cell, start):
        def fun(cell):
            return jax.lax.scan(lambda h, x: (cell(x, h), None), start, SEQUENCE[0])[0]

        return cell, fun, 5 * CELL

    module, fun, roundings = {
        "mlp": lambda: (
            nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=key),
            lambda m: jax.vmap(m)(X),
            3 * DENSE + 2 * GELU,
        ),
        "conv": lambda: (
            nn.Sequential(
                [
                    nn.Conv2d(3, 8, 3, key=key),
                    nn.Lambda(jax.nn.relu),
                    nn.MaxPool2d(2, 2),
                    nn.GroupNorm(2, 8),
                    nn.ConvTranspose2d(8, 4, 3, key=key),
                    nn.AvgPool2d(2, 2),
                ]
            ),
            lambda m: m(image),
            2 * DENSE + 1 + NORM + 2,
        ),
        "gru": lambda: scan(nn.GRUCell(8, 8, key=key), jnp.zeros(8)),
        "lstm": lambda: scan(nn.LSTMCell(8, 8, key=key), (jnp.zeros(8), jnp.zeros(8))),
        "attention": lambda: (
            nn.MultiheadAttention(2, 8, use_query_bias=True, key=key),
            lambda m: m(*[SEQUENCE[0]] * 3, mask=jnp.tril(jnp.ones((5, 5), bool))),
            ATTENTION,
        ),
        "norms": lambda: (
            [nn.Linear(8, 8, key=key), nn.LayerNorm(8), nn.RMSNorm(8)],
            lambda ms: jax.vmap(lambda x: ms[2](ms[1](ms[0](x))))(X),
            DENSE + 2 * NORM,
        ),
        "embedding": lambda: (
            [
                nn.Embedding(11, 8, key=key),
                nn.RotaryPositionalEmbedding(8),
                nn.Linear(8, 8, key=key),
            ],
            lambda ms: jax.vmap(ms[2])(ms[1](jax.vmap(ms[0])(TOKENS[0]))),
            DENSE,
        ),
    }[name]()
    _, params, combine = equinox_net(module)
    check(lambda params: fun(combine(params)), params, roundings=roundings)


def test_equinox_batch_norm_state():
    eqx = package("equinox")
    net, state = eqx.nn.make_with_state(
        lambda key: [eqx.nn.Linear(8, 8, key=key), eqx.nn.BatchNorm(8, "batch", mode="batch")]
    )(jax.random.key(0))
    _, params, combine = equinox_net(net)

    def fun(params, state):
        linear, norm = combine(params)
        one = lambda x, state: norm(linear(x), state)  # noqa: E731
        out, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            X, state
        )
        return out, jax.tree.leaves(state)

    check(fun, params, state, roundings=DENSE + NORM)


# Haiku.


def haiku_net(build, *inputs):
    hk = package("haiku")
    net = hk.transform_with_state(lambda *args: build(hk)(*args))
    params, state = net.init(jax.random.key(0), *inputs)

    def fun(params, state):
        return net.apply(params, state, jax.random.key(1), *inputs)

    return fun, generic(params), state


@pytest.mark.parametrize("name", ["mlp", "resnet", "attention", "vq"])
def test_haiku(name):
    build, inputs, roundings = {
        "mlp": (lambda hk: hk.nets.MLP([16, 16, 8], activation=jax.nn.gelu), (X,), 3 * 4 + 2 * 8),
        # 4 groups of one bottleneck-free block: 2 convolutions and norms, relus, a residual.
        "resnet": (
            lambda hk: (
                lambda x: hk.nets.ResNet(
                    blocks_per_group=(1, 1, 1, 1),
                    num_classes=10,
                    bottleneck=False,
                    channels_per_group=(8, 8, 16, 16),
                    use_projection=(True, True, True, True),
                )(x, is_training=True)
            ),
            (IMAGES,),
            4 * (2 * (3 + NORM + 1) + 1) + 3 + NORM + 1 + DENSE,
        ),
        "attention": (
            lambda hk: (
                lambda x: hk.MultiHeadAttention(
                    2, 4, w_init=hk.initializers.VarianceScaling(), model_size=8
                )(hk.LayerNorm(-1, True, True)(x), x, x)
            ),
            (SEQUENCE,),
            ATTENTION + NORM,
        ),
        "vq": (
            lambda hk: (
                lambda x: hk.Linear(8)(
                    hk.nets.VectorQuantizerEMA(8, 16, 0.25, 0.9)(x, is_training=False)["quantize"]
                )
            ),
            (X,),
            DENSE,
        ),
    }[name]
    fun, params, state = haiku_net(build, *inputs)
    check(fun, params, state, roundings=roundings)


@pytest.mark.parametrize("cell", ["LSTM", "GRU", "VanillaRNN"])
def test_haiku_recurrent(cell):
    def build(hk):
        def run(x):
            core = getattr(hk, cell)(8)
            return hk.dynamic_unroll(core, x, core.initial_state(2), time_major=False)[0]

        return run

    fun, params, state = haiku_net(build, SEQUENCE)
    check(fun, params, state, roundings=5 * CELL)


# Keras on JAX.


def keras_net(build):
    os.environ["KERAS_BACKEND"] = "jax"
    keras = package("keras")
    assert keras.backend.backend() == "jax"
    keras.utils.set_random_seed(0)
    return build(keras)


@pytest.mark.parametrize("name", ["convnet", "lstm", "transformer"])
@pytest.mark.parametrize("training", [True, False])
def test_keras(name, training):
    def convnet(keras):
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((16, 16, 3)),
                layers.Conv2D(8, 3),
                layers.BatchNormalization(),
                layers.ReLU(),
                layers.MaxPooling2D(),
                layers.SeparableConv2D(8, 3),
                layers.GlobalAveragePooling2D(),
                layers.Dense(4, activation="softmax"),
            ]
        )

    def lstm(keras):
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((6,), dtype="int32"),
                layers.Embedding(11, 8),
                layers.Bidirectional(layers.LSTM(8, return_sequences=True)),
                layers.GRU(8),
                layers.Dense(11),
            ]
        )

    def transformer(keras):
        layers = keras.layers
        x = layers.Input((5, 8))
        h = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
        h = layers.LayerNormalization()(x + h)
        h = layers.Dense(8)(layers.Dense(16, activation="gelu")(h)) + h
        return keras.Model(x, layers.LayerNormalization()(h))

    build, inputs, roundings = {
        "convnet": (convnet, IMAGE, DENSE + NORM + 1 + 2 * DENSE + DENSE + 1),
        "lstm": (lstm, TOKENS, 2 * 6 * CELL + DENSE),
        "transformer": (transformer, SEQUENCE, BLOCK),
    }[name]
    model = keras_net(build)
    params = generic([jnp.asarray(v.value) for v in model.trainable_variables])
    rest = [jnp.asarray(v.value) for v in model.non_trainable_variables]

    def fun(params, rest):
        return model.stateless_call(params, rest, inputs, training=training)

    check(fun, params, rest, roundings=roundings)


# Differential equations and solvers.


@pytest.mark.parametrize("solver", ["Euler", "Tsit5", "Kvaerno3"])
def test_diffrax_neural_ode(solver):
    diffrax = package("diffrax")
    w = normal(3, 8, 8) / 8**0.5

    def fun(w):
        adaptive = solver != "Euler"
        # An adaptive solver wants errors that 16-bit terms do not have: its tolerance is theirs.
        controller = (
            diffrax.PIDController(rtol=1e-2, atol=1e-2) if adaptive else diffrax.ConstantStepSize()
        )
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w) - 0.1 * y),
            getattr(diffrax, solver)(),
            t0=0.0,
            t1=1.0,
            dt0=0.1,
            y0=X[0],
            args=w,
            stepsize_controller=controller,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 1.0, 3)),
        )
        return solution.ys

    # f rounds 3 + 3 times; the state integrates that over a time of 1 and stays float32. Steps that
    # are chosen by a rounded error estimate differ by the solver's own tolerance.
    check(fun, w, roundings=6, float32_matmuls=None)


def test_diffrax_stochastic():
    diffrax = package("diffrax")
    w = normal(3, 8, 8) / 8**0.5
    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(8,), key=jax.random.key(0))

    def fun(w):
        drift = diffrax.ODETerm(lambda t, y, _: jnp.tanh(y @ w) - y)
        noise = diffrax.ControlTerm(lambda t, y, _: 0.1 * jnp.eye(8), path)
        return diffrax.diffeqsolve(
            diffrax.MultiTerm(drift, noise), diffrax.Euler(), 0.0, 1.0, 0.1, X[0]
        ).ys

    check(fun, w, roundings=6 + 3)


def test_optimistix_and_lineax():
    optx, lx = package("optimistix"), package("lineax")
    w = normal(3, 8, 8) / 8

    def fun(w):
        system = lambda y, w: y - jnp.tanh(y @ w) - X[0]  # noqa: E731
        root = optx.root_find(system, optx.Newton(1e-3, 1e-3), X[0], w, throw=False).value
        solved = lx.linear_solve(lx.MatrixLinearOperator(jnp.eye(8) + w @ w), X[0]).value
        return root, solved

    # The root is off by what the system is: matmul, tanh, two differences; its Jacobian is near 1.
    check(fun, w, roundings=2 * 6, float32_matmuls=None)


# Graphs, geometry, probability, kernels.


@pytest.mark.parametrize("name", ["convolution", "attention", "network"])
def test_jraph(name):
    jraph = package("jraph")
    graph = jraph.GraphsTuple(
        nodes=X,
        edges=normal(4, 8, 8),
        senders=jnp.array([0, 1, 2, 3, 0, 1, 2, 3]),
        receivers=jnp.array([1, 2, 3, 0, 0, 1, 2, 3]),
        globals=None,
        n_node=jnp.array([4]),
        n_edge=jnp.array([8]),
    )
    ws = [normal(k, 8, 8) / 8**0.5 for k in (5, 6)]
    column = normal(7, 24 if name == "network" else 16, 8) / 4

    def fun(params):
        *ws, column = params
        if name == "convolution":

            def layer(w):
                return jraph.GraphConvolution(lambda n: jax.nn.relu(n @ w), add_self_edges=True)

        elif name == "attention":

            def layer(w):
                logits = lambda s, r, e: jnp.concatenate([s, r], -1) @ column[:, :1]  # noqa: E731
                return jraph.GAT(lambda n: n @ w, logits, jax.nn.leaky_relu)

        else:

            def layer(w):
                return jraph.GraphNetwork(
                    lambda e, s, r, g: jnp.tanh(jnp.concatenate([e, s, r], -1) @ column),
                    lambda n, s, r, g: jax.nn.relu((n + r) @ w),
                )

        out = graph
        for w in ws:
            out = layer(w)(out)
        return out.nodes

    # 2 layers: a matmul, an attention or edge matmul, nonlinearities, products with weights.
    check(fun, [*ws, column], roundings=2 * (2 * 3 + 5))


def test_e3nn_tensor_product():
    e3nn = package("e3nn_jax")
    positions, w = normal(4, 5, 3), normal(5, 8, 8) / 8**0.5

    def fun(w):
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", positions, normalize=True)
        features = e3nn.IrrepsArray("8x0e", normal(6, 5, 8) @ w)
        return e3nn.tensor_product(features, harmonics).array

    check(fun, w, roundings=3 + 4, float32_matmuls=None)


def test_distrax_and_numpyro():
    distrax, dist = package("distrax"), package("numpyro.distributions")
    w = normal(3, 8, 8) / 8**0.5

    def fun(w):
        h = X @ w
        flow = distrax.Transformed(
            distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8)),
            distrax.Block(distrax.ScalarAffine(h, 1.0 + jax.nn.softplus(h)), 1),
        )
        mixture = dist.MixtureSameFamily(dist.Categorical(logits=h), dist.Normal(h, 1.0))
        return (
            flow.log_prob(X),
            distrax.Categorical(logits=h).entropy(),
            dist.Normal(h, jax.nn.softplus(h)).log_prob(X),
            dist.StudentT(4.0, h, 1.0).log_prob(X),
            mixture.log_prob(X[:, 0]),
            dist.Normal(h, 1.0).sample(jax.random.key(0)),
        )

    # (x - h) / s, squared: the relative error of s, softplus of numbers near -2, triples.
    check(fun, w, roundings=3 + 3 + 3 * 3)


@pytest.mark.parametrize("name", ["flash_attention", "causal_flash_attention"])
def test_flash_attention_of_a_package(name):
    flash = package("flash_attention_jax")
    x = normal(4, 1, 1, 16, 32)
    ws = [normal(k, 32, 32) / 32**0.5 for k in (5, 6, 7)]
    fun = getattr(flash, name)

    def attend(ws):
        q, k, v = (x @ w for w in ws)
        return fun(q, k, v, jnp.ones((1, 16), bool)) if name == "flash_attention" else fun(q, k, v)

    # Projections, the scale, scores of size 1 to 3, p cast, its product with v, division.
    check(attend, ws, roundings=3 + 1 + 3 * 3 + 4)


@pytest.mark.parametrize("policy", EPS)
def test_random_draws_are_those_of_float32(policy):
    """Every sampler of jax.random with a default: the same numbers, bit for bit."""
    key = jax.random.key(3)
    alpha = jnp.abs(X) + 1.0

    def draw(key, alpha):
        r = jax.random
        return {
            "normal": r.normal(key, (4,)),
            "uniform": r.uniform(key, (4,)),
            "gamma": r.gamma(key, alpha),
            "beta": r.beta(key, alpha, alpha),
            "dirichlet": r.dirichlet(key, alpha),
            "poisson": r.poisson(key, alpha),
            "categorical": r.categorical(key, alpha),
            "gumbel": r.gumbel(key, (4,)),
            "truncated": r.truncated_normal(key, -1.0, 1.0, (4,)),
            "permutation": r.permutation(key, alpha),
            "choice": r.choice(key, 8, (3,), p=jax.nn.softmax(alpha[0])),
            "multivariate": r.multivariate_normal(key, alpha[0], jnp.eye(8)),
            "bits": r.bits(key, (4,)),
            "split": r.split(key, 2),
        }

    got, true = jax.jit(jaxamp.autocast(draw, policy))(key, alpha), jax.jit(draw)(key, alpha)
    got.pop("multivariate"), true.pop("multivariate")  # a matmul of its own: not the same numbers
    assert distance(got, true) <= 1e-6
    for name in ("normal", "uniform", "gumbel", "truncated", "permutation"):
        np.testing.assert_array_equal(got[name], true[name])
