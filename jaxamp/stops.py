"""Casts at which a gradient stops: a `stop_gradient` beside a cast, and no other way around."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jaxamp import jaxprs

CAST, STOP = "convert_element_type", "stop_gradient"


def stopped_casts(jaxpr: Any, outer: bool) -> Iterator[Any]:
    """The equations `stop_gradient` in front of or behind a float cast that cut all gradient.

    A value that something else reads as well has a gradient by that way: so does a
    straight-through estimator, x + stop_gradient(x.astype(jnp.bfloat16) - x), whose x is read by
    the addition.

    Args:
        jaxpr: One program; those inside of it are not looked at.
        outer: Whether it is the whole program, so that nothing else reads its inputs.
    """
    made_by = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    read = [atom for eqn in jaxpr.eqns for atom in eqn.invars] + list(jaxpr.outvars)
    reads = Counter(atom for atom in read if not jaxprs.is_literal(atom))
    cast = {eqn.invars[0] for eqn in jaxpr.eqns if _is_float_cast(eqn)}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != STOP or not jaxprs.is_inexact(eqn.invars[0]):
            continue
        source = eqn.invars[0]
        way = [source]
        if source in made_by and _is_float_cast(made_by[source]):
            way += made_by[source].invars
        elif eqn.outvars[0] not in cast:
            continue
        if all(reads[var] == 1 and (outer or var not in jaxpr.invars) for var in way):
            yield eqn


def _is_float_cast(eqn: Any) -> bool:
    """Whether it casts a float to a float of another width."""
    if eqn.primitive.name != CAST or jaxprs.is_literal(eqn.invars[0]):
        return False
    source, result = eqn.invars[0], eqn.outvars[0]
    floats = jaxprs.is_inexact(source) and jaxprs.is_inexact(result)
    return floats and jaxprs.dtype_of(source) != jaxprs.dtype_of(result)
