import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jaxamp


def net(w, x):
    with jax.named_scope("body"):
        x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    with jax.named_scope("head"):
        return jnp.mean(jax.nn.logsumexp(x @ w[0], axis=-1))


def problem():
    return jnp.ones((3, 8, 8)), jnp.ones((4, 8))


def test_rows_say_what_and_why():
    rows = jaxamp.explain(net, "compute=bf16")(*problem()).rows
    found = {(row.op, row.scope): row for row in rows}
    dot = found["dot_general", "body"]
    assert (dot.from_dtype, dot.to_dtype, dot.kind) == ("float32", "bfloat16", "matmul")
    assert dot.count == 1 and "matrix units" in dot.reason
    logits = found["dot_general", "head"]  # read by the logsumexp alone
    assert (logits.to_dtype, logits.kind) == ("float32", "matmul") and "16-bit" in logits.reason
    assert found["exp", "head"].to_dtype == "float32" and found["exp", "head"].kind == "full"


def test_bytes_are_those_that_the_backward_pass_keeps():
    args = problem()
    explanation = jaxamp.explain(net, "compute=bf16")(*args)
    mixed = jaxamp.autocast(net, "compute=bf16")
    kept = jax.eval_shape(lambda *a: jax.tree.leaves(jax.vjp(mixed, *a)[1]), *args)
    total = sum(a.size * a.dtype.itemsize for a in kept)
    arguments = sum(a.size * 4 for a in args)
    assert total - arguments <= explanation.saved_bytes <= total
    assert explanation.saved_bytes == sum(row.saved_bytes for row in explanation.rows)
    less = jaxamp.explain(net, "compute=bf16,residuals=compute")(*args)
    assert less.saved_bytes < explanation.saved_bytes


def test_it_prints_and_converts():
    explanation = jaxamp.explain(net, "compute=bf16")(*problem())
    lines = str(explanation).splitlines()
    assert "kept for the backward pass" in lines[0] and lines[1].startswith("op")
    assert any("float32 -> bfloat16" in line and "body" in line for line in lines)
    assert json.loads(json.dumps(explanation.to_dict()))["policy"] == explanation.policy


@pytest.mark.parametrize("policy,noted", [("compute=f16", True), ("compute=bf16", False)])
def test_a_literal_out_of_range_is_noted(policy, noted):

    def fun(x):
        y = x @ x
        return jnp.sum(jnp.where(x > 0, y, -1e9)) + jnp.sum(y @ y)

    notes = jaxamp.explain(fun, policy)(jnp.eye(3)).notes
    assert any("test_explain.py" in n and "cannot hold" in n for n in notes) == noted


def test_a_float32_matmul_in_a_kernel_is_noted():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    fun = lambda x: pl.pallas_call(kernel, out_shape=x, interpret=True)(x @ x)  # noqa: E731
    explanation = jaxamp.explain(fun, "compute=bf16")(jnp.eye(8))
    assert any("float32 matmul inside" in n for n in explanation.notes)
    assert explanation.saved_bytes is None and "not differentiable" in str(explanation)


def test_precision_highest_is_noted():
    fun = lambda x: jnp.dot(x, x, precision="highest")  # noqa: E731
    assert "HIGHEST" in jaxamp.explain(fun, "c=bf16")(jnp.eye(3)).notes[0]


def test_shapes_are_enough_and_other_arguments_pass():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    fun = lambda x, key, flag, *, n: x @ x * n if flag else x  # noqa: E731
    rows = jaxamp.explain(fun, "c=bf16")(x, jax.random.key(0), True, n=2).rows
    assert "dot_general" in {row.op for row in rows}
