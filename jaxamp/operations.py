"""What a single operation does: in which dtype it computes and gives its results, and why.

From its kind in the table (`jaxamp.rules`), what is known of its operands, and the exceptions:
matmuls that are left alone, numbers that the compute dtype cannot hold, what is read by whom.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jaxamp import dots, jaxprs
from jaxamp.plans import Info, Step
from jaxamp.policy import Policy
from jaxamp.rules import reason_of


def decided(
    eqn: Any, kind: str, ins: Sequence[Info], policy: Policy, forced: bool, wanted: bool
) -> Step:
    """The step of an equation without programs inside.

    Args:
        eqn: Of the trace.
        kind: Of its primitive in the table.
        ins: What is known of its operands.
        policy: Its compute dtype, `rules` and `reduce`.
        forced: It stays in float32.
        wanted: Only float32 ops read its results.
    """
    name = eqn.primitive.name
    reason = reason_of(name, policy.rules)
    operands = [info for atom, info in zip(eqn.invars, ins, strict=True) if jaxprs.is_float32(atom)]
    if kind == "matmul":
        wanted = wanted and not _outgrows(eqn, ins)
        kind, reason = _matmul_kind(eqn, _ACCUMULATOR if wanted else reason)
    elif kind == "guarded" or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
        kind = _guarded_kind(eqn, policy.compute_dtype)
    if name == "scatter" and _applies_a_function(eqn):
        kind, reason = "rigid", "`.at[].apply` has a function inside, traced for its dtypes"
    if kind == "structure":
        step = _structure_step(eqn, ins, operands, reason)
        if step is not None:
            return step
        kind = "follow"
    if forced:
        kind = "rigid" if kind == "rigid" else "full"
        reason = "inside full_precision or full="
    elif any(info.pinned for info in operands):
        kind, reason = "full", "reads a parameter that full= names"
    elif kind == "follow" and _low(operands) and any(info.wide for info in operands):
        kind, reason = "full", f"a constant that {policy.compute_dtype.name} cannot hold"
    elif kind == "follow" and _low(operands) and any(info.computed for info in operands):
        kind, reason = "full", _COMPUTED
    elif kind == "follow" and wanted:
        kind, reason = "full", "only float32 ops read it"
    low = kind == "matmul" or (kind == "follow" and _low(operands))
    step = _step(eqn, kind, reason, ins, low, wanted)
    if kind == "matmul" and policy.reduce == "float32":
        step.float32_grads = _float32_grads(eqn, ins)
    return step


_COMPUTED = "a factor computed in float32 from inputs alone, such as a rotation by position"
_ACCUMULATOR = "a matmul of 16-bit operands; only float32 ops read it, so it gives its float32 sum"


def _low(operands: Sequence[Info]) -> bool:
    """The widest of the strong operands is in the compute dtype."""
    strong = [info.low for info in operands if not info.weak]
    return bool(strong) and all(strong)


def _step(eqn, kind, reason, ins, low, float32_out=False) -> Step:
    """A step whose float32 operands all go to one dtype, and its float32 results too."""
    to_low = tuple(low if jaxprs.is_float32(atom) else None for atom in eqn.invars)
    weak = kind != "matmul" and _all_weak(eqn, ins)
    const = all(info.const for info in ins)
    follows = weak and kind == "follow"
    out = Info(
        low=low and not float32_out,
        weak=weak,
        const=const,
        wide=follows and any(info.wide for info in ins),
        # Rounded, it would shift alike all that it is multiplied with: nothing averages out.
        computed=(weak and kind == "full" and not const)
        or (follows and any(info.computed for info in ins)),
    )
    outs = tuple(out if jaxprs.is_float32(var) else out._replace(low=False) for var in eqn.outvars)
    return Step(eqn, kind, reason, tuple(ins), to_low, outs, float32_out=float32_out and low)


def _all_weak(eqn, ins) -> bool:
    """Integers and keys carry no precision: what is made from them is weak."""
    pairs = zip(eqn.invars, ins, strict=True)
    return all(info.weak for atom, info in pairs if jaxprs.is_inexact(atom))


def _structure_step(eqn, ins, operands, reason) -> Step | None:
    """Results keep their operand's info; None where several operands have to agree."""
    if len(eqn.invars) == len(eqn.outvars):
        outs = tuple(ins)
    elif len(operands) == 1:
        outs = tuple(operands) * len(eqn.outvars)
    else:
        return None
    if eqn.primitive.name == "convert_element_type":
        outs = (outs[0]._replace(weak=_all_weak(eqn, ins)),)
    if eqn.primitive.name == "gather":  # has consumed the parameter; its rows are activations
        outs = (outs[0]._replace(pinned=False),)
    outs = tuple(
        info if jaxprs.is_float32(var) else info._replace(low=False)
        for info, var in zip(outs, eqn.outvars, strict=True)
    )
    return Step(eqn, "structure", reason, tuple(ins), (None,) * len(ins), outs)


def _applies_a_function(eqn) -> bool:
    """Whether a scatter is one of `.at[].apply`, and not one that overwrites."""
    program = eqn.params.get("update_jaxpr")
    return program is not None and bool(jaxprs.opened(program)[0].eqns)


def _matmul_kind(eqn, reason) -> tuple[str, str]:
    """Which matmuls are left alone, and why."""
    narrowable = (np.float32, jnp.bfloat16, np.float16)
    dtypes = [jaxprs.dtype_of(atom) for atom in eqn.invars[:2]]
    if np.float32 not in dtypes or not jaxprs.is_float32(eqn.outvars[0]):
        return "rigid", "the program chose these dtypes itself"
    if any(dtype not in narrowable for dtype in dtypes):
        return "rigid", "operands that are not float32, bfloat16 or float16"
    precision = eqn.params.get("precision")
    chosen = precision if isinstance(precision, tuple) else (precision,)
    if any(p not in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH) for p in chosen):
        return "full", f"precision={chosen[0]} is asked for"
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        if math.prod(eqn.invars[0].aval.shape[k] for k in contracted) <= 1:
            return "follow", "an outer product adds nothing up: it is a multiplication"
    return "matmul", reason


def _outgrows(eqn, ins) -> bool:
    """A weight makes far more numbers of an activation, as a language model's head does.

    In float32 they would be the largest array of the program, for 2 % of the gradient's error.
    """
    if eqn.primitive.name != "dot_general" or not any(info.weak for info in ins):
        return False
    pairs = list(zip(eqn.invars, ins, strict=True))
    activations = [atom for atom, info in pairs if not info.weak] or eqn.invars
    read = max(atom.aval.size for atom in activations)
    return eqn.outvars[0].aval.size > _LARGEST_GROWTH * read


_LARGEST_GROWTH = 8


def _float32_grads(eqn, ins) -> tuple[bool, ...]:
    """Operands that are float32 weights: what is weak, and cast where it is used."""
    if not dots.can_round(eqn):
        return ()
    pairs = zip(eqn.invars, ins, strict=True)
    weights = tuple(jaxprs.is_float32(atom) and i.weak and not i.low for atom, i in pairs)
    return weights if any(weights) else ()


def _guarded_kind(eqn, compute_dtype) -> str:
    if compute_dtype == np.float16 or not 0 <= eqn.params.get("y", 2) <= 3:
        return "full"
    return "follow"


def is_wide(value: Any, compute_dtype: np.dtype) -> bool:
    """A finite number in there is infinite, or a nonzero one zero, in the compute dtype."""
    if isinstance(value, jax.core.Tracer) or getattr(value, "size", 1) > _LARGEST_CHECKED:
        return False
    if getattr(value, "dtype", None) not in (None, np.dtype(np.float32)):
        return False
    try:
        size = np.abs(np.asarray(value, np.float32))
    except (TypeError, ValueError):  # a key, or an array on devices of other processes
        return False
    size = size[np.isfinite(size) & (size > 0)]
    with np.errstate(over="ignore", under="ignore"):
        held = size.astype(compute_dtype).astype(np.float32)
    return bool(size.size) and not bool(np.all(np.isfinite(held) & (held > 0)))


_LARGEST_CHECKED = 2**24  # elements: looking at a constant costs a copy to the host
