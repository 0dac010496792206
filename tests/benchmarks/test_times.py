"""Times of the hot paths, for a person to compare on one machine: no time is stored.

    pytest tests/benchmarks -m slow -n 0 --benchmark-enable

Without --benchmark-enable each runs once, untimed.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from small_step import first_batch, first_state, make_small_step

import jaxamp

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


@pytest.mark.parametrize("policy", POLICIES)
def test_tracing_a_step(benchmark, policy):
    step, state, batch = make_small_step(policy)

    def trace():
        jax.clear_caches()
        return step.trace(state, batch)

    assert benchmark(trace).jaxpr.eqns


@pytest.mark.parametrize("guarded", [False, True])
def test_updating(benchmark, guarded):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if guarded:
        tx = jaxamp.apply_if_finite(tx, jaxamp.DynamicLossScale())
    grads = {name: jnp.ones((256, 1024)) for name in "abcd"}
    state, update = tx.init(grads), jax.jit(tx.update)
    updates, _ = benchmark(lambda: jax.block_until_ready(update(grads, state, grads)))
    assert jax.tree.structure(updates) == jax.tree.structure(grads)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step(benchmark, policy):
    step, *_ = make_small_step(policy)
    kept, batch = [first_state(policy)], first_batch()

    def run():
        kept[0], metrics = step(kept[0], batch)
        return jax.block_until_ready(metrics)

    assert jnp.isfinite(benchmark(run)["train/loss"])
