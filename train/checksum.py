"""Whether the numbers of a state are those that were written."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """uint32[], the sum of all words of all leaves, modulo 2^32: any one flipped bit changes it."""

    def words(leaf):
        if leaf.dtype == jnp.bool_:
            return leaf.astype(jnp.uint32)
        width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[leaf.dtype.itemsize]
        return jax.lax.bitcast_convert_type(leaf, width).astype(jnp.uint32)

    sums = [jnp.sum(words(leaf), dtype=jnp.uint32) for leaf in jax.tree.leaves(tree)]
    weights = jnp.arange(len(sums), dtype=jnp.uint32) * 2 + 1  # odd: tell a leaf from its neighbour
    return jnp.sum(jnp.stack(sums) * weights, dtype=jnp.uint32)
