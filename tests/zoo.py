"""What the zoo asks of every program: run, differentiate, compare with float32, look at the dots.

The bound is first-order: a result that is reached through `roundings` roundings of the compute
dtype, one after the other, is off by at most `roundings * eps` of its size, eps half the distance
between 1 and the next number. A gradient is reached through the forward and the backward pass:
twice that. Each entry of the zoo counts its own. Sizes are norms over all results (gradients) of a
program, as a single one may be zero by symmetry, such as that of an attention's key bias.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxpr_search import equations

import jaxamp

EPS = {"compute=bf16": 2.0**-8, "compute=f16": 2.0**-11}
FLOAT32 = 1e-5  # what float32 itself is off by, in another order of its sums
MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def is_float(leaf):
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def generic(tree, seed=0, scale=0.1):
    """Parameters away from the zeros and ones that they start with, which hide what is wrong."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf + scale * jax.random.normal(key, leaf.shape) if is_float(leaf) else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, moved)


def projection(out):
    """A scalar of all floats in `out`: a generic direction; norms make sums constant."""
    floats = [leaf for leaf in jax.tree.leaves(out) if is_float(leaf)]
    terms = [
        jnp.sum(leaf * np.random.default_rng(k).normal(size=leaf.shape).astype(np.float32))
        / max(leaf.size, 1) ** 0.5
        for k, leaf in enumerate(floats)
    ]
    return sum(terms)


def distance(got, true):
    """||got - true|| / ||true|| over all floating leaves; the others must be equal."""
    assert jax.tree.structure(got) == jax.tree.structure(true)
    error = size = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        assert jnp.result_type(a) == jnp.result_type(b) and jnp.shape(a) == jnp.shape(b)
        if not is_float(b):
            if not jnp.issubdtype(jnp.result_type(b), jax.dtypes.prng_key):
                np.testing.assert_array_equal(a, b)
            continue
        assert np.isfinite(np.asarray(a)).all()
        error += float(jnp.sum(jnp.square(a - b)))
        size += float(jnp.sum(jnp.square(b)))
    return (error / size) ** 0.5 if size else error**0.5


def matmuls(program):
    """Operand dtypes of all matmuls of a program, pairs of them; outer products are none."""
    found = [eqn for eqn in equations(program) if eqn.primitive.name in MATMULS]
    found = [eqn for eqn in found if eqn.primitive.name != "dot_general" or contracted(eqn) > 1]
    return [tuple(str(v.aval.dtype) for v in eqn.invars[:2]) for eqn in found]


def contracted(eqn):
    """How many products a dot adds up."""
    (axes, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[k] for k in axes)


def check(fun, params, *args, roundings, low=True, float32_matmuls=0, loss_scale=2.0**8):
    """`fun(params, *args)` and its gradient with respect to `params`, bf16 and f16, near float32.

    Args:
        fun: Any results; the gradient is that of a generic projection of them.
        params: A pytree of float32 arrays.
        *args: What else it takes.
        roundings: How many roundings lie one after the other on the longest path.
        low: Whether matmuls are expected, which then have to run in the compute dtype.
        float32_matmuls: How many matmuls have to stay in float32, a reason beside it; None where
            a float32 algorithm decides that.
        loss_scale: Of the gradients.
    """

    def loss(params, *args):
        out = fun(params, *args)
        return projection(out), out

    (_, true), true_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *args)
    for policy, eps in EPS.items():
        grad_fn = jaxamp.value_and_grad(loss, policy, has_aux=True)
        mixed = lambda params, *args: grad_fn(params, *args, loss_scale=loss_scale)  # noqa: B023, E731
        traced = jax.jit(mixed).trace(params, *args)
        (_, got), grads = traced.lower().compile()(params, *args)
        tolerance = roundings * eps + FLOAT32
        assert distance(got, true) <= tolerance, (policy, "results")
        # One more for the product with the projection's direction.
        assert distance(grads, true_grads) <= 2 * (roundings + bool(roundings)) * eps + FLOAT32, (
            policy,
            "gradients",
        )
        for leaf in jax.tree.leaves(grads):
            assert leaf.dtype == jnp.float32
        pairs = matmuls(traced.jaxpr)
        compute = jaxamp.get_policy(policy).compute_dtype.name
        if float32_matmuls is not None:
            assert pairs.count(("float32", "float32")) == float32_matmuls, pairs
        assert bool(pairs.count((compute, compute))) == low, pairs
