"""`explain`: what autocast decided for a function, and why, as a table or for tools."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jmp

from jaxamp import jaxprs
from jaxamp.autocast import autocast, plan_call, trace_call
from jaxamp.plans import Plan, Step
from jaxamp.policy import get_policy
from jaxamp.stops import stopped_casts
from jaxamp.tables import table

_MOST_ROWS = 60
_AROUND = "kept by the program as a whole: a loop's rounds, a cast for a matmul"


@dataclasses.dataclass(frozen=True)
class Row:
    """Equations that were treated alike.

    Attributes:
        op: Name of the primitive.
        scope: Name scopes around it, joined by `/`.
        count: How many equations; one in a loop counts once.
        from_dtype: Dtype of the result in the trace.
        to_dtype: Dtype of the result as emitted.
        kind: A kind of `jaxamp.rules`.
        reason: Why, in words.
        saved_bytes: Bytes of results that are kept for the backward pass.
    """

    op: str
    scope: str
    count: int
    from_dtype: str
    to_dtype: str
    kind: str
    reason: str
    saved_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast decided. `print` shows a table; `to_dict` is for tools.

    Attributes:
        policy: The policy, as its string.
        rows: Most bytes first, then in the order of the program.
        notes: What will hurt, each with file and line.
        saved_bytes: Bytes kept for the backward pass, arguments not counted; None where the
            function is not differentiable.
    """

    policy: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    saved_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return dataclasses.asdict(self) | {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        header = ("op", "scope", "n", "from -> to", "saved", "kind", "why")
        shown = self.rows[:_MOST_ROWS]
        lines = table([header, *map(_cells, shown)])
        if len(self.rows) > len(shown):
            lines.append(f"... and {len(self.rows) - len(shown)} more")
        if self.saved_bytes is None:
            saved = "not differentiable"
        else:
            saved = f"{_size(self.saved_bytes)} kept for the backward pass"
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"autocast under {self.policy}: {saved}", *lines, *notes])


def explain(fun: Callable, policy: str | jmp.Policy) -> Callable[..., Explanation]:
    """What `autocast(fun, policy)` does and why, without running it.

    Args:
        fun: As for `jaxamp.autocast`.
        policy: A policy or its string.

    Returns:
        A function of the arguments of `fun`, arrays or `jax.ShapeDtypeStruct`s, that gives an
        `Explanation`.

    Raises:
        ValueError, TypeError: as `jaxamp.autocast`.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.sum(jnp.exp(x @ w))
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> for row in explain(loss, "compute=bf16")(x, x).rows:
    ...     print(row.op, row.scope, row.from_dtype, row.to_dtype, row.kind, row.saved_bytes)
    exp head float32 float32 full 256
    dot_general head float32 float32 matmul 0
    reduce_sum head float32 float32 full 0
    """
    policy = get_policy(policy)
    mixed = autocast(fun, policy)

    @functools.wraps(fun)
    def explained(*args, **kwargs) -> Explanation:
        call = trace_call(fun, args, kwargs)
        plan = plan_call(call, policy)
        saved = _saved(mixed, args, kwargs)
        decided = Counter(_decided(plan))
        left = dict(saved or {})  # each saved byte is shown once, with the first row it fits
        rows = [
            Row(op, scope, n, *how, saved_bytes=left.pop((op, scope), 0))
            for (op, scope, *how), n in decided.items()
        ]
        rows += [Row(*key, 1, "", "", "saved", _AROUND, size) for key, size in left.items()]
        rows.sort(key=lambda row: -row.saved_bytes)
        total = None if saved is None else sum(row.saved_bytes for row in rows)
        return Explanation(str(policy), tuple(rows), tuple(dict.fromkeys(_notes(plan))), total)

    return explained


def _steps(plan: Plan, around: str = "") -> Iterator[tuple[Step, Plan, str]]:
    """Steps at all depths, with the user's line: that of the call, where there is none inside."""
    for step in plan.steps:
        line = jaxprs.where(step.eqn) or around
        yield step, plan, line
        for sub in step.subs:
            yield from _steps(sub, line)


def _decided(plan: Plan) -> Iterator[tuple]:
    """(op, scope, from, to, kind, reason) of each equation that makes or reads float32."""
    for step, inner, _ in _steps(plan):
        atoms = (*step.eqn.invars, *step.eqn.outvars)
        if step.kind == "enter" or not any(map(jaxprs.is_float32, atoms)):
            continue
        from_dtype, to_dtype = _dtypes(step, inner)
        yield step.eqn.primitive.name, step.scope, from_dtype, to_dtype, step.kind, step.reason


def _dtypes(step: Step, plan: Plan) -> tuple[str, str]:
    pairs = list(zip(step.eqn.outvars, step.outs, strict=True))
    floats = [pair for pair in pairs if jaxprs.is_float32(pair[0])] or pairs
    if not floats:
        return "", ""
    var, info = floats[0]
    traced = str(getattr(var.aval, "dtype", ""))
    return traced, plan.policy.compute_dtype.name if info.low else traced


def _notes(plan: Plan) -> Iterator[str]:
    for step, inner, line in _steps(plan):
        eqn = step.eqn
        name, compute = eqn.primitive.name, inner.policy.compute_dtype.name
        reads_float32 = any(map(jaxprs.is_float32, eqn.invars))
        if step.kind == "rigid" and reads_float32 and _has_matmul(eqn):
            yield f"{name} stays float32, and there is a float32 matmul inside it: {line}"
        elif step.reason.startswith("a constant that"):
            yield f"{name} stays float32 because of a constant that {compute} cannot hold: {line}"
        elif name in _MATMULS and step.kind == "full":
            yield f"{name} stays float32: {step.reason}: {line}"
    for line in _stops(plan):
        yield f"the gradient stops here, at a cast under stop_gradient, with no way around: {line}"


def _stops(plan: Plan, outer: bool = True) -> Iterator[str]:
    for eqn in stopped_casts(plan.jaxpr, outer):
        if jaxprs.is_users(line := jaxprs.where(eqn)):
            yield line
    for sub in (sub for step in plan.steps for sub in step.subs):
        yield from _stops(sub, outer=False)


_MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _has_matmul(eqn: Any) -> bool:
    inner = [e for program in jaxprs.programs(eqn) for e in jaxprs.opened(program)[0].eqns]
    return any(e.primitive.name in _MATMULS or _has_matmul(e) for e in inner)


def _saved(fun: Callable, args: tuple, kwargs: dict) -> dict[tuple[str, str], int] | None:
    """(op, scope) -> bytes of its results that the backward pass needs."""

    def pullback(*args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        at = [k for k, leaf in enumerate(leaves) if _is_float(leaf)]

        def of_floats(*floats):
            filled = dict(enumerate(leaves)) | dict(zip(at, floats, strict=True))
            args, kwargs = jax.tree.unflatten(treedef, [filled[k] for k in range(len(leaves))])
            return fun(*args, **kwargs)

        return jax.tree.leaves(jax.vjp(of_floats, *(leaves[k] for k in at))[1])

    try:
        program = trace_call(pullback, args, kwargs).program
    except (TypeError, ValueError, NotImplementedError):
        return None
    jaxpr, _ = jaxprs.opened(program)
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    saved: Counter = Counter()
    for var in {v for v in jaxpr.outvars if not jaxprs.is_literal(v)}:
        if var in made_by and jaxprs.dtype_of(var) is not None:
            eqn = made_by[var]
            size = var.aval.size * var.aval.dtype.itemsize
            saved[eqn.primitive.name, jaxprs.scope_of(eqn)] += size
    return dict(saved)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)


def _cells(row: Row) -> tuple[str, ...]:
    arrow = (
        row.to_dtype if row.from_dtype == row.to_dtype else f"{row.from_dtype} -> {row.to_dtype}"
    )
    saved = _size(row.saved_bytes) if row.saved_bytes else ""
    return row.op, row.scope, str(row.count), arrow, saved, row.kind, row.reason


def _size(num_bytes: float) -> str:
    """A size for people.

    >>> _size(100), _size(3 * 2**20)
    ('100 B', '3.0 MiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
