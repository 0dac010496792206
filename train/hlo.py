"""The text of an optimized program: its instructions, and how often each of them runs."""

import math
import re
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line: `name = type opcode(operands), ...`, and what stands after the type as `text`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    text: str


Computations = dict[str, dict[str, Instruction]]

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")


def parse(text: str) -> tuple[str, Computations]:
    """The entry's name, and the instructions of each computation by name; a root comes last."""
    computations: Computations = {}
    entry, root, body = "", "", {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            body = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif found := _NAME.match(line):
            body[found[1]] = _instruction(found[1], line[found.end() :])
            root = found[1] if "ROOT" in found[0] else root
        elif line.startswith("}") and root in body:
            body[root] = body.pop(root)
    return entry, computations


def _instruction(name: str, rest: str) -> Instruction:
    end = closing(rest) if rest.startswith("(") else rest.index(" ")
    opcode, _, after = rest[end:].strip().partition("(")
    inside = after[: closing("(" + after) - 2]
    inside = re.sub(r"/\*.*?\*/|[\[{][^\]}]*[\]}]", "", inside)
    operands = tuple(part.split()[-1].lstrip("%") for part in inside.split(",") if part.split())
    return Instruction(name, rest[:end], opcode, operands, rest[end:])


def closing(text: str) -> int:
    """Where the parenthesis that `text` starts with is closed, plus 1."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return place + 1
    return len(text)


def executions(entry: str, computations: Computations) -> tuple[list[tuple[str, int]], int]:
    """(computation, how often it runs) for the entry and what it loops over, branches to, calls."""
    runs: list[tuple[str, int]] = []
    unknown = 0
    waiting = [(entry, 1)]
    while waiting:
        name, times = waiting.pop()
        runs.append((name, times))
        for instruction in computations.get(name, {}).values():
            trips: int | None = 1
            if instruction.opcode == "while":
                trips = trip_count(instruction, computations)
                unknown += trips is None
            waiting += [(called, times * (trips or 1)) for called in _called(instruction)]
    return runs, unknown


def trip_count(loop: Instruction, computations: Computations) -> int | None:
    """As XLA says it; else of a condition `i < constant`, by what the body adds to i.

    The loops of JAX and of XLA start at 0; a TPU's compiler unrolls some and adds 2.
    """
    if known := re.search(r'known_trip_count[^}]*?"n":"(\d+)"', loop.text):
        return int(known[1])
    condition = computations.get(attribute(loop, "condition") or "", {})
    root = list(condition.values())[-1] if condition else None
    if root is None or root.opcode != "compare" or "direction=LT" not in root.text:
        return None
    counter, limit = (condition.get(name) for name in root.operands)
    count = _constant(limit)
    place = re.search(r"index=(\d+)", counter.text) if counter else None
    if count is None or place is None:
        return None
    step = _step(computations.get(attribute(loop, "body") or "", {}), int(place[1]))
    return -(-count // step) if step else None


def _step(body: dict[str, Instruction], place: int) -> int | None:
    """What a loop's body adds to one element of what it carries."""
    carry = list(body.values())[-1]
    value = body.get(carry.operands[place]) if place < len(carry.operands) else None
    step = 0
    while value is not None and value.opcode in ("add", "copy"):
        added = [_constant(body.get(name)) for name in value.operands[1:]]
        step += sum(amount or 0 for amount in added)
        value = body.get(value.operands[0])
    return step if value is not None and value.opcode == "get-tuple-element" else None


def _constant(instruction: Instruction | None) -> int | None:
    number = re.match(r"\s*constant\((\d+)\)", instruction.text) if instruction else None
    return int(number[1]) if number else None


def _called(instruction: Instruction) -> list[str]:
    if instruction.opcode == "while":
        return [attribute(instruction, "body") or ""]
    if instruction.opcode == "call":
        return [attribute(instruction, "to_apply") or ""]
    if instruction.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", instruction.text)
        names = branches[1].split(",") if branches else []
        sides = (f"{side}_computation" for side in ("true", "false"))
        names += [attribute(instruction, side) or "" for side in sides]
        return [name.strip().lstrip("%") for name in names if name]
    return []


def attribute(instruction: Instruction, key: str) -> str | None:
    """The name after `key=`."""
    found = re.search(rf"\b{key}=%?([\w.\-]+)", instruction.text)
    return found[1] if found else None


_BYTES = {"pred": 1, "token": 0, "opaque": 0, "bf16": 2, "c64": 8, "c128": 16}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")


def arrays(type_text: str) -> list[tuple[str, int]]:
    """(dtype, number of elements) of each array of a type."""
    return [
        (found[1], math.prod(int(n) for n in found[2].split(",") if n))
        for found in _ARRAY.finditer(type_text)
    ]


def size(type_text: str, everywhere: bool = False) -> float:
    """Bytes of a type in main memory: not of what is marked S(1), a TPU's vector memory."""
    return sum(
        math.prod(int(n) for n in found[2].split(",") if n) * bytes_of(found[1])
        for found in _ARRAY.finditer(type_text)
        if everywhere or not re.search(r"S\([1-9]\)", found[3] or "")
    )


def bytes_of(dtype: str) -> float:
    """Bytes of one element."""
    if dtype in _BYTES:
        return _BYTES[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)  # f32, s8, u16, f8e4m3fn
    return int(digits[1]) / 8 if digits else 0.0
