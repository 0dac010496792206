"""The second experiment of `train.compare`: each policy at the largest batch that fits."""

import sys
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

import jaxamp
from train import fit
from train.chips import find_target
from train.config import Config, ConfigError
from train.data import Corpus
from train.experiment import Experiment
from train.recorded import of_corpus
from train.reports.runs import policy_name

TITLE = "Each policy at the largest batch that fits: speed alone"
STEPS = 20  # enough for a median; the loss is not compared


def with_largest_batches(
    first: Experiment, folder: Path, corpus: Corpus, mesh: Mesh, memory_gib: float | None
) -> tuple[Experiment, Experiment]:
    """The first experiment, knowing the largest batches, and the one that trains with them.

    Raises:
        ConfigError: not even the smallest batch fits.
    """
    capacity = _capacity(mesh) if memory_gib is None else int(memory_gib * 2**30)
    sizes = {
        policy: largest_batch_size(config, corpus, policy, mesh, capacity)
        for policy, config in first.configs.items()
    }
    for policy, size in sizes.items():
        print(f"{policy_name(str(policy))}: a batch of {size} fits {capacity / 2**30:.2f} GiB")
        if size == 0:
            raise ConfigError(
                f"{policy_name(str(policy))} does not fit {capacity / 2**30:.2f} GiB with one row "
                "a device and microbatch; use more memory, or leave out --also-largest-batch"
            )
    configs = {
        policy: config.model_copy(update={"batch_size": sizes[policy], "num_steps": STEPS})
        for policy, config in first.configs.items()
    }
    second = Experiment(TITLE, folder, configs, first.seeds, ("batch_size",), sizes)
    return replace(first, largest_batch_sizes=sizes), second


def largest_batch_size(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, mesh: Mesh, capacity: int
) -> int:
    """Sequences a step, no more than the corpus has."""
    name = policy_name(str(policy))

    def try_config(config: Config) -> fit.Attempt:
        print(f"compiling {name}, batch size {config.batch_size} ...", file=sys.stderr, flush=True)
        return fit.attempt(config, policy, mesh, capacity)

    unit = config.grad_accum_steps * mesh.shape["data"] * mesh.shape["fsdp"]
    most = len(corpus.train) // unit * unit
    start = try_config(of_corpus(config, corpus))
    return fit.largest_batch_size(try_config, start, mesh, most)


def _capacity(mesh: Mesh) -> int:
    """What JAX may use of a device; on a CPU the memory of the machine."""
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in mesh.local_devices]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else find_target("cpu").chip.memory_bytes
