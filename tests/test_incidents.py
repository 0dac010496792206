"""What is an incident and what is none, and what a run does about one."""

import json
import sys
import time

import jax
import numpy as np
import pytest
from small_run import assert_same_run, checkpoints, final_state, flags, metrics

import jaxamp
from train import loop
from train.checkpoint import load
from train.config import Config
from train.data import load as load_corpus
from train.data import train_batches
from train.enquiry.case import newest_incident
from train.incidents import Incident, Watch
from train.rollback import Log, Response, response
from train.run import main

OUT_OF_RANGE = 10**6
"""A token that is no row of the embedding: JAX reads NaN there."""


def values(loss, norm=1.0):
    return {"train/loss": loss, "train/grad_norm": norm, "amp/loss_scale": 1.0}


def seen(losses, finite=True, at_floor=False, limit=50):
    """(kind, since, step) of the incidents in a curve."""
    watch, found = Watch(limit), []
    for step, loss in enumerate(losses, 1):
        incident = watch.look(step, values(loss), finite, at_floor)
        found += [(incident.kind, incident.since, incident.step)] if incident else []
    return found


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed):
    """Falling losses with Gaussian noise, and with that of Student's t with 3 degrees of freedom.

    A t3 number is over 6 robust deviations (6.8 of its scale) with probability 0.003, so three in a
    row come once in 3e7 steps.
    """
    rng = np.random.default_rng(seed)
    curve = 1.8 + 3.7 * np.exp(-np.arange(4000) / 500)
    assert seen(curve + rng.normal(0, 0.1, 4000)) == []
    assert seen(curve + 0.1 * rng.standard_t(3, 4000)) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_stays_high_is_a_spike(seed):
    losses = 2 + np.random.default_rng(seed).normal(0, 0.05, 300)
    losses[200:] += 1
    assert seen(losses)[0] == ("spike", 201, 203)
    losses[202:] -= 1  # two are none
    assert seen(losses) == []


def test_before_anything_is_usual_nothing_is_a_spike():
    assert seen([2.0] * 50 + [9.0] * 10) == []
    assert seen([2.0] * 64 + [9.0] * 3) == [("spike", 65, 67)]


@pytest.mark.parametrize("loss", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_an_incident(loss):
    assert seen([2.0, loss, 2.0]) == [("nan", 2, 2)]


def test_calibration_of_the_loss_scale_is_none():
    """Overflows until the scale fits, and each time that it has grown."""
    scale, watch = jaxamp.DynamicLossScale(2.0**24, growth_interval=5), Watch(3)
    for step in range(1, 200):
        finite = float(scale.loss_scale) <= 2.0**10
        at_floor = float(scale.loss_scale) <= float(scale.min_scale)
        assert watch.look(step, values(2.0), finite, at_floor) is None
        scale = scale.adjust(jax.numpy.asarray(finite))


def test_bad_steps_in_a_row_at_the_floor_are_one():
    assert seen([2.0] * 5, finite=False, at_floor=True, limit=4)[0] == ("skips", 1, 4)


def test_bad_steps_say_at_which_scale():
    incident = Watch(1).look(1, values(2.0) | {"amp/loss_scale": 0.25}, False, True)
    message = "gradients were not finite 1 times in a row at loss scale 0.25; loss 2"
    assert incident.message == message


def test_norm_spikes_are_counted_and_go_on_from_earlier_rows():
    watch = Watch(50)
    norms = [1.0] * 64 + [10.5, 9.0, np.inf, 11.0]
    counts = [watch.norm_spikes(norm) for norm in norms]
    assert counts[-4:] == [1, 1, 1, 2]
    rows = [
        values(2.0, n) | {"monitor/grad_norm_spikes": c} for n, c in zip(norms, counts, strict=True)
    ]
    assert Watch(50, rows).norm_spikes(10.5) == 3


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({}, "spike", ("skip", None)),
        ({}, "skips", ("stop", None)),
        ({"on_incident": "stop"}, "nan", ("stop", None)),
        ({"on_incident": "rollback"}, "skips", ("rollback", 6)),
    ],
)
def test_the_response_is_what_the_settings_say(tmp_path, settings, kind, expected):
    """A checkpoint of the first bad step, or of a later one, is not good."""
    incident = Incident(kind, 9, 7, "")
    found = response(incident, Config(**settings), [2, 6, 7, 8], Log(tmp_path))
    assert (found.action, found.to_step) == expected


# Runs. A batch at a time is poisoned on its way to the device.


@pytest.fixture
def poison(monkeypatch):
    """Poisons the n-th batches that the process trains on, counted from 1."""

    def poison(*which):
        original, seen = loop.global_batch, []

        def global_batch(mesh, batch, size):
            training = sys._getframe(1).f_code.co_name == "training"
            if training:
                seen.append(batch["tokens"])
            if training and len(seen) in which:
                batch = batch | {"tokens": np.full_like(batch["tokens"], OUT_OF_RANGE)}
            return original(mesh, batch, size)

        monkeypatch.setattr(loop, "global_batch", global_batch)
        return seen

    return poison


QUIET = {"eval_every_steps": 1000, "checkpoint_every_steps": 2, "sample_tokens": 0, "num_steps": 8}


def log(workdir):
    return Log(workdir).entries


def test_skip_keeps_a_bundle_once_and_goes_on(tmp_path, poison, capsys):
    poison(4, 6)
    assert main(flags(tmp_path, policy="mixed_bfloat16", **QUIET)) == 0
    assert [(e["kind"], e["step"], e["action"]) for e in log(tmp_path)] == [("nan", 4, "skip")]
    assert "incident at step 4: the loss, without a loss scale, is nan" in capsys.readouterr().err
    bundle = tmp_path / "incidents/step-000004"
    with np.load(bundle / "batch-0.npz") as batch:
        assert set(batch["tokens"].ravel()) == {OUT_OF_RANGE}
        assert batch["labels"].shape == (4, 32) and batch["labels"].dtype == np.int32
    about = json.loads((bundle / "incident.json").read_text())
    assert about["versions"]["jax"] == jax.__version__ and about["checkpoint"] >= 4
    assert metrics(bundle)[-1]["step"] == 4
    assert load(bundle).step == about["checkpoint"]
    assert metrics(tmp_path)[-1]["amp/skipped_steps"] == 2


def test_stop_saves_and_says_where_to_look(tmp_path, poison, capsys):
    poison(5)
    assert main(flags(tmp_path, on_incident="stop", **QUIET)) == 1
    error = capsys.readouterr().err
    for part in ("train.diagnose", "incidents/step-000005", "blocks/attention/key/kernel"):
        assert part in error
    assert int(final_state(tmp_path)[0].step) in (5, 6)


def test_rollback_goes_on_with_other_data_from_before(tmp_path, poison, capsys):
    """Steps 1 to 5 with batch 5 bad, back to 4, and then from batch 7 on: 6 was on its way."""
    seen = poison(5)
    assert main(flags(tmp_path / "a", on_incident="rollback", **QUIET)) == 0
    entry = log(tmp_path / "a")[0]
    assert (entry["action"], entry["step"], entry["to_step"]) == ("rollback", 5, 4)
    assert "going on from step 4" in capsys.readouterr().out
    rows = metrics(tmp_path / "a")
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert np.isfinite([row["train/loss"] for row in rows]).all()
    assert rows[-1]["amp/skipped_steps"] == 0
    # The same by hand: a run of four steps whose data then go on with the seventh batch.
    config = load(tmp_path / "a").config
    batches = train_batches(load_corpus(config.data), config.batch_size, config.seed)
    for tokens in seen:
        np.testing.assert_array_equal(tokens, next(batches)["tokens"])
    assert len(seen) == 10


def test_fallback_policy_is_in_force_after_a_resume_too(tmp_path, poison, capsys):
    poison(5)
    given = {"policy": "mixed_bfloat16", "on_incident": "rollback", "fallback_policy": "float32"}
    assert main(flags(tmp_path, **given, **QUIET)) == 0
    assert "precision changed from" in capsys.readouterr().out
    more = QUIET | {"num_steps": 10}
    assert main(flags(tmp_path, "--resume", **given, **more)) == 0
    out = capsys.readouterr().out
    assert "compute=f32,output=f32 since the incident at step 5" in out
    assert "compute=f32" in load(tmp_path).config.policy


def test_rollbacks_are_bounded_over_restarts(tmp_path, poison, capsys):
    poison(5, 8, 11)
    given = {"on_incident": "rollback", "max_rollbacks": 2} | QUIET
    assert main(flags(tmp_path, **given)) == 1
    assert [e["action"] for e in log(tmp_path)] == ["rollback", "rollback", "stop"]
    assert "--max-rollbacks 2 are used up" in capsys.readouterr().err
    poison(2)
    assert main(flags(tmp_path, "--resume", **given | {"num_steps": 20})) == 1
    assert [e["action"] for e in log(tmp_path)][3:] == ["stop"]


def test_without_a_good_checkpoint_there_is_no_way_back(tmp_path, poison, capsys):
    poison(1)
    assert main(flags(tmp_path, on_incident="rollback", **QUIET)) == 1
    assert "there is no checkpoint from before" in capsys.readouterr().err


def test_a_death_after_a_rollback_does_not_meet_the_same_data_again(tmp_path, poison, monkeypatch):
    """The process dies before it saves anew; the resumed run ends as one that lived on."""
    poison(5)
    assert main(flags(tmp_path / "lives", on_incident="rollback", **QUIET)) == 0
    monkeypatch.undo()
    poison(5)
    monkeypatch.setattr(loop, "prepare", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(flags(tmp_path / "dies", on_incident="rollback", **QUIET)) == 130
    assert checkpoints(tmp_path / "dies") == ["2", "4"]
    monkeypatch.undo()
    assert main(flags(tmp_path / "dies", "--resume", on_incident="rollback", **QUIET)) == 0
    assert_same_run(tmp_path / "lives", tmp_path / "dies")


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="is for on_incident rollback"):
        Config(fallback_policy="float32")
    with pytest.raises(ValueError, match="needs keep_checkpoints 2 or more, not 1"):
        Config(on_incident="rollback", keep_checkpoints=1)
    with pytest.raises(ValueError, match="fp7"):
        Config(on_incident="rollback", fallback_policy="compute=fp7")


def test_a_bundle_cut_short_is_not_there(tmp_path, poison):
    """What a kill left of one is overwritten."""
    (tmp_path / "incidents/.step-000004").mkdir(parents=True)
    (tmp_path / "incidents/.step-000004/junk").touch()
    poison(4)
    assert main(flags(tmp_path, "--resume", **QUIET)) == 0
    names = sorted(path.name for path in (tmp_path / "incidents").iterdir())
    assert names == ["log.jsonl", "step-000004"]
    assert not (tmp_path / "incidents/step-000004/junk").exists()


def test_a_run_that_ends_with_nan_went_bad(tmp_path, capsys):
    """The second update throws the weights so far that float16 overflows in the forward pass."""
    settings = {"policy": "mixed_float16", "optimizer__learning_rate": 300}
    assert main(flags(tmp_path, **QUIET | settings)) == 1
    assert (
        "error: the run ends with an eval loss of nan; python -m train" in capsys.readouterr().err
    )


def test_a_bundle_that_cannot_be_written_stops_nothing(tmp_path, poison, monkeypatch, capsys):
    def full(*args):
        raise OSError(28, "No space left on device")

    poison(4)
    monkeypatch.setattr(loop, "write_bundle", full)
    assert main(flags(tmp_path, **QUIET)) == 0
    assert "nothing is kept of it: [Errno 28] No space" in capsys.readouterr().err
    assert log(tmp_path)[0]["bundle"] is None


def test_the_state_of_a_spike_is_no_checkpoint(tmp_path, monkeypatch, capsys):
    def look(self, step, *args):
        return Incident("spike", step, step - 2, "high") if step == 5 else None

    monkeypatch.setattr(loop.Watch, "look", look)
    assert main(flags(tmp_path, on_incident="stop", **QUIET)) == 1
    assert checkpoints(tmp_path) == ["2", "4"]
    assert "its updates were applied" in capsys.readouterr().err


def test_a_fallback_that_cannot_run_is_found_before_the_first_step(tmp_path, capsys):
    more = {"on_incident": "rollback", "fallback_policy": "compute=bf16,full=no/such/scope"}
    assert main(flags(tmp_path / "run", **more, **QUIET)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --fallback-policy") and "no/such/scope" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["garbage", '{"action": "rollback"}', "3", "{}"])
def test_a_damaged_log_is_named(tmp_path, line, capsys):
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents/log.jsonl").write_text(line + "\n")
    assert main(flags(tmp_path, "--resume", **QUIET)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "log.jsonl: damaged" in line


def test_data_go_on_behind_what_was_bad_where_a_checkpoint_is_damaged_too(tmp_path):
    log = Log(tmp_path)
    assert log.data_state(4) is None
    incident = Incident("nan", 9, 9, "")
    for to_step, position in ((4, 6), (8, 11)):
        entry = {"policy_after": "float32", "data_state": position}
        log.add(incident, Response("rollback", to_step), "float32", **entry)
    assert [Log(tmp_path).data_state(step) for step in (4, 8, 10)] == [11, 11, None]


def test_the_newest_bundle_is_found_by_number(tmp_path):
    for name in ("step-000123", "step-000005-2", "step-000123-2", "step-000005"):
        (tmp_path / "incidents" / name).mkdir(parents=True)
        (tmp_path / "incidents" / name / "incident.json").touch()
    assert newest_incident(tmp_path).name == "step-000123-2"


@pytest.mark.slow
def test_the_diagnosis_names_the_cause(tmp_path, poison, with_diagnosis):
    poison(4)
    assert main(flags(tmp_path, policy="mixed_bfloat16", on_incident="stop", **QUIET)) == 1
    text = tmp_path / "incidents/step-000004/diagnosis.txt"
    until = time.monotonic() + 300
    while "cause:" not in text.read_text() and time.monotonic() < until:
        time.sleep(1)
    assert "cause: 128 of the tokens are not in 0 to 256" in text.read_text()
