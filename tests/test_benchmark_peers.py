"""The peers: what is not the same training is not timed, what is not installed says how."""

import json
import shutil
import sys

import numpy as np
import pytest
from test_benchmark import TINY, assert_one_error

import train.peers
from train import benchmark
from train.benchmarks import peers
from train.benchmarks.peers import Peer, tolerances
from train.config import Config, ModelConfig
from train.peers import serve
from train.peers.serve import Task, read, write

FAKE = """
import json, sys
from serve import serve
def make(task, compute):
    losses = iter({losses} + [0.5] * 9)
    return lambda: next(losses)
serve(make)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark with peers that are scripts of a few lines, ours among them."""
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    shutil.copy(serve.__file__, tmp_path)
    monkeypatch.setattr(train.peers, "__file__", str(tmp_path / "__init__.py"))

    def run(scripts, *flags):
        table = {}
        for name, script in scripts.items():
            (tmp_path / f"{name}.py").write_text(script)
            table[name] = Peer(f"{name}.py", "pip install it")
        monkeypatch.setattr(peers, "PEERS", table)
        others = [name for name in table if name != peers.OURS]
        args = ["--config", str(config), "--json", str(out), "--training-steps", "1", "--rounds=1"]
        code = benchmark.main(["peers", *args, "--steps", "1", "--peers", *others, *flags])
        return code, json.loads(out.read_text()) if out.exists() else None

    return run


def test_a_peer_is_timed_where_both_losses_are_ours(run, capsys):
    before, after = tolerances(ModelConfig(n_layers=1))
    scripts = {
        "jaxamp": FAKE.format(losses=[3.0, 2.0]),
        "torch": FAKE.format(losses=[3.0 * (1 + before / 2), 2.0 * (1 + after / 2)]),
        "jmp": FAKE.format(losses=[3.0 * (1 + 2 * before), 2.0]),
        "flax": FAKE.format(losses=[3.0, 2.0 * (1 + 2 * after)]),
    }
    _, found = run(scripts)
    figures = {figure["name"]: figure["values"] for figure in found["figures"]}
    assert set(figures["float32 loss before a step"]) == set(scripts)
    assert set(figures["step, bf16, of jaxamp"]) == {"jaxamp", "torch"}
    assert [target["name"] for target in found["targets"]] == ["step, bf16, jaxamp of torch"]
    jmp, flax = found["skipped"]
    assert jmp.startswith("jmp: not the same training: float32 losses before and after a step are")
    assert flax.startswith("flax: not the same training") and f"allowed {after:.1e}" in flax
    assert "skipped jmp: " in capsys.readouterr().out


def test_what_is_not_installed_says_how_and_what_ends_says_why(run):
    ours = FAKE.format(losses=[3.0, 2.0])
    scripts = {"jaxamp": ours, "torch": "import no_such_module", "keras": "1 / 0"}
    code, found = run(scripts)
    assert code == 0
    torch, keras = sorted(found["skipped"], reverse=True)
    assert torch == (
        "torch: not installed (ModuleNotFoundError: No module named 'no_such_module'): "
        "pip install it"
    )
    assert keras == "keras: ended with 1: ZeroDivisionError: division by zero"


def test_nothing_is_measured_without_ours(run, capsys):
    code, _ = run({"jaxamp": "raise SystemExit('no jax here')", "torch": ""})
    assert_one_error(code, "jaxamp: ended with 1: no jax here", capsys)


def test_a_task_is_read_as_it_was_written(tmp_path):
    rng = np.random.default_rng(0)
    weights = {"norm/scale": rng.normal(size=3).astype(np.float32)}
    task = Task(weights, np.arange(4).reshape(2, 2), np.ones((2, 2)), {"n_heads": 2, "eps": 1e-14})
    write(str(tmp_path / "task.npz"), task)
    again = read(str(tmp_path / "task.npz"))
    assert again.settings == task.settings and list(again.weights) == ["norm/scale"]
    for one, other in zip((*task[:3],), (*again[:3],), strict=True):
        np.testing.assert_equal(one, other)


@pytest.mark.slow
def test_the_peers_of_this_environment_train_as_we_do(tmp_path, capsys):
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    args = ["--config", str(config), "--json", str(out), "--training-steps", "3", "--rounds", "1"]
    args += ["--steps", "1", "--compute", "f16"]
    assert benchmark.main(["peers", *args, "--peers", "jmp", "flax"]) == 0
    found = json.loads(out.read_text())
    assert found["skipped"] == []
    losses = {figure["name"]: figure["values"] for figure in found["figures"]}
    of_f16 = losses["loss of step 3, f16"]
    assert set(of_f16) == {"jaxamp", "jmp", "flax"}
    # A step moves a loss by less than itself; its float16 error, by which they differ, is u = 2^-11
    # of that, after three steps at most 3 u. 1e-5 was measured.
    assert max(of_f16.values()) - min(of_f16.values()) < 3 * 2**-11 * of_f16["jaxamp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module"), [("mpx", "mpx"), ("keras", "keras"), ("torch", "torch")]
)
def test_the_other_peers_train_as_we_do_where_they_are_installed(name, module, tmp_path):
    pytest.importorskip(module)
    config, out = tmp_path / "tiny.toml", tmp_path / "out.json"
    config.write_text(TINY)
    args = ["--config", str(config), "--json", str(out), "--training-steps", "3", "--rounds", "1"]
    benchmark.main(["peers", *args, "--peers", name])
    assert json.loads(out.read_text())["skipped"] == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelConfig(norm="layernorm"), "the peers are written for model.norm rmsnorm, not layern"),
        (ModelConfig(n_kv_heads=2), "the peers are written for model.n_kv_heads None, not 2"),
    ],
)
def test_a_model_that_the_peers_do_not_have_is_an_error(model, message):
    with pytest.raises(ValueError, match=message):
        peers.make_task(Config(model=model), peers.Options())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--threads", "0"), "--threads must be at least 1, got 0"),
        (
            ("--python", "jmp=/bin/sh"),
            "jmp=/bin/sh: NAME=PATH, NAME one of mpx, keras, torch",
        ),
        (("--python", "torch"), "--python torch: NAME=PATH"),
        (("--python", "torch=/no/such"), "--python torch=/no/such: /no/such is not a program"),
        (("--peers", "tensorflow"), "tensorflow"),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys):
    assert_one_error(benchmark.main(["peers", *flags]), message, capsys)


def test_both_flags_of_two_pythons_count():
    flags = ["--python", f"torch={sys.executable}", "--python", f"keras={sys.executable}"]
    options = benchmark.parse_flags(peers.Options, flags, "", "")
    assert set(peers._pythons(options)) == {"torch", "keras"}
