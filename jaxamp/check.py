"""`check_optimizer`: what around the guard, or without it, loses or hides 16-bit gradients."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import optax

from jaxamp import jaxprs
from jaxamp.loss_scale import NoOpLossScale, get_loss_scale, to_float32
from jaxamp.optimizer import GUARD, ApplyIfFiniteState
from jaxamp.policy import get_policy


def check_optimizer(
    tx: optax.GradientTransformation, params: Any, policy: str | jmp.Policy, **extra_args: Any
) -> tuple[str, ...]:
    """What of an optimizer will hurt in mixed precision, without running it.

    `tx.init` and `tx.update` are traced with the shapes of `params`. Told are: parameters or
    optimizer state in 16 bits; float16 without a loss scale; and what changes gradients before
    `apply_if_finite` has checked them, bypasses it, or adds to its updates, so that it acts on a
    skipped step too.

    Args:
        tx: Any optax transformation, as the training step uses it.
        params: The parameters that are trained, arrays or `jax.ShapeDtypeStruct`s; in 16 bits
            where the policy keeps them so.
        policy: The policy of the training step, or its string.
        **extra_args: What `tx.update` needs beside gradients, state and parameters.

    Returns:
        One line for each finding; empty where there is nothing to say.

    Raises:
        ValueError: a policy that cannot be.

    >>> params = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    >>> clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    >>> from jaxamp import apply_if_finite, get_loss_scale
    >>> scale = get_loss_scale("compute=f16")
    >>> check_optimizer(apply_if_finite(optax.chain(clip, adamw), scale), params, "compute=f16")
    ()
    >>> wrong = optax.chain(clip, apply_if_finite(adamw, scale))
    >>> print(check_optimizer(wrong, params, "compute=f16")[0].split(" (")[0])
    clip_by_global_norm
    """
    tx, policy = optax.with_extra_args_support(tx), get_policy(policy)
    if policy.param_dtype.itemsize < 4:  # else arrays of 16 bits are told as they are
        params = jax.eval_shape(policy.cast_to_param, params)
    opt_state = jax.eval_shape(tx.init, params)
    notes = [*_narrow("the parameters", params), *_narrow_state(opt_state)]
    is_guard = lambda node: isinstance(node, ApplyIfFiniteState)  # noqa: E731
    guards = [node for node in jax.tree.leaves(opt_state, is_leaf=is_guard) if is_guard(node)]
    notes += _loss_scale(guards, policy)
    if guards:
        grads = jax.eval_shape(to_float32, params)
        update = lambda *args: tx.update(*args, **extra_args)  # noqa: E731
        notes += _around(jax.make_jaxpr(update)(grads, opt_state, params), grads)
    return tuple(notes)


def _narrow(what: str, tree: Any) -> Iterator[str]:
    """16-bit leaves: where a small change of a number rounds to none."""
    for dtype in dict.fromkeys(leaf.dtype for leaf in jax.tree.leaves(tree) if _is_narrow(leaf)):
        # Half of the distance between two numbers of nmant bits is at least this part of them.
        part = f"2^-{jnp.finfo(dtype).nmant + 2}"
        yield f"{what}: {dtype}, which loses changes below {part} of a number; keep float32"


def _narrow_state(opt_state: Any) -> Iterator[str]:
    fields: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        names = [name for name in names if name != "value"]  # as nnx.Variable calls its array
        fields.setdefault(names[-1] if names else "state", []).append(leaf)
    for name, leaves in fields.items():
        yield from _narrow(f"the optimizer's {name}", leaves)


def _is_narrow(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize <= 2


def _loss_scale(guards: Sequence[ApplyIfFiniteState], policy: str | jmp.Policy) -> Iterator[str]:
    if isinstance(get_loss_scale(policy), NoOpLossScale):
        return
    mend = "apply_if_finite(tx, loss_scale=jaxamp.get_loss_scale(policy))"
    if not guards:
        yield (
            "float16 without apply_if_finite: an overflow in the backward pass reaches the "
            f"parameters, and there is no loss scale; {mend}"
        )
    elif len(guards) > 1:
        yield f"{len(guards)} apply_if_finite: a step is skipped whole by one around all; {mend}"
    elif isinstance(guards[0].loss_scale, NoOpLossScale):
        yield f"float16 without a loss scale: gradients below 2^-24 vanish; {mend}"


class _Value(NamedTuple):
    """What a value of `update` descends from.

    Attributes:
        raw: Gradients, by a way that does not lead through the guard.
        checked: What the guard makes.
        by: Who changed it on its way, outside of the guard.
    """

    raw: bool = False
    checked: bool = False
    by: frozenset[str] = frozenset()


# Change no number, or so that what is not finite stays so.
_HARMLESS = (
    *("broadcast_in_dim", "concatenate", "convert_element_type", "copy", "expand_dims", "reshape"),
    *("optimization_barrier", "sharding_constraint", "slice", "squeeze", "stop_gradient"),
    *("transpose",),
)
_ADDITIONS = ("add", "add_any", "sub")


def _around(program: Any, grads: Any) -> Iterator[str]:
    """Who changes gradients or updates outside of the guard."""
    before: dict[str, None] = {}

    def walk(jaxpr: Any, ins: Sequence[_Value], calls: tuple = ()) -> list[_Value]:
        known = dict(zip(jaxpr.invars, ins, strict=True))
        read = lambda a: _Value() if jaxprs.is_literal(a) else known.get(a, _Value())  # noqa: E731
        for eqn in jaxpr.eqns:
            operands, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
            if GUARD in jaxprs.scope_of(eqn).split("/"):
                before.update(dict.fromkeys(who for v in operands if v.raw for who in sorted(v.by)))
                outs = [_Value(checked=True)] * len(eqn.outvars)
            elif name in jaxprs.CALLS:
                outs = walk(jaxprs.opened(jaxprs.called(eqn))[0], operands, (eqn, *calls))
            elif name == "cond":
                branches = [jaxprs.opened(branch)[0] for branch in eqn.params["branches"]]
                ways = [walk(branch, operands[1:], (eqn, *calls)) for branch in branches]
                outs = [_joined(values) for values in zip(*ways, strict=True)]
            else:
                outs = [_result((eqn, *calls), operands)] * len(eqn.outvars)
            known.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    jaxpr, _ = jaxprs.opened(program)
    count = len(jax.tree.leaves(grads))  # updates are the first outputs, as gradients are inputs
    ins = [_Value(raw=True)] * count + [_Value()] * (len(jaxpr.invars) - count)
    updates = walk(jaxpr, ins)[:count]
    for who in before:
        yield (
            f"{who} changes gradients before apply_if_finite checks them: it may hide an Inf, and "
            "a skipped step changes its state; move it inside of apply_if_finite"
        )
    past = {who for value in updates if value.raw for who in value.by} - set(before)
    for who in sorted(past):
        yield f"{who} makes updates that apply_if_finite does not check; move it inside"
    for who in sorted({who for v in updates if v.checked and not v.raw for who in v.by}):
        yield (
            f"{who} adds to what apply_if_finite makes, on a skipped step too; move it inside of "
            "apply_if_finite"
        )


def _joined(values: Sequence[_Value]) -> _Value:
    raw, checked = any(v.raw for v in values), any(v.checked for v in values)
    return _Value(raw, checked, frozenset().union(*(v.by for v in values)))


def _result(eqns: Sequence[Any], operands: Sequence[_Value]) -> _Value:
    """Of an equation, the first, within its calls; who came first is told, not all who follow."""
    eqn, value = eqns[0], _joined(operands)
    pairs = zip(eqn.invars, operands, strict=True)
    adds = eqn.primitive.name in _ADDITIONS and any(
        not v.checked and not jaxprs.is_literal(atom) for atom, v in pairs
    )
    changes = eqn.primitive.name not in _HARMLESS if value.raw else value.checked and adds
    return value._replace(by=frozenset((_who(eqns),))) if changes and not value.by else value


def _who(eqns: Sequence[Any]) -> str:
    """The transformation that made an equation: its name and place, the user's own code first.

    What JAX remembers of an earlier trace has no place; that of the call around it is taken.
    """
    for eqn in eqns:
        frames = getattr(eqn.source_info.traceback, "frames", ())
        frames = list(itertools.takewhile(lambda frame: frame.file_name != __file__, frames))
        users = [frame for frame in frames if jaxprs.is_users(frame.file_name)]
        for frame in (*users, *filter(_is_update, frames)):
            return f"{frame.function_name.split('.')[0]} ({frame.file_name}:{frame.line_num})"
    return eqns[0].primitive.name


def _is_update(frame: Any) -> bool:
    return frame.function_name.split(".")[-1] in ("update", "update_fn")
