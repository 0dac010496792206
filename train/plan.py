"""What a run needs of a chip that need not be here: `python -m train.plan --target v5e:4x4`.

The train step of `train.run` is compiled ahead of time for the target, once for each policy and as
often as it takes to find a remat and a batch size; nothing is run and no data is read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

import jaxamp
from jaxamp.policy import auto_policy
from train import fit
from train.chips import NoCompiler, Target, find_target
from train.config import Config, ConfigError
from train.exits import leave
from train.figures import aligned
from train.parse import parse, parse_policy
from train.roofline import Roofline, matmul_flops, roofline
from train.traffic import Program, read

PROG = "python -m train.plan"
POLICIES = ("float32", "mixed_bfloat16")
ABOUT = """Compile the train step of a config for chips that need not be here, and print whether it
fits, what it needs and what limits it. All flags of train.run, and these:
--target NAME: v5e:4x4 (slices of v4, v5e, v5p, v6e, tpu7x), h100 or h100:8 (a100, h100, h200,
b200), or cpu.
--policy POLICY: may be given several times; default: float32 and mixed_bfloat16.
--json FILE: write the figures there too.
--no-largest-batch-size: do not look for it; each try is a compilation."""


class Options(NamedTuple):
    """What is asked for beside a config."""

    target: str
    policies: tuple[str, ...]
    json: Path | None
    largest_batch_size: bool


class Plan(NamedTuple):
    """What was found for one policy.

    Attributes:
        memory: Of one device.
        remat: What fits and recomputes least, no less than the config asks for.
        flops: Of one device's matmuls in one step, recomputed ones too.
        program: What was read from the optimized program; None where the compiler found no room.
        roofline: The least time of a step; None where it is not known.
        largest_batch_size: Sequences; None: not asked for.
        advice: What would make it fit.
    """

    memory: fit.Memory
    remat: str
    flops: float
    program: Program | None
    roofline: Roofline | None
    largest_batch_size: int | None
    advice: list[str]


def main(args: Sequence[str] | None = None) -> int:
    """Prints the plan; the exit code is 1 where a policy does not fit, 2 for bad input."""
    jax.config.update("jax_platforms", "cpu")
    try:
        options, rest = _options(sys.argv[1:] if args is None else args)
        config = parse(rest, PROG, ABOUT)
        target = find_target(options.target)
        config, mesh, changes = fit.prepared(config, target)
        notes = [*changes, *target.notes]
        plans = {
            name: plan(config, _policy(name, target), target, mesh, options.largest_batch_size)
            for name in options.policies
        }
        notes += _notes(plans, target)
        if options.json is not None:
            found = to_json(plans, config, target, mesh, notes)
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    except (ConfigError, NoCompiler, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(render(plans, config, target, mesh, notes))
    return 0 if all(plan.memory.fits for plan in plans.values()) else 1


def _options(args: Sequence[str]) -> tuple[Options, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--target")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--largest-batch-size", action=argparse.BooleanOptionalAction, default=True)
    try:
        found, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None
    if {"-h", "--help"} & set(rest):
        parse(rest, PROG, ABOUT)  # prints and exits
    if found.target is None:
        raise ConfigError("--target is needed: what to compile for, such as v5e:4x4, h100:8 or cpu")
    if found.json is not None and not found.json.parent.is_dir():
        raise ConfigError(f"--json {found.json}: no such directory")
    policies = tuple(dict.fromkeys(found.policy or POLICIES))
    return Options(found.target, policies, found.json, found.largest_batch_size), rest


def _policy(name: str, target: Target) -> jaxamp.Policy:
    if name.strip() == "auto":
        return auto_policy(target.devices[0])
    return parse_policy(name, "--policy")


def plan(
    config: Config, policy: jaxamp.Policy, target: Target, mesh: Mesh, find_largest: bool
) -> Plan:
    """The plan of a config under one policy."""
    capacity = target.chip.memory_bytes
    try_config = fit.announced(policy, mesh, capacity)
    best = fit.with_least_remat(try_config, config, policy.compute_dtype != "float32")
    flops = matmul_flops(best.traced, mesh.size)
    program = None if best.program is None else read(best.program.as_text(), mesh.size)
    time = None
    if program is not None:
        time = roofline(target.chip, policy, flops, program.accessed_bytes, program.sent_bytes)
    batch_size = fit.largest_batch_size(try_config, best, mesh) if find_largest else None
    advice = [] if best.memory.fits else fit.advice(best, mesh)
    return Plan(best.memory, best.config.model.remat, flops, program, time, batch_size, advice)


def _notes(plans: dict[str, Plan], target: Target) -> list[str]:
    notes = [
        f"{name}: {plan.program.unknown_loops} loops of unknown length count once"
        for name, plan in plans.items()
        if plan.program is not None and plan.program.unknown_loops
    ]
    reserved = 0.75 * target.chip.memory_bytes  # what JAX takes of a GPU unless told
    tight = [
        name for name, plan in plans.items() if plan.memory.fits and plan.memory.peak > reserved
    ]
    if tight and target.devices[0].platform == "gpu":
        notes.append(f"{', '.join(tight)}: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 to use so much")
    return notes


def to_json(
    plans: dict[str, Plan], config: Config, target: Target, mesh: Mesh, notes: list[str]
) -> dict[str, Any]:
    """Bytes, FLOPs and seconds of one device."""
    return {
        "target": target.name,
        "device_kind": target.devices[0].device_kind,
        "devices": len(target.devices),
        "source": target.chip.source,
        "mesh": dict(mesh.shape),
        "config": config.model_dump(),
        "notes": notes,
        "policies": {name: _plan_json(plan) for name, plan in plans.items()},
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    memory, program, time = plan.memory, plan.program, plan.roofline
    sizes = {f"{name}_bytes": size for name, size in memory._asdict().items()}
    return {
        "fits": memory.fits,
        **sizes,
        "remat": plan.remat,
        "flops": plan.flops,
        "bytes_accessed": program.accessed_bytes if program else None,
        "collective_bytes": program.collective_bytes() if program else None,
        "roofline": time and {**time._asdict(), "seconds": time.seconds, "limit": time.limit},
        "largest_batch_size": plan.largest_batch_size,
        "advice": plan.advice,
    }


def render(
    plans: dict[str, Plan], config: Config, target: Target, mesh: Mesh, notes: list[str]
) -> str:
    """A table, a column for each policy; then what would make it fit, and the notes."""
    kind, axes = target.devices[0].device_kind, mesh.shape.items()
    head = (
        f"{target.name}: {mesh.size} x {kind}, mesh {', '.join(f'{a} {n}' for a, n in axes)}; "
        f"batch {config.batch_size} x {config.data.seq_len} tokens in "
        f"{config.grad_accum_steps} microbatches; figures of one device and one step"
    )
    columns = {name: _column(plan) for name, plan in plans.items()}
    labels = list(dict.fromkeys(label for column in columns.values() for label in column))
    rows = [["", *columns]] + [
        [label, *(column.get(label, "-") for column in columns.values())] for label in labels
    ]
    lines = aligned(rows)
    for name, plan in plans.items():
        lines += [f"to make {name} fit: {hint}" for hint in plan.advice]
    return "\n".join([head, *lines, *(f"note: {note}" for note in notes)])


def _column(plan: Plan) -> dict[str, str]:
    memory, program, time = plan.memory, plan.program, plan.roofline
    gib = lambda size: f"{size / 2**30:.3f} GiB"  # noqa: E731
    over = gib(memory.peak - memory.capacity)
    column = {
        "fits": "yes" if memory.fits else f"no, {over} over",
        "remat": plan.remat,
        "peak memory": gib(memory.peak),
        **{f"  {name}": gib(getattr(memory, name)) for name in ("params", "moments")},
        **{f"  {name}": gib(getattr(memory, name)) for name in ("activations", "other")},
        "memory of the device": gib(memory.capacity),
        "FLOPs of matmuls": f"{plan.flops:.4g}",
    }
    if program is not None:
        column["bytes accessed"] = f"{program.accessed_bytes / 1e9:.2f} GB"
        for kind, dtypes in program.collective_bytes().items():
            column |= {f"{kind} {d}": f"{size / 1e9:.3f} GB" for d, size in dtypes.items()}
    if time is not None:
        column["step takes at least"] = f"{time.seconds:.4g} s ({time.limit})"
        parts = zip(("compute", "memory", "network"), time, strict=True)
        column |= {f"  by {name}": f"{seconds:.4g} s" for name, seconds in parts}
    if plan.largest_batch_size is not None:
        column["largest batch size"] = str(plan.largest_batch_size or "none")
    return column


if __name__ == "__main__":
    leave(main())
