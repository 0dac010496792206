"""The ruler: the variants are one function, and what is read from programs is what is there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import benchmark, chips, compiled
from train.config import Config, ModelConfig
from train.figures import Figure, Report, Target, ratio, render, to_json
from train.model import apply, create
from train.variants import Layers, by_hand, floor, forward, make_variants

VOCAB = 31
MODELS = {
    "rmsnorm": ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32),
    "layernorm": ModelConfig(
        n_layers=2,
        d_model=16,
        n_heads=4,
        n_kv_heads=2,
        norm="layernorm",
        activation="gelu",
        tie_embeddings=False,
    ),
}
TINY = """
batch_size = 2
[model]
n_layers = 1
d_model = 16
n_heads = 2
[data]
seq_len = 16
"""


def of_model(name):
    config = Config(model=MODELS[name], z_loss=1e-3)
    graphdef, params = create(config.model, VOCAB, jax.random.key(0))
    tokens, labels = jax.random.randint(jax.random.key(1), (2, 3, 12), 0, VOCAB)
    return config, graphdef, params, {"tokens": tokens, "labels": labels}


def relative_distance(a, b):
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])  # noqa: E731
    return np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [by_hand, floor])
@pytest.mark.parametrize("model", MODELS)
def test_written_out_model_is_the_model_in_float32(model, precision):
    config, graphdef, params, batch = of_model(model)
    of_model_ = jax.jit(lambda params: apply(graphdef, params, batch["tokens"]))
    how = precision(jnp.float32)
    written = jax.jit(lambda params: forward(config.model, params, batch["tokens"], how))
    # Both round in float32, some 20 operations deep: eps * 20 = 2.4e-6.
    assert relative_distance(written(params), of_model_(params)) < 2.4e-6
    square = lambda logits: jnp.sum(jnp.square(logits))  # noqa: E731
    grads = [jax.jit(jax.grad(lambda p, f=f: square(f(p))))(params) for f in (written, of_model_)]
    assert relative_distance(*grads) < 5e-6  # twice as deep


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "floor"])
@pytest.mark.parametrize("layers", [Layers(unroll=True), Layers(remat=True)])
def test_layers_are_those_of_the_scan(name, layers):
    config, graphdef, params, batch = of_model("layernorm")
    both = [make_variants(config, graphdef, "bf16", given)[name] for given in (Layers(), layers)]
    grads = [jax.jit(variant.value_and_grad())(params, batch) for variant in both]
    # Float32 rounds in another order; what the floor rounds to bfloat16 may fall the other way.
    assert relative_distance(*grads) < (5e-6 if name == "float32" else 2**-9)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["bf16", "f16"])
def test_every_variant_is_near_float32_and_none_is_float32(compute):
    config, graphdef, params, batch = of_model("rmsnorm")
    variants = make_variants(config, graphdef, compute)
    exact = jax.jit(variants.pop("float32").value_and_grad())(params, batch)[1]
    if compute == "f16":
        del variants["jmp, plain layers"]  # no loss scale here, and its norm's gradient is NaN
    for variant in variants.values():
        loss, grads = jax.jit(variant.value_and_grad())(params, batch)
        assert loss.dtype == jnp.float32
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
        assert 1e-5 < relative_distance(grads, exact) < 0.05, variant.name


def test_by_hand_and_jmp_multiply_in_16_bits_and_the_floor_does_not():
    config, graphdef, params, batch = of_model("rmsnorm")
    variants = make_variants(config, graphdef, "bf16")

    def matmuls(name):
        return compiled.float32_dots(variants[name].value_and_grad(), params, batch)

    assert matmuls("by hand") == 0
    assert matmuls("floor") == matmuls("float32") > 0


HLO = """
  %p.1 = f32[4,8]{1,0:T(8,128)} parameter(0)
  %p.2 = bf16[8,4]{1,0} parameter(1)
  %p.3 = f32[8,4]{1,0} parameter(2)
  %convolution.1 = f32[4,4]{1,0} convolution(%p.1, %p.2), dim_labels=bf_io->bf
  ROOT %convolution.2 = bf16[4,4]{1,0} convolution(%p.1, %p.3), dim_labels=bf_io->bf
  %gemm = (f32[4,4]{1,0}, s8[9]{0}) custom-call(%p.1, %p.3), custom_call_target="__cublas$gemm"
  %add.3 = f32[4,8]{1,0} add(%p.1, %p.1)
"""


def test_float32_matmuls_of_a_compiled_program():
    found = [line.split()[0] for line in compiled.float32_matmuls(HLO)]
    assert found == ["ROOT", "%gemm"]
    typed = "%d = f32[2,2] dot(f32[2,3]{1,0} %p.1, f32[3,2]{1,0} %p.3)"
    assert len(list(compiled.float32_matmuls(HLO + typed))) == 3


@pytest.mark.slow
def test_figures_of_a_program_compiled_here():
    config, graphdef, params, batch = of_model("rmsnorm")
    variant = make_variants(config, graphdef, "bf16")["float32"]
    shapes = (params, batch)
    program = compiled.compile_for(jax.devices()[0], variant.value_and_grad(), shapes)
    figures = compiled.figures_of(program, "cpu")
    assert figures.peak_bytes > figures.temp_bytes > 0
    assert figures.accessed_bytes > sum(leaf.nbytes for leaf in jax.tree.leaves(shapes))


def test_table_and_json():
    report = Report(
        [Figure("gradient error", "1e-3", {"by hand": 2.0, "autocast": 1.0})],
        [Target("of by hand", 0.5, 0.7), Target("below jmp", 1.0, 1.0, strict=True)],
        ["tpu: no compiler"],
    )
    assert render(report).splitlines() == [
        "figure          unit  by hand  autocast",
        "---------------------------------------",
        "gradient error  1e-3    2.000     1.000",
        "",
        "target      measured  wanted",
        "----------------------------------",
        "of by hand     0.500  <= 0.7  pass",
        "below jmp      1.000     < 1  MISS",
        "",
        "skipped tpu: no compiler",
    ]
    written = json.loads(json.dumps(to_json(report, {"seeds": 1})))
    assert written["targets"][1] == {
        "name": "below jmp",
        "value": 1.0,
        "bound": 1.0,
        "strict": True,
        "passed": False,
    }
    assert ratio([1.0, 9.0, 4.0], [2.0, 9.0, 4.0]) == 1.0


def run(tmp_path, *flags):
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    out = tmp_path / "out.json"
    code = benchmark.main(["autocast", "--config", str(path), "--json", str(out), *flags])
    return code, json.loads(out.read_text()) if out.exists() else None


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    few = ("--seeds", "1", "--training-steps", "1", "--repeats", "1")
    _, written = run(tmp_path, *few, "--measures", "errors", "float32", "compilations", "program")
    out = capsys.readouterr().out
    assert "gradient error, f16, of floor" in out and f"wrote {tmp_path / 'out.json'}" in out
    exact = {target["name"]: target["value"] for target in written["targets"]}
    assert exact["compute=f32: results that differ in a bit"] == 0
    assert exact["programs compiled by a second call, jit"] == 0
    assert exact["programs compiled by a second call, no jit, beyond float32"] == 0
    assert exact["float32 matmuls, StableHLO"] == 0
    errors = {figure["name"]: figure["values"] for figure in written["figures"]}
    assert set(errors["gradient error, bf16"]) >= {"by hand", "jmp", "autocast", "floor"}


def test_a_missing_compiler_is_one_line(tmp_path, capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("libtpu.so\nnot found")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", missing)
    code, written = run(tmp_path, "--measures", "tpu", "gpu")
    assert code == 0
    tpu, gpu = written["skipped"]
    assert tpu.startswith("tpu: ") and "pip install 'jax[tpu]==" in tpu and "\n" not in tpu
    assert gpu.startswith("gpu: ") and "pip install jax-cuda13-plugin==" in gpu
    assert f"skipped {tpu}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--seeds", "0"), "--seeds must be at least 1, got 0"),
        (("--measures", "speed"), "speed"),
        (("--json", "no/such/place.json"), "no such directory"),
        (("--config", "no-such.toml"), "no-such.toml"),
        (("--chip.n-heads", "3"), "--chip: d_model 1024 must be an even multiple"),
        (("--chip.n-layers", "0"), "--chip.n-layers must be at least 1"),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys):
    assert_one_error(benchmark.main(["autocast", *flags]), message, capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["autocats"], "unknown benchmark 'autocats'; did you mean autocast?"),
        (["--seeds", "1"], "unknown benchmark '--seeds'; allowed: autocast, step"),
        (["step", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["step", "--compute", "f8"], "f8"),
    ],
)
def test_a_bad_command_is_one_line(args, message, capsys):
    assert_one_error(benchmark.main(args), message, capsys)


def test_usage_lists_what_there_is(capsys):
    assert benchmark.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in benchmark.BENCHMARKS)


def assert_one_error(code, message, capsys):
    assert code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if not line.startswith(("measuring", "starting"))]
    assert len(errors) == 1 and errors[0].startswith("error: ") and message in errors[0]
