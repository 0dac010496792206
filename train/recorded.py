"""What is known of a policy's training step beside its metrics: `figures.json` of a run."""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

import jaxamp
from train import fit
from train.config import Config, ConfigError
from train.data import Corpus
from train.loop import Programs
from train.machine.devices import device_name
from train.machine.versions import versions
from train.mesh import batch_sharding
from train.metrics import peak_memory
from train.reports.runs import policy_name
from train.roofline import matmul_flops
from train.start import fresh_state
from train.step import make_eval_step, structure
from train.traffic import read
from train.workdir import write_whole


class Compiled(NamedTuple):
    """The programs of a policy; `seconds` is what tracing and compiling the training step took."""

    programs: Programs
    attempt: fit.Attempt
    seconds: float


def compile_step(config: Config, corpus: Corpus, policy: jaxamp.Policy, mesh: Mesh) -> Compiled:
    """The training step compiled ahead of time: its figures are those of the program that runs.

    Raises:
        ConfigError: the compiler finds no room for it.
    """
    name = policy_name(str(policy))
    before = time.perf_counter()
    attempt = fit.announced(policy, mesh, 0)(fit.of_vocabulary(config, corpus.vocab_size))
    seconds = time.perf_counter() - before
    if attempt.program is None:
        needed, there = attempt.memory.peak / 2**30, attempt.memory.capacity / 2**30
        raise ConfigError(
            f"{name} needs {needed:.2f} GiB of a device that has {there:.2f}; lower --batch-size, "
            "raise --grad-accum-steps, or see what train.plan advises"
        )
    graphdef, _ = structure(config, corpus.vocab_size, policy)
    programs = Programs(attempt.program, make_eval_step(config, graphdef, policy))
    return Compiled(programs, attempt, seconds)


def device_peaks(
    configs: Mapping[jaxamp.Policy, Config],
    compiled: Mapping[jaxamp.Policy, Compiled],
    corpus: Corpus,
    mesh: Mesh,
) -> dict[jaxamp.Policy, int | None]:
    """The most bytes that a device holds in a step of each policy; None where it is not known.

    The runtime counts the most since the process began. So one step of each is taken, alone, in the
    order of what the compiler says they need; a count that has not risen says nothing.
    """
    found: dict[jaxamp.Policy, int | None] = dict.fromkeys(compiled)
    before = peak_memory()
    if before is None:
        return found
    for policy in sorted(compiled, key=lambda policy: compiled[policy].attempt.memory.peak):
        config = configs[policy]
        tokens = np.zeros((config.batch_size, config.data.seq_len), np.int32)
        tokens = jax.device_put(tokens, batch_sharding(mesh))
        state = fresh_state(config, corpus, policy, mesh)
        step = compiled[policy].programs.train_step
        jax.block_until_ready(step(state, {"tokens": tokens, "labels": tokens}))
        after = peak_memory() or 0
        found[policy] = after if after > before else None
        before = max(after, before)
    return found


def write_figures(
    workdirs: Sequence[Path],
    compiled: Compiled,
    mesh: Mesh,
    device_peak: int | None,
    largest_batch_size: int | None,
    command: str,
) -> None:
    """Writes `figures.json` of the runs of a policy that have none; bytes of one device.

    They share a program, and what it took to compile stands in the first.
    """
    device = mesh.devices.flat[0]
    sizes = compiled.attempt.memory._asdict()
    figures = {
        "device": f"{mesh.size} x {device_name(device)}" if mesh.size > 1 else device_name(device),
        "device_kind": device.device_kind,
        "versions": versions(),
        "commit": _commit(),
        "command": command,
        "memory": {f"{name}_bytes": sizes[name] for name in sizes if name != "capacity"},
        "flops": matmul_flops(compiled.attempt.traced, mesh.size),
        "bytes_accessed": read(compiled.attempt.program.as_text(), mesh.size).accessed_bytes,
        "device_peak_bytes": device_peak,
        "largest_batch_size": largest_batch_size,
    }
    for workdir in workdirs:
        seconds: dict[str, Any] = {}
        if workdir == workdirs[0]:
            seconds = {"compile_seconds": compiled.seconds}
        path = workdir / "figures.json"
        if not path.exists():  # else from before a stop
            write_whole(path, json.dumps(figures | seconds, indent=2))


def _commit() -> str | None:
    """Of the code that runs, marked where it was changed since; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
