import functools

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from jax import lax
from jaxpr_search import dtypes, equations, float32_matmuls, scoped_equations

import jaxamp

BF16, F16 = "compute=bf16", "compute=f16"
EPS = {BF16: 2.0**-8, F16: 2.0**-11}  # half the distance between 1 and the next number
both = pytest.mark.parametrize("policy", [BF16, F16])
seeds = pytest.mark.parametrize("seed", range(3))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def relative(got, true):
    return float(jnp.linalg.norm(got - true) / jnp.linalg.norm(true))


# Cases from public reports: table "Autocast" of the cases.


@both
def test_softmax(policy):
    got = jaxamp.autocast(jax.nn.softmax, policy)(jnp.array([100.3, 100.0, 50.0]))
    np.testing.assert_allclose(got, [0.574, 0.426, 0.0], atol=1e-2)


@both
def test_softmax_of_a_matmul(policy):
    """x @ I rounds each logit once, by eps * 100; the softmax itself is float32."""
    fun = lambda x: jax.nn.softmax(x @ jnp.eye(3))  # noqa: E731
    got = jaxamp.autocast(fun, policy)(jnp.array([100.0, 99.5, 50.0]))
    true = jax.nn.softmax(jnp.array([100.0, 99.5, 50.0]))
    np.testing.assert_allclose(got, true, atol=1e-6)  # these logits are exact in 16 bits


@pytest.mark.parametrize(
    "policy,size,right", [(F16, 70000, 11.156), (BF16, 50257, 10.825)], ids=["f16", "bf16"]
)
def test_cross_entropy(policy, size, right):
    def loss(x, w, label):
        logits = x @ w
        return jax.nn.logsumexp(logits) - logits[label]

    args = (jnp.zeros(2), jnp.zeros((2, size)), 7)
    value, grad = jax.value_and_grad(jaxamp.autocast(loss, policy))(*args)
    np.testing.assert_allclose(value, right, atol=1e-3)
    assert jnp.isfinite(grad).all()


@both
@pytest.mark.parametrize("fill", [-1e9, np.finfo(np.float32).min], ids=["1e9", "finfo"])
@pytest.mark.parametrize("how", ["where", "add", "mul"])
def test_mask(policy, fill, how):
    def attend(x, w, mask):
        scores = x @ w
        if how == "where":
            scores = jnp.where(mask, scores, fill)
        elif how == "add":
            scores = scores + jnp.where(mask, 0.0, fill)
        else:
            scores = scores + (1.0 - mask) * fill
        return jax.nn.softmax(scores, axis=-1)

    mask = jnp.arange(4)[None] < jnp.array([[4], [2], [0]])
    x, w = normal(0, 3, 8), normal(1, 8, 4)
    got = jaxamp.autocast(attend, policy)(x, w, mask)
    true = attend(x, w, mask)
    assert jnp.isfinite(got).all()
    assert (got[:2][~mask[:2]] == 0).all()
    np.testing.assert_allclose(got[2], true[2], atol=64 * EPS[policy])  # a fully masked row


@both
def test_rope(policy):
    def cos(positions, frequencies):
        return jnp.cos(jnp.einsum("t,d->td", positions, frequencies))

    frequencies = 10000.0 ** (-jnp.arange(32) / 32)
    args = (jnp.arange(4096.0), frequencies)
    np.testing.assert_allclose(jaxamp.autocast(cos, policy)(*args), cos(*args), atol=1e-6)


@both
@pytest.mark.parametrize("square", [jnp.square, lambda x: x * x, lambda x: x**2])
def test_rms_norm(policy, square):
    def norm(x, w):
        x = x @ w
        return x * lax.rsqrt(jnp.mean(square(x), -1, keepdims=True) + 1e-6)

    sign = jnp.where(jax.random.bernoulli(jax.random.key(0), shape=(2, 64)), 1.0, -1.0)
    x = sign * jnp.array([[300.0], [1000.0]])
    got = jaxamp.autocast(norm, policy)(x, jnp.eye(64))
    np.testing.assert_allclose(got, sign, atol=2 * EPS[policy])


def test_ids_and_others_are_untouched():
    tree = {
        "ids": jnp.array([2049, 30522]),
        "flag": jnp.array([True, False]),
        "key": jax.random.key(0),
        "complex": jnp.array([1 + 2.0000002j]),
        "half": jnp.array([1.5], jnp.float16),
        "x": jnp.array([1.0 + 2**-20]),
        "none": None,
    }
    with jax.enable_x64(True):
        tree["double"] = jnp.array([1 + 1e-12], jnp.float64)
        got = jaxamp.autocast(lambda t: t, "params=f32,compute=bf16,output=bf16")(tree)
        kept = {name for name in tree if name != "x"}
        assert got["x"].dtype == jnp.bfloat16
        for name in kept:
            assert jax.tree.map(lambda a, b: bool((a == b).all()), got[name], tree[name]) in (
                True,
                None,
            )
            assert getattr(got[name], "dtype", None) == getattr(tree[name], "dtype", None)


def loops(w, x, kind):
    if kind == "scan":
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0]
    if kind == "fori":
        return lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x)
    if kind == "while":
        init = (0, x)
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), init)[1]
    return lax.cond(x[0, 0] < 3, lambda c: jnp.tanh(c @ w), lambda c: c, x)


@both
@pytest.mark.parametrize("kind", ["scan", "fori", "while", "cond"])
def test_scan_carry(policy, kind):
    fun = functools.partial(loops, kind=kind)
    x, w = normal(0, 4, 8), normal(1, 8, 8) / 8**0.5
    mixed = jaxamp.autocast(fun, policy)
    assert not float32_matmuls(mixed, w, x)
    got, true = mixed(w, x), fun(w, x)
    assert got.dtype == true.dtype == jnp.float32
    assert relative(got, true) < 3 * 4 * EPS[policy]  # 3 rounds: operands, result, tanh


@both
def test_shared_weight(policy):
    """The gradient of a weight that is used 400 times adds up in float32."""
    fun = lambda w, x: sum((x @ w)[0, 0] for _ in range(400))  # noqa: E731
    x = jnp.array([[1.0, 0.0]])
    assert jax.grad(jaxamp.autocast(fun, policy))(jnp.ones((2, 1)), x)[0, 0] == 400


@both
def test_scanned_weight(policy):
    def fun(w, x):
        return lax.scan(lambda c, _: (c + (x @ w)[0, 0], None), 0.0, length=1000)[0]

    grad = jax.grad(jaxamp.autocast(fun, policy))(jnp.ones((2, 1)), jnp.array([[1.0, 0.0]]))
    assert grad[0, 0] == 1000
    plain = lambda w: lax.scan(lambda c, _: (c + w, None), 0.0, length=1000)[0]  # noqa: E731
    assert jax.grad(jaxamp.autocast(plain, policy))(1.0) == 1000


@both
@seeds
def test_remat(policy, seed):
    def fun(w, x):
        return jnp.sum(jax.nn.silu(x @ w) @ w)

    w, x = normal(seed, 8, 8), normal(seed + 10, 4, 8)
    cast = functools.partial(jaxamp.autocast, policy=policy)
    plain = jax.grad(cast(fun))(w, x)
    np.testing.assert_array_equal(jax.grad(cast(jax.checkpoint(fun)))(w, x), plain)
    np.testing.assert_array_equal(jax.grad(jax.checkpoint(cast(fun)))(w, x), plain)


@both
def test_custom_vjp(policy):
    @jax.custom_vjp
    def double(x, w):
        return x @ w

    double.defvjp(
        lambda x, w: (x @ w, (x, w)), lambda saved, g: (2 * g @ saved[1].T, 2 * saved[0].T @ g)
    )
    x, w = normal(0, 4, 8), normal(1, 8, 8)
    loss = lambda w: jnp.sum(double(jnp.tanh(x @ w), w))  # noqa: E731
    got, true = jax.grad(jaxamp.autocast(loss, policy))(w), jax.grad(loss)(w)
    assert got.dtype == jnp.float32
    assert relative(got, true) < 8 * EPS[policy]  # 3 matmuls, tanh and their operands
    assert not float32_matmuls(jax.grad(jaxamp.autocast(loss, policy)), w)


@both
@pytest.mark.parametrize("strong", [False, True])
def test_weak_literal(policy, strong):
    x = normal(0, 4, 4)
    fun = lambda x: x @ x + 1.0  # noqa: E731
    if strong:
        fun = lambda x: (x @ x) @ x + 1.0  # noqa: E731
    name = jaxamp.get_policy(policy).compute_dtype.name
    assert dtypes(jaxamp.autocast(fun, policy), x, primitive="add") == [[name] * 3]
    assert jaxamp.autocast(fun, policy)(x).dtype == jnp.float32


@both
def test_linalg_and_fft(policy):
    a = normal(0, 8, 8)
    cholesky = lambda a: jnp.linalg.cholesky(a @ a.T + 8 * jnp.eye(8))  # noqa: E731
    got = jaxamp.autocast(cholesky, policy)(a)
    assert relative(got, cholesky(a)) < 8 * EPS[policy]
    assert dtypes(jaxamp.autocast(cholesky, policy), a, primitive="cholesky") == [["float32"] * 2]
    spectrum = lambda a: jnp.abs(jnp.fft.rfft(a @ a))  # noqa: E731
    assert relative(jaxamp.autocast(spectrum, policy)(a), spectrum(a)) < 8 * EPS[policy]


def test_dropout():
    def dropped(x, w, key):
        y = x @ w
        keep = jax.random.bernoulli(key, 0.7, y.shape)
        return jnp.where(keep, y / 0.7, 0.0)

    x, w = normal(0, 16, 8) + 3, jnp.eye(8)
    masks = [
        jaxamp.autocast(dropped, policy)(x, w, jax.random.key(5)) == 0
        for policy in ("compute=f32", BF16, F16)
    ]
    assert (masks[0] == masks[1]).all() and (masks[0] == masks[2]).all() and masks[0].any()


@both
def test_scatter(policy):
    fun = lambda i, x, w: jnp.zeros(4).at[i].add(x @ w)  # noqa: E731
    args = (jnp.array([0, 0, 1]), normal(0, 3), normal(1, 3, 3))
    assert dtypes(jaxamp.autocast(fun, policy), *args, primitive="scatter-add")[0][-1] == "float32"
    ones = lambda x, w: jnp.zeros(1).at[jnp.zeros(4096, int)].add(jnp.sum(x @ w) * jnp.ones(4096))  # noqa: E731
    got = jaxamp.autocast(ones, policy)(jnp.ones((1, 2)), jnp.full((2, 1), 0.5))
    assert got[0] == 4096


@both
def test_keys_static_arguments_and_keywords(policy):
    def fun(tree, train, *, rate, mode="a", x):
        assert train is True and mode == "b" and tree["none"] is None and rate == 0.5
        noise = jax.random.normal(tree["key"], x.shape) * rate
        return {"y": x @ tree["w"] + noise, "mode": mode, "none": None}

    tree = {"w": normal(0, 4, 4), "key": jax.random.key(1), "none": None}
    mixed = jaxamp.autocast(fun, policy)
    got = mixed(tree, True, rate=0.5, mode="b", x=normal(1, 2, 4))
    true = fun(tree, True, rate=0.5, mode="b", x=normal(1, 2, 4))
    assert got["mode"] == "b" and got["none"] is None
    assert relative(got["y"], true["y"]) < 4 * EPS[policy]


# Equivalence.


def mlp(params, x):
    for w, b, scale in params:
        y = jax.nn.gelu(x @ w + b)
        x = x + scale * (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)
    return jnp.mean(jax.nn.logsumexp(x, axis=-1))


def mlp_problem(seed, depth=3, width=16):
    keys = jax.random.split(jax.random.key(seed), depth)
    params = [
        (jax.random.normal(k, (width, width)) / width**0.5, jnp.zeros(width), jnp.ones(width))
        for k in keys
    ]
    add = lambda b: b[None]  # rank promotion raises in this suite  # noqa: E731
    params = [(w, add(b), add(s)) for w, b, s in params]
    return params, normal(seed + 100, 8, width)


@seeds
def test_compute_float32_is_bit_identical(seed):
    args = mlp_problem(seed)
    mixed = jax.value_and_grad(jaxamp.autocast(mlp, "compute=f32"))
    jax.tree.map(np.testing.assert_array_equal, mixed(*args), jax.value_and_grad(mlp)(*args))


@both
@seeds
def test_gradients_are_near_and_float32(policy, seed):
    """Each of 3 layers rounds its matmul's operands and result and 4 elementwise results, and the
    backward pass the same again."""
    args = mlp_problem(seed)
    grads = jax.grad(jaxamp.autocast(mlp, policy))(*args)
    for got, true in zip(
        jax.tree.leaves(grads), jax.tree.leaves(jax.grad(mlp)(*args)), strict=True
    ):
        assert got.dtype == jnp.float32
        assert relative(got, true) < 3 * 2 * 7 * EPS[policy]


@both
def test_no_float32_matmul_forward_or_backward(policy):
    args = mlp_problem(0)
    assert not float32_matmuls(jax.value_and_grad(jaxamp.autocast(mlp, policy)), *args)


def test_parameters_see_no_16_bits_where_no_activation_meets_them():
    """Statistics kept in float32 and updated from float32 sums are exact."""
    fun = lambda mean, x: 0.99 * mean + 0.01 * jnp.mean(x, axis=0)  # noqa: E731
    args = (normal(0, 8), normal(1, 32, 8))
    np.testing.assert_array_equal(jaxamp.autocast(fun, BF16)(*args), fun(*args))


def test_output_dtype_is_that_of_the_policy():
    x = normal(0, 4, 4)
    assert jaxamp.autocast(jnp.dot, "p=f32,c=bf16,o=bf16")(x, x).dtype == jnp.bfloat16
    assert jaxamp.autocast(jnp.dot, "p=f32,c=f32,o=f16")(x, x).dtype == jnp.float16
    assert jaxamp.autocast(lambda x: x.astype(jnp.float16), BF16)(x).dtype == jnp.float16
    assert jaxamp.autocast(jnp.dot, jmp.get_policy("p=f32,c=bf16,o=f32"))(x, x).dtype == x.dtype


def test_precision_highest_and_narrow_programs_are_left_alone():
    x = normal(0, 4, 4)
    highest = jaxamp.autocast(functools.partial(jnp.dot, precision="highest"), BF16)
    assert dtypes(highest, x, x) == [["float32"] * 3]
    half = jaxamp.autocast(lambda x: x.astype(jnp.float16) @ x.astype(jnp.float16), BF16)
    assert dtypes(half, x) == [["float16"] * 3]
    whole = jaxamp.autocast(lambda x: x.astype(int) @ x.astype(int), BF16)
    assert dtypes(whole, x) == [["int32"] * 3]


@pytest.mark.parametrize("default", ["highest", "high", "default"])
@pytest.mark.parametrize("rule", [False, True])
def test_default_precision_is_for_the_matmuls_that_stay_in_float32(default, rule):
    """As in PyTorch: it says how float32 is multiplied, not what is float32."""

    @jax.custom_vjp
    def dot(x, w):
        return x @ w

    def backward(residuals, cotangent):
        x, w = residuals
        return cotangent @ w.T, x.T @ cotangent

    dot.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def loss(params, x):
        x = (dot if rule else jnp.dot)(x, params["low"])
        return jnp.sum(jnp.tanh(x @ params["full"]))

    params = {"low": normal(0, 8, 8), "full": normal(1, 8, 8)}
    mixed = jaxamp.grad(loss, "compute=bf16,full=full")
    with jax.default_matmul_precision(default):
        program = jax.make_jaxpr(mixed)(params, normal(2, 4, 8))
        (plain,) = jax.make_jaxpr(jnp.dot)(jnp.eye(2), jnp.eye(2)).eqns
    dots = [e for e in equations(program) if e.primitive.name in ("dot_general", "rounded_dot")]
    is_low = [
        e.primitive.name == "rounded_dot" or str(e.invars[0].aval.dtype) == "bfloat16" for e in dots
    ]
    assert is_low == [True, False, False, False, True] + [True] * rule
    for eqn, low in zip(dots, is_low, strict=True):
        assert eqn.params["precision"] == (None if low else plain.params["precision"])


def test_default_precision_is_that_of_each_trace():
    """Programs inside are kept from trace to trace, and the setting is not theirs."""
    loss = jax.jit(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    mixed = jaxamp.autocast(loss, "compute=bf16,full=w")
    w, x = normal(0, 8, 8), normal(1, 4, 8)
    for default in ("highest", "default", None, "high", "highest"):
        with jax.default_matmul_precision(default):
            (found,) = precisions(jax.make_jaxpr(mixed)(w, x))
            (plain,) = precisions(jax.make_jaxpr(jnp.dot)(x, w))
        assert found == plain


def test_default_precision_is_not_for_16_bit_matmuls_of_an_autocast_inside():
    inner = jaxamp.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)), BF16)
    with jax.default_matmul_precision("highest"):
        program = jax.make_jaxpr(jaxamp.autocast(inner, BF16))(normal(0, 8, 8), normal(1, 4, 8))
    assert set(precisions(program)) == {None}


def precisions(program):
    names = ("dot_general", "rounded_dot")
    return [e.params["precision"] for e in equations(program) if e.primitive.name in names]


def test_full_reaches_the_backward_pass_of_a_gradient_inside():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum(jnp.sin(x @ w))

    w, x = normal(0, 8, 8), normal(1, 4, 8)
    mixed = jaxamp.autocast(jax.grad(loss), "compute=bf16,full=head")
    assert dtypes(mixed, w, x) == [["float32"] * 3] * 2


def test_look_ahead_gives_float32_logits_and_16_bit_gradients():
    loss = lambda w, x: jax.nn.logsumexp(x @ w)  # noqa: E731
    w, x = normal(0, 8, 8), normal(1, 4, 8)
    assert dtypes(jaxamp.autocast(loss, BF16), w, x) == [["bfloat16", "bfloat16", "float32"]]
    backward = dtypes(jax.grad(jaxamp.autocast(loss, BF16)), w, x)
    assert all(d[:2] == ["bfloat16"] * 2 for d in backward) and len(backward) == 2


def test_what_is_computed_from_inputs_alone_is_not_rounded():
    """A rotation by position, like RoPE's: products with cos and sin are float32."""

    def rotate(x, w, positions):
        y = x @ w
        return y * jnp.cos(positions)[:, None] - y[:, ::-1] * jnp.sin(positions)[:, None]

    x, w, positions = normal(0, 4, 8), normal(1, 8, 8), jnp.arange(4.0)
    assert (
        dtypes(jaxamp.autocast(rotate, BF16), x, w, positions, primitive="mul")
        == [["float32"] * 3] * 2
    )
    scaled = lambda x, w: (x @ w) * w[:1]  # noqa: E731
    assert dtypes(jaxamp.autocast(scaled, BF16), x, w, primitive="mul") == [["bfloat16"] * 3]


@pytest.mark.parametrize("outputs, given", [(64, "float32"), (65, "bfloat16")])
def test_look_ahead_leaves_a_vocabulary_in_16_bits(outputs, given):
    """Above 8 times the numbers that a weight reads."""
    loss = lambda w, x: jax.nn.logsumexp(jnp.tanh(x @ w[:, :8]) @ w)  # noqa: E731
    w, x = normal(0, 8, outputs), normal(1, 4, 8)
    assert dtypes(jaxamp.autocast(loss, BF16), w, x)[1] == ["bfloat16", "bfloat16", given]


def test_what_only_float32_ops_read_is_not_rounded_twice():
    """Where results of matmuls are kept in 16 bits, the scale of logits is applied in float32."""
    fun = lambda x: jax.nn.softmax((x @ x) * 0.3)  # noqa: E731
    lean = jaxamp.autocast(fun, BF16 + ",residuals=compute")
    assert dtypes(lean, normal(0, 4, 4))[0][2] == "bfloat16"
    assert dtypes(lean, normal(0, 4, 4), primitive="mul")[0] == ["float32"] * 3


def test_rules_of_the_policy():
    fun = lambda x: lax.erf(x @ x)  # noqa: E731
    x = normal(0, 4, 4)
    policy = jaxamp.get_policy(BF16)
    assert dtypes(jaxamp.autocast(fun, policy), x, primitive="erf") == [["bfloat16"] * 2]
    full = policy.replace(rules={"erf": "full"})
    assert dtypes(jaxamp.autocast(fun, full), x, primitive="erf") == [["float32"] * 2]
    dots = policy.replace(rules={"dot_general": "full"})
    assert dtypes(jaxamp.autocast(fun, dots), x) == [["float32"] * 3]


# What passes through, what is refused.


def test_integers_pass_through():
    fun = lambda ids: ids * 2 + 1  # noqa: E731
    np.testing.assert_array_equal(jaxamp.autocast(fun, BF16)(jnp.arange(5)), fun(jnp.arange(5)))


def test_numpy_and_python_scalars_work():
    got = jaxamp.autocast(lambda x, n, s: x @ x * s + n, F16)(np.eye(2, dtype=np.float32), 1, 2.0)
    np.testing.assert_array_equal(got, 2 * np.eye(2) + 1)


@pytest.mark.parametrize("policy", ["compute=f64", "compute=bf16,matmul=f8"])
def test_a_policy_that_cannot_be_met_is_refused(policy):
    with pytest.raises(ValueError, match="policy"):
        jaxamp.autocast(jnp.dot, policy)


def test_not_a_function():
    with pytest.raises(TypeError, match="takes a function"):
        jaxamp.autocast(3, BF16)


def test_an_untraceable_function_says_so():
    def branches(x):
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jaxamp.autocast(branches, BF16)(jnp.float32(1.0))
    assert "test_autocast.py" in str(caught.value)
    assert any("as jax.jit does" in note for note in caught.value.__notes__)


def test_an_error_of_emission_names_the_users_line():
    """`rules` can ask for what a primitive refuses."""
    policy = jaxamp.get_policy(BF16).replace(rules={"cholesky": "matmul"})
    with pytest.raises((NotImplementedError, TypeError), match="bfloat16") as caught:
        jaxamp.autocast(lambda a: jnp.linalg.cholesky(a @ a), policy)(jnp.eye(4))
    assert any("test_autocast.py" in note for note in caught.value.__notes__)


# Names survive.


def test_scopes_and_source_lines_survive():
    def fun(x):
        with jax.named_scope("outer"):
            y = x @ x
            with jax.named_scope("inner"):
                return jax.nn.relu(y) @ y

    program = jax.make_jaxpr(jaxamp.autocast(fun, BF16))(jnp.eye(3))
    scopes = [s for s, e in scoped_equations(program) if e.primitive.name == "dot_general"]
    assert scopes == ["outer", "outer/inner"]
    text = jax.jit(jaxamp.autocast(fun, BF16)).lower(jnp.eye(3)).as_text(debug_info=True)
    assert "outer/inner" in text and "test_autocast.py" in text


def test_the_second_call_compiles_nothing():
    def fun(w, x):
        body = lambda c, _: (jax.nn.silu(c @ w), None)  # noqa: E731
        return jnp.sum(lax.scan(body, x, length=2)[0])

    compiled = jax.jit(jax.value_and_grad(jaxamp.autocast(fun, BF16)))
    args = (normal(0, 4, 4), normal(1, 4, 4))
    compiled(*args)
    assert compiled._cache_size() == 1
    compiled(*args)
    assert compiled._cache_size() == 1


@jax.jit
def _inner(x, w):
    return jax.nn.softmax(jax.nn.silu(x @ w))


def test_the_second_eager_call_compiles_nothing():
    mixed = jaxamp.autocast(lambda x, w: _inner(x, w) @ w, BF16)
    args = (normal(0, 4, 4), normal(1, 4, 4))
    mixed(*args)
    compiles = []
    listen = lambda name, *_, **__: compiles.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        mixed(*args)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not [name for name in compiles if "backend_compile" in name]
