"""Twelve faults in the trainer's Transformer and in a ResNet: line, reason, a fix that works."""

import functools
import inspect

import jax
import jax.numpy as jnp
import optax
import planted_models as planted
import pytest
from flax import nnx
from jax import lax
from planted_models import line_of

import jaxamp
from train import model

F16 = jaxamp.get_policy("compute=f16")
MODELS = {"transformer": planted.transformer, "resnet": planted.resnet}

pytestmark = [
    pytest.mark.slow,
    # numpy says so of each -1e9 that JAX turns into a float16.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


@pytest.fixture(params=MODELS)
def make(request, monkeypatch):
    """`make(**places)` -> Planted."""
    with jax.numpy_rank_promotion("allow"):  # Flax's norms
        made = functools.partial(MODELS[request.param], monkeypatch)
        made.name = request.param  # pyright: ignore[reportFunctionMemberAccess]
        yield made


def diagnosed(case, policy=F16, **kwargs):
    found = jaxamp.diagnose(case.loss, policy)(case.params, *case.args, **kwargs)
    print(found.fault)
    return found


def fault_of(case, policy=F16, **kwargs):
    return diagnosed(case, policy, **kwargs).fault


def is_well(case, policy=F16, **kwargs):
    """Loss and gradients of the step itself, compiled."""
    step = jax.jit(jaxamp.value_and_grad(case.loss, policy))
    return planted.is_all_finite(step(case.params, *case.args, **kwargs))


def set_by(policy, setting):
    """The policy with a remedy's setting, as the user would write it."""
    name, value = setting.split("=", 1)
    if name == "rules":
        primitive, kind = value.split(":")
        return policy.replace(rules={**dict(policy.rules), primitive: kind})
    return jaxamp.get_policy(f"{policy},{setting}")


def test_healthy_before_anything_is_planted(make):
    case = make()
    assert fault_of(case, loss_scale=64.0) is None and is_well(case, loss_scale=64.0)


def test_exp_overflows(make):
    def swish(x):
        e = jnp.exp(8 * x)  # here
        return x * e / (1 + e)

    policy = F16.replace(rules={"exp": "follow"})
    # A BatchNorm would give the activation float32.
    case = make(activation=swish, **({} if make.name == "transformer" else {"norm": _no_norm}))
    assert not is_well(case, policy) and is_well(case, F16)
    fault = fault_of(case, policy)
    assert fault.where.startswith(line_of(swish)) and fault.phase == "forward"
    assert (fault.kind, fault.primitive) == ("overflow", "exp") and not fault.in_float32
    assert fault.scope.startswith(("blocks/feed_forward", "block0"))
    assert fault.remedy.setting == "rules=exp:full"
    assert is_well(case, set_by(policy, fault.remedy.setting))


def _no_norm(x):
    return x


def unit(x, eps, dtype=jnp.float16):
    y = x.astype(dtype)
    variance = jnp.mean(y * y, -1, keepdims=True)
    if eps:
        variance = variance + eps  # eps
    return (y * lax.rsqrt(variance)).astype(x.dtype)  # here


@pytest.mark.parametrize("eps", [0, 1e-8])
def test_root_of_a_tiny_variance_and_an_eps_that_is_lost(make, eps):
    def tiny(x, dtype):
        return unit(1e-5 * x, eps, dtype)  # 1e-10, which float16 has not

    case = make(norm=functools.partial(tiny, dtype=jnp.float16))
    assert not is_well(case)
    fault = fault_of(case)
    assert fault.where.startswith(line_of(unit)) and fault.primitive == "rsqrt"
    assert fault.kind == "division by zero" and not fault.in_float32
    assert "finite" in fault.remedy.checked
    assert fault.scope.startswith(("blocks/attention_norm", "block0"))
    if eps:
        assert f"is added at {line_of(unit, 'eps')}" in fault.remedy.advice
    else:
        assert "casts to 16 bits" in fault.remedy.advice and "(unit)" in fault.remedy.advice
    assert is_well(make(norm=functools.partial(tiny, dtype=jnp.float32)))


def test_a_mask_of_minus_1e9(make):
    def by_hand(scores, mask, low=-1e9):
        scores = scores.astype(jnp.float16)
        scores = scores + (1 - mask.astype(jnp.float16)) * low  # here
        return jax.nn.softmax(scores, axis=-1)

    case = make(weights=by_hand)
    assert not is_well(case)
    fault = fault_of(case)
    assert fault.where.startswith(line_of(by_hand)) and not fault.in_float32
    assert "-6e4" in fault.remedy.advice and line_of(by_hand) in fault.remedy.advice
    assert fault.scope.endswith(("attention", "pool"))
    assert is_well(make(weights=functools.partial(by_hand, low=-6e4)))
    # Written without casts it is autocast's, which sees that float16 has no such number.
    case = make(weights=planted.softmax_where)
    assert fault_of(case) is None and is_well(case)


def test_a_mask_by_where(make):
    def by_hand(scores, mask, low=-1e9):
        scores = jnp.where(mask, scores.astype(jnp.float16), low)  # here
        return jax.nn.softmax(scores, axis=-1)

    fault = fault_of(make(weights=by_hand))
    assert fault.where.startswith(line_of(by_hand)) and not fault.in_float32
    assert fault.kind == "overflow" and line_of(by_hand) in fault.remedy.advice
    assert is_well(make(weights=functools.partial(by_hand, low=-6e4)))


def test_logits_over_65504(make):
    case = make()
    is_transformer = make.name == "transformer"
    factors = {"embed/embedding": 3e3, "norm/scale": 3e3}
    if not is_transformer:
        factors = {"head/kernel": 4e1, "blocks/1/norms/1/scale": 1e3}
    large = lambda path, w: w * factors.get(_path(path), 1)  # noqa: E731
    case = case._replace(params=jax.tree_util.tree_map_with_path(large, case.params))
    assert not is_well(case)
    fault = fault_of(case)
    code = model.Transformer.logits if is_transformer else planted.ResNet.__call__
    mark = "return constrain(head(" if is_transformer else "# logits"
    assert fault.where.startswith(_line_with(code, mark))
    assert (fault.kind, fault.primitive, fault.scope) == ("overflow", "dot_general", "head")
    assert not fault.in_float32 and fault.remedy.setting == "full=head"
    assert is_well(case, set_by(F16, "full=head"))


def _path(keys):
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def _line_with(code, text):
    lines, start = inspect.getsourcelines(code)
    (at,) = [k for k, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(code)}:{start + at}:"


def test_log_of_a_probability_that_underflowed(make):
    factor = 150 if make.name == "transformer" else 4

    def by_hand(logits, labels, dtype=jnp.float16):
        p = jax.nn.softmax(factor * logits, axis=-1).astype(dtype)  # lost
        picked = jnp.take_along_axis(p, labels[..., None], axis=-1)
        return -jnp.log(picked)[..., 0]  # here

    case = make(losses=by_hand)
    assert not is_well(case)
    fault = fault_of(case)
    assert fault.where.startswith(line_of(by_hand)) and not fault.in_float32
    assert (fault.kind, fault.primitive) == ("division by zero", "log")
    assert fault.lost_at.startswith(line_of(by_hand, "lost"))
    assert line_of(by_hand, "lost") in fault.remedy.advice and "finite" in fault.remedy.checked
    assert is_well(make(losses=functools.partial(by_hand, dtype=jnp.float32)))


def test_a_scan_that_adds_up_in_float16(make):
    def by_hand(logits, labels, dtype=jnp.float16):
        def add(total, nll):
            return total + 4096 * nll.astype(dtype), None  # here

        nll = planted.cross_entropy(logits, labels).ravel()
        nll = jnp.concatenate([nll] * 8)
        return lax.scan(add, jnp.zeros((), dtype), nll)[0] / 4096 / 8

    case = make(losses=by_hand)
    assert not is_well(case)
    fault = fault_of(case)
    assert fault.where.startswith(line_of(by_hand)) and not fault.in_float32
    assert (fault.kind, fault.primitive) == ("overflow", "add") and fault.rounds[0] > 0
    assert line_of(by_hand) in fault.remedy.advice
    assert is_well(make(losses=functools.partial(by_hand, dtype=jnp.float32)))


def test_a_learning_rate_too_high(make):
    case = make()
    sgd = optax.sgd(1e4 if make.name == "transformer" else 1e12)
    params, state, weights = case.params, sgd.init(case.params), []
    step = jax.jit(jax.value_and_grad(case.loss))
    while planted.is_all_finite(params) and len(weights) < 20:
        weights.append(params)
        _, grads = step(params, *case.args)
        updates, state = sgd.update(grads, state)
        params = optax.apply_updates(params, updates)
    assert not planted.is_all_finite(params)
    grown = case._replace(params=weights[-1])
    assert not is_well(grown, "compute=f32")
    fault = fault_of(grown)
    assert "float32 fails too, as the weights have grown" in fault.remedy.advice
    assert "lower learning rate" in fault.remedy.advice and fault.in_float32
    assert "none of them over 1" in fault.remedy.checked
    after = fault_of(case._replace(params=params))
    assert after.kind == "argument" and "an earlier update made params" in after.remedy.advice
    assert after.in_float32 and is_well(case)


def test_nan_in_the_data(make):
    case = make()
    batch, *rest = case.args
    if make.name == "transformer":  # what tokens can have: one that the vocabulary has not
        bad = batch | {"tokens": batch["tokens"].at[1, 2].set(planted.VOCAB)}
        fault = fault_of(case._replace(args=(bad, *rest)))
        assert fault.kind == "index" and "batch/tokens has an index" in fault.remedy.advice
        assert f"0 to {planted.VOCAB - 1}" in fault.remedy.advice
        assert "finite" in fault.remedy.checked and fault.in_float32 and fault.scope == "embed"
    else:
        bad = batch | {"image": batch["image"].at[1, 2, 3, 0].set(jnp.nan)}
        fault = fault_of(case._replace(args=(bad, *rest)))
        assert fault.kind == "argument" and "batch/image is not finite" in fault.remedy.advice
        assert fault.in_float32


def test_data_that_is_not_normalized(make):
    if make.name == "transformer":
        pytest.skip("tokens have no size")
    case = make()
    batch, *rest = case.args
    fault = fault_of(case._replace(args=(batch | {"image": batch["image"] * 1e37}, *rest)))
    assert fault.in_float32 and "batch/image reaches" in fault.remedy.advice


def test_a_scale_too_high_for_the_loss(make):
    case = make()
    found = diagnosed(case, loss_scale=2.0**40)
    assert not is_well(case, loss_scale=2.0**40)
    assert found.fault.kind == "overflow" and found.fault.phase == "backward"
    assert not found.fault.in_float32
    name, value = found.fault.remedy.setting.split("=")
    assert name == "loss_scale" and is_well(case, loss_scale=float(value))


def test_frozen_weights(make):
    case = make()
    grads = jax.jit(jax.grad(case.loss))(case.params, *case.args)
    adam = optax.adam(1e-4)  # as large as 2**-13 of a weight of 1
    updates, _ = adam.update(grads, adam.init(case.params))
    low = jax.tree.map(lambda w: (1 + w).astype(jnp.bfloat16), case.params)
    case = case._replace(params=low)
    found = diagnosed(case, "params=bf16,compute=bf16", updates=updates)
    assert found.fault is None and len(found.frozen) == len(jax.tree.leaves(low))
    assert all(one.share > 0.5 > one.in_float32 for one in found.frozen)
    assert "with params=f32" in str(found)
    full = case._replace(params=jax.tree.map(lambda w: w.astype(jnp.float32), low))
    found = diagnosed(full, "compute=bf16", updates=updates)
    assert all(one.share < 0.5 for one in found.frozen)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_a_rule_whose_gradient_has_another_dtype(make, size):
    """JAX casts it back without a word."""

    def relu(x, dtype=jnp.float16):
        @jax.custom_vjp
        def relu(x):
            return nnx.relu(x)

        def backward(x, g):
            return (jnp.where(x > 0, g, 0).astype(dtype),)  # here

        relu.defvjp(lambda x: (nnx.relu(x), x), backward)
        return relu(x)

    def losses(logits, labels):
        return size * planted.cross_entropy(logits, labels)

    policy = jaxamp.get_policy("compute=bf16")
    case = make(activation=relu, losses=losses)
    fault = fault_of(case, policy)
    assert fault.where.startswith(line_of(relu)) and fault.phase == "backward"
    assert fault.kind == ("overflow" if size > 1 else "underflow") and not fault.in_float32
    assert line_of(relu) in fault.remedy.advice
    assert ("none of them vanishes" in fault.remedy.checked) == (size < 1)
    ((_, low, high),) = fault.inputs
    assert low < 0 < high
    repaired = make(activation=functools.partial(relu, dtype=jnp.float32), losses=losses)
    assert fault_of(repaired, policy) is None and is_well(repaired, policy)
