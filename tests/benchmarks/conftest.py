import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def optimized():
    """What is measured here is compiled as users compile it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
