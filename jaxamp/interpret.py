"""Run a traced program equation by equation, and record what each one did.

Programs inside are entered: calls, branches, and loops round by round, so that the first bad round
of a scan is known. A loop is never compiled, and no cast is fused away: what is recorded is what
the program says.

The same program can be run with some of its equations *widened*: their 16-bit operands are taken to
float32 and their results stay there. Widened everywhere it is the float32 twin of a mixed program,
with the same equations in the same order, so that records of both can be compared one by one.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxamp import jaxprs
from jaxamp.census import Numbers
from jaxamp.operate import as_written, has_precision, lost_literal, widened
from jaxamp.record import Record, Site, fill


class Value(NamedTuple):
    """An array, and the numbers of the records that made it; arguments are -1, -2, ...

    `same` says that it is what it was in the run that this one is like.
    """

    array: Any
    makers: tuple[int, ...] = ()
    same: bool = True


class Run(NamedTuple):
    """Outputs of a program, and its records in the order in which they were made."""

    outs: list[Value]
    records: list[Record]


def run(
    program: Any,
    arrays: Sequence[Any],
    widen: Callable[[Site], bool] = lambda site: False,
    look: Callable[[Site, Any, Any], list[Numbers | None]] | None = None,
    observe: bool = True,
    restored: frozenset[int] = frozenset(),
    like: dict[tuple[int, int], Record] | None = None,
) -> Run:
    """Run a closed jaxpr on arrays.

    Args:
        program: From `jax.make_jaxpr`.
        arrays: One per input.
        widen: Which equations are held in float32.
        look: Is shown (site, equation, results) of each one, and counts the results it looks at.
        observe: Without, nothing is recorded.
        restored: Equations (by id) whose literals are what 16 bits could not hold.
        like: Records, by their keys, of a run on the same arrays with nothing widened. What comes
            out as it did there is not computed again.
    """
    evaluator = _Evaluator(widen, look, observe, restored, like)
    jaxpr, consts = jaxprs.opened(program)
    values = [Value(array, (-1 - k,)) for k, array in enumerate(arrays)]
    outs = evaluator.program(jaxpr, consts, values, Site("", "", "forward", ()))
    return Run(outs, evaluator.records)


class _Evaluator:
    def __init__(self, widen, look, observe, restored, like):
        self.widen, self.look, self.observe = widen, look, observe
        self.restored, self.like = restored, like
        self.records: list[Record] = []
        self.ran: Counter[int] = Counter()
        self.sites: dict[Any, Site] = {}
        self.ends: dict[int, list[set[Any]]] = {}

    def program(self, jaxpr, consts, args: Sequence[Value], around: Site) -> list[Value]:
        env = dict(zip(jaxpr.constvars, map(Value, consts), strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        if id(jaxpr) not in self.ends:  # a loop comes here once a round
            self.ends[id(jaxpr)] = _last_reads(jaxpr)

        def read(atom: Any) -> Value:
            return Value(jaxprs.literal(atom)) if jaxprs.is_literal(atom) else env[atom]

        for eqn, read_last in zip(jaxpr.eqns, self.ends[id(jaxpr)], strict=True):
            site = self.site(eqn, around)
            ins = [read(atom) for atom in eqn.invars]
            if id(eqn) in self.restored:
                meant = map(lost_literal, eqn.invars)
                ins = [v if m is None else Value(m) for v, m in zip(ins, meant, strict=True)]
            outs = _ENTER.get(eqn.primitive.name, _Evaluator.operation)(self, eqn, ins, site)
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in read_last:  # memory that is used again is ten times faster than new memory
                del env[var]
        return [read(atom) for atom in jaxpr.outvars]

    def site(self, eqn, around: Site) -> Site:
        key = id(eqn), around[:3]
        if key not in self.sites:  # a loop comes here once a round
            self.sites[key] = _site(eqn, around)
        return self.sites[key]._replace(rounds=around.rounds)

    def opened(self, program, args, site) -> list[Value]:
        jaxpr, consts = jaxprs.opened(program)
        return self.program(jaxpr, consts, args, site)

    def operation(self, eqn, ins, site) -> list[Value]:
        wide = self.widen(site) and has_precision(eqn)
        key = (id(eqn), self.ran[id(eqn)])
        self.ran[id(eqn)] += 1
        if self.like and not wide and all(value.same for value in ins):
            return [Value(out) for out in self.like[key].outs]
        arrays = [value.array for value in ins]
        with eqn.ctx.manager:
            outs = widened(eqn, arrays) if wide else as_written(eqn, arrays)
        if not self.observe:
            return [Value(out, same=False) for out in outs]
        record = Record(key, eqn, site, tuple(value.makers for value in ins))
        if not self.look:  # nothing of a run that is looked at is used again
            record.operands, record.outs = tuple(arrays), outs
        fill(record, eqn, arrays, outs, self.look(site, eqn, outs) if self.look else None)
        self.records.append(record)
        return [Value(out, (len(self.records) - 1,)) for out in outs]

    def call(self, eqn, ins, site) -> list[Value]:
        return self.opened(jaxprs.called(eqn), ins, site)

    def cond(self, eqn, ins, site) -> list[Value]:
        self.follow(ins[0])
        branches = eqn.params["branches"]
        chosen = min(max(int(ins[0].array), 0), len(branches) - 1)
        return self.opened(branches[chosen], ins[1:], site)

    def loop(self, eqn, ins, site) -> list[Value]:
        """`while`: operands are (constants of the condition, of the body, carry)."""
        start = eqn.params["cond_nconsts"]
        end = start + eqn.params["body_nconsts"]
        carry, turn = ins[end:], 0
        while True:
            (goes_on,) = self.opened(eqn.params["cond_jaxpr"], [*ins[:start], *carry], site)
            self.follow(goes_on)
            if not goes_on.array.item():
                return carry
            inside = site._replace(rounds=(*site.rounds, turn))
            carry = self.opened(eqn.params["body_jaxpr"], [*ins[start:end], *carry], inside)
            turn += 1

    def follow(self, predicate: Value) -> None:
        """After one that may have come out in another way, records are of other operations."""
        if not predicate.same:
            self.like = None

    def scan(self, eqn, ins, site) -> list[Value]:
        num_consts, num_carry = jaxprs.scan_counts(eqn)
        end = num_consts + num_carry
        consts, carry = ins[:num_consts], ins[num_consts:end]
        stacks = [value._replace(array=_sliceable(value.array)) for value in ins[end:]]
        length = eqn.params["length"]
        order = range(length)[::-1] if eqn.params["reverse"] else range(length)
        given: list[Any] = [None] * length
        for k in order:
            rows = [value._replace(array=value.array[k]) for value in stacks]
            inside = site._replace(rounds=(*site.rounds, k))
            outs = self.opened(eqn.params["jaxpr"], [*consts, *carry, *rows], inside)
            carry, given[k] = outs[:num_carry], outs[num_carry:]
        stacked = [
            _stacked([row[j] for row in given], var)
            for j, var in enumerate(eqn.outvars[num_carry:])
        ]
        return [*carry, *stacked]


def _last_reads(jaxpr: Any) -> list[set[Any]]:
    """Per equation: the variables that are not read after it."""
    ahead, found = set(filterfalse(jaxprs.is_literal, jaxpr.outvars)), []
    for eqn in reversed(jaxpr.eqns):
        met = {*filterfalse(jaxprs.is_literal, eqn.invars), *eqn.outvars}
        found.append(met - ahead)
        ahead |= met
    return found[::-1]


_ENTER: dict[str, Callable] = {
    name: _Evaluator.call for name in jaxprs.CALLS if name != "shard_map"
} | {"scan": _Evaluator.scan, "while": _Evaluator.loop, "cond": _Evaluator.cond}


def _sliceable(stack: Any) -> Any:
    """On the host, where a row costs nothing; keys have to stay with JAX."""
    return np.asarray(stack) if isinstance(stack.dtype, np.dtype) else stack


def _stacked(rows: list[Value], var: Any) -> Value:
    if not rows:
        return Value(jnp.zeros(var.aval.shape, var.aval.dtype))
    makers = tuple(dict.fromkeys(maker for row in rows for maker in row.makers))  # of any round
    arrays = [row.array for row in rows]
    stack = np.stack(arrays) if jaxprs.dtype_of(var) is not None else jnp.stack(arrays)
    return Value(stack, makers, all(row.same for row in rows))


# Where an equation stands.


def _site(eqn: Any, around: Site) -> Site:
    stack = str(eqn.source_info.name_stack)
    scope = scope_path(around.scope, stack)
    phase = "backward" if "transpose(" in stack else around.phase
    return Site(jaxprs.users_line(eqn) or around.where, scope, phase, ())


def scope_path(around: str, stack: str) -> str:
    """The user's scopes in a name stack, without the transforms that wrapped them.

    >>> scope_path("net", "transpose(jvp(head))/jvp(head)/rematted_computation/norm/ij,jk->ik")
    'net/head/norm'
    """
    parts = [part for part in jaxprs.inner_scopes(stack) if not _is_made_by_jax(part)]
    for k in range(len(parts) // 2, 0, -1):
        if parts[:k] == parts[k : 2 * k]:  # once of the transpose, once of what it transposes
            parts = parts[k:]
    return "/".join([around, *parts] if around else parts)


def _is_made_by_jax(scope: str) -> bool:
    """`jnp.einsum` opens a scope with the name of what it was asked for."""
    is_einsum = "," in scope or "->" in scope
    return is_einsum or scope in ("rematted_computation", "checkpoint")
