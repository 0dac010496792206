"""The step: the loss against plain numpy, accumulation against the batch, the guard around it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxamp
from train.config import Config, ModelConfig, OptimizerConfig
from train.step import (
    accumulate,
    at_floor,
    cross_entropy,
    decayed,
    init_state,
    loss_sums,
    make_eval_step,
    make_loss_fn,
    make_schedule,
    make_train_step,
    nonfinite_gradients,
    step_policy,
)

VOCAB = 31
SMALL = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32)


def small_config(**changes):
    return Config(model=SMALL, batch_size=8, num_steps=20).model_copy(update=changes)


def random_batch(seed, batch_size=8, seq_len=12, ignored=0.2):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (batch_size, seq_len)).astype(np.int32)
    labels = rng.integers(0, VOCAB, (batch_size, seq_len)).astype(np.int32)
    labels[rng.random(labels.shape) < ignored] = -100
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(labels)}


def start(config, policy="float32"):
    policy = jaxamp.get_policy(policy)
    graphdef, _ = nnx.eval_shape(lambda: init_state(config, VOCAB, policy))
    state = jax.jit(lambda: init_state(config, VOCAB, policy)[1])()
    return graphdef, state, make_train_step(config, graphdef, policy)


def leaves_equal(a, b):
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b)
    return all(jax.tree.leaves(same))


@pytest.mark.parametrize("seed", range(3))
def test_cross_entropy_against_numpy_in_float64(seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, 5, VOCAB)) * 5
    labels = rng.integers(-1, VOCAB, (3, 5))
    labels[labels < 0] = -100
    nll = count = z2 = 0
    for row, label in zip(logits.reshape(-1, VOCAB), labels.ravel(), strict=True):
        if label != -100:
            log_z = np.log(np.exp(row).sum())
            nll, z2, count = nll + log_z - row[label], z2 + log_z**2, count + 1
    got = cross_entropy(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
    # 15 sums of float32 numbers: 15 * 2^-24 relative, and as much again for log and exp.
    np.testing.assert_allclose(got, (nll, z2, count), rtol=30 * 2.0**-24)


@pytest.mark.parametrize(("dtype", "size"), [("float16", 70000), ("bfloat16", 50257)])
def test_cross_entropy_of_wide_16_bit_logits(dtype, size):
    """flax#677: 70000 zero logits in float16 are 11.156 nats, 50257 in bfloat16 10.825."""
    nll, _, _ = cross_entropy(jnp.zeros((1, 1, size), dtype), jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_allclose(nll, np.log(size), rtol=1e-6)


def test_everything_ignored_is_zero_and_not_nan():
    config = small_config()
    _, state, step = start(config)
    batch = random_batch(0, ignored=2.0)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = step(state, batch)
    assert metrics["train/loss"] == 0 and metrics["amp/grads_finite"]
    decay = 1 - config.optimizer.weight_decay * float(make_schedule(config.optimizer, 20)(0))
    np.testing.assert_allclose(
        state.params["embed"]["embedding"], before["embed"]["embedding"] * decay, rtol=1e-6
    )


def test_ignored_positions_do_not_matter():
    config = small_config()
    graphdef, state, _ = start(config)
    loss_fn, batch = make_loss_fn(config, graphdef), random_batch(1)
    count = jnp.sum(batch["labels"] != -100)
    grads = jax.jit(jax.grad(lambda p, b: loss_fn(p, b, None, count)[0]))
    padded = {
        "tokens": jnp.pad(batch["tokens"], ((0, 2), (0, 0))),
        "labels": jnp.pad(batch["labels"], ((0, 2), (0, 0)), constant_values=-100),
    }
    for a, b in zip(
        jax.tree.leaves(grads(state.params, batch)),
        jax.tree.leaves(grads(state.params, padded)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)  # sums of 96 terms, another order


@pytest.mark.parametrize(("seed", "num_microbatches"), [(0, 2), (1, 4), (2, 4)])
def test_microbatches_add_up_to_the_batch(seed, num_microbatches):
    """Also when they count different numbers of labels. Only the order of float32 sums differs."""
    config = small_config(z_loss=1e-3)
    graphdef, state, _ = start(config)
    grad_fn = jaxamp.value_and_grad(make_loss_fn(config, graphdef), "float32", has_aux=True)
    batch, key = random_batch(seed, ignored=0.6), jax.random.key(0)
    run = jax.jit(functools.partial(accumulate, grad_fn), static_argnums=3)
    whole = run(state.params, batch, key, 1)
    parts = run(state.params, batch, key, num_microbatches)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert b.dtype == jnp.float32
        # About 100 additions of terms up to the largest entry: 100 * 2^-24 of it.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=100 * 2.0**-24 * float(jnp.abs(a).max()))


def test_case_bad_microbatch():
    """espnet#3283: window 2, [inf, 2] then [2, 2]: skipped, scale halved once; then mean 2."""
    tx = jaxamp.apply_if_finite(optax.sgd(1.0), jaxamp.DynamicLossScale(8.0))

    def loss_fn(w, batch, key, count):
        loss = w * jnp.sum(batch["slope"]) / count
        return loss, loss

    def window(params, state, slopes):
        batch = {"slope": jnp.array(slopes), "labels": jnp.zeros(2, jnp.int32)}
        scale = jaxamp.loss_scale(state)
        grad_fn = jaxamp.value_and_grad(loss_fn, "float32", has_aux=True)
        scaled = lambda *args: grad_fn(*args, loss_scale=scale)  # noqa: E731
        _, grad = accumulate(scaled, params, batch, jax.random.key(0), 2)
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    params, state = jnp.float32(0.0), tx.init(jnp.float32(0.0))
    params, state = window(params, state, [jnp.inf, 2.0])
    assert params == 0 and state.loss_scale.loss_scale == 4 and state.skipped_steps == 1
    params, state = window(params, state, [2.0, 2.0])
    assert params == -2 and state.loss_scale.loss_scale == 4 and state.skipped_steps == 1


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_training_lowers_the_loss_and_keeps_float32(policy):
    config = small_config(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2))
    graphdef, state, step = start(config, policy)
    batch, losses = random_batch(0), []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[-1] < losses[0] - 0.5 and state.step == 20
    floating = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(leaf.dtype == jnp.float32 for leaf in floating)
    assert step._cache_size() == 1
    nll, count = make_eval_step(config, graphdef, jaxamp.get_policy(policy))(state.params, batch)
    assert float(nll / count) < losses[0] - 0.5


def test_bad_step_leaves_everything_but_the_counters():
    _, state, step = start(small_config(), "mixed_float16")
    state, _ = step(state, random_batch(0))
    bad = state.params | {"norm": {"scale": state.params["norm"]["scale"].at[0].set(jnp.inf)}}
    state = state._replace(params=bad)
    before = jax.tree.map(np.asarray, state)
    after, metrics = step(state, random_batch(1))
    assert not metrics["amp/grads_finite"] and metrics["amp/skipped_steps"] == 1
    assert leaves_equal(after.params, before.params)
    assert leaves_equal(after.opt_state.inner_state, before.opt_state.inner_state)
    assert after.opt_state.loss_scale.loss_scale == before.opt_state.loss_scale.loss_scale / 2


def test_nonfinite_gradients_are_named():
    config = small_config()
    graphdef, state, step = start(config)
    broken = state.params["blocks"]["feed_forward"]["up"]["kernel"].at[1].set(jnp.nan)
    state.params["blocks"]["feed_forward"]["up"]["kernel"] = broken
    batch = random_batch(0)
    state, _ = step(state, batch)
    names = nonfinite_gradients(config, graphdef, jaxamp.get_policy("float32"), state, batch, 1)
    assert "blocks/feed_forward/up/kernel" in names and "embed/embedding" in names


def test_weight_decay_spares_norms_and_biases():
    config = small_config(model=SMALL.model_copy(update={"norm": "layernorm"}))
    mask = decayed(start(config)[1].params)
    paths = jax.tree_util.tree_leaves_with_path(mask)
    by_name = {jax.tree_util.keystr(p, simple=True, separator="/"): m for p, m in paths}
    assert by_name["blocks/attention/query/kernel"] and by_name["embed/embedding"]
    assert not by_name["norm/scale"] and not by_name["norm/bias"]
    assert all(m == name.endswith(("kernel", "embedding")) for name, m in by_name.items())


def test_schedule():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_learning_rate_fraction=0.1)
    rates = [float(make_schedule(config, 20)(k)) for k in range(21)]
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rates[12], 0.1 + 0.9 * 0.5, rtol=1e-6)
    np.testing.assert_allclose(rates[20], 0.1, rtol=1e-6)
    constant = config.model_copy(update={"schedule": "constant", "warmup_steps": 0})
    assert [float(make_schedule(constant, 20)(k)) for k in (0, 5, 20)] == [1.0, 1.0, 1.0]


def test_at_floor():
    assert at_floor(jaxamp.NoOpLossScale())
    assert not at_floor(jaxamp.DynamicLossScale(4.0))
    assert at_floor(jaxamp.DynamicLossScale(1.0))


def test_dropout_differs_by_step_and_microbatch_and_is_reproducible():
    config = small_config(model=SMALL.model_copy(update={"dropout": 0.5}))
    _, state, step = start(config)
    keep = jax.tree.map(jnp.array, state)
    _, first = step(state, random_batch(0))
    _, again = step(jax.tree.map(jnp.array, keep), random_batch(0))
    _, later = step(keep._replace(step=jnp.int32(1)), random_batch(0))
    assert first["train/loss"] == again["train/loss"] != later["train/loss"]


def loss_and_gradients(config, policy="float32", seed=0):
    """`((loss, nll), gradients)` of a random batch."""
    graphdef, state, _ = start(config, policy)
    grad_fn = jaxamp.value_and_grad(make_loss_fn(config, graphdef), policy, has_aux=True)
    key = jax.random.key(seed)
    return jax.jit(grad_fn)(state.params, random_batch(seed), key, jnp.int32(70))


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        # About 100 additions of terms up to the largest entry, in another order: 100 * 2^-24 of it.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=100 * 2.0**-24 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(("seed", "chunk", "tie"), [(0, 4, True), (1, 5, False), (2, 99, True)])
def test_the_loss_in_chunks_is_the_loss(seed, chunk, tie):
    """Also where the chunk does not divide the 12 tokens or is longer than they are."""
    model = SMALL.model_copy(update={"tie_embeddings": tie, "dropout": 0.1})
    config = small_config(model=model, z_loss=1e-2)
    whole = loss_and_gradients(config, seed=seed)
    chunked = loss_and_gradients(config.model_copy(update={"loss_chunk": chunk}), seed=seed)
    assert_close(chunked, whole)


@pytest.mark.parametrize("compute", ["bf16", "f16"])
@pytest.mark.slow
def test_chunks_add_up_in_float32_under_autocast(compute):
    """The head's gradient is a sum over 12 chunks; in 16 bits it would be off by 2^-9 of itself."""
    config = small_config(model=SMALL.model_copy(update={"tie_embeddings": False}))
    chunked = config.model_copy(update={"loss_chunk": 1})
    policy = f"compute={compute}"
    whole, parts = loss_and_gradients(config, policy), loss_and_gradients(chunked, policy)
    losses, heads = zip(*((losses, grads["head"]) for losses, grads in (whole, parts)), strict=True)
    assert_close(losses[1], losses[0])
    assert_close(heads[1], heads[0])


def test_evaluation_in_chunks_is_evaluation():
    config = small_config()
    graphdef, state, _ = start(config)
    evaluate = lambda config: make_eval_step(config, graphdef, jaxamp.get_policy("float32"))(  # noqa: E731
        state.params, random_batch(3)
    )
    whole, parts = evaluate(config), evaluate(config.model_copy(update={"loss_chunk": 5}))
    np.testing.assert_allclose(parts[0], whole[0], rtol=100 * 2.0**-24)  # 96 terms
    assert parts[1] == whole[1] and parts[1].dtype == jnp.int32


@pytest.mark.parametrize("policy", ["float32", "compute=bf16"])
@pytest.mark.slow
def test_chunks_never_hold_all_logits(policy):
    vocab, length = 32768, 128
    config = small_config(model=SMALL.model_copy(update={"n_layers": 1}))
    mixed = jaxamp.get_policy(policy)
    graphdef, state = nnx.eval_shape(lambda: init_state(config, vocab, mixed))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def temp_bytes(chunk, differentiate):
        def loss(params, batch):
            return loss_sums(graphdef, params, batch, chunk=chunk)[0]

        fun = jaxamp.value_and_grad(loss, mixed) if differentiate else jaxamp.autocast(loss, mixed)
        program = jax.jit(fun).lower(state.params, {"tokens": ids, "labels": ids}).compile()
        return program.memory_analysis().temp_size_in_bytes

    logits_bytes = 2 * length * vocab * 4
    for differentiate in (False, True):
        assert temp_bytes(None, differentiate) > logits_bytes
        assert temp_bytes(8, differentiate) < logits_bytes / 2


def test_islands_are_the_policys():
    policy = jaxamp.get_policy("compute=bf16")
    for remat, residuals in (("none", "float32"), ("full", "float32"), ("islands", "compute")):
        config = small_config(model=SMALL.model_copy(update={"remat": remat}))
        assert step_policy(policy, config).residuals == residuals
    asked = policy.replace(residuals="compute")
    assert step_policy(asked, small_config()) == asked


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.slow
def test_a_step_that_recomputes_is_the_step(remat):
    found, expected = (one_step(remat, "float32")[0] for remat in (remat, "none"))
    assert leaves_equal(found, expected)


@pytest.mark.slow
def test_a_step_with_islands_is_near_the_step():
    """What it recomputes starts from 16-bit values: eps x 2 layers x 8 roundings in each."""
    found, expected = (one_step(r, "mixed_bfloat16")[1] for r in ("islands", "none"))
    assert float(found) == pytest.approx(float(expected), rel=2**-8 * 2 * 8)
    assert found != expected  # it did something


def one_step(remat, policy):
    """Parameters after a step, and its gradient norm."""
    _, state, step = start(small_config(model=SMALL.model_copy(update={"remat": remat})), policy)
    state, metrics = step(state, random_batch(0))
    return state.params, metrics["train/grad_norm"]
