import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jaxpr_search import dtypes as all_dtypes

import jaxamp
from jaxamp import full_precision

LOW, FULL = ["bfloat16"] * 2, ["float32"] * 2


def dtypes(fun, *args):
    """Operands of each matmul; what a 16-bit one gives depends on who reads it."""
    return [found[:2] for found in all_dtypes(fun, *args)]


def params():
    w = jnp.eye(4)
    return {"body": {"kernel": w}, "head": {"kernel": w, "bias": jnp.ones((1, 4))}}


def model(params, x):
    with jax.named_scope("body"):
        x = jnp.tanh(x @ params["body"]["kernel"])
    with jax.named_scope("head"):
        return x @ params["head"]["kernel"] + params["head"]["bias"]


def cast(fun=model, full=(), **more):
    return jaxamp.autocast(fun, jaxamp.get_policy("c=bf16").replace(full=full, **more))


@full_precision
def decorated(x):
    return x @ x


@full_precision()
def called(x):
    return x @ x


def in_context(x):
    with full_precision:
        return x @ x


def in_called_context(x):
    with full_precision(), full_precision:
        return x @ x


@pytest.mark.parametrize("fun", [decorated, called, in_context, in_called_context])
def test_the_ops_inside_stay_float32(fun):
    x = jnp.eye(4)
    assert dtypes(cast(lambda x: fun(x) @ x), x) == [FULL, LOW]
    assert decorated.__name__ == "decorated"


def test_it_reaches_into_programs_and_ends():
    @jax.jit
    def inner(x):
        return jnp.tanh(x @ x)

    def fun(x):
        with full_precision:
            a = jax.checkpoint(inner)(x)
            a = jax.lax.scan(lambda c, _: (c @ a, None), a, length=2)[0]
        return inner(a)

    assert dtypes(cast(fun), jnp.eye(4)) == [FULL, FULL, LOW]


def test_it_is_a_no_op_without_autocast():
    x = jnp.eye(4)
    plain = jax.jit(lambda x: x @ x).lower(x).as_text()
    assert jax.jit(lambda x: in_context(x)).lower(x).as_text() == plain


def test_it_ends_at_an_exception():
    with pytest.raises(KeyError), full_precision:
        raise KeyError
    assert dtypes(cast(jnp.dot), jnp.eye(4), jnp.eye(4)) == [LOW]


@pytest.mark.parametrize("glob", ["*/head/*", "*head*", "params/head", "params/head/kernel"])
def test_a_glob_of_parameters(glob):
    assert dtypes(cast(lambda params, x: model(params, x), [glob]), params(), jnp.eye(4)) == [
        LOW,
        FULL,
    ]


@pytest.mark.parametrize("glob", ["head", "*/head", "h*d"])
def test_a_glob_of_scopes(glob):
    assert dtypes(cast(full=[glob]), params(), jnp.eye(4)) == [LOW, FULL]


def test_globs_through_loops_and_calls():
    def stacked(params, x):
        def body(x, layer):
            return jax.jit(lambda x, w: jnp.tanh(x @ w.T))(x @ layer["a"], layer["b"]), None

        return jax.lax.scan(body, x, params)[0]

    layers = {"a": jnp.ones((2, 4, 4)), "b": jnp.ones((2, 4, 4))}
    assert dtypes(cast(stacked, ["*/b"]), layers, jnp.eye(4)) == [LOW, FULL]


def test_keyword_and_linen_paths():
    def by_keyword(*, weights, x):
        return x @ weights["head"]

    weights = {"head": jnp.eye(4)}
    mixed = cast(by_keyword, ["weights/head"])
    assert dtypes(lambda w, x: mixed(weights=w, x=x), weights, jnp.eye(4)) == [FULL]

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.tanh(nn.Dense(4, name="body")(x)))

    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((2, 4)))
    for glob in ("Net/head", "*/params/head/*"):
        assert dtypes(cast(net.apply, [glob]), variables, jnp.ones((2, 4))) == [LOW, FULL]


def test_a_glob_that_matches_nothing_lists_what_there_was():
    with pytest.raises(ValueError, match=r"'\*/haed' matches no parameter and no scope") as caught:
        cast(full=["*/head", "*/haed"])(params(), jnp.eye(4))
    assert "params/head/kernel" in str(caught.value) and "body" in str(caught.value)
