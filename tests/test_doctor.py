"""`train.doctor`: what it says of a machine, of made-up ones where this one cannot show it."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import pytest

import jaxamp
from train import doctor
from train.machine import devices, rates, settings, versions

SMALL = rates.Size(side=64, calls=1, elements=256, budget_seconds=0.01)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(rates, "size_for", lambda device: SMALL)


# The command.


def test_it_prints_and_writes_what_it_found(small, tmp_path, capsys):
    path = tmp_path / "found.json"
    assert doctor.main(["--json", str(path)]) == 0
    out = capsys.readouterr().out
    for word in ("device:", "jaxlib", "float32, highest", "subnormal", "policy:", "all fits"):
        assert word in out
    found = json.loads(path.read_text())
    assert found["platform"] == "cpu" and found["advice"]["auto"] == "float32"
    assert found["matmuls"][0]["name"] == "float32"


@pytest.mark.parametrize("flags", [["--json", "there.json"], ["--json", "no/dir.json"], ["--jsn"]])
def test_bad_input_is_one_line(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.json").write_text("kept")
    assert doctor.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert (tmp_path / "there.json").read_text() == "kept" and not captured.out


def test_a_misfit_is_told_and_makes_the_exit_code_1(small, monkeypatch, capsys):
    monkeypatch.setattr(versions, "misfits", lambda found: ["jax 1 needs jaxlib 2"])
    assert doctor.main([]) == 1
    assert "does not fit: jax 1 needs jaxlib 2" in capsys.readouterr().out


def test_a_jax_that_does_not_start_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jax", None)
    assert doctor.main([]) == 1
    assert "does not fit: JAX does not start" in capsys.readouterr().out


# Versions.


def test_this_environment_fits():
    assert versions.misfits(versions.versions()) == []


REQUIRES = {
    "jax": [
        "jaxlib<=0.10.2,>=0.10.1",
        'jaxlib==0.10.1; extra == "ci"',
        'jaxlib<=0.10.2,>=0.10.2; extra == "cuda13"',
        'jax-cuda13-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda13"',
        'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
        'libtpu==0.0.42.*; extra == "tpu"',
    ],
    "jax-cuda13-plugin": ["jax-cuda13-pjrt==0.10.2"],
}
FITS = {"python": "3.12.1", "jax": "0.10.2", "jaxlib": "0.10.2"}
FITS |= {"flax": "0.12.8", "optax": "0.2.8", "jmp": "0.0.4", "numpy": "2.4"}
FITS |= {"orbax-checkpoint": "0.12.8", "jaxamp-train": "0.1.0"}
PLUGIN = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"}


@pytest.mark.parametrize(
    "changes,said",
    [
        ({}, ""),
        ({"jaxlib": "0.10.1"}, ""),  # as jax says, and the extra `ci` is not in use
        (PLUGIN, ""),
        ({"libtpu": "0.0.42.1"}, ""),
        ({"python": "3.10.4"}, "needs Python >=3.11"),
        ({"jax": "0.9.2"}, "jaxamp-train 0.1.0 needs jax<0.13,>=0.10"),
        ({"jaxlib": "0.9.0"}, "jax 0.10.2 needs jaxlib<=0.10.2,>=0.10.1; 0.9.0 is installed"),
        (PLUGIN | {"jax-cuda13-plugin": "0.10.1"}, "jax[cuda13] 0.10.2 needs jax-cuda13-plugin"),
        (PLUGIN | {"jax-cuda13-pjrt": "0.10.1"}, "jax-cuda13-plugin 0.10.2 needs jax-cuda13-pjrt"),
        (PLUGIN | {"jaxlib": "0.10.1"}, "jax[cuda13] 0.10.2 needs jaxlib"),
        ({"libtpu": "0.0.30"}, "jax[tpu] 0.10.2 needs libtpu==0.0.42.*"),
    ],
)
def test_versions_that_do_not_fit_are_named(changes, said, monkeypatch):
    monkeypatch.setattr(versions.metadata, "requires", lambda name: REQUIRES.get(name))
    lines = versions.misfits(FITS | changes)
    assert len(lines) == bool(said) and all(said in line for line in lines)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(versions.metadata, "requires", lambda name: None)
    (line,) = versions.misfits({name: v for name, v in FITS.items() if name != "jmp"})
    assert "needs jmp" in line


@pytest.mark.parametrize(
    "seen,platform,found,asked,said",
    [
        ([], "cpu", {}, None, ""),
        (["GPU 0: NVIDIA H200"], "gpu", {}, None, ""),
        (["GPU 0: NVIDIA H200"], "cpu", {}, "cpu", ""),  # asked for
        (["GPU 0: NVIDIA H200"], "cpu", {}, None, "pip install '.[cuda]'"),
        (["GPU 0: NVIDIA H200"], "cpu", PLUGIN, None, "jax-cuda13-plugin, jax-cuda13-pjrt is"),
        (["/dev/accel0"], "cpu", {}, "", "pip install '.[tpu]'"),
    ],
)
def test_an_accelerator_that_is_not_used_is_named(seen, platform, found, asked, said):
    line = devices.unused(seen, platform, found, asked)
    assert said in line and bool(line) == bool(said)


# Settings.


def test_settings_are_shown_with_what_they_do():
    flags = "--xla_gpu_ftz=true --xla_cpu_max_isa=AVX2 --xla_dump_to=/d"
    environment = {"XLA_FLAGS": flags, "NVIDIA_TF32_OVERRIDE": "0", "HOME": "/h"}
    config = SimpleNamespace(jax_enable_x64=True, jax_default_matmul_precision="bfloat16")
    found = {s.name: (s.value, s.effect) for s in settings.settings(config, environment)}
    assert set(found) == {
        *("JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE"),
        *("XLA_FLAGS xla_gpu_ftz", "XLA_FLAGS xla_cpu_max_isa", "XLA_FLAGS"),
    }
    assert found["XLA_FLAGS"] == ("--xla_dump_to=/d", "not known to change numbers")
    assert found["XLA_FLAGS xla_cpu_max_isa"][0] == "AVX2"
    assert settings.settings(SimpleNamespace(), {}) == []


@pytest.mark.slow
def test_each_setting_is_known_to_this_jax_and_off_by_default():
    values = {"xla_cpu_max_isa": "AVX2", "xla_disable_hlo_passes": "none"}
    values |= {"xla_gpu_autotune_level": "0", "xla_backend_optimization_level": "1"}
    flags = " ".join(f"--{name}={values.get(name, 'false')}" for name in settings._XLA)
    script = (
        "import jax; from train.machine.settings import _CONFIG, settings;"
        "jax.numpy.zeros(1); [getattr(jax.config, name) for name in _CONFIG];"
        "assert settings(jax.config, {}) == []"
    )
    env = {**os.environ, "XLA_FLAGS": flags}  # XLA ends at a flag it does not know
    result = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# Rates.


def test_errors_show_the_precision_of_each_matmul():
    rows, refused = rates.matmuls(jax.devices()[0], SMALL)
    error = {row.name: row.error for row in rows}
    assert not refused and all(row.per_second > 0 and row.ratio > 0 for row in rows)
    # Rounding a factor to p bits changes it by at most 2^-p and on average by a fraction of that,
    # which two factors and the product add up to in quadrature.
    for name, bits in {"float32, highest": 24, "float16": 11, "bfloat16": 8}.items():
        most = 2.0**-bits * (8 if bits == 24 else 2)  # 64 float32 additions round as well
        assert most / 32 < error[name] < most


def test_a_dtype_that_the_device_refuses_is_one_line(monkeypatch):
    preset = jax.lax.DotAlgorithmPreset.TF32_TF32_F32  # XLA:CPU has none
    kinds = {"float32": ("float32", None), "float32, tf32": ("float32", preset)}
    monkeypatch.setattr(rates, "_kinds", lambda device: kinds)
    rows, refused = rates.matmuls(jax.devices()[0], SMALL)
    assert [row.name for row in rows] == ["float32"]
    assert len(refused) == 1 and refused[0].startswith("float32, tf32: refused by cpu")


def test_a_slow_dtype_has_fewer_rounds():
    calls = {"float32": 0, "slow": 0}

    def run(name, seconds):
        calls[name] += 1
        time.sleep(seconds)

    runs = {"float32": lambda: run("float32", 0.001), "slow": lambda: run("slow", 0.05)}
    rows = rates._timed(runs, budget_seconds=0.02)
    assert calls["slow"] == 3  # to compile, for a first look, and one round
    assert calls["float32"] > 3
    assert rows[0].ratio == 1 and rows[1].ratio < 0.5


def test_bandwidth_and_subnormals_are_of_each_dtype():
    device = jax.devices()[0]
    assert [row.name for row in rates.elementwise(device, SMALL)] == ["float32", "bfloat16"]
    found = rates.subnormals(device)
    assert list(found) == ["float32", "bfloat16", "float16"]
    assert all(how == "kept" or how.startswith("flushed to zero when") for how in found.values())


# The policy.


def rows(error=4e-7, **ratios):
    return [
        rates.Rate("float32", 1, 1, 1, error),
        *(rates.Rate(n, 1, 1, r, 1e-3) for n, r in ratios.items()),
    ]


def auto(policy):
    return jaxamp.get_policy(policy).replace(reason="auto: it is so")


@pytest.mark.parametrize(
    "policy,measured,taken,said",
    [
        ("float32", rows(bfloat16=1.2, float16=0.1), "float32", "bfloat16 1.20, float16 0.10"),
        ("float32", rows(), "float32", "none ran"),
        ("float32", rows(bfloat16=2.0, float16=1.1), "mixed_bfloat16", "but here a bfloat16"),
        ("mixed_bfloat16", rows(bfloat16=15, float16=15), "mixed_bfloat16", "15.0 times"),
        ("mixed_bfloat16", rows(1e-3, bfloat16=0.9), "mixed_bfloat16", "is no float32 matmul"),
        ("mixed_float16", rows(float16=0.5), "float32", "something else uses the device"),
        ("mixed_bfloat16", rows(float16=2.0), "float32", "does not run here"),
    ],
)
def test_the_policy_is_autos_unless_measured_otherwise(policy, measured, taken, said):
    advice = doctor.advise(auto(policy), measured)
    assert (advice.policy, advice.auto) == (taken, policy)
    assert said in advice.reason and "it is so" in advice.reason
    assert jaxamp.get_policy(advice.policy)
