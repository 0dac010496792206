"""The devices that JAX sees, and the accelerators that it does not use."""

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")


def device_name(device: Any) -> str:
    """Its kind; of a CPU, which has none, its make and how many cores this process may use."""
    if device.platform != "cpu":
        return device.device_kind
    names = _cpuinfo("model name")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores"


def cpu_instructions() -> list[str]:
    """Of the x86 instructions that matter for 16 bits those that this CPU says it has."""
    flags = (_cpuinfo("flags") or [""])[0].split()
    return [name for name in _INSTRUCTIONS if name in flags]


def _cpuinfo(key: str) -> list[str]:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def accelerators() -> list[str]:
    """Accelerators that the system shows, whether or not JAX uses them."""
    return [*_nvidia(), *map(str, sorted(Path("/dev").glob("accel[0-9]*")))]


def _nvidia() -> list[str]:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [line.partition(" (UUID")[0] for line in lines]


def unused(seen: Iterable[str], platform: str, found: Mapping[str, str], asked: str | None) -> str:
    """One line where an accelerator is there and JAX runs on the CPU; empty where all is well.

    Args:
        seen: Of `accelerators`.
        platform: Of the device that JAX runs on.
        found: Installed versions.
        asked: `jax_platforms`, with which a user may want the CPU.
    """
    seen = list(seen)
    if not seen or platform != "cpu" or (asked or "").split(",")[0] == "cpu":
        return ""
    is_gpu = seen[0].startswith("GPU")
    plugins = [name for name in found if ("cuda" in name if is_gpu else name == "libtpu")]
    mend = (
        f"{', '.join(plugins)} is installed and does not start; JAX's warning above says why"
        if plugins
        else f"pip install '.[{'cuda' if is_gpu else 'tpu'}]'"
    )
    return f"{seen[0]} is there and JAX runs on the CPU: {mend}"
