"""`memory`: what the train step needs by policy, remat and loss chunk, and the batch that fits."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

import jax

import jaxamp
from train import fit, measures
from train.benchmarks.chip_model import CHIP, Chip
from train.benchmarks.options import BenchmarkOptions, config_of
from train.chips import NoCompiler, find_target, usable_memory
from train.config import Config, Remat
from train.figures import Figure, Report
from train.mesh import make_mesh
from train.parse import parse_policy

ABOUT = """Measure the memory of the train step of train.run, compiled and not run: parameters,
moments, activations, and the largest batch that fits, for each policy, remat and loss chunk, on
this machine and on a TPU v5e that need not be here."""


@dataclasses.dataclass(frozen=True)
class Options(BenchmarkOptions):
    targets: tuple[str, ...] = ("here", "v5e")
    """`here`, or chips as train.plan names them; one device of each."""
    policies: tuple[str, ...] = ("float32", "mixed_bfloat16")
    """Columns of the table."""
    remats: tuple[Remat, ...] = get_args(Remat)
    """What the backward pass recomputes."""
    loss_chunk: int = 128
    """Tokens of a row whose logits exist at a time; each remat is compiled with it and without."""
    largest_batch_size: bool = True
    """Look for the largest batch too; each try is a compilation."""
    chip: Chip = CHIP


class Place(NamedTuple):
    """One device to compile for, and the memory that programs may use of it, in bytes."""

    name: str
    device: Any
    capacity: int


def measure(options: Options) -> Report:
    report = Report([], [], [])
    config = options.chip.of(config_of(options))
    policies = {name: parse_policy(name, "--policies") for name in options.policies}
    for target in options.targets:
        try:
            place = find_place(target)
        except NoCompiler as error:
            report.skipped.append(f"{target}: {error}")
            continue
        for figure in _figures(config, policies, place, options):
            report.figures.append(figure)
    return report


def find_place(target: str) -> Place:
    """`here` is the first device of JAX; a GPU's or TPU's allocator says how much it hands out."""
    if target == "here":
        device = jax.devices()[0]
        return Place(measures.here(), device, usable_memory([device]))
    found = find_target(target)
    return Place(target, found.devices[0], found.chip.memory_bytes)


def _figures(
    config: Config, policies: dict[str, jaxamp.Policy], place: Place, options: Options
) -> Iterable[Figure]:
    mesh = make_mesh(config.mesh, [place.device])
    state: dict[str, fit.Memory] = {}
    for remat in options.remats:
        for chunk in (None, options.loss_chunk):
            how = f"{place.name}, remat {remat}" + (f", loss chunk {chunk}" if chunk else "")
            model = config.model.model_copy(update={"remat": remat})
            tried = config.model_copy(update={"model": model, "loss_chunk": chunk})
            peaks, activations, largest = {}, {}, {}
            for name, policy in policies.items():
                if remat == "islands" and policy.compute_dtype == "float32":
                    continue  # there are none
                attempt = fit.announced(policy, mesh, place.capacity, f" for {place.name}")
                found = attempt(tried)
                state[name] = found.memory
                peaks[name] = found.memory.peak / 2**20
                activations[name] = found.memory.activations / 2**20
                if options.largest_batch_size:
                    largest[name] = fit.largest_batch_size(attempt, found, mesh)
            yield Figure(f"peak, {how}", "MiB", peaks)
            yield Figure(f"activations, {how}", "MiB", activations)
            if options.largest_batch_size:
                yield Figure(f"largest batch, {how}", "sequences", largest)
    for part in ("params", "moments", "capacity"):
        sizes = {name: getattr(memory, part) / 2**20 for name, memory in state.items()}
        yield Figure(f"{part}, {place.name}", "MiB", sizes)
