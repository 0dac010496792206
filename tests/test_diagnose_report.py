"""Healthy functions raise no alarm; what the report says of ranges, errors and frozen weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxamp
from jaxamp import jaxprs, operate, sensitivity
from train import model
from train.config import ModelConfig


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def mlp():
    def loss(w, x):
        with jax.named_scope("body"):
            h = jax.nn.gelu(x @ w["body"])
        with jax.named_scope("head"):
            return jnp.mean(jax.nn.logsumexp(h @ w["head"], axis=-1))

    return loss, ({"body": normal(0, 8, 8), "head": normal(1, 8, 5)}, normal(2, 4, 8))


def transformer():
    config = ModelConfig(n_layers=2, d_model=16, n_heads=2, remat="full")
    graphdef, params = model.create(config, 32, jax.random.key(0))

    def loss(params, tokens):
        logits = model.apply(graphdef, params, tokens[:, :-1]).astype(jnp.float32)
        losses = jax.nn.logsumexp(logits, -1)
        losses -= jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(losses)

    return loss, (params, jax.random.randint(jax.random.key(1), (2, 9), 0, 32))


def convolution():
    def loss(w, x):
        y = lax.conv(x, w["conv"], (1, 1), "SAME")
        y = jax.nn.relu((y - y.mean((0, 2, 3), keepdims=True)) * lax.rsqrt(y.var() + 1e-5))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return jnp.mean((y.reshape(2, -1) @ w["out"]) ** 2)

    return loss, ({"conv": normal(0, 3, 2, 3, 3), "out": normal(1, 12, 1)}, normal(2, 2, 2, 4, 4))


def masked_softmax():
    def loss(w, x):
        scores = jnp.where(jnp.tri(4, dtype=bool), x @ w @ x.T, -jnp.inf)
        return jnp.mean((jax.nn.softmax(scores, axis=-1) @ x) ** 2)

    return loss, (normal(0, 4, 4), normal(1, 4, 4))


def lstm():
    def loss(w, x):
        def turn(state, x):
            h, c = state
            f, i, o, g = jnp.split(x @ w["in"] + h @ w["state"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        (h, _), _ = lax.scan(turn, (jnp.zeros((2, 4)), jnp.zeros((2, 4))), x)
        return jnp.mean(h**2)

    return loss, ({"in": normal(0, 3, 16), "state": normal(1, 4, 16)}, normal(2, 5, 2, 3))


def branches():
    def loss(w, x):
        y = lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: jnp.log(x) @ w, x)
        y = lax.fori_loop(0, 3, lambda _, y: y * 2, y)
        return jnp.mean(jnp.where(y > 0, y, 0.1 * y))

    return loss, (normal(0, 4, 4), jnp.abs(normal(1, 2, 4)))


_SMALL = [mlp, convolution, masked_softmax, lstm, branches]


@pytest.mark.parametrize(
    "make,policy",
    [(make, "compute=f16") for make in [*_SMALL, transformer]]
    + [(make, "compute=bf16") for make in _SMALL],
)
def test_healthy_functions_raise_no_alarm(make, policy):
    fun, args = make()
    found = jaxamp.diagnose(fun, policy)(*args, loss_scale=8.0)
    assert found.fault is None and "all gradients are finite" in str(found)
    # At most forty roundings in a row, each of u at most, in random directions: sqrt(40) u.
    u = 2**-11 if policy == "compute=f16" else 2**-8
    assert 0 < found.error < 6.3 * u
    assert found.contributions[0].error_without < found.error


@pytest.mark.parametrize("make", [mlp, lstm, branches])
def test_loss_and_error_are_those_of_the_compiled_step(make):
    fun, args = make()
    found = jaxamp.diagnose(fun, "compute=bf16")(*args, loss_scale=8.0)
    options = {"xla_allow_excess_precision": False}
    step = jax.jit(jaxamp.value_and_grad(fun, "compute=bf16"), compiler_options=options)
    loss, grads = step(*args)
    np.testing.assert_allclose(found.loss, loss, rtol=1e-6)  # float32 sums in another order
    exact = jax.tree.leaves(jax.jit(jax.grad(fun))(*args))
    pairs = list(zip(jax.tree.leaves(grads), exact, strict=True))
    error = np.sqrt(sum(np.sum((a - b) ** 2) for a, b in pairs))
    error /= np.sqrt(sum(np.sum(b**2) for _, b in pairs))
    # After a sum in another order one number of the hundred or so may be rounded the other way.
    np.testing.assert_allclose(found.error, error, rtol=0.05)
    json.dumps(found.to_dict(), allow_nan=False)


def test_float32_has_no_error():
    fun, args = masked_softmax()
    found = jaxamp.diagnose(fun, "compute=f32")(*args)
    assert found.fault is None and found.error == 0 and found.scale is None


def test_the_scope_that_makes_the_error_comes_first():
    def loss(w, x):
        with jax.named_scope("fine"):
            x = x @ w["fine"]  # exact: an identity, and numbers that bfloat16 holds
        with jax.named_scope("coarse"):
            x = x @ w["coarse"]
        return jnp.mean(x**2)

    x = jnp.round(4 * normal(0, 4, 8)) / 4
    w = {"fine": jnp.eye(8), "coarse": normal(1, 8, 8)}
    found = jaxamp.diagnose(loss, "compute=bf16")(w, x)
    assert found.contributions[0].scope == "coarse"
    assert found.contributions[0].removed > 0.5  # what stays: "fine" rounds the way back too
    full = jaxamp.diagnose(loss, "compute=bf16,full=coarse")(w, x)
    np.testing.assert_allclose(full.error, found.contributions[0].error_without, rtol=1e-6)
    lines = [line for line in str(found).splitlines() if line.startswith("coarse")]
    one = found.contributions[0]
    shown = [f"{one.error_without:.3g}", f"{one.removed:.0%}", f"{full.loss:.6g}"]
    assert [line.split()[1:] for line in lines] == [shown]


def test_without_scopes_lines_are_ranked():
    def loss(w, x):
        h = jnp.tanh(x @ w)
        return jnp.mean((h @ w) ** 2)

    found = jaxamp.diagnose(loss, "compute=bf16")(normal(0, 8, 8), normal(1, 4, 8))
    assert all("test_diagnose_report.py" in one.scope for one in found.contributions)


def test_ranges_of_weights_activations_and_gradients():
    def loss(w, x):
        with jax.named_scope("layer"):
            y = x @ w["kernel"]
        return jnp.sum(y * 2.0**-30) + jnp.sum(y @ w["small"]) * 0

    w = {"kernel": jnp.full((4, 4), 0.5), "small": jnp.float32([[2.0**-30] * 4] * 4)}
    found = jaxamp.diagnose(loss, "compute=f16")(w, jnp.full((2, 4), 8.0), loss_scale=2.0)
    named = {(t.role, t.name): t for t in found.tensors}
    kernel = named["weight", "w/kernel"].numbers
    assert kernel.exponent_range == (-1, -1) and kernel.size == 16
    assert named["weight", "w/small"].numbers.shares()["f16"]["flushed"] == 1
    dots = [t for t in found.tensors if t.name == "dot_general" and t.scope == "layer"]
    assert dots[0].role == "activation" and dots[0].numbers.exponent_range == (4, 4)
    gradient = named["gradient", "w/kernel"].numbers
    assert gradient.exponent_range == (-25, -25)  # 2 rows * 8 * 2**-30, at scale 2
    table = found.to_dict()["scopes"]
    assert {"weight", "activation", "gradient"} == {row["role"] for row in table}
    assert "what a cast would flush to zero / make subnormal" in str(found)


def test_each_use_of_a_jitted_function_has_its_own_range():
    def loss(w, x):
        for name in "abcd":  # jax.nn.relu is a jit, whose program all uses share
            with jax.named_scope(name):
                x = jax.nn.relu(x @ w)
        return jnp.mean(x)

    found = jaxamp.diagnose(loss, "compute=bf16")(4 * jnp.eye(4), jnp.ones((2, 4)))
    relus = [t for t in found.tensors if t.name == "max"]
    assert [t.scope for t in relus] == list("abcd")
    assert [t.numbers.exponent_range for t in relus] == [(2, 2), (4, 4), (6, 6), (8, 8)]


def test_gradients_that_are_float16_by_hand_are_judged_as_float16():
    def loss(w, x):
        h = (x @ w).astype(jnp.float16)
        return jnp.sum((h * h).astype(jnp.float32)) * 2.0**-26

    args = jnp.eye(4), jnp.ones((2, 4))
    found = jaxamp.diagnose(loss, "compute=bf16")(*args)
    assert found.scale == jaxamp.diagnose(loss, "compute=f16")(*args).scale
    assert found.scale.loss_scale == 4 and found.scale.flushed_now > found.scale.flushed == 0


def test_float32_matmuls_have_the_users_precision(monkeypatch):
    def loss(w, x):
        return jnp.mean((x @ w["wide"]) @ w["narrow"])

    seen, bind = [], jaxprs.bind

    def watched(eqn, operands, **changes):
        if eqn.primitive.name == "dot_general":
            seen.append({**eqn.params, **changes}["precision"])
        return bind(eqn, operands, **changes)

    w = {"wide": jnp.eye(4), "narrow": jnp.eye(4)}
    highest = (lax.Precision.HIGHEST,) * 2
    with jax.default_matmul_precision("highest"):
        monkeypatch.setattr(jaxprs, "bind", watched)
        jaxamp.diagnose(loss, "compute=f32")(w, jnp.ones((2, 4)))
    assert seen and set(seen) <= {highest, lax.Precision.HIGHEST}


def test_the_twin_has_highest_precision_whatever_the_program_has(monkeypatch):
    (eqn,) = jax.make_jaxpr(lambda x: lax.dot(x, x, precision="default"))(jnp.eye(2)).eqns
    monkeypatch.setattr(jaxprs, "bind", lambda eqn, operands, **changes: [changes["precision"]])
    assert operate.widened(eqn, [np.eye(2, dtype=np.float32)] * 2) == [lax.Precision.HIGHEST]


def test_gradients_that_vanish_and_the_scale_that_rescues_them():
    def loss(w, x):
        h = jnp.tanh(x @ w["one"])
        h = jnp.tanh(h @ w["two"]) * 2.0**-14
        return jnp.mean(jnp.sum((h @ w["three"]) ** 2, -1))

    w = {"one": normal(0, 4, 4), "two": normal(1, 4, 4), "three": normal(2, 4, 4)}
    found = jaxamp.diagnose(loss, "compute=f16")(w, normal(3, 2, 4))
    assert found.scale.flushed_now > 0.1 and found.scale.flushed < found.scale.flushed_now
    rescued = jaxamp.diagnose(loss, "compute=f16")(
        w, normal(3, 2, 4), loss_scale=found.scale.loss_scale
    )
    assert rescued.error < found.error / 4
    assert rescued.scale == found.scale._replace(flushed_now=found.scale.flushed)


def test_frozen_weights():
    def loss(w, x):
        return jnp.mean((x @ w["a"]) ** 2) + jnp.sum(w["b"])

    w = {"a": jnp.ones((4, 4), jnp.bfloat16), "b": jnp.ones((4,), jnp.bfloat16)}
    updates = {"a": jnp.full((4, 4), -(2.0**-10)), "b": jnp.float32([0, -(2.0**-10), 1, 1])}
    diagnosed = jaxamp.diagnose(loss, "params=bf16,compute=bf16")
    found = diagnosed(w, jnp.ones((2, 4)), updates=updates)
    assert [one.path for one in found.frozen] == ["w/a", "w/b"]
    assert found.frozen[0].share == 1 and found.frozen[0].dtype == "bfloat16"
    assert found.frozen[1].share == pytest.approx(1 / 3)
    assert [one.in_float32 for one in found.frozen] == [0, 0]
    assert "w/a" in str(found).rpartition("round to nothing")[2]
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), w)
    assert diagnosed(floats, jnp.ones((2, 4)), updates=updates).frozen == found.frozen
    in_float32 = jaxamp.diagnose(loss, "compute=bf16")
    assert in_float32(floats, jnp.ones((2, 4)), updates=updates).frozen == ()
    with pytest.raises(ValueError, match="updates must be a tree like"):
        in_float32(floats, jnp.ones((2, 4)), updates=updates["a"])


def test_an_update_of_a_float64_weight_is_added_in_float64():
    weight, update = np.float64([1.0, 1.0]), np.float64([1e-10, 1e-17])
    (found,) = sensitivity.frozen(weight, update, ["w"], np.dtype(np.float32))
    assert found == sensitivity.Frozen("w", "float64", 0.5, 1.0)


def test_argnums_keywords_keys_and_loss_scale_objects():
    def loss(x, w, *, key, flag, zeros):
        h = x @ w if flag else x + zeros
        return jnp.mean(h * jax.random.bernoulli(key, 0.5, h.shape))

    diagnosed = jaxamp.diagnose(loss, "compute=f16", argnums=(0, -1))
    scale = jaxamp.DynamicLossScale(2.0**10)
    found = diagnosed(
        normal(0, 2, 4),
        normal(1, 4, 4),
        key=jax.random.key(0),
        flag=True,
        zeros=jnp.zeros((2, 4)),
        loss_scale=scale,
    )
    assert found.fault is None and found.loss_scale == 1024
    assert [t.name for t in found.tensors if t.role == "weight"] == ["x", "w"]
    last = jaxamp.diagnose(lambda x, w: jnp.sum(x * w), "compute=f16", argnums=-1)
    assert [t.name for t in last(jnp.ones(2), 3.0).tensors if t.role == "weight"] == ["w"]


def test_a_sum_that_stalls_in_float16():
    """All is finite, and the gradient is what it should be: the loss alone is wrong."""

    def loss(w, x):
        def add(total, row):
            return (total + row).astype(jnp.float16), None

        rows = (x @ w).astype(jnp.float16)
        return lax.scan(add, jnp.float16(0), rows)[0].astype(jnp.float32) * 1e-3

    found = jaxamp.diagnose(loss, "compute=f16")(jnp.ones(4), jnp.full((3000, 4), 0.25))
    assert found.loss == pytest.approx(2.048) and found.loss_in_float32 == pytest.approx(3)
    assert "the loss is far from that in float32 (" in str(found).splitlines()[1]
    assert ".add) in float32 it is 3" in str(found).splitlines()[1]
    (scope,) = [one for one in found.contributions if one.loss == found.loss_in_float32]
    assert "(test_a_sum_that_stalls_in_float16.<locals>.loss.<locals>.add)" in scope.scope
    assert found.to_dict()["loss_in_float32"] == found.loss_in_float32


def test_a_gradient_far_from_that_in_float32_is_said():
    """float16 has 2056 for 2055, so that a difference of 1 becomes 2."""

    def loss(w, x, c):
        y, c = (x @ w).astype(jnp.float16), c.astype(jnp.float16)
        return 1 + jnp.sum((y * c[0] - y * c[1]).astype(jnp.float32))

    args = jnp.full((4, 4), 2.0**-10), jnp.full((2, 4), 2.0**-10), jnp.float32([2055, 2054])
    found = jaxamp.diagnose(loss, "compute=f16")(*args)
    assert found.fault is None and found.error == pytest.approx(1)
    assert "but the gradients are far from those in float32" in str(found)


@pytest.mark.parametrize("where", ["cond", "while"])
def test_a_scope_that_turns_a_branch(where):
    """Its run in float32 goes another way: what it does there is computed, not looked up."""

    def loss(w, x):
        with jax.named_scope("turns"):
            s = lax.stop_gradient(jnp.sum(x @ w))
        with jax.named_scope("after"):
            if where == "cond":
                y = lax.cond(s > 40, lambda x: jnp.sum(jnp.tanh(x @ w)), lambda x: 3.0, x)
            else:
                count = lambda k, t: (k + 1, t + jnp.where(k < 1, 40, 0.005))  # noqa: E731
                ahead = lambda c: c[1] < s  # noqa: E731
                k, _ = lax.while_loop(ahead, lambda c: count(*c), (0, jnp.float32(0)))
                y = k + jnp.sum(jnp.tanh(x @ w))
            return y + jnp.sum(jnp.square(x @ w))

    # Rounded to 10 bits each product is 40 at most, in float32 it is above.
    args = jnp.full((4, 1), 1.0), jnp.full((1, 4), 10.003)
    found = jaxamp.diagnose(loss, "compute=f16")(*args)
    honest = {
        one.scope: jaxamp.diagnose(loss, f"compute=f16,full={one.scope}")(*args)
        for one in found.contributions
    }
    assert set(honest) == {"turns", "after"}
    # `full=` casts at the borders of a scope: once more to 11 bits. The other branch is 0.5% away.
    for one in found.contributions:
        np.testing.assert_allclose(one.loss, honest[one.scope].loss, rtol=1e-3)


def test_ranges_say_what_is_not_finite():
    found = jaxamp.diagnose(lambda w, x: jnp.sum(w * x), "compute=f16")(
        jnp.ones(4), jnp.float32([1, 2, np.nan, 4])
    )
    assert found.fault.kind == "argument" and "0..2, 25% not finite" in str(found)
    assert "loss scale to use" not in str(found)  # of numbers that are none


def test_a_fault_reads_as_text():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.mean((x @ w) @ w @ w)

    found = jaxamp.diagnose(loss, "compute=f16")(jnp.full((4, 4), 100.0), jnp.ones((2, 4)))
    text = str(found)
    assert "overflow: made by dot_general, forward, scope head" in text
    assert "test_diagnose_report.py" in text and "try full=head" in text and "checked:" in text
    assert json.loads(json.dumps(found.to_dict()))["fault"]["remedy"]["setting"] == "full=head"


def test_a_scope_that_overflows_in_float32_is_plain_data():
    """Held in float32 it is not rounded down any more: the sum after it passes 65504."""

    def loss(w, x):
        with jax.named_scope("a"):
            y = (x * w).astype(jnp.float16)
            z = (y + y) + jnp.float16(15)
        return jnp.mean((z * jnp.float16(1)).astype(jnp.float32)) * 1e-4

    found = jaxamp.diagnose(loss, "compute=f16")(jnp.full((1, 1), 32759.9), jnp.ones((1, 1)))
    assert found.fault is None and found.contributions[0].loss == np.inf
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["contributions"][0]["loss"] == "inf"
