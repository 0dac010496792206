"""Healthy models in bfloat16 and float16: no fault, a scale that can be used, a small error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import planted_models as planted
import pytest
from flax import nnx
from jax import lax
from zoo import normal

import jaxamp


@pytest.fixture(autouse=True)
def rank_promotion():
    with jax.numpy_rank_promotion("allow"):  # Flax's
        yield


def of_module(net, loss):
    """`loss(net, *args)` as a function of the parameters."""
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    rest = nnx.to_pure_dict(rest)
    return (
        lambda params, *args: loss(nnx.merge(graphdef, params, rest), *args),
        nnx.to_pure_dict(params),
    )


def linear_regression(patch):
    loss = lambda w, x, y: jnp.mean((x @ w["slope"] + w["bias"] - y) ** 2)  # noqa: E731
    return loss, {"slope": normal(0, 6), "bias": jnp.zeros(())}, normal(1, 8, 6), normal(2, 8)


def mlp(patch):
    net = nnx.Sequential(
        nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.gelu, nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    )
    labels = jnp.arange(6) % 4
    return *of_module(net, lambda net, x: jnp.mean(planted.cross_entropy(net(x), labels))), normal(
        2, 6, 8
    )


def resnet(patch):
    case = planted.resnet(patch)
    return case.loss, case.params, *case.args


def transformer(patch):
    case = planted.transformer(patch)
    return case.loss, case.params, *case.args


def attention(patch):
    net = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    mask = jnp.tril(jnp.ones((1, 1, 5, 5), bool))
    return *of_module(net, lambda net, x: jnp.mean(net(x, mask=mask) ** 2)), normal(1, 2, 5, 8)


def lstm(patch):
    net = nnx.RNN(nnx.LSTMCell(8, 8, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    return *of_module(net, lambda net, x: jnp.mean(net(x)[:, -1] ** 2)), normal(2, 2, 5, 8)


def router(patch):
    """Each token by the best two of four experts."""

    def loss(w, x):
        gates = jax.nn.softmax(x @ w["router"])
        best, at = lax.top_k(gates, 2)
        chosen = jnp.sum(jax.nn.one_hot(at, 4) * best[..., None], -2)
        outs = jnp.einsum("td,edf->tef", x, w["experts"])
        balance = jnp.sum(jnp.mean(gates, 0) * jnp.mean(chosen > 0, 0))
        return jnp.mean(jnp.einsum("tef,te->tf", jax.nn.relu(outs), chosen) ** 2) + 0.01 * balance

    # No near ties: where rounding flips a choice, the gradient is another one.
    return loss, {"router": normal(0, 8, 4), "experts": normal(1, 4, 8, 8)}, normal(4, 6, 8)


def state_space(patch):
    """A selective state space, by an associative scan."""

    def loss(w, x):
        step = jax.nn.softplus(x @ w["step"])
        decay = jnp.exp(-step * jnp.exp(w["decay"]))
        join = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, state = lax.associative_scan(join, (decay, step * (x @ w["in"])), axis=1)
        return jnp.mean((jax.nn.silu(x @ w["gate"]) * state) ** 2)

    w = {name: normal(k, 8, 8) / 3 for k, name in enumerate(("step", "in", "gate"))}
    return loss, w | {"decay": jnp.zeros(8)}, normal(5, 2, 9, 8)


def variational(patch):
    def loss(w, x, key):
        mean, log_var = jnp.split(jax.nn.tanh(x @ w["encode"]), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(key, mean.shape)
        logits = z @ w["decode"]
        target = (x > 0).astype(x.dtype)
        nll = jnp.sum(jnp.logaddexp(0.0, logits) - target * logits, -1)
        kl = -0.5 * jnp.sum(1 + log_var - mean**2 - jnp.exp(log_var), -1)
        return jnp.mean(nll + kl)

    w = {"encode": normal(0, 8, 8), "decode": normal(1, 4, 8)}
    return loss, w, normal(2, 6, 8), jax.random.key(3)


def adversarial(patch):
    """The discriminator's hinge loss."""

    def loss(w, real, fake):
        judge = lambda x: jax.nn.leaky_relu(x @ w["hidden"]) @ w["out"]  # noqa: E731
        return jnp.mean(jax.nn.relu(1 - judge(real))) + jnp.mean(jax.nn.relu(1 + judge(fake)))

    return loss, {"hidden": normal(0, 8, 8), "out": normal(1, 8, 1)}, *normal(2, 2, 6, 8)


def contrastive(patch):
    """Each row against all others; itself is masked by an infinity."""

    def loss(w, x):
        z = x @ w
        z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
        logits = jnp.where(jnp.eye(6, dtype=bool), -jnp.inf, z @ z.T / 0.1)
        return jnp.mean(planted.cross_entropy(logits, jnp.arange(6) ^ 1))

    return loss, normal(0, 8, 8), normal(1, 6, 8)


_FAST = [linear_regression, mlp]
_SLOW = [resnet, transformer, attention, lstm, router, state_space, variational, adversarial]
_SLOW += [contrastive]


@pytest.mark.parametrize("policy", ["compute=bf16", "compute=f16"])
@pytest.mark.parametrize(
    "make", [*_FAST, *(pytest.param(make, marks=pytest.mark.slow) for make in _SLOW)]
)
def test_no_alarm(make, policy, monkeypatch):
    loss, params, *args = make(monkeypatch)
    scale = 256.0 if policy == "compute=f16" else None
    grads = jax.jit(jax.grad(loss))(params, *args)
    adam = optax.adam(1e-3)
    updates, _ = adam.update(grads, adam.init(params))
    found = jaxamp.diagnose(loss, policy)(params, *args, loss_scale=scale, updates=updates)
    assert found.fault is None and np.isfinite(found.loss)
    assert "far from" not in str(found)
    # Adam's first updates are 1e-3 or zero: far above half an ulp of a float32 weight.
    assert all(one.share < 0.01 for one in found.frozen)
    # At most a hundred roundings in a row, in random directions: sqrt(100) of them.
    assert 0 <= found.error < 10 * (2**-8 if policy == "compute=bf16" else 2**-11)
    if found.scale is not None and policy == "compute=f16":
        best = found.scale.loss_scale
        again = jaxamp.diagnose(loss, policy)(params, *args, loss_scale=best)
        assert again.fault is None and again.scale.margin_log2 >= 0
