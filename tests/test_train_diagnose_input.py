"""Bad input to `python -m train.diagnose`: one line that says what to do, and nothing is lost."""

import json
import shutil

import pytest
from planted import incident, plant
from small_run import flags

import jaxamp
from train.checkpoint import Checkpointer
from train.data import load, train_batches
from train.diagnose import main
from train.enquiry.case import of_run, one_device
from train.parse import load_json, parse
from train.start import fresh_state
from train.workdir import write_config


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """What a run would have left after no step at all."""
    run = tmp_path_factory.mktemp("runs") / "run"
    config = parse(flags(run, policy="params=f32,compute=f16"), "test", "")
    policy = jaxamp.get_policy(config.policy)
    corpus = load(config.data)
    state = fresh_state(config, corpus, policy, one_device())
    position = train_batches(corpus, config.batch_size, config.seed).get_state()
    checkpointer = Checkpointer(run, 1)
    checkpointer.save(state, config, corpus.vocab_size, position, corpus.fingerprint, None)
    checkpointer.wait()
    checkpointer.close()
    write_config(config, run)
    (run / "metrics.jsonl").touch()
    return run


@pytest.fixture
def copied(a_run, tmp_path):
    return plant(a_run, tmp_path / "run", lambda state: state)


def edit(path, *keys, value):
    settings = json.loads(path.read_text())
    inner = settings
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    path.write_text(json.dumps(settings))


def bundle_of(run):
    config = load_json((run / "config.json").read_text(), "config.json")
    return incident(run, of_run(run, config, jaxamp.get_policy(config.policy)).batch)


def refused(capsys, *args):
    capsys.readouterr()
    assert main([str(arg) for arg in args]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err


def test_arguments_that_do_not_go_together(a_run, tmp_path, capsys):
    taken = tmp_path / "taken.html"
    taken.write_text("mine")
    cases = [
        ([a_run, "--config", "configs/tiny.toml"], "or --config, not both"),
        ([tmp_path / "nowhere"], "no such run; give a directory that train.run wrote"),
        ([taken], "no such run"),
        ([tmp_path], "no config.json, so it is no run of train.run"),
        (["--workdir", a_run], "give the run as the first argument"),
        ([a_run, "--report", taken], "taken.html: is there already; name another file"),
        ([a_run, "--json", taken], "taken.html: is there already"),
        ([a_run, "--report", "a", "--json", "a"], "is the file of --report"),
        ([a_run, "--report"], "expected one argument"),
        ([a_run, "--bisct"], "Unrecognized options: --bisct; did you mean --bisect?"),
        ([a_run, "--target-error", "0.1"], "no effect without --bisect"),
        ([a_run, "--bisect", "--target-error", "-1"], "must be above 0"),
        ([a_run, "--bisect", "--target-error", "nan"], "must be above 0"),
        ([a_run, "--policy", "compute=bf61"], "did you mean 'bf16'?"),
        ([a_run, "--policy", "float32", "--bisect"], "output=f32 has no 16 bits"),
    ]
    for args, message in cases:
        assert message in refused(capsys, *args), args
    assert taken.read_text() == "mine"


def test_a_policy_that_cannot_be_met(a_run, capsys):
    message = refused(capsys, a_run, "--policy", "compute=bf16,full=haed")
    assert "'haed' matches no parameter and no scope" in message


def test_no_checkpoint(copied, capsys):
    shutil.rmtree(copied / "checkpoints")
    assert "no checkpoints there" in refused(capsys, copied)
    (copied / "checkpoints").mkdir()
    assert "no whole checkpoint" in refused(capsys, copied)


def test_a_checkpoint_of_another_model(copied, capsys):
    edit(copied / "config.json", "model", "d_model", value=32)
    assert "model.d_model was 16 and is 32" in refused(capsys, copied)


def test_settings_that_are_none(copied, capsys):
    edit(copied / "config.json", "num_stops", value=3)
    assert "did you mean 'num_steps'?" in refused(capsys, copied)
    (copied / "config.json").write_text("{")
    assert "config.json" in refused(capsys, copied)


def test_a_damaged_batch(copied, capsys):
    bundle = bundle_of(copied)
    file = bundle / "batch-0.npz"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert "batch-0.npz: damaged" in refused(capsys, copied)
    position = whole.index(b"PK", 10) // 2  # within the first array
    file.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    assert "batch-0.npz: damaged" in refused(capsys, bundle)
    file.unlink()
    assert "no batch-0.npz there" in refused(capsys, bundle)


def test_a_damaged_incident(copied, capsys):
    bundle = bundle_of(copied)
    (bundle / "incident.json").write_text('{"step": "x"}')
    assert "incident.json: damaged, it names no step" in refused(capsys, copied)
    (bundle / "incident.json").write_text("[")
    assert "incident.json: damaged" in refused(capsys, copied)


def test_metrics_that_are_none(copied, capsys):
    (copied / "metrics.jsonl").write_text("[\n[\n")
    assert "line 1 is not JSON" in refused(capsys, copied)
