"""Chips: what each can do at most, as its maker says, and devices of it that need not be here."""

import difflib
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.typing import DTypeLike

from train.config import ConfigError

GIB = 2**30


class NoCompiler(RuntimeError):
    """The compiler of a chip is not installed; one line that says how to install it."""


class Chip(NamedTuple):
    """What one device, as JAX shows it, can do at most; without sparsity.

    Attributes:
        name: As a target calls it.
        device_kinds: What `device.device_kind` calls devices that multiply as fast.
        flops: Operations a second by the dtype of a matmul's operands, two for each multiply-add.
            float32 is what JAX does by default: TF32 on an NVIDIA GPU, one bfloat16 pass on a TPU.
        memory_bytes: Of the device; the compiler, driver or allocator keep some of it.
        memory_bandwidth: Bytes a second.
        interconnect: Bytes a second that leave the device over all of its links to other chips of
            the slice or host: half of what makers call bidirectional bandwidth.
        source: The maker's page.
    """

    name: str
    device_kinds: tuple[str, ...]
    flops: dict[str, float]
    memory_bytes: int
    memory_bandwidth: float
    interconnect: float
    source: str


def _tpu(name, kinds, tera, memory_gib, giga, interconnect_giga, page) -> Chip:
    flops = {"bfloat16": tera * 1e12, "float32": tera * 1e12}
    source = f"https://docs.cloud.google.com/tpu/docs/{page}"
    memory = int(memory_gib * GIB)
    return Chip(name, kinds, flops, memory, giga * 1e9, interconnect_giga * 1e9, source)


def _gpu(name, kinds, tera, memory_bytes, giga, interconnect_giga, source) -> Chip:
    flops = {"bfloat16": tera * 1e12, "float16": tera * 1e12, "float32": tera / 2 * 1e12}
    return Chip(name, kinds, flops, memory_bytes, giga * 1e9, interconnect_giga * 1e9, source)


# Memory of GPUs in bytes: what the driver shows of it, from OpenXLA's target_config/specs; but H200
# (141 GiB there) as PyTorch logs show it. A TPU7x chip is two devices to JAX, and the row is one of
# them; the two cores of a v4 or v5p are one.
# Seen on the makers' pages: TPUs, and of B200 the interconnect. v4's page has no interconnect: six
# links of 50 GB/s are from Google's paper, https://arxiv.org/abs/2304.01433 (table 4), while the
# page's all-reduce of a pod comes to 269 GB/s a chip. Not seen on the maker's page, only as others
# quote it: v4's links and all else of GPUs. B200: DGX pages say 8 TB/s, the data sheet 7.7.
_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_BLACKWELL = "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"
_CHIPS: tuple[Chip, ...] = (
    _tpu("v4", ("TPU v4",), 275, 32, 1200, 300, "v4"),
    _tpu("v5e", ("TPU v5 lite", "TPU v5e"), 197, 16, 819, 200, "v5e"),
    _tpu("v5p", ("TPU v5", "TPU v5p"), 459, 95, 2765, 600, "v5p"),
    _tpu("v6e", ("TPU v6 lite", "TPU v6e"), 918, 32, 1638, 400, "v6e"),
    _tpu("tpu7x", ("TPU7x",), 2307 / 2, 192 / 2, 7380 / 2, 600 / 2, "tpu7x"),
    _gpu(
        "a100",
        (
            "NVIDIA A100-SXM4-80GB",
            "NVIDIA A100-SXM4-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA A100-PCIE-40GB",
        ),
        312,
        85100068864,
        2039,
        300,
        f"{_NVIDIA}/a100/",
    ),
    _gpu("h100", ("NVIDIA H100 80GB HBM3",), 989.4, 84942979072, 3350, 450, f"{_NVIDIA}/h100/"),
    _gpu(
        "h200",
        ("NVIDIA H200", "NVIDIA H200 141GB HBM3e"),
        989.4,
        143156 * 2**20,
        4800,
        450,
        f"{_NVIDIA}/h200/",
    ),
    _gpu("b200", ("NVIDIA B200",), 2250, 191514411008, 7700, 900, _BLACKWELL),
)
_BY_NAME = {chip.name: chip for chip in _CHIPS}
_BY_KIND = {kind: chip for chip in _CHIPS for kind in chip.device_kinds}


def peak_flops(device_kind: str, dtype: DTypeLike) -> float | None:
    """Operations a second of matmuls of `dtype` on a device, or None where it is not in the table.

    >>> peak_flops("TPU v5 lite", "bfloat16") / 1e12
    197.0
    >>> peak_flops("NVIDIA H100 80GB HBM3", "float32") / 1e12  # TF32
    494.7
    >>> peak_flops("cpu", "float32") is None
    True
    """
    chip = _BY_KIND.get(device_kind)
    return chip.flops.get(np.dtype(dtype).name) if chip else None


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
        name: As it was asked for.
        chip: Of each device.
        devices: Of one slice or host, none of which need be here.
        notes: What a compile for them cannot know, for people to read.
    """

    name: str
    chip: Chip
    devices: list[Any]
    notes: tuple[str, ...] = ()


def find_target(name: str) -> Target:
    """The devices of `v5e:4x4` (a TPU slice), `h100` or `h100:8` (GPUs of one host), or `cpu`.

    Raises:
        ConfigError: there is no such target.
        NoCompiler: its compiler is not installed.
    """
    kind, _, shape = name.strip().lower().partition(":")
    if kind == "cpu":
        if shape:
            raise ConfigError(f"--target {name}: cpu has no sizes, it is this machine's")
        return Target("cpu", _cpu(), jax.devices("cpu"))
    if kind not in _BY_NAME:
        raise ConfigError(f"--target {name}: unknown chip {kind!r}{_nearest(kind)}")
    chip = _BY_NAME[kind]
    devices = _tpu_devices(chip, shape) if kind in _DIMENSIONS else _gpu_devices(chip, shape)
    return Target(name, chip, devices, () if kind in _DIMENSIONS else _GPU_NOTES)


def _nearest(kind: str) -> str:
    names = [*_BY_NAME, "cpu"]
    near = difflib.get_close_matches(kind, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"{hint} allowed: {', '.join(names)}, as in v5e:4x4, v5p:2x2x2, h100:8"


def _cpu() -> Chip:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Chip("cpu", ("cpu",), {}, memory, 0.0, 0.0, "this machine")


def usable_memory(devices: Sequence[Any]) -> int:
    """Bytes of each device that JAX hands out; on a CPU all that the machine has."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=_cpu().memory_bytes)


# Each says no more to libtpu than which chip to compile for: it looks for none.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_DIMENSIONS = {"v4": 3, "v5e": 2, "v5p": 3, "v6e": 2, "tpu7x": 3}  # of a slice
_LARGEST_HOST = {2: (2, 4, 1), 3: (2, 2, 1)}  # chips, by dimensions; larger slices have 2x2 a host


def _tpu_devices(chip: Chip, shape: str) -> list[Any]:
    count = _DIMENSIONS[chip.name]
    shape = shape or "x".join("1" * count)
    if not re.fullmatch("x".join([r"[1-9]\d*"] * count), shape):
        example = {2: "4x4", 3: "2x2x2"}[count]
        raise ConfigError(
            f"--target {chip.name}:{shape}: a slice of {chip.name} has {count} sizes, such as "
            f"{chip.name}:{example}"
        )
    sizes = [int(size) for size in shape.split("x")] + [1] * (3 - count)
    options: dict[str, Any] = {"chip_config_name": "megacore"} if chip.name == "v4" else {}
    if all(size <= most for size, most in zip(sizes, _LARGEST_HOST[count], strict=True)):
        options["chips_per_host_bounds"] = sizes
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=f"{chip.name}:{shape}", **options
        ).devices
    except Exception as error:  # plugin and libtpu each raise what they like
        reason = _first_line(error)
        if "INVALID_ARGUMENT" in reason:
            raise ConfigError(
                f"--target {chip.name}:{shape}: no such slice; beyond one host the first two sizes "
                f"are even ({reason})"
            ) from None
        raise NoCompiler(
            f"no TPU compiler, install it with: pip install 'jax[tpu]=={version('jax')}' ({reason})"
        ) from None


_GPU_NOTES = (
    "compiled without a GPU: no cuDNN attention and no autotuning, so time and temporaries of the "
    "real program differ",
)

# XLA's GpuTargetConfigProto. Cores and clock are from data sheets, limits from the CUDA programming
# guide's table of compute capabilities; OpenXLA's target_config/specs has the same. B200's cache is
# from there, H200's as PyTorch logs show it (there it has the 50 MiB of an H100).
_GPU_TEXT = """
platform_name: "CUDA"
device_description_str: "{kind}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {capability} }}
  core_count: {cores}
  fpus_per_core: {fpus}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  l2_cache_size: {cache}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared}
  shared_memory_per_core: {shared_core}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""
_HOPPER = {"capability": 9, "cores": 132, "fpus": 128, "clock": 1.98, "cache": 50 * 2**20}
_SHARED = {"shared": 227 * 1024, "shared_core": 228 * 1024}
_GPU_FIELDS: dict[str, dict[str, Any]] = {
    "a100": {"capability": 8, "cores": 108, "fpus": 64, "clock": 1.41, "cache": 40 * 2**20}
    | {"shared": 163 * 1024, "shared_core": 164 * 1024},
    "h100": _HOPPER | _SHARED,
    "h200": _HOPPER | _SHARED | {"cache": 60 * 2**20},
    "b200": {"capability": 10, "cores": 148, "fpus": 128, "clock": 1.965, "cache": 132644864}
    | _SHARED,
}


def _gpu_devices(chip: Chip, shape: str) -> list[Any]:
    if not re.fullmatch(r"|[1-8]", shape):
        raise ConfigError(
            f"--target {chip.name}:{shape}: a host has 1 to 8 GPUs, as in {chip.name}:8"
        )
    text = _GPU_TEXT.format(
        kind=chip.device_kinds[0],
        memory=chip.memory_bytes,
        bandwidth=int(chip.memory_bandwidth),
        **_GPU_FIELDS[chip.name],
    )
    try:  # the topology is slices x hosts x GPUs
        return topologies.get_topology_desc(
            platform="cuda", target_config=text, topology=f"1x1x{shape or 1}"
        ).devices
    except Exception as error:  # as above
        raise NoCompiler(
            "no CUDA compiler, install it with: pip install "
            f"jax-cuda13-plugin=={version('jax')} nvidia-cuda-nvcc ({_first_line(error)})"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
