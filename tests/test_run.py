"""`python -m train.run` as a user sees it: what it prints and writes, how it stops and goes on."""

import json
import re
import signal

import jax
import numpy as np
import pytest
from small_run import assert_same_run, checkpoints, final_state, flags, metrics

import jaxamp
from train import loop
from train.checkpoint import load
from train.generate import main as generate
from train.incidents import BadSteps
from train.run import main
from train.step import at_floor, init_state


def run(workdir, *more, **changes):
    assert main(flags(workdir, *more, **changes)) == 0


def test_what_a_run_prints_and_writes(tmp_path, capsys):
    workdir = tmp_path / "run"
    run(workdir, policy="params=f32,compute=bf16")
    out = capsys.readouterr().out.splitlines()
    assert out[0] == (
        "precision: params float32, compute bfloat16, output float32; "
        "loss scale none (bfloat16 has float32's range); device cpu"
    )
    assert re.fullmatch(
        r"done: step 6, train loss \d\.\d{4}, eval loss \d\.\d{4}, "
        r"skipped steps 0, [\d,]+ tokens/s",
        out[-1],
    )
    assert str(workdir) in out[-2]
    lines = metrics(workdir)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert {"train/loss", "train/grad_norm", "amp/loss_scale", "amp/skipped_steps"} <= set(line)
        assert ("eval/loss" in line) == (line["step"] in (3, 6))
    assert any("perf/tokens_per_second" in line for line in lines)
    assert json.loads((workdir / "config.json").read_text())["model"]["d_model"] == 16
    assert (workdir / "sample.txt").read_text().startswith("The ")
    assert list((workdir / "tensorboard").glob("events*"))
    assert {p.name for p in (workdir / "checkpoints").iterdir()} == {"3", "6"}
    assert generate([str(workdir), "--prompt", "def ", "--num-tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_float16_scales_the_loss_by_itself(tmp_path, capsys):
    run(tmp_path, policy="compute=f16")
    assert "loss scale dynamic from 32768" in capsys.readouterr().out.splitlines()[0]
    assert metrics(tmp_path)[0]["amp/loss_scale"] == 32768


@pytest.mark.parametrize(
    ("policy", "remat", "setting"),
    [
        ("float32", "islands", "--model.remat islands"),
        ("compute=f32,residuals=compute", "none", "residuals=compute"),
        ("mixed_bfloat16", "islands", None),
        ("float32", "dots", None),
    ],
)
def test_a_remat_without_effect_is_one_warning(tmp_path, capsys, policy, remat, setting):
    assert main(flags(tmp_path, "--explain", policy=policy, model__remat=remat)) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")]
    assert len(said) == bool(setting)
    assert not setting or said[0].startswith(
        f"warning: {setting} has no effect with compute=float32: "
    )


def test_explain_prints_the_decisions_and_stops(tmp_path, capsys):
    assert main(flags(tmp_path / "run", "--explain", policy="mixed_bfloat16")) == 0
    out = capsys.readouterr().out
    assert re.search(r"dot_general +blocks/attention .*float32 -> bfloat16", out)
    assert re.search(r"exp +.*float32 .*full", out)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_full_keeps_what_it_names_in_float32(tmp_path, capsys):
    policy = "compute=bf16,full=*/feed_forward/*|head"
    assert main(flags(tmp_path / "run", "--explain", policy=policy)) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("dot_general")]
    for row in rows:
        kept = "feed_forward" in row or " head " in row
        assert (" full " if kept else " matmul ") in row
    run(tmp_path / "run", policy=policy)
    assert json.loads((tmp_path / "run/config.json").read_text())["policy"].endswith("|head")


@pytest.mark.slow
def test_tensorboard_reads_the_same_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    run(tmp_path)
    seen = {}
    for file in (tmp_path / "tensorboard").glob("events*"):
        raw = file.read_bytes()
        while raw:  # TFRecord: length, its crc, data, its crc
            size = int.from_bytes(raw[:8], "little")
            event = Event.FromString(raw[12 : 12 + size])
            seen |= {(event.step, v.tag): v.simple_value for v in event.summary.value}
            raw = raw[16 + size :]
    for line in metrics(tmp_path):
        np.testing.assert_allclose(seen[line["step"], "train/loss"], line["train/loss"], rtol=1e-6)


@pytest.mark.parametrize(
    "policy", [pytest.param("float32", marks=pytest.mark.slow), "mixed_float16"]
)
def test_case_resume_is_bit_identical(tmp_path, policy, capsys):
    """transformers#11663 and seven more: train 10; train 5, save, restore, 5 more."""
    same = {"policy": policy, "model.dropout": 0.1, "optimizer.schedule": "constant"}
    run(tmp_path / "whole", num_steps=10, checkpoint_every_steps=5, **same)
    run(tmp_path / "parts", num_steps=5, eval_every_steps=3, **same)
    kept = metrics(tmp_path / "parts")[:4]  # its last line has the evaluation of a run's end
    run(tmp_path / "parts", "--resume", num_steps=10, checkpoint_every_steps=5, **same)
    assert "resume: going on from step 5" in capsys.readouterr().out
    (a, data_a), (b, data_b) = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert data_a == data_b
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    for one, other in zip(whole, parts, strict=True):
        for name in ("step", "train/loss", "train/grad_norm", "amp/loss_scale"):
            assert one[name] == other[name]
    assert parts[:4] == kept


def test_signal_saves_and_resume_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, capsys):
    run(tmp_path / "whole")
    taken = []
    real = loop.make_train_step

    def make_train_step(*args):
        step = real(*args)

        def counting(state, batch):
            taken.append(1)
            if len(taken) == 4:
                signal.raise_signal(signal.SIGTERM)
            return step(state, batch)

        return counting

    monkeypatch.setattr(loop, "make_train_step", make_train_step)
    run(tmp_path / "parts")
    out = capsys.readouterr().out
    assert "stopped by SIGTERM at step 4" in out and "--resume" in out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run(tmp_path / "parts", "--resume")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_resume_is_safe_in_a_restart_loop(tmp_path, capsys):
    run(tmp_path, "--resume")
    assert "no checkpoint there, starting at step 0" in capsys.readouterr().out
    before = final_state(tmp_path)[0]
    run(tmp_path, "--resume")
    out = capsys.readouterr().out
    assert "going on from step 6" in out and "done: step 6, train loss" in out
    assert len(metrics(tmp_path)) == 6
    assert main(["--workdir", str(tmp_path), "--resume"]) == 0  # settings are those it wrote down
    after = final_state(tmp_path)[0]
    assert np.array_equal(before.params["norm"]["scale"], after.params["norm"]["scale"])


@pytest.mark.slow
def test_resume_drops_a_line_that_a_kill_cut_short(tmp_path):
    run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    run(tmp_path, "--resume", num_steps=8)
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 9))


@pytest.mark.slow
def test_resume_uses_the_checkpoint_before_a_damaged_one_and_says_so(tmp_path, capsys):
    run(tmp_path / "whole")
    run(tmp_path / "run")
    data = max((tmp_path / "run/checkpoints/6/state").rglob("*"), key=lambda p: p.stat().st_size)
    data.write_bytes(b"damaged")
    run(tmp_path / "run", "--resume")
    out = capsys.readouterr().out
    assert "checkpoint 6 is damaged" in out and "going on from step 3" in out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_precision_changes_at_resume_with_one_line(tmp_path, capsys):
    run(tmp_path, policy="mixed_float16", num_steps=3)
    run(tmp_path, "--resume", policy="mixed_bfloat16", num_steps=6)
    out = capsys.readouterr().out
    assert len(re.findall("precision changed.*is dropped", out)) == 1
    run(tmp_path, "--resume", policy="mixed_float16", num_steps=9)
    assert "starts at 32768" in capsys.readouterr().out


def test_case_bfloat16_skips_are_reported(tmp_path, capsys):
    """DeepSpeed#8415: inf each step in bf16: skipped = n, one warning, params unchanged."""
    run(tmp_path, policy="mixed_bfloat16", z_loss=1e38, sample_tokens=0, checkpoint_every_steps=1)
    captured = capsys.readouterr()
    assert captured.err.count("warning:") == 1 and "step 1" in captured.err
    assert metrics(tmp_path)[-1]["amp/skipped_steps"] == 6
    assert "skipped steps 6" in captured.out
    assert checkpoints(tmp_path) == ["6"]  # bad steps in a row push out no good one
    config, last = load(tmp_path).config, final_state(tmp_path)[0]
    first = jax.jit(lambda: init_state(config, 257, jaxamp.get_policy(config.policy))[1])()
    for x, y in zip(jax.tree.leaves(first.params), jax.tree.leaves(last.params), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_too_many_bad_steps_stop_the_run_with_what_was_seen(tmp_path, capsys):
    assert main(flags(tmp_path, z_loss=1e38, max_bad_steps=3)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    for part in ("step 3", "3 times in a row", "embed/embedding", "learning-rate", "saved"):
        assert part in error
    assert (tmp_path / "checkpoints/3").is_dir()


def test_case_stuck_at_the_floor():
    """DeepSpeed#1599: floor 1, limit 3, start 4, five bad steps: the stop comes at the fifth."""
    scale, bad_steps, stops = jaxamp.DynamicLossScale(4.0), BadSteps(3), []
    for _ in range(5):
        stops.append(bad_steps.are_too_many(False, bool(at_floor(scale))))
        scale = scale.adjust(False)
    assert stops == [False, False, False, False, True]
    assert not bad_steps.are_too_many(True, True) and bad_steps.count == 0


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--model.n-layrs", "6"], ["--model.n-layrs"]),
        (["--policy", "compute=bf61"], ["bf61", "bf16"]),
        (["--policy", "compute=bf16,matmul=f8"], ["matmul", "not built yet"]),
        (
            ["--policy", "compute=bf16,full=*/hed*"],
            ["'*/hed*' matches no", "params/embed/embedding"],
        ),
        (["--config", "nope.toml"], ["nope.toml"]),
        (["--data.path", "nowhere/*.txt"], ["nowhere/*.txt"]),
        (["--data.seq-len", "1000000"], ["1000000", "seq-len"]),
        (["--batch-size", "4000000"], ["batch-size"]),
        (["--model.vocab-size", "100"], ["257", "100"]),
        (["--model.attention", "cudnn"], ["cudnn", "NVIDIA"]),
        (["--workdir", "/dev/null/run"], ["/dev/null/run"]),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, more, parts):
    workdir = tmp_path / "run"
    assert main(flags(workdir, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for part in parts:
        assert part in error
    assert not workdir.exists()


def test_a_run_is_never_overwritten(tmp_path, capsys):
    run(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert main(flags(tmp_path)) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(flags(tmp_path, "--resume", **{"model.d-model": 32})) == 2
    assert "model.d_model was 16 and is 32" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
