"""Functions of JAX and optax behind a matmul: every activation, every loss, scipy, linalg, FFT."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from zoo import check, normal

optax = pytest.importorskip("optax", reason="the zoo needs optax")

pytestmark = pytest.mark.slow

X, W = normal(0, 4, 8), normal(1, 8, 8) / 8**0.5
MATMUL = 3  # two operands and the result


def behind_matmul(fun, x=X):
    """`fun` of activations, in the dtype that autocast gives them; W is what is learnt."""
    return lambda w: fun(x @ w)


def unit(x):
    """Activations in (0.05, 0.95)."""
    return 0.05 + 0.9 * jax.nn.sigmoid(x)


# jax.nn. Steps that round, one after the other, beyond the matmul; those in float32 do not.
ACTIVATIONS = {
    "celu": 3,
    "elu": 3,
    "gelu": 8,
    "glu": 3,
    "hard_sigmoid": 3,
    "hard_silu": 4,
    "hard_swish": 4,
    "hard_tanh": 1,
    "identity": 0,
    "leaky_relu": 2,
    "log_sigmoid": 3,
    "log_softmax": 2,
    "logmeanexp": 1,
    "logsumexp": 1,
    "mish": 4,
    "relu": 1,
    "relu6": 2,
    "selu": 4,
    "sigmoid": 1,
    "silu": 2,
    "soft_sign": 3,
    "softmax": 1,
    "softplus": 2,
    "sparse_plus": 4,
    "sparse_sigmoid": 4,
    "squareplus": 5,
    "standardize": 3,
    "swish": 2,
    "tanh": 1,
}
NOT_ACTIVATIONS = {
    "dot_product_attention",  # below
    "get_scaled_dot_general_config",  # no numbers
    "log1mexp",  # below: of positive numbers
    "one_hot",  # of integers
    "scaled_dot_general",  # chooses its own dtypes, for accelerators
    "scaled_matmul",  # the same
}


def test_every_activation_is_listed():
    found = {n for n, f in vars(jax.nn).items() if callable(f) and not n.startswith("_")}
    found = {n for n in found if not inspect.isclass(getattr(jax.nn, n))}
    assert found <= {*ACTIVATIONS, *NOT_ACTIVATIONS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    fun = getattr(jax.nn, name, None)
    if fun is None:
        pytest.skip("not in this version of jax")
    check(behind_matmul(fun), W, roundings=MATMUL + ACTIVATIONS[name])


@pytest.mark.parametrize("how", ["causal", "mask", "bias", "window", "grouped"])
def test_dot_product_attention(how):
    x = normal(2, 2, 5, 32)
    mask = jnp.tril(jnp.ones((1, 1, 5, 5), bool))
    kwargs = {
        "causal": {"is_causal": True},
        "mask": {"mask": mask},
        "bias": {"bias": normal(3, 1, 4, 5, 5)},
        "window": {"is_causal": True, "local_window_size": 2},
        "grouped": {},
    }[how]

    def fun(ws):
        q, k, v = ((x @ w).reshape(2, 5, -1, 8) for w in ws)
        if how == "grouped":
            k, v = k[:, :, :2], v[:, :, :2]
        return jax.nn.dot_product_attention(q, k, v, **kwargs)

    ws = [normal(k, 32, 32) / 32**0.5 for k in (4, 5, 6)]
    # The projections, q k^T, the scale, the bias, softmax's result, its product with v. The scores
    # have a size of 3, so an error of theirs is 3 times as large behind the softmax.
    check(fun, ws, roundings=MATMUL + 3 * 3 + 2)


# optax losses: (function of activations [4, 8], roundings beyond the matmul). Labels are constants.

CLASSES = jnp.array([1, 0, 7, 3])
ONE_HOT = jax.nn.one_hot(CLASSES, 8)
SIGNS = jnp.sign(normal(7, 4, 8))
PROBABILITIES = jax.nn.softmax(normal(8, 4, 8))
TARGETS = normal(9, 4, 8)

# All of them are sums, logarithms and exponentials in float32; a handful of differences, products
# and maxima round before that. A difference of numbers of size 1 that gives 1/2 doubles the error.
FEW, SOME = 4, 10


def losses():
    return {
        "convex_kl_divergence": (
            lambda x: optax.losses.convex_kl_divergence(jax.nn.log_softmax(x), PROBABILITIES),
            SOME,
        ),
        "ctc_loss": (
            lambda x: optax.losses.ctc_loss(
                jnp.stack([x, x + 1.0]),
                jnp.zeros((2, 4)),
                jnp.array([[1, 2], [3, 0]]),
                jnp.array([[0.0, 0.0], [0.0, 1.0]]),
            ),
            SOME,
        ),
        "ctc_loss_with_forward_probs": (
            lambda x: optax.losses.ctc_loss_with_forward_probs(
                x[None], jnp.zeros((1, 4)), jnp.array([[1, 2]]), jnp.zeros((1, 2))
            )[0],
            SOME,
        ),
        "generalized_kl_divergence": (
            lambda x: optax.losses.generalized_kl_divergence(jax.nn.log_softmax(x), PROBABILITIES),
            SOME,
        ),
        "hinge_loss": (lambda x: optax.losses.hinge_loss(x, SIGNS), FEW),
        "kl_divergence": (
            lambda x: optax.losses.kl_divergence(jax.nn.log_softmax(x), PROBABILITIES),
            SOME,
        ),
        "kl_divergence_with_log_targets": (
            lambda x: optax.losses.kl_divergence_with_log_targets(
                jax.nn.log_softmax(x), jnp.log(PROBABILITIES)
            ),
            SOME,
        ),
        "multiclass_hinge_loss": (
            lambda x: optax.losses.multiclass_hinge_loss(x, CLASSES),
            FEW,
        ),
        "multiclass_perceptron_loss": (
            lambda x: optax.losses.multiclass_perceptron_loss(x, CLASSES),
            FEW,
        ),
        "multiclass_sparsemax_loss": (
            lambda x: optax.losses.multiclass_sparsemax_loss(x, CLASSES),
            SOME,
        ),
        "perceptron_loss": (lambda x: optax.losses.perceptron_loss(x, SIGNS), FEW),
        "poly_loss_cross_entropy": (
            lambda x: optax.losses.poly_loss_cross_entropy(x, ONE_HOT),
            FEW,
        ),
        "safe_softmax_cross_entropy": (
            lambda x: optax.losses.safe_softmax_cross_entropy(x, ONE_HOT),
            FEW,
        ),
        "sigmoid_binary_cross_entropy": (
            lambda x: optax.losses.sigmoid_binary_cross_entropy(x, jnp.clip(SIGNS, 0, 1)),
            FEW,
        ),
        "sigmoid_focal_loss": (
            lambda x: optax.losses.sigmoid_focal_loss(x, jnp.clip(SIGNS, 0, 1), alpha=0.25),
            SOME,
        ),
        "softmax_cross_entropy": (lambda x: optax.losses.softmax_cross_entropy(x, ONE_HOT), FEW),
        "softmax_cross_entropy_with_integer_labels": (
            lambda x: optax.losses.softmax_cross_entropy_with_integer_labels(x, CLASSES),
            FEW,
        ),
        "sparsemax_loss": (
            lambda x: optax.losses.sparsemax_loss(x, jnp.clip(SIGNS, 0, 1)),
            FEW,
        ),
        "make_fenchel_young_loss": (
            lambda x: optax.losses.make_fenchel_young_loss(jax.nn.logsumexp)(x, ONE_HOT),
            FEW,
        ),
        "ranking_softmax_loss": (
            lambda x: optax.losses.ranking_softmax_loss(x, PROBABILITIES),
            FEW,
        ),
        "cosine_distance": (lambda x: optax.losses.cosine_distance(x, TARGETS), SOME),
        "cosine_similarity": (lambda x: optax.losses.cosine_similarity(x, TARGETS), SOME),
        "huber_loss": (lambda x: optax.losses.huber_loss(x, TARGETS), SOME),
        "l2_loss": (lambda x: optax.losses.l2_loss(x, TARGETS), FEW),
        "log_cosh": (lambda x: optax.losses.log_cosh(x, TARGETS), SOME),
        "squared_error": (lambda x: optax.losses.squared_error(x, TARGETS), FEW),
        "binary_dice_loss": (
            lambda x: optax.losses.binary_dice_loss(x, jnp.clip(SIGNS, 0, 1)),
            SOME,
        ),
        "dice_loss": (lambda x: optax.losses.dice_loss(x, ONE_HOT), SOME),
        "multiclass_generalized_dice_loss": (
            lambda x: optax.losses.multiclass_generalized_dice_loss(x, ONE_HOT),
            SOME,
        ),
        "ntxent": (lambda x: optax.losses.ntxent(x, jnp.array([0, 0, 1, 1])), SOME),
        "triplet_margin_loss": (
            lambda x: optax.losses.triplet_margin_loss(x, TARGETS, TARGETS[::-1]),
            SOME,
        ),
        "smooth_labels": (lambda x: optax.losses.smooth_labels(jax.nn.softmax(x), 0.1), FEW),
    }


def test_every_loss_is_listed():
    found = {
        name
        for name, value in vars(optax.losses).items()
        if callable(value) and not name.startswith("_")
    }
    assert found <= set(losses())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # optax renames some of its losses
@pytest.mark.parametrize("name", losses())
def test_loss(name):
    fun, roundings = losses()[name]
    if not hasattr(optax.losses, name):
        pytest.skip("not in this version of optax")
    with jax.numpy_rank_promotion("allow"):  # optax multiplies [B, D] by [D]
        check(behind_matmul(fun), W, roundings=MATMUL + roundings)


# linalg, FFT, scipy: in float32, whatever they are given.

SPD = 3 * jnp.eye(8)  # W @ W.T + 3 I has a condition number of at most 3, which errors grow by

linalg, special, stats = jnp.linalg, jax.scipy.special, jax.scipy.stats
LINALG = {
    "cholesky": linalg.cholesky,
    "inv": linalg.inv,
    "solve": lambda a: linalg.solve(a, X.T),
    "slogdet": lambda a: linalg.slogdet(a)[1],
    "det": lambda a: linalg.det(a) / 3**8,  # of size 1: its gradient is too large for float16
    "eigvalsh": linalg.eigvalsh,
    "svdvals": lambda a: linalg.svd(a, compute_uv=False),
    "qr": lambda a: linalg.qr(a)[1],
    "pinv": linalg.pinv,
    "norm": linalg.norm,
    "matrix_power": lambda a: linalg.matrix_power(a, 2),
    "expm": lambda a: jax.scipy.linalg.expm(a / 8),
    "cho_solve": lambda a: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(a), X.T),
    "lu": lambda a: jax.scipy.linalg.lu(a)[2],
    "triangular": lambda a: jax.scipy.linalg.solve_triangular(a, X.T),
    "cg": lambda a: jax.scipy.sparse.linalg.cg(lambda v: a @ v, X[0])[0],
}


@pytest.mark.parametrize("name", LINALG)
def test_linalg(name):
    fun = lambda w: LINALG[name](w @ w.T + SPD)  # noqa: E731
    # Two matmuls and a sum, by 3; products inside, as in expm, pinv and the power, round too.
    check(fun, W, roundings=3 * (MATMUL + 1) + 6, float32_matmuls=None)


FFT = {
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "rfft": lambda x: jnp.fft.rfft(x).real,
    "irfft": lambda x: jnp.fft.irfft(jnp.fft.rfft(x)),
    "fft2": lambda x: jnp.fft.fft2(x).imag,
    "dct": lambda x: jax.scipy.fft.dct(x),
    "stft": lambda x: jnp.abs(jax.scipy.signal.stft(x.reshape(-1), nperseg=8)[2]) ** 2,
    "convolve": lambda x: jax.scipy.signal.convolve(x, x),
    "fftconvolve": lambda x: jax.scipy.signal.fftconvolve(x, x),
}


@pytest.mark.parametrize("name", FFT)
def test_fft(name):
    check(behind_matmul(FFT[name]), W, roundings=MATMUL + 4)


SCIPY = {
    "betaln": lambda x: special.betaln(x, x),
    "digamma": special.digamma,
    "entr": special.entr,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": lambda x: special.erfinv(x - 0.5),
    "gammainc": lambda x: special.gammainc(2.0, x),
    "gammaln": special.gammaln,
    "i0": special.i0,
    "i1e": special.i1e,
    "log_ndtr": special.log_ndtr,
    "logit": special.logit,
    "logsumexp": special.logsumexp,
    "ndtri": special.ndtri,
    "polygamma": lambda x: special.polygamma(1, x + 1),
    "xlog1py": lambda x: special.xlog1py(x, x),
    "xlogy": lambda x: special.xlogy(x, x),
    "zeta": lambda x: special.zeta(x + 2, 1.0),
    "beta.logpdf": lambda x: stats.beta.logpdf(x, 2.0, 3.0),
    "gamma.logpdf": lambda x: stats.gamma.logpdf(x, 2.0),
    "laplace.cdf": stats.laplace.cdf,
    "multivariate_normal": lambda x: stats.multivariate_normal.logpdf(x, jnp.zeros(8), jnp.eye(8)),
    "norm.logpdf": stats.norm.logpdf,
    "norm.ppf": stats.norm.ppf,
    "t.logpdf": lambda x: stats.t.logpdf(x, 3.0),
    "map_coordinates": lambda x: jax.scipy.ndimage.map_coordinates(
        X, [x[0] * 2, x[1] * 4], order=1
    ),
    "resize": lambda x: jax.image.resize(x, (8, 12), "cubic"),
    "trapezoid": jax.scipy.integrate.trapezoid,
    "interp": lambda x: jnp.interp(x[0], jnp.linspace(0, 1, 8), W[0]),
}


@pytest.mark.parametrize("name", SCIPY)
def test_scipy(name):
    """In (0.05, 0.95); the sigmoid, a product, a sum; 8 for a condition number such as logit's."""
    fun = lambda x: SCIPY[name](unit(x))  # noqa: E731
    with jax.numpy_rank_promotion("allow"):  # multivariate_normal
        # An image is resized with precision=HIGHEST.
        full = None if name == "resize" else 0
        check(behind_matmul(fun), W, roundings=MATMUL + 3 * 8, float32_matmuls=full)


# Kernels and control flow.


def test_pallas_in_interpret_mode():
    """A kernel is compiled for its dtypes: it gets them, and what is around it is narrowed."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.maximum(x_ref[...], 0.0) * y_ref[...]

    like = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    call = pl.pallas_call(kernel, out_shape=like, interpret=True)

    @jax.custom_vjp
    def gated(x, y):
        return call(x, y)

    def backward(saved, g):
        x, y = saved
        return jnp.where(x > 0, g * y, 0.0), call(x, g)

    gated.defvjp(lambda x, y: (gated(x, y), (x, y)), backward)
    check(lambda w: gated(X @ w, X) @ w, W, roundings=2 * MATMUL + 1)


def flash_attention(q, k, v, block=4):
    """[T, D] each, by blocks of keys with a running maximum and sum, and a rule of its own."""

    def forward(q, k, v):
        blocks = (k.reshape(-1, block, k.shape[-1]), v.reshape(-1, block, v.shape[-1]))

        def body(carry, kv):
            top, total, acc = carry
            k, v = kv
            scores = q @ k.T
            new = jnp.maximum(top, scores.max(-1, keepdims=True))
            p, shrink = jnp.exp(scores - new), jnp.exp(top - new)
            return (new, total * shrink + p.sum(-1, keepdims=True), acc * shrink + p @ v), None

        start = (jnp.full((len(q), 1), -jnp.inf), jnp.zeros((len(q), 1)), jnp.zeros_like(q))
        (top, total, acc), _ = lax.scan(body, start, blocks)
        return acc / total, top + jnp.log(total)

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def attend_forward(q, k, v):
        out, logsum = forward(q, k, v)
        return out, (q, k, v, out, logsum)

    def attend_backward(saved, g):
        q, k, v, out, logsum = saved
        p = jnp.exp(q @ k.T - logsum)
        ds = p * (g @ v.T - jnp.sum(g * out, -1, keepdims=True))
        return ds @ k, ds.T @ q, p.T @ g

    attend.defvjp(attend_forward, attend_backward)
    return attend(q, k, v)


def test_custom_vjp_flash_attention():
    x = normal(2, 8, 8)

    def fun(ws):
        q, k, v = (x @ w for w in ws)
        return flash_attention(q / 8**0.5, k, v)

    # Projections, the scale, scores of size 3, p cast, its product with v, 2 blocks.
    check(fun, [W, W[::-1], W.T], roundings=MATMUL + 1 + 3 * 2 + 2 * 2)


def test_ode_by_scan():
    """Runge-Kutta, 8 steps: the state y adds terms that read it, four matmuls and tanhs a step."""

    def fun(w):
        f = lambda y: jnp.tanh(y @ w) - 0.1 * y  # noqa: E731

        def step(y, _):
            h = 0.1
            a = f(y)
            b = f(y + h / 2 * a)
            c = f(y + h / 2 * b)
            return y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c)), None

        return lax.scan(step, X, length=8)[0]

    # Per step of 0.1: f rounds MATMUL + 3 times, by h; the state itself rounds once or twice.
    check(fun, W, roundings=8 * 2 + MATMUL + 3)


def test_odeint():
    from jax.experimental.ode import odeint

    fun = lambda w: odeint(lambda y, t: jnp.tanh(w @ y) - y, X[0], jnp.linspace(0.0, 1.0, 3))  # noqa: E731
    # Adaptive steps: f rounds MATMUL + 2 times, the state integrates it over a time of 1.
    # It solves under default_matmul_precision("highest"), which is obeyed.
    check(fun, W, roundings=2 * (MATMUL + 2), float32_matmuls=None)


def test_graph_network_by_segment_sum():
    """Two rounds of messages: dense, gather, dense, sum by receiver, mean, residual."""
    senders, receivers = jnp.array([0, 1, 2, 3, 0, 2]), jnp.array([1, 2, 3, 0, 2, 0])

    def fun(ws):
        h = X
        for w_message, w_update in ws:
            messages = jax.nn.relu((h @ w_message)[senders] + h[receivers])
            total = jax.ops.segment_sum(messages, receivers, 4)
            count = jax.ops.segment_sum(jnp.ones(6), receivers, 4)
            h = h + jnp.tanh((total / count[:, None]) @ w_update)
        weights = jax.nn.softmax(h.sum(-1))
        return weights @ h, jax.ops.segment_max(h, jnp.array([0, 0, 1, 1]), 2)

    check(fun, [(W, W.T), (W[::-1], W)], roundings=2 * (2 * MATMUL + 5) + MATMUL)


def test_associative_scan_state_space():
    """A linear recurrence, by lax.associative_scan in log2(8) = 3 rounds of product and sum."""

    def fun(ws):
        x = X.T @ jnp.eye(4, 8)
        gate, value = jax.nn.sigmoid(x @ ws[0]), x @ ws[1]
        combine = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])  # noqa: E731
        return lax.associative_scan(combine, (gate, value))[1] @ ws[0]

    check(fun, [W, W.T], roundings=2 * MATMUL + 1 + 3 * 2)


def test_training_loop_inside():
    """Gradients and Adam inside of what is autocast, differentiated again."""

    def fun(w):
        tx = optax.adam(1e-2)

        def step(carry, _):
            p, state = carry
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(X @ p) - 1.0) ** 2))(p)
            updates, state = tx.update(grads, state)
            return (optax.apply_updates(p, updates), state), loss

        return lax.scan(step, (w, tx.init(w)), length=5)[1]

    # Losses of size 1 after at most 5 updates of 1e-2: the forward pass alone rounds.
    check(fun, W, roundings=MATMUL + 4)


@functools.cache
def beta_schedule():
    return np.linspace(1e-4, 0.02, 50, dtype=np.float32)


def test_denoising_diffusion_by_fori_loop():
    """50 steps x <- (x - b net(x)) / sqrt(1 - b) + noise: an input carry, through a matmul."""
    betas = jnp.asarray(beta_schedule())

    def fun(w):
        def body(k, x):
            beta = betas[k]
            noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), k), x.shape)
            return (x - beta * jnp.tanh(x @ w)) / jnp.sqrt(1 - beta) + 0.01 * noise

        return lax.fori_loop(0, 50, body, X)

    # The carry reads itself through a matmul: it is rounded by difference, quotient and sum.
    check(fun, W, roundings=50 * 3 + MATMUL)
