"""The benchmark of the whole step: each variant is that step, and the guard changes no number."""

import json

import jax
import numpy as np
import pytest
from jaxpr_search import equations
from test_benchmark import TINY

import jaxamp
from train import benchmark, measures
from train.benchmarks import step
from train.benchmarks.step import EXACT, GUARDED, SCALED, TF32, Step, whole_steps
from train.config import Config, DataConfig, ModelConfig
from train.data import load
from train.step import init_state, make_train_step

CONFIG = Config(
    model=ModelConfig(n_layers=1, d_model=16, n_heads=2), data=DataConfig(seq_len=16), batch_size=2
)


@pytest.fixture(scope="module")
def steps():
    corpus = load(CONFIG.data, None)
    point = measures.small_point(CONFIG, corpus)
    variants = measures.of_config(CONFIG, corpus, "bf16")
    made = whole_steps(variants, CONFIG, "cpu")
    return corpus, point, {name: Step(variant, tx, *point) for name, (variant, tx) in made.items()}


@pytest.mark.slow
def test_the_guarded_step_is_that_of_the_trainer_and_the_others_take_the_same(steps):
    corpus, point, made = steps
    policy = jaxamp.get_policy("compute=bf16")
    graphdef, state = init_state(CONFIG, corpus.vocab_size, policy)
    train_step, losses = make_train_step(CONFIG, graphdef, policy), []
    for _ in range(3):
        state, metrics = train_step(state, point.batch)
        losses.append(float(metrics["train/loss"]))
    found = {name: [float(run()) for _ in range(3)] for name, run in made.items()}
    # The loss of the trainer is divided after it is summed, that of the variants too: same program
    # but for what XLA fuses, so float32's rounding over 20 operations.
    np.testing.assert_allclose(found[GUARDED], losses, rtol=20 * 2.0**-24)
    # A scale that is a power of two rounds nothing, and a guard that skips nothing changes nothing.
    np.testing.assert_allclose(found[GUARDED], found["autocast"], rtol=20 * 2.0**-24)
    np.testing.assert_allclose(found[SCALED], found["autocast"], rtol=20 * 2.0**-24)
    for name, other in found.items():  # bfloat16 rounds by 2^-9, and losses are means
        np.testing.assert_allclose(other, found["float32"], rtol=2.0**-9, err_msg=name)
    assert found["autocast"] != found["float32"] and found["by hand"] != found["float32"]


@pytest.mark.slow
def test_a_gpu_has_two_more_that_say_how_to_multiply():
    corpus = load(CONFIG.data, None)
    point = measures.small_point(CONFIG, corpus)
    variants = measures.of_config(CONFIG, corpus, "bf16")
    made = whole_steps(variants, CONFIG, "gpu")
    assert set(made) - set(whole_steps(variants, CONFIG, "cpu")) == {TF32, EXACT}
    for name, precision in ((TF32, jax.lax.Precision.HIGH), (EXACT, jax.lax.Precision.HIGHEST)):
        program = jax.make_jaxpr(made[name][0].value_and_grad())(*point)
        matmuls = [e for e in equations(program) if e.primitive.name == "dot_general"]
        assert len(matmuls) > 20
        assert {e.params["precision"] for e in matmuls} == {(precision, precision)}


def test_utilization_is_of_the_peak_of_the_dtype(monkeypatch):
    assert step._utilization(10**12, {"autocast": 1.0}, "bf16") == {}  # a CPU's peak is not known
    peaks = {"float32": 4e12, "bfloat16": 8e12}
    monkeypatch.setattr(step, "peak_flops", lambda kind, dtype: peaks[jax.numpy.dtype(dtype).name])
    found = step._utilization(10**12, {"float32": 1.0, "autocast": 0.5, EXACT: 1.0}, "bf16")
    assert found == {"float32": 0.25, "autocast": 0.25}


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    args = ["--config", str(config), "--json", str(out), "--repeats", "2", "--compute", "bf16"]
    assert benchmark.main(["step", *args, "--measures", "time"]) in (0, 1)
    figures = {
        figure["name"]: figure["values"] for figure in json.loads(out.read_text())["figures"]
    }
    names = {"float32", "by hand", "jmp", "autocast", GUARDED, SCALED}
    assert all(set(values) == names for values in figures.values())
    assert figures["step on this CPU, bf16, of by hand"]["by hand"] == 1
    assert "step on this CPU, bf16, autocast, guard, of none" in capsys.readouterr().out


@pytest.mark.tpu
def test_the_guard_moves_no_bytes_on_a_tpu(tmp_path):
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    sizes = {"n-layers": 4, "d-model": 128, "n-heads": 2, "seq-len": 64, "vocab-size": 256}
    args = [part for name, size in sizes.items() for part in (f"--chip.{name}", str(size))]
    args += ["--config", str(config), "--json", str(out), "--measures", "tpu"]
    benchmark.main(["step", *args])
    found = json.loads(out.read_text())
    assert [target["name"] for target in found["targets"]] == [
        f"bytes accessed, TPU v5e, {name}, of none" for name in (GUARDED, SCALED)
    ]
    assert all(target["passed"] for target in found["targets"]), found["targets"]
