"""Whether a train step fits devices that need not be here: it is compiled for them."""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import jaxamp
from train.chips import Target
from train.config import Config, Remat
from train.mesh import batch_sharding, check_fits, make_mesh, microbatches, placed
from train.progress import note
from train.step import init_state, make_train_step

BYTES_VOCABULARY = 257  # of the byte tokenizer, what a config without vocab_size trains with
REMATS = get_args(Remat)  # by how much they recompute


class Memory(NamedTuple):
    """Of one device, in bytes.

    Attributes:
        peak: The most that is held at a time.
        params: Of the model.
        moments: Of the optimizer, and the few numbers of its state.
        activations: Temporaries that live at the peak: activations, gradients, copies.
        other: The batch, the metrics, and what layouts add to arrays.
        capacity: What the program may use.
    """

    peak: int
    params: int
    moments: int
    activations: int
    other: int
    capacity: int

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity


class Attempt(NamedTuple):
    """A config's train step, compiled.

    Attributes:
        config: As it was compiled.
        memory: Of one device.
        traced: The program before it is compiled, as `jax.make_jaxpr` gives it.
        program: What was compiled, which can be run; None where the compiler found no room for it.
    """

    config: Config
    memory: Memory
    traced: Any
    program: Any


def attempt(config: Config, policy: jaxamp.Policy, mesh: Mesh, capacity: int) -> Attempt:
    """The step that `train.run` would take, compiled for the devices of `mesh`.

    `capacity` is the memory of one of them, in bytes.
    """
    vocab_size = config.model.vocab_size or BYTES_VOCABULARY
    with jax.set_mesh(mesh):
        graphdef, state = nnx.eval_shape(lambda: init_state(config, vocab_size, policy))
        state = placed(mesh, state)
        shape = (config.batch_size, config.data.seq_len)
        ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=batch_sharding(mesh))
        step = make_train_step(config, graphdef, policy)
        traced = step.trace(state, {"tokens": ids, "labels": ids})
        program, shortage = _compiled(traced.lower())
    memory = _memory(state, ids, program, shortage, capacity)
    return Attempt(config, memory, traced.jaxpr, program)


def announced(
    policy: jaxamp.Policy, mesh: Mesh, capacity: int, where: str = ""
) -> Callable[[Config], Attempt]:
    """`attempt` as a function of the config, which says first what it compiles."""

    def announced_attempt(config: Config) -> Attempt:
        chunk = f", loss chunk {config.loss_chunk}" if config.loss_chunk else ""
        what = f"remat {config.model.remat}{chunk}, batch size {config.batch_size}"
        note(f"compiling {policy}{where}, {what} ...")
        return attempt(config, policy, mesh, capacity)

    return announced_attempt


def of_vocabulary(config: Config, vocab_size: int) -> Config:
    """The config with as many rows of the embedding as a corpus has words."""
    model = config.model.model_copy(update={"vocab_size": vocab_size})
    return config.model_copy(update={"model": model})


class Shortage(NamedTuple):
    """What a TPU's compiler said of a program without room: bytes needed and there, and whether
    the inputs are among those needed."""

    needed: int
    capacity: int
    has_inputs: bool


def _compiled(lowered: Any) -> tuple[Any, Shortage | None]:
    try:
        with warnings.catch_warnings():
            # A program for devices that are not here cannot be read back from JAX's cache.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            return lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        shortage = read_shortage(str(error))
        if shortage is None:
            raise
        return None, shortage


_SIZE = r"([\d.]+)([KMGT]?)"
_TEMPORARIES = re.compile(rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)")
_USED = re.compile(rf"Used {_SIZE} of {_SIZE} hbm")


def read_shortage(message: str) -> Shortage | None:
    """From the error of a TPU's compiler.

    >>> read_shortage("Used 20.00G of 15.75G hbm. Exceeded hbm capacity by 4.25G.").has_inputs
    True
    """
    for pattern, has_inputs in ((_USED, True), (_TEMPORARIES, False)):
        if found := pattern.search(message):
            needed, capacity = (
                int(float(number) * 1024 ** " KMGT".index(unit or " "))
                for number, unit in (found.group(1, 2), found.group(3, 4))
            )
            return Shortage(needed, capacity, has_inputs)
    return None


def _memory(state, ids, program, shortage: Shortage | None, capacity: int) -> Memory:
    params, moments = _held(state.params), _held(state.opt_state)
    if program is None:
        assert shortage is not None
        inputs = params + moments + 2 * _held(ids)
        peak = shortage.needed + (0 if shortage.has_inputs else inputs)
        capacity, other = shortage.capacity, 2 * _held(ids)
    else:
        stats = program.memory_analysis()
        peak = peak_bytes(stats, ids.sharding.mesh.devices.flat[0].platform)
        other = stats.argument_size_in_bytes - params - moments
    return Memory(peak, params, moments, peak - params - moments - other, other, capacity)


def peak_bytes(stats: Any, platform: str) -> int:
    """The peak of a compiled program, from its `memory_analysis()`.

    On a TPU arguments and `temp_size_in_bytes` come to more than its memory in programs that the
    compiler found room for (jax 0.10.2), and XLA's own peak agrees with what it says of programs
    that it found none for. On a CPU that peak leaves the temporaries out.
    """
    if platform != "cpu":
        return stats.peak_memory_in_bytes
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + stats.temp_size_in_bytes + results


def _held(tree: Any) -> int:
    """Bytes of a tree on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def prepared(config: Config, target: Target) -> tuple[Config, Mesh, list[str]]:
    """The config with microbatches that the mesh of the target can cut, and what was changed.

    Raises:
        ConfigError: the mesh does not fit the devices or the model.
    """
    mesh = make_mesh(config.mesh, target.devices)
    asked, parts = config.grad_accum_steps, _parts(mesh)
    possible = microbatches(config, parts)
    if possible in (None, asked):
        check_fits(config, mesh)
        return config, mesh, []
    config = config.model_copy(update={"grad_accum_steps": possible})
    check_fits(config, mesh)
    note = (
        f"grad_accum_steps {possible} instead of {asked}: microbatches of "
        f"{config.batch_size // asked} rows do not divide among {parts} devices"
    )
    return config, mesh, [note]


def _parts(mesh: Mesh) -> int:
    """Devices among which the rows of a microbatch are divided."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def with_least_remat(try_config: Callable[[Config], Attempt], config: Config, islands: bool):
    """The attempt that fits and recomputes least, no less than the config asks for; where none
    fits, the one that needs the least memory. `islands`: whether that remat does anything."""
    asked = config.model.remat
    choices = [asked, *REMATS[REMATS.index(asked) + 1 :]]
    attempts: list[Attempt] = []
    for remat in choices:
        if remat == "islands" and not islands and asked != remat:
            continue
        model = config.model.model_copy(update={"remat": remat})
        attempts.append(try_config(config.model_copy(update={"model": model})))
        if attempts[-1].memory.fits:
            return attempts[-1]
    return min(attempts, key=lambda attempt: attempt.memory.peak)


def largest_batch_size(
    try_config: Callable[[Config], Attempt], start: Attempt, mesh: Mesh, most: int | None = None
) -> int:
    """The most sequences a step that fit, with the accumulation steps and remat of `start`; 0 where
    not even one row a device and microbatch does, and never above `most`."""
    unit = start.config.grad_accum_steps * _parts(mesh)

    def peak(count: int) -> int:
        return try_config(start.config.model_copy(update={"batch_size": count * unit})).memory.peak

    memory = start.memory
    known = {0: memory.params + memory.moments, start.config.batch_size // unit: memory.peak}
    return unit * largest(peak, known, memory.capacity, None if most is None else most // unit)


def largest(
    peak: Callable[[int], int], known: dict[int, int], capacity: int, most: int | None = None
) -> int:
    """The largest count, up to `most`, whose peak is within the capacity.

    Bisection; as memory is nearly a straight line in the count, most guesses are where the line
    through the two peaks nearest to the capacity says, which saves compilations.

    Args:
        peak: Bytes of a count of 1 or more.
        known: Some peaks, that of 0 among them.
        capacity: In bytes.

    >>> largest(lambda count: 10 + 3 * count, {0: 10, 4: 22}, 1000)
    330
    """
    known = dict(known)
    while True:
        low = max((k for k, size in known.items() if size <= capacity), default=0)
        high = min((k for k, size in known.items() if size > capacity), default=None)
        if most is not None and low >= most:
            return most
        if high is not None and high - low <= 1:
            return low
        guess = _guess(known, low, high, capacity)
        guess = guess if most is None else min(guess, most)
        known[guess] = peak(guess)


def _guess(known: dict[int, int], low: int, high: int | None, capacity: int) -> int:
    """A count above `low` and below `high`."""
    guess = 2 * low if high is None else (low + high) // 2
    if len(known) % 3:  # now and then the middle, as the line may be a curve
        (a, b) = sorted(known, key=lambda k: abs(known[k] - capacity))[:2]
        slope = (known[b] - known[a]) / (b - a)
        guess = math.floor(a + (capacity - known[a]) / slope) if slope > 0 else guess
    guess = max(guess, low + 1)
    return guess if high is None else min(guess, high - 1)


def advice(attempt: Attempt, mesh: Mesh) -> list[str]:
    """What would make a step fit that does not, by arithmetic: each worth a plan of its own."""
    memory, config = attempt.memory, attempt.config
    state, over = memory.params + memory.moments, memory.peak - memory.capacity
    found = []
    if mesh.shape["data"] > 1:
        copies = mesh.shape["data"]
        saved = state * (1 - 1 / copies) / 2**30
        found.append(
            f"--mesh.data 1 --mesh.fsdp {_parts(mesh)} saves about {saved:.1f} GiB of "
            "parameters and moments"
        )
    rows = config.batch_size // config.grad_accum_steps // _parts(mesh)
    if rows > 1:
        steps = config.grad_accum_steps * rows
        saved = memory.activations * (1 - 1 / rows) / 2**30
        found.append(f"--grad-accum-steps {steps} saves up to {saved:.1f} GiB of activations")
    if config.loss_chunk is None and over < memory.activations:
        found.append("--loss-chunk 512 holds the logits of 512 tokens of a row at a time")
    chips = 2 ** math.ceil(math.log2(mesh.size * memory.peak / memory.capacity))
    found.append(f"about {chips} devices, with --mesh.fsdp over all of them")
    return found
