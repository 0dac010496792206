"""Warnings of `explain` and `check_optimizer`, and programs that must raise none."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxamp
from train.config import Config
from train.run import explained
from train.step import make_optimizer

F16, BF16, F32 = "compute=f16", "compute=bf16", "float32"
CLIP, ADAMW = optax.clip_by_global_norm(1.0), optax.adamw(1e-3)


def params(dtype=jnp.float32):
    return {"a": jax.ShapeDtypeStruct((4, 8), dtype), "b": jax.ShapeDtypeStruct((8,), dtype)}


def guarded(*inner, policy=F16):
    return jaxamp.apply_if_finite(optax.chain(*inner), jaxamp.get_loss_scale(policy))


def check(tx, policy=F16, dtype=jnp.float32, **extra):
    return jaxamp.check_optimizer(tx, params(dtype), policy, **extra)


def only(notes):
    (note,) = notes
    return note


# The guard and what is around it.


@pytest.mark.parametrize("policy", [F32, BF16, F16])
@pytest.mark.parametrize(
    "inner",
    [
        (CLIP, ADAMW),
        (optax.clip(1.0), optax.adafactor(1e-3)),
        (optax.add_decayed_weights(0.1), optax.lion(1e-3)),
        (optax.MultiSteps(ADAMW, 2).gradient_transformation(),),
        (optax.masked(ADAMW, {"a": True, "b": False}),),
    ],
)
def test_nothing_is_said_of_what_is_inside(policy, inner):
    assert check(guarded(*inner, policy=policy), policy) == ()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_nothing_is_said_of_the_trainer(policy):
    policy = jaxamp.get_policy(policy)
    assert check(make_optimizer(Config().optimizer, 100, policy), policy) == ()


@pytest.mark.parametrize(
    "outside",
    [CLIP, optax.clip(1.0), optax.zero_nans(), optax.adaptive_grad_clip(0.1), optax.trace(0.9)],
)
def test_a_change_of_gradients_before_the_guard_is_told(outside):
    note = only(check(optax.chain(outside, guarded(ADAMW))))
    assert "before apply_if_finite" in note and "optax" in note


def test_a_clip_outside_hides_an_inf():
    """What the note warns of: an elementwise clip makes 1 of an Inf, and the bad step is taken."""
    grads = {"a": jnp.full((4, 8), jnp.inf), "b": jnp.ones(8)}
    values = jax.tree.map(lambda p: jnp.ones(p.shape), params())
    tx = optax.chain(optax.clip(1.0), guarded(ADAMW))
    _, (_, state) = tx.update(grads, tx.init(values), values)
    assert state.grads_finite
    tx = guarded(optax.clip(1.0), ADAMW)
    _, state = tx.update(grads, tx.init(values), values)
    assert not state.grads_finite


def test_the_users_own_line_is_named():
    mine = optax.stateless(lambda grads, _: jax.tree.map(lambda g: g / 1024, grads))
    note = only(check(optax.chain(mine, guarded(ADAMW))))
    assert "test_check.py" in note


def test_accumulation_outside_is_told():
    notes = check(optax.MultiSteps(guarded(ADAMW), 2).gradient_transformation())
    assert notes and all("before apply_if_finite" in note for note in notes)


@pytest.mark.parametrize("after", [optax.add_decayed_weights(0.1), optax.trace(0.9)])
def test_what_moves_parameters_on_a_skipped_step_is_told(after):
    note = only(check(optax.chain(guarded(optax.scale_by_adam()), after)))
    assert "on a skipped step too" in note and "optax" in note


@pytest.mark.parametrize(
    "after", [optax.scale(-1e-3), optax.scale_by_learning_rate(lambda count: 1e-3 / (count + 1))]
)
def test_a_rate_behind_the_guard_is_harmless(after):
    assert check(optax.chain(guarded(optax.scale_by_adam()), after)) == ()


def test_a_jitted_update_is_looked_into():
    inner = guarded(ADAMW)
    tx = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    assert check(tx) == ()
    outer = optax.chain(CLIP, tx)
    outer = optax.GradientTransformationExtraArgs(outer.init, jax.jit(outer.update))
    assert "before apply_if_finite" in only(check(outer))


def test_a_group_without_a_guard_is_told():
    labels = {"a": "guarded", "b": "free"}
    tx = optax.partition({"guarded": guarded(ADAMW), "free": optax.sgd(1e-2)}, labels)
    assert any("does not check" in note for note in check(tx))
    frozen = optax.partition({"guarded": guarded(ADAMW), "free": optax.set_to_zero()}, labels)
    assert check(frozen) == ()


def test_extra_arguments_reach_the_update():
    tx = guarded(optax.adam(1e-3), optax.contrib.reduce_on_plateau())
    assert check(tx, value=jnp.float32(1.0)) == ()


# Loss scale and 16-bit numbers.


@pytest.mark.parametrize("policy", [F32, BF16])
def test_an_unguarded_optimizer_is_fine_without_float16(policy):
    assert check(ADAMW, policy) == ()


def test_float16_without_a_loss_scale_is_told():
    assert "without apply_if_finite" in only(check(optax.chain(CLIP, ADAMW)))
    assert "without a loss scale" in only(check(jaxamp.apply_if_finite(ADAMW)))
    two = optax.partition({"x": guarded(ADAMW), "y": guarded(ADAMW)}, {"a": "x", "b": "y"})
    assert "2 apply_if_finite" in only(check(two))
    static = jaxamp.apply_if_finite(ADAMW, jaxamp.StaticLossScale(1024.0))
    assert check(static) == ()


@pytest.mark.parametrize("dtype,part", [(jnp.bfloat16, 2.0**-9), (jnp.float16, 2.0**-12)])
def test_16_bit_parameters_are_told(dtype, part):
    policy = "bf16" if dtype == jnp.bfloat16 else "f16"
    note = only(check(guarded(ADAMW, policy=policy), policy, dtype))
    assert "the parameters" in note and jnp.dtype(dtype).name in note
    assert f"2^{int(jnp.log2(part))}" in note
    # The bound that the note gives: less than that part of a number never changes it.
    weights = jax.random.uniform(jax.random.key(0), (1000,), minval=1, maxval=4).astype(dtype)
    update = 0.99 * part * weights.astype(jnp.float32)
    assert (weights == (weights + update.astype(dtype)).astype(dtype)).all()
    assert not (weights == (weights + (2.1 * update).astype(dtype)).astype(dtype)).all()


def test_16_bit_moments_are_told():
    assert "mu: bfloat16" in only(check(guarded(optax.adamw(1e-3, mu_dtype=jnp.bfloat16))))
    notes = check(ADAMW, BF16, jnp.bfloat16)  # unguarded, so the moments follow the parameters
    assert any("nu: bfloat16" in note for note in notes)


# Casts under stop_gradient.


def stops(fun, *args, policy=BF16):
    notes = jaxamp.explain(fun, policy)(*args).notes
    return [note for note in notes if "the gradient stops here" in note]


X = jax.random.normal(jax.random.key(1), (4, 4))
CUT = {
    "behind a cast": lambda w: jnp.sum(lax.stop_gradient((w @ w).astype(jnp.bfloat16))),
    "before a cast": lambda w: jnp.sum(lax.stop_gradient(w @ w).astype(jnp.bfloat16)),
    "a parameter": lambda w: jnp.sum(lax.stop_gradient(w.astype(jnp.float16)) @ X.astype("f2")),
}
KEPT = {
    "straight through": lambda w: jnp.sum(w + lax.stop_gradient(w.astype(jnp.bfloat16) - w)),
    "straight through, both": lambda w: jnp.sum(
        w + lax.stop_gradient(w.astype(jnp.bfloat16)).astype(w.dtype) - lax.stop_gradient(w)
    ),
    "a target": lambda w: jnp.sum((w - lax.stop_gradient(jnp.tanh(w))) ** 2),
    "softmax": lambda w: jnp.sum((X * jax.nn.softmax((w @ w).astype(jnp.bfloat16))).astype("f4")),
    "logsumexp": lambda w: jax.nn.logsumexp((w @ w).astype(jnp.float16)).astype("f4"),
    "an accuracy": lambda w: jnp.sum(lax.stop_gradient((w > 0).astype(w.dtype)) * w),
    "a jitted rounding": lambda w: jnp.sum(w + round_inside(w) - lax.stop_gradient(w)),
    "a plain cast": lambda w: jnp.sum(w.astype(jnp.bfloat16)),
}


@jax.jit
def round_inside(w):
    return lax.stop_gradient(w.astype(jnp.bfloat16)).astype(jnp.float32)


@pytest.mark.parametrize("fun", CUT.values(), ids=CUT)
def test_a_cast_that_cuts_the_gradient_is_noted(fun):
    (note,) = stops(fun, X)
    assert "test_check.py" in note
    assert not jax.grad(lambda w: fun(w).astype(jnp.float32))(X).any()  # what the note says


@pytest.mark.parametrize("fun", KEPT.values(), ids=KEPT)
def test_a_cast_with_another_way_is_not_noted(fun):
    assert not stops(fun, X)
    assert jax.grad(lambda w: fun(w).astype(jnp.float32))(X).any()


def test_a_cut_inside_of_a_loop_is_noted():
    def fun(w):
        body = lambda x, _: (lax.stop_gradient((x @ w).astype(jnp.float16)).astype("f4"), None)  # noqa: E731
        return jnp.sum(lax.scan(body, w, None, length=2)[0])

    assert "test_check.py" in only(stops(fun, X))


def test_the_readme_example_has_no_notes():
    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    args = {"w": jnp.ones((4, 1))}, {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}
    assert jaxamp.explain(loss_fn, F16)(*args).notes == ()
    tx = guarded(CLIP, optax.adamw(3e-4))
    assert jaxamp.check_optimizer(tx, args[0], F16) == ()


def test_the_trainer_prints_what_it_finds():
    policy = jaxamp.get_policy("bf16")
    args = (params(jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.bfloat16))
    text = explained(Config(), policy, lambda p, x: jnp.sum(x @ p["a"] + p["b"]), args)
    assert text.splitlines()[-1].startswith("note: the parameters: bfloat16")


def test_parameters_are_those_of_the_policy():
    """A step keeps them in the policy's dtype, whatever the arrays at hand are in."""
    params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    notes = jaxamp.check_optimizer(optax.adam(1e-3), params, "params=bf16,compute=bf16")
    assert any(note.startswith("the parameters: bfloat16") for note in notes)
    assert any(note.startswith("mu: bfloat16") or "mu" in note for note in notes)
    assert jaxamp.check_optimizer(optax.adam(1e-3), params, "compute=bf16") == ()
