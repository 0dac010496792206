"""What numpy does in the place of XLA is the same to the last bit."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxamp import interpret, jaxprs, operate

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -3.5, 65504.0, 1e-4, 2.0**-14, 300.0, 1 / 3]

PROGRAMS = {
    "arithmetic": lambda x, y: [x + y, x - y, x * y, x / y, -x, abs(x)],
    "order": lambda x, y: [lax.max(x, y), lax.min(x, y)],
    "compare": lambda x, y: [x == y, x != y, x < y, x <= y, x > y, x >= y],
    "select": lambda x, y: [lax.select(x > y, x, y)],
    "casts": lambda x, y: [lax.convert_element_type(x, t) for t in ("f4", "f2", "bfloat16")],
    "moves": lambda x, y: [
        x.reshape(-1, 2, 6),
        x.T,
        lax.broadcast_in_dim(x, (2, 12, 3, 12), (1, 3)),
        lax.broadcast_in_dim(x[:, :1], (12, 7), (0, 1)),
        lax.slice(x, (1, 0), (9, 12), (2, 3)),
        lax.squeeze(x[:1], (0,)),
        lax.concatenate([x, y, x], 1),
    ],
}


# Of float32 and bfloat16; the last but one becomes the least normal number of bfloat16.
SUBNORMAL = [0.0, -0.0, 1e-40, -1e-40, 2.0**-149, 2.0**-126, 2.0**-133, np.inf, 1.0, 300.0]
SUBNORMAL += [2.0**-126 * (1 - 2**-9), 2.0**-63]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numpy_is_xla(name, dtype):
    assert all(by_numpy for by_numpy in _compared(name, dtype, SPECIAL))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numpy_is_xla_with_subnormal_numbers(name, dtype):
    """A CPU's XLA takes float32's for zero; only what moves numbers is numpy's then."""
    by_numpy = _compared(name, dtype, SUBNORMAL)
    if dtype == "float32":
        assert all(by_numpy) if name == "moves" else not by_numpy[0]


def _compared(name, dtype, numbers):
    """Compares each operation; gives whether it was numpy's."""
    with np.errstate(over="ignore"):
        x, y = (np.asarray(a, dtype) for a in np.meshgrid(numbers, numbers))
    program = jax.make_jaxpr(PROGRAMS[name])(x, y)
    by_numpy = []
    env = dict(zip(program.jaxpr.invars, (jnp.asarray(x), jnp.asarray(y)), strict=True))
    for eqn in program.jaxpr.eqns:
        ins = [jaxprs.literal(v) if jaxprs.is_literal(v) else env[v] for v in eqn.invars]
        want, got = jaxprs.bind(eqn, ins), operate.as_written(eqn, ins)
        by_numpy.append(isinstance(got[0], np.ndarray))
        for var, a, b in zip(eqn.outvars, want, got, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            one, other = operate.on_host(a), operate.on_host(b)
            np.testing.assert_array_equal(one, other)
            is_number = ~np.isnan(one)
            np.testing.assert_array_equal(np.signbit(one)[is_number], np.signbit(other)[is_number])
            env[var] = a
    return by_numpy


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_subnormal_numbers_are_seen(dtype):
    info = jnp.finfo(dtype)
    least, tiny = info.smallest_subnormal, info.smallest_normal
    for number in (least, 3 * least, tiny - least, tiny):
        for sign in (1, -1):
            array = np.array([0, 1, sign * number, np.inf, np.nan], dtype)
            assert operate._has_subnormal(array), number
    assert not operate._has_subnormal(np.array([0, -0.0, 2 * tiny, -1, np.inf, np.nan], dtype))
    assert not operate._has_subnormal(np.zeros(0, dtype))


@pytest.mark.parametrize("how", ["looked at", "not observed"])
def test_values_are_let_go_at_their_last_read(how):
    """Of ten results in a row two are alive at a time: what is read, and what is made."""

    def function(x):
        for _ in range(10):
            x = x * 2
        return x

    made, alive = [], []

    def multiply(params, *arrays):
        out = np.multiply(*arrays)
        made.append(weakref.ref(out))
        alive.append(sum(one() is not None for one in made))
        return out

    program = jax.make_jaxpr(function)(np.ones(3, np.float32))
    more = {"look": lambda site, eqn, outs: [None]} if how == "looked at" else {"observe": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(operate._ARITHMETIC, "mul", multiply)
        result = interpret.run(program, [np.ones(3, np.float32)], **more)
    np.testing.assert_array_equal(result.outs[0].array, 1024)
    assert alive[-1] == 2
