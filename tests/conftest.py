import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
