"""`memory`: what the train step needs by policy, remat and loss chunk, and the batch that fits."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, get_args

import jax

import jaxamp
from train import fit
from train.benchmarks import common
from train.benchmarks.common import CHIP, Chip
from train.chips import NoCompiler, find_target
from train.config import Config, ConfigError
from train.figures import Figure, Report
from train.mesh import make_mesh

ABOUT = """Measure the memory of the train step of train.run, compiled and not run: parameters,
moments, activations, and the largest batch that fits, for each policy, remat and loss chunk, on
this machine and on a TPU v5e that need not be here."""

Remat = Literal["none", "islands", "dots", "full"]


@dataclasses.dataclass(frozen=True)
class Options(common.Options):
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
    config = options.chip.of(common.config_of(options))
    policies = {name: _policy(name) for name in options.policies}
    for target in options.targets:
        try:
            place = find_place(target)
        except NoCompiler as error:
            report.skipped.append(f"{target}: {error}")
            continue
        for figure in _figures(config, policies, place, options):
            report.figures.append(figure)
    return report


def _policy(name: str) -> jaxamp.Policy:
    try:
        return jaxamp.get_policy(name)
    except ValueError as error:
        raise ConfigError(f"--policies: {error}") from None


def find_place(target: str) -> Place:
    """`here` is the first device of JAX; a GPU's or TPU's allocator says how much it hands out."""
    device = jax.devices()[0]
    if target != "here":
        found = find_target(target)
        return Place(target, found.devices[0], found.chip.memory_bytes)
    if device.platform == "cpu":
        return Place(common.here(), device, find_target("cpu").chip.memory_bytes)
    return Place(common.here(), device, (device.memory_stats() or {})["bytes_limit"])


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
                attempt = _reporting(policy, mesh, place, f"{how}, {name}")
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


def _reporting(policy: jaxamp.Policy, mesh, place: Place, what: str):
    def attempt(config: Config) -> fit.Attempt:
        common.say(f"compiling for {what}, batch size {config.batch_size} ...")
        return fit.attempt(config, policy, mesh, place.capacity)

    return attempt
