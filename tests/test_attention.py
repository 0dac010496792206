"""Which attention kernel runs, and that Pallas's gives what the plain path gives."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)
from jaxpr_search import equations

import jaxamp
from train import attention, model
from train.attention import attend, attention_implementation, causal_attention, splash
from train.chips import find_target
from train.config import Config, ModelConfig
from train.step import make_loss_fn

AXES = ("data", "fsdp", "tensor")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32


def device(platform, capability=None):
    return types.SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind=f"{platform} {capability}"
    )


CASES = [
    (device("gpu", "9.0"), "bfloat16", 64, "cudnn", "flash kernel for bfloat16"),
    (device("gpu", "8.0"), "float16", 128, "cudnn", "flash kernel for float16"),
    (device("gpu", "10.0"), "bfloat16", 256, "cudnn", "flash kernel"),
    (device("gpu", "8.9"), "bfloat16", 256, "xla", "up to 128, not 256"),
    (device("gpu", "9.0"), "bfloat16", 36, "xla", "8 divides"),
    (device("gpu", "9.0"), "float32", 64, "xla", "16-bit operands, not float32"),
    (device("gpu", "7.5"), "float16", 64, "xla", "compute capability 8.0"),
    (device("gpu", "gfx90a"), "bfloat16", 64, "xla", "NVIDIA"),
    (device("tpu"), "bfloat16", 128, "splash", "Pallas's flash kernel for bfloat16"),
    (device("tpu"), "float32", 36, "splash", "Pallas's flash kernel for float32"),
    (device("tpu"), "float16", 128, "xla", "bfloat16 or float32 operands, not float16"),
    (device("cpu"), "bfloat16", 64, "xla", "NVIDIA"),
]


@pytest.mark.parametrize(("where", "dtype", "head_dim", "expected", "because"), CASES)
def test_the_kernel_and_the_reason(where, dtype, head_dim, expected, because):
    config = ModelConfig(d_model=2 * head_dim, n_heads=2)
    name, reason = attention_implementation(config, dtype, where)
    assert name == expected
    assert because in reason
    flash = {"tpu": "splash"}.get(where.platform, "cudnn")
    demanded = config.model_copy(update={"attention": flash})
    if expected == "xla":
        with pytest.raises(ValueError, match=f"attention '{flash}' cannot run: .*{because}"):
            attention_implementation(demanded, dtype, where)
    else:
        assert attention_implementation(demanded, dtype, where)[0] == flash
    spared = config.model_copy(update={"attention": "xla"})
    assert attention_implementation(spared, dtype, where)[0] == "xla"


def test_splash_takes_whole_blocks_of_128_tokens():
    config = ModelConfig()
    name, reason = attention_implementation(config, "bfloat16", device("tpu"), length=384)
    assert name == "splash"
    name, reason = attention_implementation(config, "bfloat16", device("tpu"), length=200)
    assert name == "xla" and "multiple of 128 tokens, not 200" in reason


@pytest.mark.parametrize("kernel", ("cudnn", "splash"))
def test_a_kernel_demanded_in_vain_is_an_error_of_one_line(kernel):
    config = ModelConfig(attention=kernel)
    with pytest.raises(ValueError, match=f"attention '{kernel}' cannot run") as raised:
        trace(config)
    assert "\n" not in str(raised.value)


def tpu_mesh():
    tpu = AbstractDevice("TPU v5 lite", 1, "tpu")
    types = (AxisType.Auto,) * 3
    return use_abstract_mesh(AbstractMesh((1, 1, 1), AXES, types, abstract_device=tpu))


def test_the_mesh_that_is_set_says_what_the_program_is_for():
    assert attention_implementation(ModelConfig(), "bfloat16")[0] == "xla"
    with tpu_mesh():
        name, reason = attention_implementation(ModelConfig(), "bfloat16")
        assert name == "splash" and "TPU v5 lite" in reason


def trace(model_config, policy="compute=bf16", length=128):
    """The jaxpr of loss and gradients of a small model."""
    policy = jaxamp.get_policy(policy)
    make = functools.partial(model.create, model_config, 61, kernel_dtype=policy.compute_dtype)
    graphdef, params = jax.eval_shape(make, jax.eval_shape(jax.random.key, 0))
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    batch = {"tokens": ids, "labels": ids}
    loss_fn = make_loss_fn(Config(model=model_config), graphdef)
    grad_fn = jaxamp.value_and_grad(lambda p, b: loss_fn(p, b, None, 1), policy, has_aux=True)
    return jax.make_jaxpr(grad_fn)(params, batch)


@pytest.mark.parametrize("meshed", (False, True))
@pytest.mark.parametrize(
    ("policy", "dtype"), [("compute=bf16", "bfloat16"), ("params=f32", "float32")]
)
def test_the_kernel_gets_operands_in_the_compute_dtype(policy, dtype, meshed, monkeypatch):
    config = ModelConfig(d_model=64, n_heads=2, n_layers=2)
    if meshed:
        with tpu_mesh():
            program = trace(config, policy)
    else:
        monkeypatch.setattr(attention, "target_device", lambda: device("tpu"))
        program = trace(config, policy)
    kernels = [eqn for eqn in equations(program) if eqn.primitive.name == "pallas_call"]
    assert len(kernels) == 3  # forward, gradient of queries, gradient of keys and values
    for eqn in kernels:
        operands = [v.aval for v in eqn.invars if v.aval.shape == (2, 2, 128, 32)]
        assert len(operands) in (3, 4)  # with the cotangent
        assert {str(aval.dtype) for aval in operands} == {dtype}
    assert meshed == any(eqn.primitive.name == "shard_map" for eqn in equations(program))


def operands(seed, dtype, length=384):
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = [(2, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [
        jax.random.normal(key, shape).astype(dtype).astype(jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def values_and_gradients(attention_fn, query, key, value, cotangent):
    out, pullback = jax.vjp(attention_fn, query, key, value)
    return out, *pullback(cotangent)


@pytest.mark.parametrize(("seed", "dtype"), [(0, "float32"), (1, "bfloat16")])
def test_splash_equals_the_plain_path(seed, dtype, monkeypatch):
    """Three blocks of 128 tokens, two queries a key-value head; on the same rounded operands."""
    monkeypatch.setattr(attention, "_LARGEST_BLOCK", 128)
    given = operands(seed, dtype)
    kernel = lambda *x: splash(*x, dtype, interpret=True).astype(jnp.float32)  # noqa: E731
    plain = functools.partial(attend, is_causal=True)
    found = jax.jit(functools.partial(values_and_gradients, kernel))(*given)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(functools.partial(values_and_gradients, plain))(*given)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of at most 384 terms count as sqrt(384) < 20 roundings, and three of them follow each
        # other (logits, softmax, values or its gradient). In bfloat16 sums are float32, and what
        # is rounded one after another is the query, the probabilities, their gradient, the result.
        eps = {"float32": 60 * 2.0**-24, "bfloat16": 4 * 2.0**-9}[dtype]
        largest = float(jnp.abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=eps * largest)
        assert largest > 1


def test_the_result_is_in_the_dtype_asked_for():
    query, key, value, _ = operands(0, "float32", length=128)
    out = jax.eval_shape(lambda *x: splash(*x, jnp.bfloat16), query, key, value)
    assert out.dtype == jnp.bfloat16 and out.shape == query.shape


@pytest.mark.slow
def test_splash_on_a_mesh_equals_one_device(eight_devices):
    """Rows and heads are cut: values and gradients are those of one device, bit for bit."""
    result = eight_devices(
        """
        import jax, jax.numpy as jnp, numpy as np
        from train.attention import splash
        from train.config import MeshConfig
        from train.mesh import make_mesh

        keys = jax.random.split(jax.random.key(0), 3)
        args = [jax.random.normal(k, (4, 128, h, 16)) for k, h in zip(keys, (4, 2, 2))]

        @jax.jit
        def run(*args):
            out, pullback = jax.vjp(lambda *x: splash(*x, jnp.float32, interpret=True), *args)
            return out, pullback(jnp.cos(out))

        alone = run(*args)
        jax.clear_caches()
        with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
            cut = run(*args)
        assert len(cut[0].sharding.device_set) == 8, cut[0].sharding
        jax.tree.map(np.testing.assert_array_equal, alone, cut)
        print(cut[0].sharding.spec)
        """
    )
    assert "tensor" in result


@pytest.mark.slow
def test_the_kernel_compiles_for_a_tpu_that_is_not_here():
    """And what it never holds is the float32 logits, [2, 4, 4096, 4096]."""
    pytest.importorskip("libtpu")
    target = find_target("v5e:1x1")
    mesh = Mesh(np.reshape(target.devices, (1, 1, 1)), AXES)
    placed = NamedSharding(mesh, PartitionSpec())
    args = [
        jax.ShapeDtypeStruct((2, 4096, heads, HEAD_DIM), jnp.bfloat16, sharding=placed)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]

    def temp_bytes(kernel):
        config = ModelConfig(d_model=HEADS * HEAD_DIM, n_heads=HEADS, attention=kernel)
        run = lambda *x: causal_attention(*x, config, None)  # noqa: E731
        with jax.set_mesh(mesh):
            program = jax.jit(functools.partial(values_and_gradients, run)).lower(*args).compile()
        assert ("tpu_custom_call" in program.as_text()) == (kernel != "xla")
        return program.memory_analysis().temp_size_in_bytes

    logits_bytes = 2 * HEADS * 4096 * 4096 * 4
    assert temp_bytes("auto") < logits_bytes / 4 < temp_bytes("xla")
