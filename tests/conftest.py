import os
import subprocess
import sys
import tempfile
import textwrap

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests run small programs once: compiling them with care costs more than it saves. What must hold
# for optimised programs runs in processes of its own, in the slow suite.
jax.config.update("jax_disable_most_optimizations", True)

# Many tests build the same small model: what one of them compiled serves the others, in every
# worker of pytest-xdist. The directory is new for each session.
_CACHE = os.environ.setdefault("JAXAMP_TEST_CACHE", tempfile.mkdtemp(prefix="jaxamp-tests-"))
jax.config.update("jax_compilation_cache_dir", _CACHE)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(autouse=True)
def no_diagnoses(request, monkeypatch):
    """The diagnosis of an incident is a process of half a minute; few tests want it."""
    if "with_diagnosis" not in request.fixturenames:
        monkeypatch.setattr("train.loop.begin_diagnosis", lambda bundle: None)


@pytest.fixture
def with_diagnosis():
    """Incidents are diagnosed, as for users."""


@pytest.fixture
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def optimized():
    """Programs are compiled as users compile them."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def eight_devices():
    """Runs a script where the CPU is eight devices; returns what it prints, or the last line."""

    def run(script: str, whole: bool = False) -> str:
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ | flags,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout if whole else result.stdout.strip().splitlines()[-1]

    return run


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The fast suite takes the first seed of each test; the slow one the others."""
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("seed", 0) != 0:
            item.add_marker(pytest.mark.slow)
