"""Compare: equal conditions, runs that take turns, and no step that `train.run` would not take."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from small_run import flags

import jaxamp
from train import compare, experiment, fit, recorded, run
from train.config import Config
from train.loop import BadRun, Outcome
from train.mesh import make_mesh

POLICIES = ["--policies", "float32", "mixed_float16"]


def lines(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("perf/")} for row in rows]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared") / "out"
    more = [*POLICIES, "--seeds", "2", "--tolerance", "0.5", "--seed", "3"]
    assert compare.main(flags(folder, *more)) == 0
    return folder


def test_the_report_is_that_of_the_runs(compared, capsys):
    report = json.loads((compared / "report.json").read_text())
    assert report["tolerance"] == 0.5
    (found,) = report["comparisons"]
    assert found["equal"] and found["base"] == "float32"
    seeds = {p["policy"]: [r["seed"] for r in p["runs"]] for p in found["policies"]}
    assert seeds == {"float32": [3, 4], "mixed_float16": [3, 4]}
    (verdict,) = found["verdicts"]
    assert verdict["outcome"] == "within"
    assert verdict["sentence"] == (compared / "report.md").read_text().splitlines()[0].strip()
    for policy in found["policies"]:
        figures = [r["figures"] for r in policy["runs"]]
        assert figures[0]["compile_seconds"] > 0 and figures[1]["compile_seconds"] is None
        assert figures[0]["memory"] == figures[1]["memory"]
        assert figures[0]["flops"] > 0 and figures[0]["bytes_accessed"] > 0
        assert figures[0]["command"].startswith("python -m train.compare --model.n-layers 1")
        # No run knows what of the process's memory was its own.
        rows = (Path(policy["runs"][0]["directory"]) / "metrics.jsonl").read_text()
        assert "perf/step_seconds" in rows and "peak_memory" not in rows


def test_a_run_takes_the_steps_that_it_takes_alone(compared, tmp_path):
    """Bit for bit, though its program was compiled ahead of time and it took turns."""
    assert run.main(flags(tmp_path, "--policy", "mixed_float16", "--seed", "4")) == 0
    alone = lines(tmp_path)
    assert alone == lines(compared / "runs" / "mixed-float16-4")
    assert alone != lines(compared / "runs" / "mixed-float16-3")


def test_figures_are_those_of_the_plan(compared):
    found = json.loads((compared / "runs" / "float32-3" / "figures.json").read_text())
    config = Config.model_validate_json(
        (compared / "runs" / "float32-3" / "config.json").read_text()
    )
    mesh = make_mesh(config.mesh)
    planned = fit.attempt(config, jaxamp.get_policy("float32"), mesh, 0).memory
    assert found["memory"]["peak_bytes"] == planned.peak
    assert found["memory"]["params_bytes"] == planned.params


def test_a_finished_comparison_is_reported_anew(compared, capsys):
    before = (compared / "report.html").read_bytes()
    (compared / "report.html").unlink()
    assert compare.main(["--workdir", str(compared), "--resume"]) == 0
    assert (compared / "report.html").read_bytes() == before
    assert "wrote" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_comparison_that_was_stopped_goes_on(compared, tmp_path, number):
    more = [*POLICIES, "--seeds", "2", "--tolerance", "0.5", "--seed", "3", "--num-steps", "40"]
    ways = {"whole": None, "stopped": 3, "late": 25}
    for name, step in ways.items():
        folder = tmp_path / name
        args = flags(folder, *more, checkpoint_every_steps=7)
        process = start(args)
        if step is None:
            assert process.wait(timeout=300) == 0
            continue
        path = folder / "runs" / "float32-4" / "metrics.jsonl"
        wait_for_lines(path, step, process)
        process.send_signal(number)
        code = process.wait(timeout=120)
        assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        assert not (folder / "report.html").exists()
        assert start(["--workdir", str(folder), "--resume"]).wait(timeout=300) == 0
        for workdir in sorted((folder / "runs").iterdir()):
            assert lines(workdir) == lines(tmp_path / "whole" / "runs" / workdir.name)


def start(args):
    command = [sys.executable, "-m", "train.compare", *args]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_lines(path, count, process):
    deadline = time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= count):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def piece(stopped_by=None):
    return Outcome(1, {}, None, None, stopped_by)  # type: ignore[arg-type]


def test_runs_take_turns_and_a_bad_one_does_not_stop_the_others(capsys):
    took = []

    def one(name, count, bad=False):
        for _ in range(count):
            took.append(name)
            yield piece()
        if bad:
            raise BadRun("skips", "gradients were not finite")

    runs = {"a": one("a", 3), "b": one("b", 1, bad=True), "c": one("c", 2)}
    assert experiment.take_turns(runs) is None
    assert "".join(took) == "abcaca"
    assert "b: gradients were not finite" in capsys.readouterr().err


def test_a_signal_stops_all_runs_each_after_its_step():
    asked = []

    def one(name):
        while not asked:
            yield piece()
        yield piece("SIGTERM")

    def first():
        yield piece()
        asked.append(True)
        yield piece("SIGTERM")

    assert experiment.take_turns({"a": first(), "b": one("b")}) == "SIGTERM"


def test_device_peaks_are_those_of_one_policy_alone(monkeypatch):
    """A count that does not rise is of an earlier program, and says nothing."""
    needs = {"float32": 90, "mixed_bfloat16": 50, "mixed_float16": 50}
    policies = {jaxamp.get_policy(name): need for name, need in needs.items()}
    held = [10]

    def step(need):
        def run(state, batch):
            held[0] = max(held[0], need)
            return state

        return run

    compiled = {
        policy: SimpleNamespace(
            attempt=SimpleNamespace(memory=SimpleNamespace(peak=need)),
            programs=SimpleNamespace(train_step=step(need + 5)),
        )
        for policy, need in policies.items()
    }
    monkeypatch.setattr(recorded, "fresh_state", lambda *_: ())
    monkeypatch.setattr(recorded, "peak_memory", lambda: held[0])
    mesh = make_mesh(Config().mesh, jax.devices()[:1])
    configs = dict.fromkeys(policies, Config(batch_size=1))
    found = recorded.device_peaks(configs, compiled, None, mesh)  # type: ignore[arg-type]
    assert list(found.values()) == [95, 55, None]
    monkeypatch.setattr(recorded, "peak_memory", lambda: None)
    assert set(recorded.device_peaks(configs, compiled, None, mesh).values()) == {None}  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_largest_batch_is_an_experiment_of_its_own(tmp_path, monkeypatch):
    """In a process whose programs are optimised, unlike those of tests."""
    gib = 0.05
    more = [*POLICIES, "--seeds", "1", "--also-largest-batch", "--memory-gib", str(gib)]
    assert start(flags(tmp_path, *more, model__n_layers=2)).wait(timeout=500) == 0
    first, second = json.loads((tmp_path / "report.json").read_text())["comparisons"]
    assert first["equal"] and not second["equal"]
    sizes = {}
    for one, two in zip(first["policies"], second["policies"], strict=True):
        (before,), (after,) = one["runs"], two["runs"]
        config = Config.model_validate_json((Path(after["directory"]) / "config.json").read_text())
        sizes[one["policy"]] = config.batch_size
        # One row more does not fit, and of more than 10 it is less than a tenth.
        assert before["figures"]["largest_batch_size"] == config.batch_size > 10
        assert 0.9 * gib * 2**30 < after["figures"]["memory"]["peak_bytes"] <= gib * 2**30
        assert two["difference"] is None and two["speed"]["tokens_per_second"]["middle"] > 0
    assert sizes["mixed_float16"] > sizes["float32"]
    # Nothing is left to do, and nothing is looked for again.
    report = (tmp_path / "report.json").read_bytes()
    monkeypatch.setattr(fit, "attempt", None)
    assert compare.main(["--workdir", str(tmp_path), "--resume"]) == 0
    assert (tmp_path / "report.json").read_bytes() == report


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policies", "float32"], "two or more"),
        (["--policies", "float32", "f32"], "twice"),
        (["--policies", "float32", "bf61"], "did you mean 'bf16'"),
        (["--policy", "float32"], "--policies"),
        (["--seeds", "0"], "--seeds must be at least 1"),
        (["--seeds", "two"], "invalid int value"),
        (["--tolerance", "0"], "--tolerance must be a number above 0"),
        (["--tolerance", "nan"], "--tolerance must be a number above 0"),
        (["--memory-gib", "1"], "is for --also-largest-batch"),
        (["--batch-size", "8", "16"], "16"),
        (["--explain"], "--explain is for one run"),
        (["--on-incident", "rollback"], "cannot be compared"),
        (["--distributed.auto"], "--distributed is for one run"),
        (["--resume"], "--resume needs --workdir"),
        (["--resume", "--workdir", "no-such"], "no comparison there"),
        (["--resume", "--workdir", "no-such", "--tolerance", "1"], "leave out --tolerance"),
        (["--batch-size", "100000"], "more than the"),
        (["--config", "no-such.toml"], "no-such.toml"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare.main(args) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line
    assert not list(tmp_path.iterdir())


def test_a_directory_that_holds_a_comparison_is_left_alone(compared, capsys):
    before = (compared / "compare.json").read_bytes()
    assert compare.main(flags(compared, *POLICIES)) == 2
    assert "holds a comparison" in capsys.readouterr().err
    assert (compared / "compare.json").read_bytes() == before


def test_a_directory_that_holds_a_run_is_left_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert compare.main(flags(tmp_path, *POLICIES)) == 2
    assert "holds a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
