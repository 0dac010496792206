import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxpr_search import dtypes, equations, float32_matmuls

import jaxamp

BF16, F16 = "compute=bf16", "compute=f16"
EPS = {BF16: 2.0**-8, F16: 2.0**-11}
both = pytest.mark.parametrize("policy", [BF16, F16])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def relative(got, true):
    return float(jnp.linalg.norm(got - true) / jnp.linalg.norm(true))


def weight(seed):
    return normal(seed, 8, 8) / 8**0.5


@jax.custom_jvp
def soft_sign(x):
    return x / (1 + jnp.abs(x))


soft_sign.defjvp(lambda p, t: (soft_sign(p[0]), t[0] / (1 + jnp.abs(p[0])) ** 2))


@jax.custom_vjp
def project(x, w):
    return jnp.tanh(x) @ w


project.defvjp(
    lambda x, w: (project(x, w), (jnp.tanh(x), w)),
    lambda saved, g: ((g @ saved[1].T) * (1 - saved[0] ** 2), saved[0].T @ g),
)


@custom_vmap
def rows(x, w):
    return jnp.sin(x) @ w


@rows.def_vmap
def _(axis_size, in_batched, x, w):
    return jax.vmap(lambda x, w: jnp.sin(x) @ w, [0 if b else None for b in in_batched])(x, w), True


def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2 + 1


def mesh():
    return jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))


def times(x, w):
    return linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


PROGRAMS = {
    "jit": jax.jit(lambda x, w: jnp.tanh(x @ w) @ w),
    "closed": lambda x, w: jax.named_call(lambda x: jnp.tanh(x @ w), name="layer")(x) @ w,
    "scan": lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), c), x, length=3)[1],
    "scan_reversed": lambda x, w: lax.scan(
        lambda c, v: (c + jnp.tanh(v @ w), v), jnp.zeros(8), x, reverse=True
    )[0],
    "while": lambda x, w: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
    )[1],
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: 2 * x, x),
    "switch": lambda x, w: lax.switch(2, [jnp.exp, jnp.tanh, lambda x: x @ w], x),
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w),
    "remat_policy": jax.checkpoint(
        lambda x, w: jnp.tanh(x @ w) @ w, policy=jax.checkpoint_policies.dots_saveable
    ),
    "custom_jvp": lambda x, w: soft_sign(x @ w) @ w,
    "custom_vjp": lambda x, w: project(x @ w, w),
    "custom_vmap": lambda x, w: rows(x @ w, w),
    "linear_call": lambda x, w: times(x @ w, w),
    "shard_map": lambda x, w: jax.shard_map(
        lambda x, w: lax.psum(x @ w, "i"), mesh=mesh(), in_specs=(P("i"), P()), out_specs=P()
    )(x, w),
    "vmap_axis": lambda x, w: jax.vmap(lambda x: lax.pmean(x @ w, "b"), axis_name="b")(x),
    "pallas": lambda x, w: pl.pallas_call(kernel, out_shape=x, interpret=True)(x @ w),
    "callback": lambda x, w: jax.pure_callback(
        lambda v: np.asarray(v) * 2, x, x @ w, vmap_method="expand_dims"
    ),
    "linear_solve": lambda x, w: jnp.linalg.solve(w @ w.T + 8 * jnp.eye(8), x.T),
    "associative_scan": lambda x, w: lax.associative_scan(jnp.add, x @ w),
    "max_pool": lambda x, w: lax.reduce_window(x @ w, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    "conv": lambda x, w: lax.conv(x[None, None], w[None, None], (1, 1), "SAME"),
    "scatter": lambda x, w: (x @ w).at[0].set(w[0]).at[1].add(w[1]).at[2].max(w[2]),
    "sort": lambda x, w: jnp.sort(x @ w),
    "nested": lambda x, w: jaxamp.autocast(lambda x: x @ w, BF16)(x @ w),
}
NOT_DIFFERENTIABLE = {"while", "custom_vmap", "pallas", "callback", "linear_call"}
programs = pytest.mark.parametrize("name", PROGRAMS)


def tolerance(name, policy):
    """Three rounds, each of two operands, a matmul's result and an elementwise result; doubled
    for the backward pass; nested runs in bfloat16 whatever the policy."""
    return 2 * 3 * 4 * EPS[BF16 if name == "nested" else policy]


@both
@programs
def test_program_runs_and_is_near(name, policy):
    x, w = normal(0, 4, 8), weight(1)
    got = jax.jit(jaxamp.autocast(PROGRAMS[name], policy))(x, w)
    true = PROGRAMS[name](x, w)
    assert got.dtype == true.dtype
    assert relative(got, true) < tolerance(name, policy)


def loss_of(name, wrap=lambda fun: fun):
    return lambda x, w: jnp.sum(jnp.square(wrap(PROGRAMS[name])(x, w)))


@programs
@pytest.mark.parametrize("order", ["grad_of", "remat_of", "of_grad", "vmap_of"])
def test_program_under_and_over_transforms(name, order):
    x, w = normal(2, 4, 8), weight(3)
    cast = functools.partial(jaxamp.autocast, policy=BF16)
    if order == "vmap_of":
        if name == "linear_call":
            pytest.skip("JAX has no batching rule for it")
        over = lambda fun: jax.vmap(fun, (0, None))(jnp.stack([x, 2 * x]), w)  # noqa: E731
        got, true = over(cast(PROGRAMS[name])), over(PROGRAMS[name])
    else:
        if name in NOT_DIFFERENTIABLE:
            pytest.skip("not differentiable without autocast either")
        true = jax.grad(loss_of(name), 1)(x, w)
        fun = {
            "grad_of": lambda: jax.grad(loss_of(name, cast), 1),
            "remat_of": lambda: jax.grad(jax.checkpoint(cast(loss_of(name))), 1),
            "of_grad": lambda: cast(jax.grad(loss_of(name), 1)),
        }[order]()
        got = jax.jit(fun)(x, w)
    assert got.dtype == jnp.float32
    assert relative(got, true) < tolerance(name, BF16)


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - NOT_DIFFERENTIABLE - {"custom_vjp"}))
def test_linearize(name):
    x, w = normal(4, 4, 8), weight(5)
    mixed = jaxamp.autocast(PROGRAMS[name], BF16)
    value, tangent_of = jax.linearize(mixed, x, w)
    _, true = jax.jvp(PROGRAMS[name], (x, w), (x, w))
    assert value.dtype == jnp.float32
    assert relative(tangent_of(x, w), true) < tolerance(name, BF16)


def test_linear_call_is_transposed():
    x, w = normal(0, 4, 8), weight(1)
    mixed = jaxamp.autocast(lambda x: times(x, w), BF16)
    (got,) = jax.linear_transpose(mixed, x)(x)
    assert got.dtype == jnp.float32 and relative(got, x @ w.T) < 4 * EPS[BF16]


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp", "scan", "remat", "cond", "jit"])
def test_no_float32_matmul_inside(name):
    x, w = normal(0, 4, 8), weight(1)
    assert not float32_matmuls(jax.grad(loss_of(name, lambda f: jaxamp.autocast(f, BF16)), 1), x, w)


# Loops: in which dtype a carry goes round.


def carried(fun, *args, primitive="scan"):
    """Dtypes of the results of a loop."""
    program = jax.make_jaxpr(jaxamp.autocast(fun, BF16))(*args)
    (loop,) = [e for e in equations(program) if e.primitive.name == primitive]
    return [str(v.aval.dtype) for v in loop.outvars]


def layers(x, w):
    return lax.scan(lambda x, w: (x + jax.nn.silu(x @ w), None), x, w)[0]


def test_a_residual_stream_is_float32_and_a_mixed_one_16_bit():
    x, w = normal(0, 4, 8), normal(1, 3, 8, 8)
    assert carried(layers, x, w) == ["float32"]
    mixed = lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]  # noqa: E731
    assert carried(mixed, x, w) == ["bfloat16"]
    grad = jax.grad(lambda w: jnp.sum(jaxamp.autocast(layers, BF16)(x, w)))(w)
    assert grad.dtype == jnp.float32


def test_a_biased_and_rematerialised_residual_stream_is_float32():
    def block(x, p):
        return x + (jax.nn.silu(x @ p["w"]) @ p["w"] + p["b"])

    params = {"w": normal(1, 3, 8, 8), "b": normal(2, 3, 1, 8)}
    fun = lambda x, p: lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, p)[0]  # noqa: E731
    assert carried(fun, normal(0, 4, 8), params) == ["float32"]


def test_a_reversible_stream_is_float32():
    def body(c, w):
        a = c[0] + jnp.tanh(c[1] @ w)
        return (a, c[1] + jnp.tanh(a @ w)), None

    fun = lambda x, w: lax.scan(body, (x, x), w)[0]  # noqa: E731
    assert carried(fun, normal(0, 4, 8), normal(1, 3, 8, 8)) == ["float32"] * 2


def test_streams_that_change_places_are_float32():
    def body(c, w):
        return (c[1], c[0] + jnp.tanh(c[1] @ w)), None

    fun = lambda x, w: lax.scan(body, (x, x), w)[0]  # noqa: E731
    assert carried(fun, normal(0, 4, 8), normal(1, 4, 8, 8)) == ["float32"] * 2


def test_a_stream_that_starts_16_bit_is_widened():
    fun = lambda x, w: layers(x @ w[0], w)  # noqa: E731
    assert carried(fun, normal(0, 4, 8), normal(1, 3, 8, 8)) == ["float32"]


def test_sums_and_states_stay_float32():
    x, w = normal(0, 4, 8), weight(1)
    total = lambda x, w: lax.scan(lambda c, v: (c + v @ w, None), jnp.zeros(8), x)[0]  # noqa: E731
    assert carried(total, x, w) == ["float32"]
    from_input = lambda c, x, w: lax.scan(lambda c, v: (c + v @ w, None), c, x)[0]  # noqa: E731
    assert carried(from_input, x[0], x, w) == ["float32"]
    state = lambda x, w: lax.scan(lambda c, v: (jnp.tanh(c @ w + v), None), jnp.zeros(8), x)[0]  # noqa: E731
    assert carried(state, x, w) == ["float32"]
    started = lambda x, w: lax.scan(lambda c, v: (c + v @ w, None), x[0] @ w, x)[0]  # noqa: E731
    assert carried(started, x, w) == ["float32"]


def test_a_sum_beside_a_stream():
    def body(c, w):
        x = c[0] + jnp.tanh(c[0] @ w)
        return (x, c[1] + jnp.mean(x @ w)), None

    fun = lambda x, w: lax.scan(body, (x, jnp.float32(0)), w)[0]  # noqa: E731
    assert carried(fun, normal(0, 4, 8), normal(1, 3, 8, 8)) == ["float32", "float32"]
    got = jaxamp.autocast(lambda x: lax.fori_loop(0, 4096, lambda _, c: c + x @ x, x * 0), BF16)
    assert got(jnp.ones((1, 1)) * 1.0)[0, 0] == 4096


def test_a_carry_that_nothing_strong_touches_stays_weak():
    def body(c, _):
        return (c[0] * 0.5, c[1]), None

    fun = lambda t, x, w: (lambda c: c[0] * (x @ w))(lax.scan(body, (t, t), length=2)[0])  # noqa: E731
    args = (jnp.ones((1, 1)), normal(0, 4, 8), weight(1))
    assert carried(fun, *args) == ["float32"]  # the other one JAX takes out of the loop
    assert dtypes(jaxamp.autocast(fun, BF16), *args, primitive="mul")[-1] == ["bfloat16"] * 3


# What entering keeps.


def test_jit_keeps_its_name_and_remat_its_policy():
    policy = jax.checkpoint_policies.everything_saveable

    @jax.jit
    def named(x):
        return jax.checkpoint(lambda x: jnp.tanh(x @ x), policy=policy, prevent_cse=False)(x)

    program = jax.make_jaxpr(jaxamp.autocast(named, BF16))(jnp.eye(3))
    found = {e.primitive.name: e.params for e in equations(program)}
    assert found["jit"]["name"] == "named"
    remat = next(v for k, v in found.items() if k.startswith(("remat", "checkpoint")))
    assert remat["policy"] is policy and remat["prevent_cse"] is False


def test_a_function_that_jax_traces_once_is_planned_once():
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    program = jax.make_jaxpr(jaxamp.autocast(lambda x, w: inner(inner(inner(x, w), w), w), BF16))
    jits = [
        e.params["jaxpr"]
        for e in equations(program(jnp.eye(3), jnp.eye(3)))
        if e.primitive.name == "jit"
    ]
    assert len(jits) == 3 and jits[1] is jits[2]  # the first has a weak operand


def test_under_shard_map():
    x, w = normal(0, 4, 8), weight(1)
    specs = {"in_specs": (P("i"), P()), "out_specs": P("i")}
    fun = lambda x, w: jnp.tanh(x @ w) + lax.psum(jnp.sum(x @ w), "i")  # noqa: E731
    mixed = jax.shard_map(jaxamp.autocast(fun, BF16), mesh=mesh(), **specs)
    true = jax.shard_map(fun, mesh=mesh(), **specs)
    assert relative(jax.jit(mixed)(x, w), true(x, w)) < 8 * EPS[BF16]
    grads = [jax.grad(lambda w, f=f: jnp.sum(f(x, w)))(w) for f in (mixed, true)]
    assert relative(*grads) < 16 * EPS[BF16]


def test_custom_rules_with_integer_arguments():
    @jax.custom_vjp
    def pick(x, i, w):
        return x[i] @ w

    pick.defvjp(
        lambda x, i, w: (pick(x, i, w), (x, i, w)),
        lambda s, g: (
            jnp.zeros_like(s[0]).at[s[1]].add(3 * g @ s[2].T),
            None,
            jnp.outer(s[0][s[1]], g),
        ),
    )

    @jax.custom_jvp
    def scale(x, n):
        return x * n

    scale.defjvp(lambda p, t: (scale(*p), 5 * t[0] * p[1]))
    x, w = normal(0, 4, 8), weight(1)
    loss = lambda x: jnp.sum(scale(pick(x @ w, 1, w), jnp.int32(2)))  # noqa: E731
    got, true = jax.grad(jaxamp.autocast(loss, BF16))(x), jax.grad(loss)(x)
    assert relative(got, true) < 8 * EPS[BF16]


@pytest.mark.slow
def test_second_derivatives():
    x, w = normal(0, 8), weight(1)
    fun = lambda x: jnp.sum(jax.nn.silu(soft_sign(x @ w) @ w))  # noqa: E731
    got, true = jax.hessian(jaxamp.autocast(fun, BF16))(x), jax.hessian(fun)(x)
    assert relative(got, true) < 16 * EPS[BF16]


@both
def test_the_tangent_of_an_integer_operand_of_a_custom_jvp(policy):
    """JAX writes it into the rule as a float0 literal where the rule calls its function again."""

    @jax.custom_jvp
    def rows(x, i):
        return x[i] * 2

    rows.defjvp(lambda p, t: (rows(*p), t[0][p[1]] * 2))
    x, w = normal(0, 4, 8), weight(1)
    loss = lambda w: jnp.sum(rows(x @ w, jnp.array([0, 1])))  # noqa: E731
    got, true = jax.grad(jaxamp.autocast(loss, policy))(w), jax.grad(loss)(w)
    assert relative(got, true) < 4 * EPS[policy]


@both
@pytest.mark.parametrize("rule", ["jvp", "vjp"])
def test_a_rule_whose_function_closes_over_an_array(policy, rule):
    """JAX makes it an operand with respect to which it refuses to differentiate."""
    x, w, closed = normal(0, 4, 8), weight(1), normal(2, 4, 8)
    fun = lambda y: jnp.sin(y) * closed  # noqa: E731
    if rule == "jvp":
        mine = jax.custom_jvp(fun)
        mine.defjvp(lambda p, t: (mine(*p), 2 * jnp.cos(p[0]) * t[0] * closed))
    else:
        mine = jax.custom_vjp(fun)
        mine.defvjp(lambda y: (mine(y), y), lambda y, g: (2 * jnp.cos(y) * g * closed,))
    loss = lambda w: jnp.sum(mine(x @ w))  # noqa: E731
    program = jax.make_jaxpr(loss)(w)
    assert [e.params["num_consts"] for e in program.eqns if "num_consts" in e.params] == [1]
    got, true = jax.jit(jax.grad(jaxamp.autocast(loss, policy)))(w), jax.grad(loss)(w)
    assert relative(got, true) < 12 * EPS[policy]


@both
def test_a_function_applied_to_elements(policy):
    x, w = normal(0, 4, 8), weight(1)
    fun = lambda x: (x @ w).at[0].apply(jnp.tanh)  # noqa: E731
    got, true = jax.jit(jaxamp.autocast(fun, policy))(x), fun(x)
    assert relative(got, true) < 4 * EPS[policy]


@both
def test_a_rule_that_asks_what_is_differentiated(policy):
    """With symbolic_zeros a rule sees which operands are perturbed; no more are, under autocast."""
    seen = []

    @jax.custom_vjp
    def scaled(x, scale):
        return jnp.sin(x) * scale, x

    def forward(x, scale):
        seen.append((x.perturbed, scale.perturbed))
        return scaled(x.value, scale.value), (x.value, scale.value)

    def backward(saved, cotangents):
        g, _ = cotangents
        return 2 * g * jnp.cos(saved[0]) * saved[1], None

    scaled.defvjp(forward, backward, symbolic_zeros=True)
    x, w, scale = normal(0, 4, 8), weight(1), normal(2, 4, 8)
    loss = lambda w: jnp.sum(scaled(x @ w, scale)[0])  # noqa: E731
    got, true = jax.grad(jaxamp.autocast(loss, policy))(w), jax.grad(loss)(w)
    assert relative(got, true) < 12 * EPS[policy]
    assert set(seen) == {(True, False)}


@both
def test_a_jvp_rule_that_asks_what_is_differentiated(policy):
    seen = []

    @jax.custom_jvp
    def scaled(x, scale):
        return jnp.sin(x) * scale

    def rule(primals, tangents):
        x, scale = primals
        seen.append(isinstance(tangents[1], SymbolicZero))
        return scaled(x, scale), 2 * jnp.cos(x) * scale * tangents[0]

    scaled.defjvp(rule, symbolic_zeros=True)
    x, w, scale = normal(0, 4, 8), weight(1), normal(2, 4, 8)
    loss = lambda w: jnp.sum(scaled(x @ w, scale))  # noqa: E731
    got, true = jax.grad(jaxamp.autocast(loss, policy))(w), jax.grad(loss)(w)
    assert relative(got, true) < 12 * EPS[policy]
    assert set(seen) == {True}
