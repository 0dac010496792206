"""The policy: grammar, presets, devices, and that it is jmp's in all that jmp does."""

import itertools
import types

import jax
import jax.numpy as jnp
import jmp
import pytest

import jaxamp
from jaxamp import Policy, auto_policy, get_policy

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


@pytest.mark.parametrize("names", list(itertools.product(DTYPES, repeat=3)))
def test_agrees_with_jmp_where_all_is_said(names):
    text = "params={},compute={},output={}".format(*names)
    ours, theirs = get_policy(text), jmp.get_policy(text)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert get_policy(str(ours)) == ours and get_policy(theirs) == ours


def test_output_follows_params_not_compute():
    assert get_policy("params=f32,compute=bf16").output_dtype == jnp.float32
    assert jmp.get_policy("params=f32,compute=bf16").output_dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("  params = f32 , compute=bf16 ", "mixed_bfloat16"),
        ("p=f32,c=f16,o=f32", "mixed_float16"),
        ("full", "float32"),
        ("bf16", "params=bf16,compute=bf16,output=bf16"),
        ("params=bf16", "bf16"),
        ("compute=bfloat16", "mixed_bfloat16"),
    ],
)
def test_spellings(text, same):
    assert get_policy(text) == get_policy(same)


def test_full_and_matmul_parse_and_print_back():
    policy = get_policy("compute=bf16, full=*/head | blocks/0/* , matmul=f8")
    assert policy.full == ("*/head", "blocks/0/*") and policy.matmul == "f8"
    text = "params=f32,compute=bf16,output=f32,full=*/head|blocks/0/*,matmul=f8"
    assert str(policy) == text and get_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("parms=f32", ["unknown key 'parms'", "'params'", "compute", "output", "full", "matmul"]),
        ("compute=bf61", ["unknown dtype 'bf61' for 'compute'", "'bf16'"]),
        ("mixed_bfloat61", ["unknown name", "'mixed_bfloat16'"]),
        ("compute=f16,c=bf16", ["'compute' is given twice"]),
        ("compute=", ["'compute' has no value"]),
        ("compute=f16,output", ["'output' has no value"]),
        ("compute=f16,", ["unknown key ''"]),
        ("", ["unknown name ''"]),
        ("compute=int8", ["unknown dtype 'int8'"]),
        ("compute=bf16,matmul=f9", ["unknown matmul 'f9'", "allowed: tf32, f8, mxfp8, nvfp4"]),
        ("compute=bf16,full=a||b", ["full: ''"]),
    ],
)
def test_parse_errors_name_the_part(text, parts):
    with pytest.raises(ValueError) as error:
        get_policy(text)
    for part in [f"policy {text!r}", *parts]:
        assert part in str(error.value)


def test_type_errors():
    with pytest.raises(TypeError, match="got NoneType"):
        get_policy(None)
    with pytest.raises(ValueError, match="compute_dtype must be one of .* int32"):
        Policy(jnp.float32, jnp.int32, jnp.float32)


def device(platform, capability=None, kind="some card"):
    return types.SimpleNamespace(platform=platform, device_kind=kind, compute_capability=capability)


@pytest.mark.parametrize(
    ("where", "preset", "reason"),
    [
        (device("tpu", kind="TPU v5 lite"), "mixed_bfloat16", "TPU v5 lite"),
        (device("gpu", "9.0"), "mixed_bfloat16", "9.0"),
        (device("gpu", "8.0"), "mixed_bfloat16", "bfloat16 tensor cores"),
        (device("gpu", "12.0"), "mixed_bfloat16", "12.0"),
        (device("gpu", "7.5"), "mixed_float16", "no bfloat16"),
        (device("gpu", "6.1"), "float32", "not known to gain"),
        (device("gpu", "gfx942"), "mixed_bfloat16", "matrix cores"),
        (device("gpu", "gfx906"), "float32", "not known to gain"),
        (device("gpu"), "float32", "unknown"),
        (device("cpu"), "float32", "CPU"),
        (device("METAL"), "float32", "not known to gain"),
    ],
)
def test_auto_asks_the_device(where, preset, reason):
    policy = auto_policy(where)
    assert policy == get_policy(preset) and reason in policy.reason


def test_auto_by_name_asks_the_first_device():
    assert get_policy("auto").reason == auto_policy(jax.devices()[0]).reason


def test_is_a_jmp_policy():
    policy = get_policy("mixed_bfloat16")
    assert isinstance(policy, jmp.Policy)
    tree = {"x": jnp.ones(2), "ids": jnp.arange(2), "flag": True, "key": jax.random.key(0)}
    cast = policy.cast_to_compute(tree)
    assert cast["x"].dtype == jnp.bfloat16 and cast["ids"].dtype == jnp.int32
    assert policy.with_output_dtype(jnp.bfloat16).output_dtype == jnp.bfloat16
    assert hash(policy) == hash(get_policy("c=bf16"))


@pytest.mark.parametrize("text", ["compute=bf16,matmul=f8"])
def test_what_is_not_built_is_refused(text):
    with pytest.raises(ValueError, match="not built yet"):
        jaxamp.value_and_grad(lambda w: w, text)
