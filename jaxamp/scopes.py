"""Name scopes: `full_precision`, and the globs of `policy.full` over scopes and parameters."""

import contextlib
import fnmatch
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxamp import jaxprs

_FULL_PRECISION = "full_precision"
_MOST_LISTED = 20


class _FullPrecision(contextlib.ContextDecorator):
    """Keep the ops inside in float32 under `jaxamp.autocast`; a context manager and a decorator.

    It is a name scope that autocast reads: outside of autocast it does nothing, and it changes no
    compiled program.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> def f(x, w):
    ...     with full_precision:
    ...         y = x @ w
    ...     return y @ w
    >>> x = jnp.ones((2, 2))
    >>> [row.to_dtype for row in jaxamp.explain(f, "c=bf16")(x, x).rows]
    ['float32', 'bfloat16']

    As a decorator, with or without parentheses:

    >>> @full_precision
    ... def head(x, w):
    ...     return x @ w
    """

    def __init__(self):
        self._entered = threading.local()

    def __call__(self, fun: Callable | None = None) -> Any:
        """Decorate `fun`; without it, itself, so that parentheses are allowed."""
        if fun is None:
            return self

        @functools.wraps(fun)
        def in_full_precision(*args, **kwargs):
            with self:
                return fun(*args, **kwargs)

        return in_full_precision

    def __enter__(self):
        scope = jax.named_scope(_FULL_PRECISION)
        scope.__enter__()
        self._entered.__dict__.setdefault("scopes", []).append(scope)
        return self

    def __exit__(self, *exception):
        return self._entered.scopes.pop().__exit__(*exception)


full_precision = _FullPrecision()


class Scopes:
    """The scopes of a program, and which patterns of `policy.full` matched one."""

    def __init__(self, patterns: Sequence[str]):
        self.patterns = patterns
        self.seen: set[str] = set()
        self.matched: set[str] = set()

    def enter(self, around: str, eqn: Any) -> str:
        """The scope of an equation in a program with scope `around`."""
        within = jaxprs.scope_of(eqn)
        scope = f"{around}/{within}" if around and within else around or within
        if self.patterns:
            self.seen.add(scope)
        return scope

    def is_full(self, scope: str) -> bool:
        """Whether the scope is one of `full_precision`, or matched by a pattern."""
        matched = matching(self.patterns, scope) if self.patterns and scope else ()
        self.matched.update(matched)
        return bool(matched) or (_FULL_PRECISION in scope and _FULL_PRECISION in scope.split("/"))

    def absorb(self, other: "Scopes") -> None:
        """Add what a program inside has seen."""
        self.seen |= other.seen
        self.matched |= other.matched


def matching(patterns: Iterable[str], path: str) -> list[str]:
    """The globs that match a path or one of its ancestors; `*` crosses `/`.

    >>> matching(["*/head", "*head*", "head", "emb*"], "params/head/kernel")
    ['*/head', '*head*']
    >>> matching(["*/head"], "head")
    ['*/head']
    """
    parts = path.split("/")
    ancestors = ["/".join(parts[:k]) for k in range(1, len(parts) + 1)]
    rooted = [*ancestors, *(f"/{ancestor}" for ancestor in ancestors)]
    return [glob for glob in patterns if any(fnmatch.fnmatchcase(path, glob) for path in rooted)]


def check_all_matched(scopes: Scopes, parameters: Sequence[str]) -> None:
    """A pattern that matches nothing has a typo in it.

    Raises:
        ValueError: with the pattern, and the paths and scopes that there were.
    """
    unmatched = [glob for glob in scopes.patterns if glob not in scopes.matched]
    if unmatched:
        raise ValueError(
            f"full: {unmatched[0]!r} matches no parameter and no scope.\n"
            f"  parameters: {_listed(parameters)}\n"
            f"  scopes: {_listed(sorted(scopes.seen - {''}))}"
        )


def _listed(paths: Sequence[str]) -> str:
    more = f", and {len(paths) - _MOST_LISTED} more" if len(paths) > _MOST_LISTED else ""
    return (", ".join(paths[:_MOST_LISTED]) or "none") + more
