"""Planted faults: each is found at its line, and the remedy is one that was tried out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import F16, at, fault_of, line_of, ones
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxamp


def test_exp_overflows_where_a_rule_allows_it():
    def loss(w, x):
        with jax.named_scope("gate"):
            y = x @ w
            y = jnp.exp(y)  # here
        return jnp.mean((y * 1e-3) @ w)

    policy = jaxamp.get_policy(F16).replace(rules={"exp": "follow"})
    args = ones(4, 4), ones(2, 4, value=3.0)
    fault = fault_of(loss, *args, policy=policy)
    assert at(fault, loss)
    assert (fault.kind, fault.primitive, fault.phase) == ("overflow", "exp", "forward")
    assert fault.scope == "gate" and not fault.in_float32
    assert fault.inputs == (("float16", 12.0, 12.0),)
    assert fault.remedy.setting == "rules=exp:full"
    repaired = policy.replace(rules={"exp": "full"})
    assert jaxamp.diagnose(loss, repaired)(*args).fault is None


def test_logits_over_65504_and_full_repairs_it():
    def loss(w, x):
        with jax.named_scope("body"):
            h = jnp.tanh(x @ w["body"])
        with jax.named_scope("head"):
            z = h @ w["head"]  # here
            z = z * 2
            z = z @ w["last"]
        return jnp.mean(jax.nn.logsumexp(z, axis=-1))

    w = {"body": ones(4, 4), "head": ones(4, 4, value=3e4), "last": ones(4, 4, value=1e-3)}
    fault = fault_of(loss, w, ones(2, 4))
    assert at(fault, loss)
    assert (fault.kind, fault.primitive, fault.scope) == ("overflow", "dot_general", "head")
    assert fault.remedy.setting == "full=head" and "finite" in fault.remedy.checked
    repaired = jaxamp.diagnose(loss, f"{F16},full=head")(w, ones(2, 4))
    assert repaired.fault is None and np.isfinite(repaired.loss)


def test_root_of_a_tiny_variance():
    def loss(w, x):
        y = (x @ w).astype(jnp.float16)
        with jax.named_scope("norm"):
            square = y * y  # lost
            variance = square.mean(-1, keepdims=True)
            y = y * lax.rsqrt(variance)  # here
        return jnp.mean(y.astype(jnp.float32) ** 2)

    fault = fault_of(loss, ones(4, 4), ones(2, 4, value=1e-5))
    assert at(fault, loss) and fault.primitive == "rsqrt"
    assert fault.kind == "division by zero" and not fault.in_float32
    assert fault.lost_at.startswith(line_of(loss, "lost"))
    assert "casts to 16 bits" in fault.remedy.advice
    assert "finite" in fault.remedy.checked


def test_an_eps_that_float16_does_not_hold():
    def loss(w, x):
        y = (x @ w).astype(jnp.float16)
        y = y - y.mean(-1, keepdims=True)
        variance = (y * y).mean(-1, keepdims=True) + 1e-8  # eps
        y = y * lax.rsqrt(variance)  # here
        return jnp.mean(y.astype(jnp.float32))

    fault = fault_of(loss, ones(4, 4), ones(2, 4))
    assert at(fault, loss) and fault.kind == "division by zero"
    assert line_of(loss, "eps") in fault.remedy.advice
    assert not fault.in_float32
    assert "need float32" in fault.remedy.advice and "finite" in fault.remedy.checked
    assert "in float32: finite with the constant that was meant" in str(fault)


def test_a_mask_of_minus_1e9_cast_by_hand():
    def loss(w, x, mask):
        scores = (x @ w).astype(jnp.float16)
        low = jnp.float32(-1e9) * jnp.ones_like(x)
        low = low.astype(jnp.float16)  # here
        scores = jnp.where(mask, scores, low)
        return jnp.mean(jax.nn.softmax(scores, axis=-1).astype(jnp.float32) ** 2)

    mask = jnp.zeros((2, 4), bool)  # all of a row: with one that is seen, -inf does no harm
    fault = fault_of(loss, ones(4, 4), ones(2, 4), mask)
    assert at(fault, loss)
    assert (fault.kind, fault.primitive) == ("overflow", "convert_element_type")
    assert line_of(loss, "here") in fault.remedy.advice and not fault.in_float32
    assert jaxamp.diagnose(loss, F16)(ones(4, 4), ones(2, 4), mask.at[:, 0].set(True)).fault is None


def test_a_row_that_is_masked_whole_with_an_infinity_on_purpose():
    def loss(w, x, mask):
        scores = jnp.where(mask, x @ w, -jnp.inf)
        p = jax.nn.softmax(scores, axis=-1)  # here
        return jnp.mean(p**2)

    mask = jnp.ones((2, 4), bool).at[1].set(False)
    fault = fault_of(loss, ones(4, 4), ones(2, 4), mask)
    assert at(fault, loss) and (fault.kind, fault.primitive) == ("nan", "sub")
    assert fault.in_float32 and "float32 fails too" in fault.remedy.advice


def test_an_overflow_beside_an_infinity_on_purpose():
    def loss(w, x):
        scores = (x @ w).astype(jnp.float16)
        scores = jnp.where(jnp.arange(4) == 0, -jnp.inf, scores)
        scores = scores * 4096  # here
        return jnp.mean(jax.nn.softmax(scores, axis=-1).astype(jnp.float32) ** 2)

    fault = fault_of(loss, ones(4, 4), ones(2, 4, value=10.0))
    assert at(fault, loss) and (fault.kind, fault.primitive) == ("overflow", "mul")


def test_a_mask_that_is_an_argument_is_no_fault():
    def loss(w, x, bias):
        return jnp.mean(jax.nn.softmax(x @ w + bias, axis=-1) ** 2)

    bias = jnp.zeros((2, 4)).at[:, 1].set(-jnp.inf)
    assert jaxamp.diagnose(loss, F16)(ones(4, 4), ones(2, 4), bias).fault is None


def test_log_of_a_probability_that_underflowed():
    def loss(w, x):
        p = jax.nn.softmax(x @ w)
        p = p.astype(jnp.float16)  # lost
        logs = jnp.log(p)  # here
        return -jnp.mean(logs.astype(jnp.float32))

    fault = fault_of(loss, jnp.eye(4) * 40, ones(1, 4) * jnp.array([[1.0, 0.0, 0.0, 0.0]]))
    assert at(fault, loss) and (fault.kind, fault.primitive) == ("division by zero", "log")
    assert fault.lost_at.startswith(line_of(loss, "lost"))
    assert line_of(loss, "lost") in fault.remedy.advice


def test_a_sum_in_a_float16_carry_goes_bad_in_a_round():
    def loss(w, x):
        y = x @ w

        def add(total, row):
            total = total + row.astype(jnp.float16) * 4096  # here
            return total, None

        total, _ = lax.scan(add, jnp.zeros(4, jnp.float16), y)
        return jnp.mean(total.astype(jnp.float32))

    fault = fault_of(loss, ones(4, 4), ones(9, 4))
    assert at(fault, loss) and (fault.kind, fault.primitive) == ("overflow", "add")
    assert fault.rounds == (3,)  # 4 * 4096 a round
    assert "casts to 16 bits" in fault.remedy.advice


def test_a_loss_scale_that_is_too_high():
    def loss(w, x):
        h = x @ w["one"]
        h = jnp.tanh(h)
        h = h @ w["two"]
        return jnp.mean(jnp.sum(h**2, -1))

    args = {"one": jnp.eye(4), "two": jnp.eye(4)}, ones(2, 4)
    found = jaxamp.diagnose(loss, F16)(*args, loss_scale=2.0**20)
    fault = found.fault
    assert (fault.kind, fault.phase) == ("overflow", "backward") and not fault.in_float32
    name, value = fault.remedy.setting.split("=")
    assert name == "loss_scale" and float(value) == found.scale.loss_scale < 2.0**20
    assert jaxamp.diagnose(loss, F16)(*args, loss_scale=float(value)).fault is None
    highest = found.scale.loss_scale * 2.0**found.scale.margin_log2
    assert jaxamp.diagnose(loss, F16)(*args, loss_scale=highest).fault is None
    assert jaxamp.diagnose(loss, F16)(*args, loss_scale=highest * 2).fault is not None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_that_is_not_finite_is_to_blame(value):
    def loss(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    batch = {"x": ones(2, 4), "y": ones(2, 4)}
    for name in batch:  # an Inf of x becomes NaN in the product, which is still not to blame
        bad = batch | {name: batch[name].at[1, 2].set(value)}
        fault = fault_of(loss, jnp.eye(4), bad)
        assert fault.kind == "argument" and f"batch/{name}" in fault.remedy.advice
        assert "float32 is not finite either" in fault.remedy.checked and fault.in_float32


def test_log_of_a_negative_number_fails_in_float32_too():
    def loss(w, x):
        y = x @ w
        return jnp.mean(jnp.log(-y))  # here

    fault = fault_of(loss, ones(4, 4), ones(2, 4))
    assert at(fault, loss) and (fault.kind, fault.primitive) == ("nan", "log")
    assert fault.in_float32 and "float32 fails too" in fault.remedy.advice
    assert line_of(loss, "here") in fault.remedy.checked


def test_a_gradient_that_is_nan_where_the_loss_is_finite():
    def loss(w, x):
        y = x @ w
        root = jnp.sqrt(y)  # here
        return jnp.mean(jnp.where(y > 0, root, 0.0))

    found = jaxamp.diagnose(loss, F16)(jnp.zeros((4, 4)), ones(2, 4))
    fault = found.fault
    assert np.isfinite(found.loss) and at(fault, loss) and fault.in_float32


def test_a_rule_of_the_users_that_gives_nan():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(x, g):
        return (g * jnp.log(x - 5),)  # here

    double.defvjp(lambda x: (double(x), x), backward)

    def loss(w, x):
        y = x @ w
        return jnp.mean(double(y))

    fault = fault_of(loss, ones(4, 4), ones(2, 4))
    assert at(fault, backward)
    assert (fault.kind, fault.primitive, fault.phase) == ("nan", "log", "backward")
    assert "float32 fails too" in fault.remedy.advice


def test_a_rule_of_the_users_that_overflows_in_float16():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    def backward(_, g):
        return ((g.astype(jnp.float16) * 60000 * 8).astype(g.dtype) / 480000,)  # here

    double.defvjp(lambda x: (double(x), None), backward)

    def loss(w, x):
        y = x @ w
        return jnp.sum(double(y))

    fault = fault_of(loss, ones(4, 4), ones(2, 4))
    assert at(fault, backward)
    assert (fault.kind, fault.primitive, fault.phase) == ("overflow", "mul", "backward")
    assert not fault.in_float32 and "casts to 16 bits" in fault.remedy.advice


def test_inside_jit_and_checkpoint():
    @jax.jit
    def head(w, y):
        z = y @ w  # here
        return z * 4

    @jax.checkpoint
    def block(w, x):
        with jax.named_scope("block"):
            return head(w, head(w, x)) @ w

    fault = fault_of(lambda w, x: jnp.mean(block(w, x)), ones(4, 4, value=40.0), ones(2, 4))
    assert at(fault, head) and fault.kind == "overflow" and fault.scope == "block"
    assert fault.remedy.setting == "full=block"


def test_a_pole_is_one_of_the_numbers_that_went_bad():
    def divided(w, x):
        y = jnp.where(jnp.arange(4)[None] == 3, jnp.inf, x @ w).astype(jnp.float16)
        y = y / jnp.float16([[1e-7, 1, 1, 0]])  # here
        return jnp.max(y.astype(jnp.float32)[:, :3])

    fault = fault_of(divided, ones(4, 4), ones(2, 4))
    assert at(fault, divided) and (fault.kind, fault.primitive) == ("overflow", "div")

    def powered(w, x):
        low = (x @ w).astype(jnp.float16) * jnp.float16([[100, 0, 1, 1]])
        return jnp.sum((low ** jnp.float16([[9, 2, 1, 1]])).astype(jnp.float32))

    fault = fault_of(powered, ones(4, 4), ones(2, 4))
    assert (fault.kind, fault.primitive) == ("overflow", "pow")


def test_a_program_that_is_not_entered_has_its_float32_by_policy():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        def local(w, x):
            return lax.psum(jnp.sum(jnp.tanh((x @ w) @ w @ w)), "data")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return mapped(w, x)  # here

    w = 300 * jnp.float32([[1, -1], [-1, 1]])
    fault = fault_of(loss, w, ones(2, 2, value=1.0).at[:, 1].set(-1.0))
    assert at(fault, loss) and fault.primitive == "shard_map"
    assert not fault.in_float32 and fault.remedy.setting == "full=w"


def test_a_line_in_a_library_is_that_of_its_caller():
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(linear)

    def loss(state, x):
        linear = nnx.merge(graphdef, state)
        y = linear(x)  # here
        return jnp.mean(linear(y) ** 2)

    fault = fault_of(loss, jax.tree.map(lambda w: jnp.full_like(w, 3e4), state), ones(2, 4))
    assert at(fault, loss) and fault.kind == "overflow"


def test_a_loss_that_is_infinite_by_a_constant_or_an_argument():
    fault = fault_of(lambda w: jnp.max(w) + jnp.inf, ones(4))
    assert fault.in_float32
    fault = fault_of(lambda w, x: jnp.max(w) + x, ones(4), jnp.float32(np.inf))
    assert fault.kind == "argument" and "x is not finite" in fault.remedy.advice


def test_cuts_of_aux_do_not_alarm():
    def loss(w):
        return jnp.mean(w), {"log": jnp.log(w - 1)}

    assert jaxamp.diagnose(loss, F16, has_aux=True)(ones(4)).fault is None


@pytest.mark.parametrize(
    "fun,args,error",
    [
        (lambda w: w * 2, (ones(2),), r"floating scalar, got float32\[2\]"),
        (lambda w: jnp.sum(w > 0), (ones(2),), r"floating scalar, got int32\[\]"),
        (lambda w: None, (ones(2),), "floating scalar, got NoneType"),
        (lambda w: jnp.sum(w), (jnp.arange(2),), "cannot differentiate <lambda>: grad requires"),
        (lambda w: lax.while_loop(lambda x: x < 3, lambda x: x * 2, w), (1.0,), "cannot differ"),
    ],
)
def test_errors_are_one_line(fun, args, error):
    with pytest.raises(ValueError, match=error) as raised:
        jaxamp.diagnose(fun, F16)(*args)
    assert len(str(raised.value).splitlines()) == 1


def test_under_jit_is_one_line():
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda w: jaxamp.diagnose(lambda w: jnp.sum(w), F16)(w).loss)(ones(2))


def test_errors_of_the_function_are_its_own():
    def loss(w):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        jaxamp.diagnose(loss, F16)(ones(2))
    with pytest.raises(TypeError):
        jaxamp.diagnose(lambda w: jnp.sum(w @ jnp.ones(7)), F16)(ones(4, 4))
    with pytest.raises(ValueError, match="matches no"):
        jaxamp.diagnose(lambda w: jnp.sum(w), f"{F16},full=nope")(ones(4, 4))
    with pytest.raises(TypeError):
        jaxamp.diagnose(3, F16)
