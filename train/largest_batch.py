"""The second experiment of `train.compare`: each policy at the largest batch that fits."""

import json
from dataclasses import replace
from pathlib import Path

from jax.sharding import Mesh

import jaxamp
from train import fit
from train.chips import usable_memory
from train.config import Config, ConfigError
from train.data import Corpus
from train.experiment import Experiment
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
    given = memory_gib is not None
    capacity = int(memory_gib * 2**30) if given else usable_memory(mesh.local_devices)
    sizes = {
        policy: _found_before(first, policy)
        or largest_batch_size(config, corpus, policy, mesh, capacity)
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


def _found_before(first: Experiment, policy: jaxamp.Policy) -> int | None:
    """What an earlier start has written down: the search takes minutes."""
    path = first.workdir(policy, first.seeds[0]) / "figures.json"
    return json.loads(path.read_text())["largest_batch_size"] if path.is_file() else None


def largest_batch_size(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, mesh: Mesh, capacity: int
) -> int:
    """Sequences a step, no more than the corpus has."""
    try_config = fit.announced(policy, mesh, capacity)
    start = try_config(fit.of_vocabulary(config, corpus.vocab_size))
    return fit.largest_batch_size(try_config, start, mesh, len(corpus.train))
