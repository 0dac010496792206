"""`diagnose`: one step, run slowly, to see what its precision does to it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jmp

from jaxamp import blame, census, jaxprs, remedies, sensitivity
from jaxamp.autocast import Call, autocast, trace_call
from jaxamp.diagnosis import Diagnosis, Fault, Tensor
from jaxamp.gradients import as_loss_scale, check_callable, split_aux
from jaxamp.interpret import Run, run
from jaxamp.loss_scale import to_float32
from jaxamp.operate import is_finite, is_floating, is_narrow
from jaxamp.policy import Policy, get_policy
from jaxamp.problem import Problem, finite
from jaxamp.record import Site
from jaxamp.rules import RULES

_MOST_SCOPES = 6  # each is a run of its own


def diagnose(
    fun: Callable,
    policy: str | jmp.Policy,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., Diagnosis]:
    """Where a step under `policy` makes NaN or Inf, loses small numbers, and loses precision.

    The loss and its gradient are run once under `jaxamp.autocast`, operation by operation and loops
    round by round, and once more in float32. The `Diagnosis` says

      * which operation made the NaN or Inf that reached the loss or a gradient, if there is one:
        its line, scope, operands, whether float32 has it too, and a remedy that was tried out;
      * the range of every weight, activation and gradient, and what float16, bfloat16 and the two
        8-bit formats would make of them; which loss scale keeps the gradients;
      * the error of loss and gradients, and which scopes make it: up to six are run again in
        float32, one at a time (scopes as deep as there are no more of them; lines where there are
        no scopes);
      * with `updates`, which weights do not move because their update is less than half an ulp.

    It is made for looking at one bad step, not for every step: nothing is compiled as a whole, and
    all intermediate results are kept until the run ends. Not under `jit`.

    Args:
        fun: Its first result is the loss, a floating scalar. State and dropout keys are arguments.
        policy: A policy or its string.
        argnums: As in `jax.value_and_grad`.
        has_aux: As in `jax.value_and_grad`; what is not finite in aux alone is no fault.

    Returns:
        A function `(*args, loss_scale=None, updates=None, **kwargs) -> Diagnosis`. `loss_scale` is
        as for `jaxamp.value_and_grad`; `updates` is what an optimizer would add to the arguments of
        `argnums`, a tree like theirs (a tuple of trees if `argnums` is one).

    Raises:
        ValueError: the loss is no floating scalar, JAX cannot differentiate `fun`, an argument of
            `argnums` is not floating, `updates` is another tree, it is traced by `jit`, or as
            `jaxamp.autocast`.
        TypeError: `fun` is not callable.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.mean(jnp.exp((x @ w).astype(jnp.float16)))
    >>> found = diagnose(loss, "compute=f16")(jnp.ones((4, 3)), jnp.full((2, 4), 3.0))
    >>> found.fault.kind, found.fault.primitive, found.fault.scope, found.fault.in_float32
    ('overflow', 'exp', 'head', False)
    """
    check_callable(fun)
    policy = get_policy(policy)

    @functools.wraps(fun)
    def diagnosed(*args, loss_scale=None, updates=None, **kwargs) -> Diagnosis:
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            raise ValueError("diagnose looks at numbers: call it outside of jit and grad")
        scale = jnp.float32(as_loss_scale(loss_scale).loss_scale)
        chosen = (argnums,) if isinstance(argnums, int) else argnums
        chosen = [k + len(args) if k < 0 else k for k in chosen]
        args = tuple(jax.tree.map(jnp.asarray, a) if k in chosen else a for k, a in enumerate(args))

        def trace(policy: Policy, decorate: Callable = lambda fun: fun) -> Call:
            gradient = _scaled_gradient(decorate(fun), policy, argnums, has_aux)
            return trace_call(gradient, args, {**kwargs, "loss_scale": scale})

        call = trace(policy)
        weights = tuple(args[k] for k in chosen)
        return _diagnosed(call, policy, trace, weights, _tuple(updates, argnums))

    return diagnosed


def _tuple(updates: Any, argnums: int | Sequence[int]) -> Any:
    return (updates,) if isinstance(argnums, int) and updates is not None else updates


class _NotALoss(ValueError):
    """What the function gave cannot be differentiated."""


def _scaled_gradient(fun: Callable, policy: Policy, argnums, has_aux: bool) -> Callable:
    """`(*args, loss_scale, **kwargs) -> (loss, gradients times the scale)`."""
    mixed = autocast(fun, policy.replace(output_dtype=jnp.float32))
    name = getattr(fun, "__name__", "the function")
    # The user's, which tracing sets aside: autocast gives it to the matmuls that stay float32.
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(fun)
    def gradient(*args, loss_scale, **kwargs):
        ran = []

        def scaled_loss(*args, **kwargs):
            loss, _ = split_aux(mixed(*args, **kwargs), has_aux)
            ran.append(loss)
            if not _is_floating_scalar(loss):
                raise _NotALoss(f"diagnose needs a loss that is a floating scalar, got {_of(loss)}")
            loss = to_float32(loss)
            with jax.named_scope("loss_scale"):
                return loss * loss_scale, loss

        try:
            with jax.default_matmul_precision(precision):
                grads, loss = jax.grad(scaled_loss, argnums, has_aux=True)(*args, **kwargs)
        except _NotALoss:
            raise
        except Exception as error:
            if not ran and not str(error).startswith("grad requires"):
                raise  # the function itself failed
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"diagnose cannot differentiate {name}: {reason}") from error
        return loss, grads

    return gradient


def _is_floating_scalar(loss: Any) -> bool:
    """Whether it is what can be differentiated."""
    dtype = getattr(loss, "dtype", None)
    return dtype is not None and loss.shape == () and jnp.issubdtype(dtype, jnp.floating)


def _of(loss: Any) -> str:
    if not hasattr(loss, "dtype"):
        return type(loss).__name__
    return f"{loss.dtype}[{','.join(map(str, loss.shape))}]"


def _diagnosed(call: Call, policy: Policy, trace, weights: tuple, updates: Any) -> Diagnosis:
    program, arrays = call.program, call.arrays
    scale = float(arrays[remedies.scale_at(call)])
    mixed = run(program, arrays)
    tensors = _Tensors()
    twin = run(program, arrays, widen=lambda site: True, look=tensors.look)
    at = _places(call, weights)
    paths = [call.paths[k] for k in at]
    gradients = [value.array for value in twin.outs[1:]]
    rows = _named("weight", paths, jax.tree.leaves(weights))
    rows += tensors.rows() + _named("gradient", paths, gradients)
    best = tensors.best_scale(scale)
    fault = _fault(mixed, twin, call, policy, trace, at, best)
    error, parts = None, []
    if all(is_finite(value.array) for value in (*mixed.outs, *twin.outs)):
        error, parts = sensitivity.contributions(program, arrays, mixed, twin, _MOST_SCOPES)
    frozen = []
    if updates is not None:
        frozen = sensitivity.frozen(weights, updates, paths, policy.param_dtype)
    return Diagnosis(
        policy=str(policy),
        loss=float(mixed.outs[0].array),
        loss_in_float32=float(twin.outs[0].array),
        loss_scale=scale,
        fault=fault,
        tensors=tuple(rows),
        scale=best,
        error=error,
        contributions=tuple(parts),
        frozen=tuple(frozen),
    )


def _places(call: Call, weights: tuple) -> list[int]:
    """Which of the call's arrays each weight is."""
    numbered = list(enumerate(call.arrays))
    at = {id(array): k for k, array in reversed(numbered)}  # of two that are one, the first
    return [at[id(leaf)] for leaf in jax.tree.leaves(weights)]


def _named(role: str, paths: Sequence[str], arrays: Sequence[Any]) -> list[Tensor]:
    return [
        Tensor(role, path.rpartition("/")[0], path, "", str(array.dtype), census.count(array))
        for path, array in zip(paths, arrays, strict=True)
    ]


class _Tensors:
    """Ranges of what the operations of a run give, those of a loop's rounds taken together.

    An equation of a jitted function that is called in several places is one for each of them.
    """

    def __init__(self):
        self.found: dict[Any, tuple[Site, Any, census.Numbers]] = {}

    def look(self, site: Site, eqn: Any, outs: Sequence[Any]) -> list[census.Numbers | None]:
        """Counts the results, but where an operation only moves numbers."""
        if RULES.get(eqn.primitive.name) == "structure" and not _narrows(eqn):
            return [None] * len(outs)
        counted = [census.count(out) if is_floating(out) else None for out in outs]
        key = id(eqn), site[:3]
        for numbers in filter(None, counted):
            before = self.found.get(key)
            self.found[key] = (site, eqn, before[2] + numbers if before else numbers)
        return counted

    def rows(self) -> list[Tensor]:
        return [
            Tensor(_ROLES[site.phase], site.scope, eqn.primitive.name, site.where, dtype, numbers)
            for site, eqn, numbers in self.found.values()
            for dtype in [str(jaxprs.dtype_of(eqn.outvars[0]))]
        ]

    def best_scale(self, used: float) -> census.Scale | None:
        """For what of the backward pass has 16 bits, all of it as float16 if any of it is."""
        found = [
            (jaxprs.dtype_of(eqn.outvars[0]), numbers)
            for site, eqn, numbers in self.found.values()
            if site.phase == "backward" and is_narrow(jaxprs.dtype_of(eqn.outvars[0]))
        ]
        if not found:
            return None
        dtype = min((dtype for dtype, _ in found), key=lambda dtype: jnp.finfo(dtype).max)
        numbers = functools.reduce(census.Numbers.__add__, (numbers for _, numbers in found))
        return census.best_scale(numbers, census.NAMES[dtype], used)


def _narrows(eqn: Any) -> bool:
    """A cast to 16 bits: it moves no numbers, but may lose some."""
    dtypes = [jaxprs.dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
    is_cast = eqn.primitive.name == "convert_element_type"
    return is_cast and is_narrow(dtypes[1]) and not is_narrow(dtypes[0])


_ROLES = {"forward": "activation", "backward": "gradient"}


def _fault(mixed: Run, twin: Run, call: Call, policy, trace, weights, scale) -> Fault | None:
    cause = blame.first_cause(mixed, call.arrays) or blame.underflow(mixed, twin)
    if cause is None:
        return None
    problem = Problem(cause, mixed, twin, call, policy, trace, weights, scale)
    remedy = remedies.find(problem)
    record = cause.record
    fails = problem.fails_in_float32
    if record is None:  # an argument comes out as it is
        return Fault(cause.kind, "", "", "", "forward", (), (), fails, False, "", remedy)
    lost = problem.lost if cause.kind not in ("overflow", "underflow") else None
    return Fault(
        kind=cause.kind,
        primitive=record.eqn.primitive.name,
        where=record.site.where,
        scope=record.site.scope,
        phase=record.site.phase,
        rounds=record.site.rounds,
        inputs=tuple(blame.ranges(record)),
        in_float32=fails,
        lost_constant=not (finite(twin) or fails) and problem.lost_constant is not None,
        lost_at=lost.site.where if lost else "",
        remedy=remedy,
    )
