"""The benchmarks of memory and of tracing: what they print is what the programs hold."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from test_benchmark import TINY, assert_one_error

import jaxamp
from train import benchmark, compiled, fit
from train.benchmarks import memory, trace
from train.benchmarks.chip_model import Chip
from train.config import Config
from train.mesh import make_mesh

SIZES = {"n-layers": 1, "d-model": 16, "n-heads": 2, "seq-len": 16, "batch-size": 2}
SMALL = [part for name, n in SIZES.items() for part in (f"--chip.{name}", str(n))]
SMALL += ["--chip.vocab-size", "64"]


def figures_of(out):
    return {found["name"]: found["values"] for found in json.loads(out.read_text())["figures"]}


@pytest.mark.slow
def test_memory_is_that_of_the_step(tmp_path):
    out = tmp_path / "out.json"
    flags = ["--targets", "here", "--remats", "none", "islands", "--loss-chunk", "8"]
    flags += ["--no-largest-batch-size", "--json", str(out)]
    assert benchmark.main(["memory", *flags, *SMALL]) == 0
    found = figures_of(out)
    policy = jaxamp.get_policy("mixed_bfloat16")
    chip = Chip(1, 16, 2, 16, 2, 64)
    config = chip.of(Config(loss_chunk=8))
    attempt = fit.attempt(config, policy, make_mesh(config.mesh, jax.devices()), 1)
    peak = found["peak, this CPU, remat none, loss chunk 8"]
    assert peak["mixed_bfloat16"] == attempt.memory.peak / 2**20
    assert set(peak) == {"float32", "mixed_bfloat16"}
    assert set(found["peak, this CPU, remat islands"]) == {"mixed_bfloat16"}
    held = 16 * (64 + 4 * 16 + 3 * 64 + 2 + 1) * 4 / 2**20  # embedding, attention, swiglu, norms
    assert found["params, this CPU"]["float32"] == held
    assert found["moments, this CPU"]["float32"] == pytest.approx(2 * held, abs=1e-3)


def test_the_largest_batch_is_looked_for_where_the_memory_of_the_device_ends(tmp_path, monkeypatch):
    def attempt(config, policy, mesh, capacity):
        needed = 10 + 3 * config.batch_size + (policy.compute_dtype == "float32")
        return SimpleNamespace(config=config, memory=fit.Memory(needed, 4, 6, 1, 0, capacity))

    monkeypatch.setattr(fit, "attempt", attempt)
    place = memory.Place("this CPU", jax.devices()[0], 100)
    monkeypatch.setattr(memory, "find_place", lambda target: place)
    out = tmp_path / "out.json"
    flags = ["--targets", "here", "--remats", "full", "--json", str(out)]
    assert benchmark.main(["memory", *flags, *SMALL]) == 0
    largest = figures_of(out)["largest batch, this CPU, remat full"]
    assert largest == {"float32": 29, "mixed_bfloat16": 30}


def test_a_gpu_here_has_what_its_allocator_hands_out(monkeypatch):
    stats = {"bytes_limit": 7}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    assert memory.find_place("here") == ("this GPU", gpu, 7)


def test_operations_are_counted_inside_loops_and_calls():
    def fun(x):
        x, _ = jax.lax.scan(
            lambda c, _: (jnp.sin(c).astype("bfloat16").astype("float32"), c), x, length=3
        )
        return jax.jit(jnp.sin)(x)

    counts = compiled.primitive_counts(jax.make_jaxpr(fun)(1.0))
    assert counts["sin"] == 2 and counts["convert_element_type"] == 2 and counts["scan"] == 1


@pytest.mark.slow
def test_a_trace(tmp_path, capsys):
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    args = ["--config", str(config), "--json", str(out), "--depths", "1", "2", "--repeats", "1"]
    assert benchmark.main(["trace", *args]) in (0, 1)
    found = figures_of(out)
    assert found["equations, 1 layers"] == found["equations, 2 layers"]  # a loop
    converts = found["converts in them, 2 layers"]
    assert converts["autocast"] > converts["float32"]
    assert all(seconds > 0 for seconds in found["compiling, 1 layers"].values())
    targets = {t["name"]: t["value"] for t in json.loads(out.read_text())["targets"]}
    assert targets["programs that a second call compiles, 2 layers"] == 0


def test_a_second_call_that_compiles_is_seen(monkeypatch):
    fresh = lambda state, batch: (jax.jit(lambda x: x + 1)(state), None)  # noqa: E731
    monkeypatch.setattr(trace, "_step", lambda *_: (fresh, jnp.float32(0)))
    assert trace.compilations_of_second_call(None, None, "float32", None) > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["memory", "--loss-chunk", "0"], "--loss-chunk must be at least 1, got 0"),
        (["memory", "--targets", "v5"], "unknown chip 'v5'"),
        (["memory", "--policies", "f8"], "--policies: "),
        (["memory", "--chip.n-heads", "3"], "--chip: d_model 1024 must be an even multiple"),
        (["trace", "--depths", "4", "0"], "--depths must be at least 1, got 0"),
        (["trace", "--repeats", "-1"], "--repeats must be at least 1, got -1"),
    ],
)
def test_bad_input_is_one_line(args, message, capsys):
    assert_one_error(benchmark.main(args), message, capsys)
