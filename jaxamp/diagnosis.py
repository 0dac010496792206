"""What `diagnose` found, as data and as text."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxamp.census import Numbers, Scale
from jaxamp.remedies import Remedy
from jaxamp.sensitivity import Contribution, Frozen
from jaxamp.tables import table


@dataclasses.dataclass(frozen=True)
class Fault:
    """The first operation whose NaN or Inf reached the loss or a gradient, or whose zeros did.

    Attributes:
        kind: "nan", "overflow" (a finite number too large for its dtype), "division by zero" (an
            exact pole: 1/0, log 0), "index" (one out of range: JAX gives NaN for it), "argument"
            (it was there before the function ran) or "underflow" (all is finite, and most of a
            gradient is zero that is not so in float32).
        primitive: Name of the operation; for an argument the first that reads it.
        where: The user's line, `file:line:column (function)`; of a library that is installed, the
            line that called it, without a column.
        scope: Name scopes around it, joined by `/`.
        phase: "forward" or "backward".
        rounds: In which round of the loops around it, from 0; a backward scan counts down.
        inputs: (dtype, least, largest) of each floating operand.
        in_float32: Whether the loss or a gradient is not finite in float32 either.
        lost_constant: In float32 a constant of the code was put back that 16 bits cannot hold.
        lost_at: Where numbers became zero that are not zero in float32, if that is behind it.
        remedy: What to try, and how that was checked.
    """

    kind: str
    primitive: str
    where: str
    scope: str
    phase: str
    rounds: tuple[int, ...]
    inputs: tuple[tuple[str, float, float], ...]
    in_float32: bool
    lost_constant: bool
    lost_at: str
    remedy: Remedy

    def __str__(self) -> str:
        rounds = f", round {', '.join(map(str, self.rounds))}" if self.rounds else ""
        scope = f", scope {self.scope}" if self.scope else ""
        what = "not finite as it was given, first read" if self.kind == "argument" else "made"
        in_float32 = "not finite either" if self.in_float32 else "finite"
        meant = " with the constant that was meant" if self.lost_constant else ""
        lines = [
            f"{self.kind}: {what} by {self.primitive or 'nothing'}, {self.phase}{rounds}{scope}",
            f"  at {self.where or 'no line'}",
            *(f"  reads {dtype} from {low:.3g} to {top:.3g}" for dtype, low, top in self.inputs),
            f"  in float32: {in_float32}{meant}",
        ]
        if self.lost_at:
            lines.append(f"  zeros that float32 has not, first at {self.lost_at}")
        head = f"try {self.remedy.setting}" if self.remedy.setting else "advice"
        lines.append(f"  {head}: {self.remedy.advice}")
        lines.append(f"  checked: {self.remedy.checked}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The range of an array, in float32, and what narrow formats would make of it.

    Attributes:
        role: "weight", "activation" (forward) or "gradient" (backward, at the loss scale used).
        scope: Its name scopes; of a weight and its gradient, the path above it.
        name: The operation that makes it, or the path of a weight.
        where: The user's line.
        dtype: In which the program holds it.
        numbers: Counts, over all rounds of a loop.
    """

    role: str
    scope: str
    name: str
    where: str
    dtype: str
    numbers: Numbers

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, strings and numbers."""
        n = self.numbers
        return {
            **{key: getattr(self, key) for key in ("role", "scope", "name", "where", "dtype")},
            "size": n.size,
            "exponents": n.exponent_range and list(n.exponent_range),
            "zero": n.zeros / max(n.size, 1),
            "casts": n.shares(),
        }


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `jaxamp.diagnose` found. `print` shows it; `to_dict` is for tools.

    Attributes:
        policy: The policy, as its string.
        loss: As it was before scaling.
        loss_in_float32: The same in float32.
        loss_scale: The scale of the run.
        fault: The first cause of NaN or Inf, or of a gradient that vanished; None if there is none.
        tensors: Ranges of weights, activations and gradients.
        scale: The loss scale for this backward pass; None where nothing in it has 16 bits.
        error: ||g - g32|| / ||g32|| of the gradients; None if they are not finite.
        contributions: The scopes that make that error, largest part first.
        frozen: Weights whose updates round to nothing, the most frozen first.
    """

    policy: str
    loss: float
    loss_in_float32: float
    loss_scale: float
    fault: Fault | None
    tensors: tuple[Tensor, ...]
    scale: Scale | None
    error: float | None
    contributions: tuple[Contribution, ...]
    frozen: tuple[Frozen, ...]

    def by_scope(self) -> tuple[Tensor, ...]:
        """The tensors of each role and scope taken together."""
        groups: dict[tuple[str, str], list[Tensor]] = {}
        for tensor in self.tensors:
            groups.setdefault((tensor.role, tensor.scope), []).append(tensor)
        return tuple(_together(*key, members) for key, members in groups.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and finite numbers: others are "nan", "inf" and "-inf"."""
        fault = self.fault and dataclasses.asdict(self.fault)
        if self.fault and fault:
            fault |= {
                "rounds": list(self.fault.rounds),
                "inputs": [
                    [dtype, _plain(low), _plain(top)] for dtype, low, top in self.fault.inputs
                ],
                "remedy": self.fault.remedy._asdict(),
            }
        return {
            "policy": self.policy,
            "loss": _plain(self.loss),
            "loss_in_float32": _plain(self.loss_in_float32),
            "loss_scale": self.loss_scale,
            "fault": fault,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "scopes": [tensor.to_dict() for tensor in self.by_scope()],
            "scale": self.scale and self.scale._asdict(),
            "error": self.error,
            "contributions": [
                {name: x if isinstance(x, str) else _plain(x) for name, x in one._asdict().items()}
                for one in self.contributions
            ],
            "frozen": [one._asdict() for one in self.frozen],
        }

    def __str__(self) -> str:
        head = f"diagnosis under {self.policy}: loss {self.loss:.6g} (in float32 "
        head += f"{self.loss_in_float32:.6g}), loss scale {self.loss_scale:g}"
        blocks = [[head, self._verdict()], _ranges(self.by_scope()), self._scale_lines()]
        blocks += [self._error_lines(), self._frozen_lines()]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _verdict(self) -> str:
        if self.fault:
            return str(self.fault)
        found = "the loss and all gradients are finite"
        if self._loss_is_off(self.loss):
            found += ", but the loss is far from that in float32 (no fault where it is a small "
            found += "difference of large numbers)"
            near = sorted(self.contributions, key=lambda c: abs(c.loss - self.loss_in_float32))
            if near and not self._loss_is_off(near[0].loss):
                found += f"; with {near[0].scope} in float32 it is {near[0].loss:.6g}"
        elif self.error is not None and self.error > _FAR_GRADIENT:
            found += ", but the gradients are far from those in float32"
        return found

    def _loss_is_off(self, loss: float) -> bool:
        return abs(loss - self.loss_in_float32) > _FAR_LOSS * abs(self.loss_in_float32)

    def _scale_lines(self) -> list[str]:
        if self.scale is None or not math.isfinite(self.loss_in_float32):
            return []
        s = self.scale
        lines = [
            f"loss scale to use: {s.loss_scale:g}, which can be doubled {s.margin_log2} times more"
        ]
        if s.flushed > s.flushed_now:
            lines = [f"no loss scale keeps these gradients: above {s.loss_scale:g} some overflow"]
        zeros = f"{s.flushed_now:.2%} now, {s.flushed:.2%} with it"
        return [*lines, f"  zero in gradients held in 16 bits: {zeros}"]

    def _error_lines(self) -> list[str]:
        if self.error is None or not self.contributions:
            return []
        rows = [("held in float32", "error left", "takes away", "loss")]
        rows += [
            (one.scope, f"{one.error_without:.3g}", f"{one.removed:.0%}", f"{one.loss:.6g}")
            for one in self.contributions
        ]
        return [f"gradient error against float32: {self.error:.3g}", *table(rows)]

    def _frozen_lines(self) -> list[str]:
        rows = [("weight", "dtype", "updates that round to nothing", "with params=f32")]
        rows += [
            (one.path, one.dtype, f"{one.share:.1%}", f"{one.in_float32:.1%}")
            for one in self.frozen
        ]
        return table(rows) if self.frozen else []


_FAR_LOSS, _FAR_GRADIENT = 0.1, 0.5
"""Of those in float32; of eleven healthy models at most 0.008 and 0.04."""


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def _together(role: str, scope: str, members: Sequence[Tensor]) -> Tensor:
    dtypes = "|".join(dict.fromkeys(member.dtype for member in members))
    numbers = members[0].numbers
    for member in members[1:]:
        numbers = numbers + member.numbers
    return Tensor(role, scope, f"{len(members)} tensors", "", dtypes, numbers)


def _ranges(scopes: Sequence[Tensor]) -> list[str]:
    if not scopes:
        return []
    formats = list(scopes[0].numbers.casts)
    header = ("range of", "scope", "held in", "2^min..2^max", "zero")
    rows = [(*header, *formats)]
    title = "ranges in float32, and what a cast would flush to zero / make subnormal / overflow"
    return [title, *table([*rows, *range_rows(scopes)])]


def range_rows(scopes: Sequence[Tensor]) -> Iterator[tuple[str, ...]]:
    """For a table: role, scope, dtypes, exponents, share of zeros, and what each cast would do."""
    for one in scopes:
        n = one.numbers
        ends = n.exponent_range
        between = f"{ends[0]}..{ends[1]}" if ends else "none"
        if n.exponents[-1]:
            between += f", {_share(n.exponents[-1] / n.size)} not finite"
        casts = ("/".join(_share(x) for x in shares.values()) for shares in n.shares().values())
        yield one.role, one.scope, one.dtype, between, _share(n.zeros / max(n.size, 1)), *casts


def _share(part: float) -> str:
    """A share for people: `0` only for none at all.

    >>> _share(0.0), _share(1e-6), _share(0.25)
    ('0', '<.1%', '25%')
    """
    if part == 0:
        return "0"
    if part < 0.001:
        return "<.1%"
    return f"{100 * part:.2g}%" if part < 0.995 else "100%"
