"""Where the precision goes: scopes by what they add to the gradient's error, and frozen weights."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxamp.interpret import Run, run
from jaxamp.operate import is_narrow, on_host, works_narrow
from jaxamp.record import Record, Site


class Contribution(NamedTuple):
    """A scope, or a line where there are no scopes.

    Attributes:
        scope: Its name.
        error_without: ||g - g32|| / ||g32|| with this scope held in float32.
        removed: Share of the error that this takes away.
        loss: The loss with this scope held in float32.
    """

    scope: str
    error_without: float
    removed: float
    loss: float


class Frozen(NamedTuple):
    """A weight and its update.

    Attributes:
        path: The weight.
        dtype: In which it is kept.
        share: Of its nonzero updates, those after which it is the same number as before.
        in_float32: The same if it were kept in float32.
    """

    path: str
    dtype: str
    share: float
    in_float32: float


def error(outs: Sequence[Any], exact: Sequence[Any]) -> float:
    """||g - g32|| / ||g32|| over all gradients; 0 where both are zero."""
    pairs = [
        (np.float64(on_host(a)), np.float64(on_host(b))) for a, b in zip(outs, exact, strict=True)
    ]
    difference = sum(float(np.sum((a - b) ** 2)) for a, b in pairs) ** 0.5
    norm = sum(float(np.sum(b**2)) for _, b in pairs) ** 0.5
    return difference / norm if norm else float(difference > 0)


def contributions(
    program: Any, arrays: Sequence[Any], result: Run, twin: Run, most: int
) -> tuple[float, list[Contribution]]:
    """The error of the gradients, and the scopes that make it, largest part first.

    Args:
        program: Gives the loss, then the gradients.
        arrays: Its inputs.
        result: Its run, with records.
        twin: Its run in float32.
        most: How many scopes are tried; each is a run.
    """
    loss, *gradients = (value.array for value in result.outs)
    exact_loss, *exact = (value.array for value in twin.outs)
    whole = error(gradients, exact)
    if not whole and loss == exact_loss:
        return whole, []
    label = _labels(result.records, most)
    counted = Counter(label(r.site) for r in result.records if works_narrow(r.eqn))
    found, records = [], {record.key: record for record in result.records}
    for name, _ in counted.most_common(most):
        held = run(
            program,
            arrays,
            lambda site, name=name: label(site) == name,
            observe=False,
            like=records,
        )
        loss, *gradients = (value.array for value in held.outs)
        left = error(gradients, exact)
        removed = 1 - left / whole if whole else 0.0
        found.append(Contribution(name, left, removed, float(loss)))
    return whole, sorted(found, key=lambda one: one.error_without)


def _labels(records: Sequence[Record], most: int) -> Callable[[Site], str]:
    """Scopes as deep as there are few enough of them; lines where there is no scope."""
    sites = {record.site for record in records if works_narrow(record.eqn)}
    deepest = max((site.scope.count("/") + 1 for site in sites), default=1)

    def at_depth(depth: int) -> Callable[[Site], str]:
        return lambda site: "/".join(site.scope.split("/")[:depth]) or site.where

    fitting = [d for d in range(1, deepest + 1) if len({at_depth(d)(s) for s in sites}) <= most]
    return at_depth(fitting[-1] if fitting else 1)


def frozen(weights: Any, updates: Any, paths: Sequence[str], param_dtype: Any) -> list[Frozen]:
    """Weights with updates that round to nothing, in `param_dtype` if that has 16 bits.

    Raises:
        ValueError: the two trees differ.
    """
    leaves, treedef = jax.tree.flatten(weights)
    if jax.tree.structure(updates) != treedef:
        raise ValueError(
            f"updates must be a tree like the differentiated arguments, {treedef}, "
            f"got {jax.tree.structure(updates)}"
        )
    found = []
    for path, weight, update in zip(paths, leaves, jax.tree.leaves(updates), strict=True):
        dtype = param_dtype if is_narrow(param_dtype) else np.asarray(weight).dtype
        shares = _stays(weight, update, dtype), _stays(weight, update, np.float32)
        found.append(Frozen(path, np.dtype(dtype).name, *shares))
    return sorted((one for one in found if one.share), key=lambda one: -one.share)


def _stays(weight: Any, update: Any, dtype: Any) -> float:
    """Share of the nonzero updates after which the weight, kept in `dtype`, is what it was."""
    w = np.asarray(weight).astype(dtype)
    moved = np.float64(on_host(w)) + np.float64(on_host(update))
    nonzero = on_host(update) != 0
    same = (moved.astype(dtype) == w) & nonzero
    return np.count_nonzero(same) / max(np.count_nonzero(nonzero), 1)
