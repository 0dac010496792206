"""`apply_if_finite`, with the tables "Skip, clip, count" and "Optimizer arithmetic in 16 bits"."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxamp
from jaxamp import DynamicLossScale, apply_if_finite

NAN, INF = jnp.float32(jnp.nan), jnp.float32(jnp.inf)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def run(tx, params, grads_of_steps):
    """Parameters and state after the given gradients, jitted, and the updates of each step."""
    state, update, seen = tx.init(params), jax.jit(tx.update), []
    for grads in grads_of_steps:
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        seen.append(updates)
    return params, state, seen


def random_tree(seed, scale=1.0):
    keys = jax.random.split(jax.random.key(seed), 2)
    return {"w": scale * jax.random.normal(keys[0], (7, 3)), "b": jax.random.normal(keys[1], (3,))}


def adam():
    schedule = optax.linear_schedule(0.0, 0.1, 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


# --- Skip, clip, count


def test_case_clip_acts_on_unscaled_gradients():
    """Lightning#9599: g=[3,4] at scale 1024, max norm 1."""
    tx = apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), DynamicLossScale(1024.0)
    )
    params = jnp.zeros(2)
    grad_fn = jaxamp.grad(lambda w: w @ jnp.array([3.0, 4.0], w.dtype), "mixed_float16")
    state = tx.init(params)
    updates, _ = tx.update(grad_fn(params, loss_scale=jaxamp.loss_scale(state)), state, params)
    np.testing.assert_allclose(-updates, [0.6, 0.8], rtol=1e-6)


def test_case_float16_norm():
    """maxtext#5143: float16 gradients [300]*4: norm 600, clipped to 0.5 each."""
    tx = apply_if_finite(optax.clip_by_global_norm(1.0))
    grads = jnp.full(4, 300, jnp.float16)
    updates, state = tx.update(grads, tx.init(grads))
    assert state.grad_norm == 600.0 and state.grads_finite
    np.testing.assert_allclose(updates, 0.5, rtol=1e-6)


def test_case_bfloat16_norm():
    """600 scalar bfloat16 ones: 24.495, where a bfloat16 sum stops at 16."""
    grads = [jnp.ones([], jnp.bfloat16)] * 600
    _, state = jax.jit(apply_if_finite(optax.identity()).update)(
        grads, apply_if_finite(optax.identity()).init(grads)
    )
    np.testing.assert_allclose(state.grad_norm, np.sqrt(600), rtol=1e-6)


def test_case_nan_is_never_applied():
    """optax#1746: NaN, NaN, NaN, 1.0 gives updates 0, 0, 0, -1 with sgd(1.0)."""
    _, state, updates = run(apply_if_finite(optax.sgd(1.0)), jnp.float32(0), [NAN, NAN, NAN, 1.0])
    assert [float(u) for u in updates] == [0.0, 0.0, 0.0, -1.0]
    assert (state.skipped_steps, state.consecutive_skips) == (3, 0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize("seed", range(3))
def test_case_full_skip(seed, bad):
    """flaxchat#6: params, mu, nu, count bit-equal before and after; so too -0.0 parameters."""
    tx, params = apply_if_finite(adam(), DynamicLossScale(4.0)), random_tree(seed)
    params["b"] = params["b"].at[0].set(-0.0).at[1].set(0.0)
    params, state, _ = run(tx, params, [random_tree(seed + 10)])
    grads = random_tree(seed + 20)
    grads["w"] = grads["w"].at[seed, 1].set(bad)
    updates, after = jax.jit(tx.update)(grads, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    assert_same_bits(after.inner_state, state.inner_state)
    assert (after.loss_scale.loss_scale, after.skipped_steps) == (2.0, 1)


def test_case_schedule_is_held():
    """pytorch#55585: 3 overflows, 2 clean: Adam count 2, learning rates of updates 0 and 1."""
    schedule = lambda count: 0.1 * count  # noqa: E731
    tx = apply_if_finite(optax.inject_hyperparams(optax.adam)(learning_rate=schedule))
    state, rates = tx.init(jnp.float32(1.0)), []
    for grad in (INF, INF, INF, jnp.float32(1.0), jnp.float32(1.0)):
        _, state = tx.update(grad, state)
        rates.append(float(state.inner_state.hyperparams["learning_rate"]))
    np.testing.assert_allclose(rates[-2:], [0.0, 0.1], rtol=1e-6)
    assert optax.tree_utils.tree_get(state.inner_state.inner_state, "count") == 2


@pytest.mark.parametrize("grads", [{}, {"frozen": None}])
def test_case_no_gradients(grads):
    """nerfstudio#1919: an empty gradient tree is finite, and a no-op."""
    tx = apply_if_finite(optax.adam(0.1), DynamicLossScale())
    updates, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    assert updates == grads and state.grads_finite and state.grad_norm == 0


def test_case_two_devices_skip_together(eight_devices):
    """pytorch#136009: inf only in shard 1 of 2: both skip, parameters and scale equal bitwise."""
    out = eight_devices(
        """
        import jax, jax.numpy as jnp, numpy as np, optax, jaxamp
        from jax.sharding import PartitionSpec as P, NamedSharding
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        tx = jaxamp.apply_if_finite(optax.adam(0.1), jaxamp.DynamicLossScale(8.0))
        params = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P()))
        state = tx.init(params)
        x = jax.device_put(jnp.ones((4, 4)).at[3, 2].set(jnp.inf), NamedSharding(mesh, P("data")))
        @jax.jit
        def step(params, state, x):
            grads = jaxamp.grad(lambda w, x: jnp.mean(x @ w), "float32")(params, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
        after, state = step(params, state, x)
        shards = [np.asarray(s.data).tobytes() for s in after.addressable_shards]
        scales = [float(s.data) for s in state.loss_scale.loss_scale.addressable_shards]
        print(len(shards), set(shards) == {np.arange(4.0, dtype=np.float32).tobytes()}, set(scales))
        """
    )
    assert out == "2 True {4.0}"


def test_case_logged_loss():
    """fastai#3048: 8 microbatches of loss 1.0 at scale 2048 log 1.0."""
    value_and_grad = jaxamp.value_and_grad(lambda w: w * 1.0, "mixed_float16")
    losses = [value_and_grad(jnp.float32(1.0), loss_scale=2048.0)[0] for _ in range(8)]
    assert np.mean(losses) == 1.0


def test_case_bfloat16_skips_are_counted():
    """DeepSpeed#8415: inf each step in bf16: skipped = n, parameters unchanged."""
    tx = apply_if_finite(optax.adam(0.1), jaxamp.get_loss_scale("mixed_bfloat16"))
    params, state, _ = run(tx, random_tree(0), [jax.tree.map(jnp.log, random_tree(1, 0.0))] * 5)
    assert (state.skipped_steps, state.consecutive_skips) == (5, 5)
    assert_same_bits(params, random_tree(0))


# --- Optimizer arithmetic in 16 bits


def test_case_frozen_weight():
    """speculators#765: w=1, 100 updates of -1e-3 in bf16 compute: 0.9 with float32 params."""
    tx = apply_if_finite(optax.sgd(1.0))
    grad_fn = jaxamp.grad(lambda w: w * jnp.asarray(1e-3, w.dtype), "mixed_bfloat16")
    params = jnp.float32(1.0)
    params, _, _ = run(tx, params, [grad_fn(params)] * 100)
    # bfloat16(1e-3) is off by up to 2^-9 of itself, 100 float32 additions by 100 * 2^-24.
    np.testing.assert_allclose(params, 0.9, atol=0.1 * 2.0**-8 + 100 * 2.0**-24)


@pytest.mark.parametrize(("grad", "update"), [(0.0, 0.0), (1e-4, -1e-3)])
def test_case_adam_eps_in_float16(grad, update):
    """optax#1754: float16 params: 0 for a zero gradient, about -lr for 1e-4; now nan and -inf."""
    params = jnp.ones(3, jnp.float16)
    _, _, updates = run(apply_if_finite(optax.adam(1e-3)), params, [jnp.full(3, grad, jnp.float16)])
    # g/(|g| + 1e-8) is 1 - 1e-4, and float16(1e-4) cancels out of it.
    np.testing.assert_allclose(updates[0], update, rtol=2e-4)


@pytest.mark.slow
def test_case_second_moment():
    """optax#1552: bf16 params, g=1, 3000 steps: nu 0.950, where bfloat16 stops at 0.5."""
    tx, params = apply_if_finite(optax.adam(1e-3)), jnp.ones([], jnp.bfloat16)
    body = lambda state, _: (tx.update(jnp.ones([], jnp.bfloat16), state, params)[1], None)  # noqa: E731
    state, _ = jax.lax.scan(body, tx.init(params), length=3000)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "nu"), 1 - 0.999**3000, rtol=1e-4)


def test_case_ema():
    """ema-pytorch#18: ema 1, target 2, decay 0.999, 1000 steps: 1.632; bfloat16 stays at 1."""
    tx, params = apply_if_finite(optax.ema(0.999, debias=False)), jnp.ones([], jnp.bfloat16)
    state = tx.init(params)
    state = state._replace(inner_state=state.inner_state._replace(ema=jnp.float32(1.0)))
    body = lambda state, _: (tx.update(jnp.full([], 2, jnp.bfloat16), state)[1], None)  # noqa: E731
    state, _ = jax.lax.scan(body, state, length=1000)
    np.testing.assert_allclose(state.inner_state.ema, 2 - 0.999**1000, rtol=1e-4)


# --- what holds for every inner transformation


INNERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": adam,
    "adafactor": lambda: optax.adafactor(0.1),
    "lion": lambda: optax.lion(0.1),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "bf16 moments": lambda: optax.adam(0.1, mu_dtype=jnp.bfloat16),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "multi": lambda: optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "multi steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("name", INNERS)
def test_clean_steps_are_the_inner_transformation(name):
    """With finite gradients the wrapper is not there, and nor is a bad step among them."""
    grads = [random_tree(seed) for seed in range(3)]
    bad = jax.tree.map(lambda g: g * jnp.nan, grads[0])
    plain, _, _ = run(INNERS[name](), random_tree(9), grads)
    wrapped, state, _ = run(
        apply_if_finite(INNERS[name]()), random_tree(9), [grads[0], bad, *grads[1:]]
    )
    # Equal but for how XLA fuses the two programs: a few roundings in each of three steps.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), wrapped, plain
    )
    assert state.skipped_steps == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("seed", range(3))
def test_a_power_of_two_scale_changes_no_bit_over_20_steps(policy, seed):
    x = jax.random.normal(jax.random.key(seed + 100), (16, 7))
    loss_fn = lambda p, x: jnp.mean(jnp.square(jnp.tanh(x @ p["w"] + p["b"][None])))  # noqa: E731

    def train(loss_scale):
        tx = apply_if_finite(adam(), loss_scale)

        @jax.jit
        def step(params, state):
            grad_fn = jaxamp.value_and_grad(loss_fn, policy)
            _, grads = grad_fn(params, x, loss_scale=jaxamp.loss_scale(state))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = random_tree(seed)
        state = tx.init(params)
        for _ in range(20):
            params, state = step(params, state)
        return params

    assert_same_bits(train(None), train(DynamicLossScale(2.0**10, growth_interval=7)))


def test_extra_arguments_pass_through():
    seen = {}

    def update(updates, state, params=None, *, value, **extra_args):
        seen.update(value=value, **extra_args)
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = apply_if_finite(inner)
    tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2), value=3.0, grad_fn="g")
    assert seen == {"value": 3.0, "grad_fn": "g"}


def test_donation_scan_and_a_second_init():
    tx = apply_if_finite(adam(), DynamicLossScale())
    step = jax.jit(lambda state, g: tx.update(g, state, g)[1], donate_argnums=0)
    for _ in range(2):  # the first loop must not have donated the scale that init starts from
        state = tx.init(random_tree(0))
        for seed in range(2):
            state = step(state, random_tree(seed))
        assert jaxamp.loss_scale(state).finite_steps == 2
    grads = jax.tree.map(lambda *g: jnp.stack(g), random_tree(0), random_tree(1))
    scanned, _ = jax.lax.scan(
        lambda s, g: (tx.update(g, s, g)[1], None), tx.init(random_tree(0)), grads
    )
    assert jax.tree.structure(scanned) == jax.tree.structure(state)


def test_sharded_state_keeps_its_sharding():
    mesh = jax.make_mesh((1,), ("data",))
    params = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, PartitionSpec("data")))
    tx = apply_if_finite(optax.adam(0.1))
    _, state, _ = run(tx, params, [jnp.ones((4, 2))])
    mu = optax.tree_utils.tree_get(state, "mu")
    assert mu.shape == (4, 2) and state.grads_finite


def test_with_train_state():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 5)))
    tx = optax.chain(apply_if_finite(optax.adam(0.1), DynamicLossScale(8.0)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    after = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, bad)
    assert_same_bits(after.params, params)
    assert jaxamp.loss_scale(after).loss_scale == jaxamp.loss_scale(after.opt_state).loss_scale == 4


def test_with_nnx_optimizer():
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(
        model, apply_if_finite(optax.adam(0.1), DynamicLossScale(8.0)), wrt=nnx.Param
    )
    before = jax.tree.map(jnp.array, nnx.to_pure_dict(nnx.state(model)))

    @nnx.jit
    def step(model, optimizer, factor):
        def loss_fn(model):
            return jnp.sum(model(jnp.ones((2, 5)))) * factor

        grads = nnx.grad(loss_fn)(model)
        optimizer.update(model, grads)
        return jaxamp.loss_scale(optimizer)

    assert step(model, optimizer, INF).loss_scale == 4.0
    assert_same_bits(nnx.to_pure_dict(nnx.state(model)), before)
    assert step(model, optimizer, jnp.float32(1.0)).finite_steps == 1
    assert jaxamp.loss_scale(optimizer).loss_scale == 4.0
    assert not np.allclose(model.kernel[...], before["kernel"])


def test_loss_scale_is_found_at_any_depth_and_only_one():
    scale = DynamicLossScale(64.0)
    nested = optax.chain(optax.identity(), optax.chain(apply_if_finite(optax.sgd(1.0), scale)))
    assert jaxamp.loss_scale({"a": [nested.init(jnp.ones(2))]}).loss_scale == 64.0
    with pytest.raises(ValueError, match="found 0"):
        jaxamp.loss_scale(optax.sgd(1.0).init(jnp.ones(2)))
    two = optax.chain(apply_if_finite(optax.sgd(1.0)), apply_if_finite(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="found 2"):
        jaxamp.loss_scale(two.init(jnp.ones(2)))
