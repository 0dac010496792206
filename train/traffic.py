"""What an optimized program moves: collectives and bytes of memory, loops times their trips.

XLA's own cost analysis counts the body of a loop once and a TPU's vector memory like its main one,
and a GPU's compiler has none. Counted its way, a train step on one TPU v5e is within 0.5 % of it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from train.hlo import (
    Computations,
    Instruction,
    arrays,
    attribute,
    bytes_of,
    closing,
    executions,
    parse,
    size,
)

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Their operands and results are named, not moved.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"),
    *("call", "after-all", "opt-barrier", "partition-id", "replica-id", "iota", "add-dependency"),
)
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_SLICES = ("dynamic-slice", "slice", "gather")


class Collective(NamedTuple):
    """One collective of a program.

    Attributes:
        kind: One of `KINDS`.
        dtype: HLO's name for it: `f32`, `bf16`, `s32`.
        bytes: The array of one chip before it is scattered, or after it is gathered.
        sent_bytes: What each chip sends at least, as in a ring.
        times: How often it runs in one call.
    """

    kind: str
    dtype: str
    bytes: float
    sent_bytes: float
    times: int


class Program(NamedTuple):
    """Figures of one chip, in one call of the program.

    Attributes:
        collectives: Each once, whatever the number of its parts.
        accessed_bytes: Read and written by instructions that are not in a fusion, those that stay
            in a TPU's vector memory left out.
        unknown_loops: Loops whose trips the program does not say; their bodies count once.
    """

    collectives: list[Collective]
    accessed_bytes: float
    unknown_loops: int

    def collective_bytes(self) -> dict[str, dict[str, float]]:
        """Bytes by kind and dtype."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for c in self.collectives:
            found[c.kind][c.dtype] += c.bytes * c.times
        return {kind: dict(dtypes) for kind, dtypes in sorted(found.items())}

    @property
    def sent_bytes(self) -> float:
        return sum(c.sent_bytes * c.times for c in self.collectives)


def read(text: str, devices: int = 1) -> Program:
    """The figures of a compiled program's text, `compiled.as_text()`, for that many devices."""
    entry, computations = parse(text)
    runs, unknown = executions(entry, computations)
    accessed = 0.0
    for name, times in runs:
        body = computations[name]
        accessed += times * sum(_accessed(i, body, computations) for i in body.values())
    return Program(_collectives(runs, computations, devices), accessed, unknown)


def _collectives(
    runs: list[tuple[str, int]], computations: Computations, devices: int
) -> list[Collective]:
    """Those of all computations and their fusions.

    The parts into which a TPU's compiler cuts an asynchronous one share a channel. Some lie in a
    loop that computes meanwhile: the one that runs least says how often it starts.
    """
    found: dict[Any, list[Collective]] = {}
    for name, times in sorted(runs, key=lambda run: run[1]):
        for holder, body in _with_fusions(name, computations):
            for instruction in body.values():
                kind = instruction.opcode.removesuffix("-start")
                if kind not in KINDS:
                    continue
                channel = re.search(r"channel_id=(\d+)", instruction.text)
                key = channel[1] if channel else (name, holder, instruction.name)
                if holder.startswith("all-reduce-scatter"):  # a TPU's fusion of both
                    kind = "reduce-scatter"
                if key not in found:
                    found[key] = list(_cost(kind, instruction, body, times, devices))
    return [collective for parts in found.values() for collective in parts]


def _with_fusions(name: str, computations: Computations) -> Iterator[tuple[str, dict]]:
    body = computations.get(name, {})
    yield name, body
    for instruction in body.values():
        called = attribute(instruction, "calls")
        if called:
            yield from _with_fusions(called, computations)


def _cost(
    kind: str, instruction: Instruction, body: dict, times: int, devices: int
) -> Iterator[Collective]:
    group = _group_size(instruction.text, devices)
    for operand in instruction.operands:
        for dtype, count in arrays(body[operand].type if operand in body else ""):
            given = count * bytes_of(dtype)
            whole = given * group if kind == "all-gather" else given
            share = {"all-reduce": 2 * (group - 1) / group, "collective-permute": 1.0}
            sent = whole * share.get(kind, (group - 1) / group)
            yield Collective(kind, dtype, whole, sent, times)


def _group_size(text: str, devices: int) -> int:
    """Devices among which a collective runs, from one of three ways to write it."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", text):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes.get(axis, 1)) for axis in re.findall(r"'(\w+)'", found[2]))
    return devices


def _accessed(instruction: Instruction, body: dict, computations: Computations) -> float:
    opcode, operands = instruction.opcode, [name for name in instruction.operands if name in body]
    if opcode in _FREE or opcode.endswith("-done") or "AllocateBuffer" in instruction.text:
        return 0.0
    if opcode == "copy-start":
        return size(instruction.type)  # where to, and where from
    if opcode == "slice-start":
        result = instruction.type[closing(instruction.type[1:]) + 1 :]
        dtype, count = arrays(result)[0]
        return size(result) + count * bytes_of(dtype)
    if opcode in _SLICES:
        return 2 * min(size(instruction.type), *(size(body[name].type) for name in operands[:1]))
    if opcode == "dynamic-update-slice":
        return 2 * size(body[operands[1]].type)
    if opcode != "fusion":
        read = sum(size(body[name].type) for name in operands)
        return read + size(instruction.type)
    inside = computations.get(attribute(instruction, "calls") or "", {})
    if any(_DONE in i.text for i in inside.values()):
        return 0.0
    read = sum(
        min(size(body[name].type), _read(place, inside, computations))
        for place, name in enumerate(instruction.operands)
        if name in body
    )
    written = _written(list(inside.values())[-1], inside, computations) if inside else 0.0
    return read + min(size(instruction.type), written)


def _read(place: int, inside: dict, computations: Computations) -> float:
    """Bytes that a fusion reads of an operand: of one that it only slices, the slices."""
    number = f"({place})"
    names = {i.name for i in inside.values() if i.opcode == "parameter" and number in i.text[:24]}
    total = 0.0
    for user in inside.values():  # those that use a value come after it
        if names.isdisjoint(user.operands):
            continue
        first = bool(user.operands) and user.operands[0] in names
        if user.opcode == "bitcast":
            names.add(user.name)
        elif user.opcode == "tuple" or (user.opcode in KINDS and _goes_on(inside)):
            continue
        elif user.opcode in _SLICES and first:
            total += size(user.type, everywhere=True)
        elif user.opcode == "fusion":
            nested = computations.get(attribute(user, "calls") or "", {})
            places = [k for k, name in enumerate(user.operands) if name in names]
            total += sum(_read(place, nested, computations) for place in places)
        elif not (user.opcode == "dynamic-update-slice" and first):
            return math.inf
    return total


def _goes_on(inside: dict) -> bool:
    """Whether a fusion computes while a collective runs that has started before: it hands its
    buffers through, and they count where it starts."""
    starts = any(_START in instruction.text for instruction in inside.values())
    tuple_of = list(inside.values())[-1]
    return not starts and tuple_of.opcode == "tuple"


def _written(root: Instruction, inside: dict, computations: Computations) -> float:
    """Bytes that a fusion writes: of what it updates in place, the update."""
    operands = [inside[name] for name in root.operands if name in inside]
    if root.opcode == "parameter" or (root.opcode in KINDS and _goes_on(inside)):
        return 0.0
    if root.opcode in ("tuple", "bitcast") or _START in root.text:
        return sum(_written(operand, inside, computations) for operand in operands)
    if root.opcode == "dynamic-update-slice":
        return size(operands[1].type, everywhere=True)
    nested = computations.get(attribute(root, "calls") or "", {})
    if root.opcode == "fusion" and nested:
        return _written(list(nested.values())[-1], nested, computations)
    return size(root.type, everywhere=True)
