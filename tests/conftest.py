import os
import subprocess
import sys
import textwrap

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def eight_devices():
    """Runs a script where the CPU is eight devices; returns the last line that it prints."""

    def run(script: str) -> str:
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=os.environ | flags,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip().splitlines()[-1]

    return run
