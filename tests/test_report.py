"""Report: its files, what it refuses, and that missing figures are said to be missing."""

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from small_run import flags
from synthetic_runs import judged, metrics, pairs, write

from train import report, run
from train.reports.conditions import Comparison
from train.reports.runs import ReportError, read_run

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def report_on(runs, out, tolerance=0.02, **how):
    return report.write_report([Comparison("Runs", runs, **how)], out, "command", tolerance)


@pytest.fixture(scope="module")
def three_policies(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for policy in POLICIES:
        for seed in range(3):
            write(root / f"{policy}-{seed}", policy, seed)
    return sorted(root.iterdir())


@pytest.fixture(scope="module")
def written(three_policies, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report"
    report_on(three_policies, out)
    return out


def test_figures_are_those_of_the_runs(three_policies, written):
    found = json.loads((written / "report.json").read_text())["comparisons"][0]["policies"]
    assert [policy["policy"] for policy in found] == list(POLICIES)
    base, bfloat16, float16 = found
    read = {p: [read_run(r) for r in three_policies if r.name.startswith(p)] for p in POLICIES}
    ends = lambda p: [r.series["eval/loss"].values[-1] for r in read[p]]  # noqa: E731
    by = np.subtract(ends("mixed_bfloat16"), ends("float32"))
    np.testing.assert_allclose(list(bfloat16["difference"]["by_seed"].values()), by)
    assert bfloat16["difference"]["interval"]["mean"] == pytest.approx(np.mean(by))
    median = lambda r: np.median(r.series["perf/step_seconds"].values)  # noqa: E731
    ratios = [
        median(a) / median(b) for a, b in zip(read["float32"], read["mixed_bfloat16"], strict=True)
    ]
    assert bfloat16["speed"]["to_base"] == {
        "middle": pytest.approx(np.median(ratios)),
        "low": pytest.approx(min(ratios)),
        "high": pytest.approx(max(ratios)),
        "count": 3,
    }
    logs = np.log(ratios)
    bounds = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    interval = bfloat16["speed"]["to_base_interval"]
    assert [interval["low"], interval["high"]] == pytest.approx(list(bounds))
    times = np.concatenate([r.series["perf/step_seconds"].values for r in read["float32"]])
    assert len(times) == 3 * 57  # of 60 steps three have other work in them
    assert base["speed"]["step_seconds"]["low"] == pytest.approx(np.quantile(times, 0.25))
    tenth = [r.series["train/loss"].values[-6:].mean() for r in read["float32"]]
    assert base["train_loss"]["middle"] == pytest.approx(np.mean(tenth))
    peak = lambda p: p["memory"]["compiled"]["peak_bytes"]  # noqa: E731
    assert bfloat16["memory"]["to_base"] == pytest.approx(peak(bfloat16) / peak(base))
    assert base["memory"]["device_peak_bytes"] is None
    stability = float16["stability"]
    assert (stability["skipped_steps"], stability["skipped_at_start"]) == (6, 6)
    assert (stability["bad_losses"], stability["bad_norms"]) == (0, 6)
    assert stability["loss_scale"]["low"] == 2**14
    assert stability["ended_badly"] == {} == base["stability"]["ended_badly"]


@pytest.mark.parametrize("diverges", [1, 45])
def test_a_diverged_run_is_no_match(tmp_path, diverges):
    runs = [write(tmp_path / f"base-{s}", "float32", s) for s in range(2)]
    runs += [
        write(tmp_path / f"run-{s}", "mixed_bfloat16", s, diverges=diverges if s else None)
        for s in range(2)
    ]
    (verdict,) = report_on(runs, tmp_path / "out")
    assert verdict.outcome == "diverged"
    assert f"diverged in 1 of 2 seeds (not finite: seed 1: train/loss from step {diverges} on)" in (
        verdict.sentence
    )
    assert "matches" not in (tmp_path / "out" / "report.html").read_text()


def test_without_eval_losses_train_losses_are_compared_and_it_says_so(tmp_path):
    runs = [
        write(tmp_path / f"{policy}-{seed}", policy, seed, eval_every=0)
        for policy in POLICIES[:2]
        for seed in range(3)
    ]
    (verdict,) = report_on(runs, tmp_path / "out")
    assert "train loss (the runs have no eval loss in common)" in verdict.sentence
    assert "no eval loss" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "eval-loss.png").exists()


def test_what_is_missing_is_said(tmp_path):
    runs = pairs(tmp_path / "runs", [0.0, 0.001], with_figures=False)
    (verdict,) = report_on(runs, tmp_path / "out")
    assert "memory not recorded" in verdict.sentence
    assert "on a device that is not recorded" in verdict.sentence
    assert not (tmp_path / "out" / "memory.png").exists()
    assert "command: not recorded" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "name, settings",
    [
        ("batch_size", {"batch_size": 16}),
        ("data.seq_len", {"data": {"seq_len": 64}}),
        ("model.d_model", {"model": {"d_model": 64}}),
        ("data.path", {"data": {"path": "other.txt"}}),
        ("optimizer.learning_rate", {"optimizer": {"learning_rate": 1e-3}}),
    ],
)
def test_unequal_runs_are_refused(tmp_path, capsys, name, settings):
    one = write(tmp_path / "one", "float32")
    two = write(tmp_path / "two", "mixed_bfloat16", settings=settings)
    out = tmp_path / "out"
    assert report.main([str(one), str(two), "--output", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: runs under unequal conditions: {name} ")
    assert str(one) in said and str(two) in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_largest_batches_are_compared_by_tokens_and_not_by_loss(tmp_path):
    runs = [
        write(tmp_path / "a", "float32", settings={"batch_size": 8}),
        write(tmp_path / "b", "mixed_bfloat16", settings={"batch_size": 24}),
    ]
    (verdict,) = report_on(runs, tmp_path / "out", may_differ=("batch_size",))
    assert verdict.outcome == "not compared"
    seconds = [np.median(read_run(r).series["perf/step_seconds"].values) for r in runs]
    assert f"; {3 * seconds[0] / seconds[1]:.2f} times the speed" in verdict.sentence
    assert not (tmp_path / "out" / "loss-difference.png").exists()
    mixed = write(tmp_path / "c", "mixed_bfloat16", seed=1, settings={"batch_size": 16})
    with pytest.raises(ReportError, match="batch_size 24"):
        judged([*runs, mixed], may_differ=("batch_size",))


def _no_run(path):
    return path / "nothing", "no such run"


def _no_metrics(path):
    (write(path / "run", "float32") / "metrics.jsonl").unlink()
    return path / "run", "no metrics: metrics.jsonl is missing"


def _empty(path):
    return write(path / "run", "float32", rows=[]), "no metrics: metrics.jsonl is empty"


def _no_config(path):
    (write(path / "run", "float32") / "config.json").unlink()
    return path / "run", "no config.json"


def _not_json(path):
    run = write(path / "run", "float32")
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2}\n{"st\n{"step": 3}\n')
    return run, "metrics.jsonl: line 2 is not JSON"


def _backwards(path):
    rows = metrics("float32", 0)
    return write(path / "run", "float32", rows=rows[5:] + rows[:5]), "step 1 comes after step 60"


def _words(path):
    rows = [{"step": 1, "train/loss": "low"}]
    return write(path / "run", "float32", rows=rows), "train/loss is not a number, got 'low'"


def _bad_figures(path):
    run = write(path / "run", "float32")
    (run / "figures.json").write_text('{"compile_seconds": -1}')
    return run, "figures.json: compile_seconds"


@pytest.mark.parametrize(
    "make",
    [_no_run, _no_metrics, _empty, _no_config, _not_json, _backwards, _words, _bad_figures],
)
def test_bad_input_is_one_line(tmp_path, capsys, make):
    path, words = make(tmp_path)
    assert report.main([str(path), "--output", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "args", [[], ["--tolerance", "0"], ["--tolerance", "nan"], ["--tollerance"]]
)
def test_bad_flags_are_one_line(tmp_path, capsys, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    given = [] if not args else [str(write(tmp_path / "run", "float32")), *args]
    assert report.main(given) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert not (tmp_path / "report").exists()


def test_only_a_reports_own_files_are_replaced(tmp_path, capsys):
    run = write(tmp_path / "run", "float32")
    out = tmp_path / "out"
    (tmp_path / "file").write_text("mine")
    assert report.main([str(run), "--output", str(tmp_path / "file")]) == 2
    assert (tmp_path / "file").read_text() == "mine"
    assert report.main([str(run), "--output", str(out)]) == 0
    (out / "mine.png").write_bytes(b"mine")
    assert "memory.png" in {path.name for path in out.iterdir()}
    (run / "figures.json").unlink()
    assert report.main([str(run), "--output", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert "memory.png" not in names and "mine.png" in names  # the old one would show old bytes
    (out / "train-loss.png").write_bytes(b"mine")
    before = (out / "report.html").read_bytes()
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2}\n')
    assert report.main([str(run), "--output", str(out)]) == 2
    assert "was not written by train.report" in capsys.readouterr().err
    assert (out / "report.html").read_bytes() == before


def test_texts_of_others_are_escaped(tmp_path):
    run = write(tmp_path / "run", "float32")
    command = "python -m train.run --sample-prompt '<script>alert(1)</script>'"
    (run / "figures.json").write_text(json.dumps({"command": command}))
    report_on([run], tmp_path / "out")
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text


def test_the_same_runs_give_the_same_bytes(three_policies, written, tmp_path):
    report_on(three_policies, tmp_path)
    for path in written.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_training_does_not_pay_for_the_report():
    code = "import sys, train.run, train.report; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_runs_of_the_trainer_are_reported(tmp_path, capsys):
    runs = [tmp_path / policy for policy in POLICIES]
    for path in runs:
        assert run.main(flags(path, policy=path.name, num_steps=20, eval_every_steps=10)) == 0
    capsys.readouterr()
    given = [*map(str, runs), "--output", str(tmp_path / "out")]
    assert report.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["mixed_bfloat16", "mixed_float16", "wrote"]
    assert all("one seed gives no interval" in line for line in lines[:2])
