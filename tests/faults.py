"""Diagnoses of small functions that go bad."""

import json

import jax.numpy as jnp
from planted_models import line_of

import jaxamp

F16 = "compute=f16"


def fault_of(fun, *args, policy=F16, **kwargs):
    found = jaxamp.diagnose(fun, policy)(*args, **kwargs)
    assert found.fault is not None and found.error is None
    json.dumps(found.to_dict(), allow_nan=False)
    return found.fault


def at(fault, fun, mark="here"):
    return fault.where.startswith(line_of(fun, mark))


def ones(*shape, value=1.0):
    return jnp.full(shape, value, jnp.float32)
