"""What is advised against a fault: it was run and helps, and little else changes."""

import functools
import importlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from faults import F16, at, fault_of, ones
from jax import lax

import jaxamp
from jaxamp import blame

diagnose = importlib.import_module("jaxamp.diagnose")  # the package has the function of that name


def test_a_line_without_scopes_is_kept_in_float32():
    def loss(w, x):
        y = jnp.tanh(x @ w) * 300
        z = y * 30000  # here
        z = z / 30000
        return jnp.mean((z / 300) @ w)

    args = ones(4, 4), ones(2, 4)
    fault = fault_of(loss, *args, policy=f"{F16},rules=mul:follow")
    assert at(fault, loss) and fault.kind == "overflow"
    assert fault.remedy.setting == "rules=mul:full"

    def gathered(w, x):
        y = (x @ w)[jnp.array([0, 1, 1])]  # here
        return jnp.mean(y * 7e4 * y)

    args = ones(4, 4, value=100.0), ones(2, 4)
    fault = fault_of(gathered, *args)
    assert at(fault, gathered) and fault.phase == "backward"
    assert "full_precision" in fault.remedy.advice

    def in_full_precision(w, x):
        with jaxamp.full_precision():
            y = (x @ w)[jnp.array([0, 1, 1])]
        return jnp.mean(y * 7e4 * y)

    assert jaxamp.diagnose(in_full_precision, F16)(*args).fault is None


def test_compute_f32_is_advised_only_where_it_was_run_and_helped():
    def loss(w, x):
        y = (x @ w) @ w @ w * 1e-5  # over 65504 by policy
        z = (jnp.sum(w) * 7e4).astype(jnp.float16).astype(jnp.float32) * 1e-9  # and by hand
        return jnp.mean(y) + z

    args = ones(4, 4, value=100.0), ones(2, 4)
    assert not np.isfinite(jaxamp.diagnose(loss, "compute=f32")(*args).loss)
    remedy = fault_of(loss, *args).remedy
    assert remedy.setting == "" and "leave out the casts of the function" in remedy.advice
    assert remedy.checked.startswith("with all 16-bit values held in float32 the loss")


def test_faults_in_several_places():
    def in_scopes(w, x):
        with jax.named_scope("a"):
            y = x @ w["a"] @ w["a"] @ w["a"]
        with jax.named_scope("b"), jax.named_scope("c"):
            z = x @ w["b"] @ w["b"] @ w["b"]
        return jnp.mean(y) * 1e-9 + jnp.mean(z) * 1e-9

    args = {"a": ones(4, 4, value=200.0), "b": ones(4, 4, value=200.0)}, ones(2, 4)
    remedy = fault_of(in_scopes, *args).remedy
    assert remedy.setting == "full=a|b/c" and f"with {remedy.setting} the loss" in remedy.checked
    assert jaxamp.diagnose(in_scopes, f"{F16},full=a|b/c")(*args).fault is None

    def nested(w, x):
        with jax.named_scope("a"):
            with jax.named_scope("b"):
                y = x @ w["b"] @ w["b"] @ w["b"]
            z = x @ w["a"] @ w["a"] @ w["a"]
        with jax.named_scope("c"):
            u = x @ w["c"] @ w["c"] @ w["c"]
        return jnp.mean(y) * 1e-9 + jnp.mean(z) * 1e-9 + jnp.mean(u) * 1e-9

    args = args[0] | {"c": ones(4, 4, value=200.0)}, ones(2, 4)
    assert fault_of(nested, *args).remedy.setting == "full=a|c"

    def without_scopes(w, x):
        y = lax.conv(lax.conv(x["image"], w["conv"], (1, 1), "SAME"), w["conv"], (1, 1), "SAME")
        z = x["rows"] @ w["dot"] @ w["dot"]
        return jnp.mean(y) * 1e-9 + jnp.mean(z) * 1e-9

    large = functools.partial(ones, value=300.0)
    w = {"conv": large(1, 1, 3, 3), "dot": large(4, 4)}
    args = w, {"image": large(1, 1, 4, 4), "rows": large(2, 4)}
    assert fault_of(without_scopes, *args).remedy.setting == "full=w/conv|w/dot"


def test_float32_everywhere_where_nothing_smaller_helps():
    def loss(w, x):  # in more places than are tried, by two primitives
        twice = [lax.conv(lax.conv(x, k, (1, 1), "SAME"), k, (1, 1), "SAME") for k in w]
        dots = x[0, 0] @ x[0, 0] @ x[0, 0]
        return sum(map(jnp.mean, twice)) * 1e-9 + jnp.mean(dots) * 1e-9

    w = [ones(1, 1, 3, 3, value=300.0) for _ in range(9)]
    remedy = fault_of(loss, w, ones(1, 1, 4, 4, value=300.0)).remedy
    assert remedy.setting == "compute=f32" and "with compute=f32 the loss" in remedy.checked


def test_a_fault_traces_float32_once(monkeypatch):
    def loss(w, x):
        y = (x @ w).astype(jnp.float16)
        y = y * lax.rsqrt((y * y).mean(-1, keepdims=True))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    spies = {}
    for name in ("_scaled_gradient", "lost_at", "lost_constants"):
        module = diagnose if name == "_scaled_gradient" else blame
        spies[name] = mock.Mock(side_effect=getattr(module, name))
        monkeypatch.setattr(module, name, spies[name])
    fault = fault_of(loss, ones(4, 4), ones(2, 4, value=1e-5))
    assert "casts to 16 bits" in fault.remedy.advice
    traced = [call.args[0] for call in spies["_scaled_gradient"].mock_calls]
    assert len(traced) - traced.count(loss) == 1  # in full_precision
    assert spies["lost_at"].call_count == spies["lost_constants"].call_count == 1
