"""`python -m train.diagnose`: the cause that was planted is named, and none where none was."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from planted import incident, plant, scaled
from small_run import RARELY, flags, metrics

import jaxamp
from train.diagnose import diagnosed, main
from train.enquiry.case import newest_incident, of_config, of_run
from train.enquiry.trial import gradient_fn, training_fn
from train.parse import load_json
from train.run import main as train
from train.step import nonfinite_gradients


def trained(workdir, code=0, **changes):
    assert train(flags(workdir, **changes)) == code
    return workdir


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A float16 run that was cut off: its checkpoint is of step 6, its metrics go on to step 8."""
    settings = {"policy": "compute=f16", "num_steps": 8, "sample_tokens": 0}
    run = trained(tmp_path_factory.mktemp("runs") / "f16", **settings)
    shutil.rmtree(run / "checkpoints/8")
    return run


def case_of(run):
    run = newest_incident(run)
    config = load_json((run / "config.json").read_text(), "config.json")
    return of_run(run, config, jaxamp.get_policy(config.policy))


def found_in(case):
    """By the words that the question asks about."""
    found = diagnosed(case)
    return found.verdict, {one.question: one for one in found.findings}


# What is run is what the trainer runs.


def test_trials_are_the_steps_of_the_run(a_run):
    case = case_of(a_run)
    case = dataclasses.replace(case, following=case.following[:1])
    training = training_fn(case, case.policy)(case)
    written = metrics(a_run)[6:8]
    assert [line["train/loss"] for line in written] == list(training.losses)
    assert [line["train/grad_norm"] for line in written] == list(training.norms)


@pytest.mark.slow
def test_the_dropout_key_is_that_of_the_step(tmp_path):
    run = trained(tmp_path / "run", policy="float32", model__dropout=0.5)
    shutil.rmtree(run / "checkpoints/6")
    case = case_of(run)
    one = gradient_fn(case, case.policy)(case.state.params, case.batch, case.key())
    # float32 sums in another order.
    assert one.loss == pytest.approx(metrics(run)[3]["train/loss"], rel=1e-5)
    assert one.norm == pytest.approx(metrics(run)[3]["train/grad_norm"], rel=1e-4)
    other = gradient_fn(case, case.policy)(case.state.params, case.batch, case.key(1))
    assert abs(other.loss - one.loss) > 1e-3


def test_an_incident_is_read_as_it_was(a_run, tmp_path):
    run = plant(a_run, tmp_path / "run", lambda state: state)
    batch = case_of(run).batch
    shown = {name: array[::-1] for name, array in batch.items()}
    incident(run, shown, parts=2)
    lines = [line | {"amp/loss_scale": 2.0 ** line["step"]} for line in metrics(run)]
    bundle = newest_incident(run)
    (bundle / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    case = case_of(run)
    assert bundle.name == "step-000007" and case.step == 7
    assert "the very batch of step 7: gradients are not finite" in case.source
    np.testing.assert_array_equal(case.batch["tokens"], shown["tokens"])
    assert float(jaxamp.loss_scale(case.state.opt_state).loss_scale) == 2.0**7
    assert case_of(bundle).source == case.source


def test_an_incident_needs_no_data(a_run, tmp_path):
    run = plant(a_run, tmp_path / "run", lambda state: state)
    bundle = incident(run, case_of(run).batch)
    settings = json.loads((bundle / "config.json").read_text())
    settings["data"]["path"] = "nowhere.txt"
    (bundle / "config.json").write_text(json.dumps(settings))
    case = case_of(run)
    assert not case.following
    assert "the data cannot be read here" in case.notes[0] and "nowhere.txt" in case.notes[0]


# Causes that are planted.


def test_a_label_out_of_range_is_named(a_run, tmp_path, capsys):
    run = plant(a_run, tmp_path / "run", lambda state: state)
    batch = {name: array.copy() for name, array in case_of(run).batch.items()}
    batch["labels"][1, 5] = 257
    incident(run, batch)
    out = tmp_path / "found.json"
    assert main([str(run), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "incidents/step-000007" in printed.splitlines()[0]
    assert "cause: 1 of the labels are not in 0 to 256: the first is 257 in row 1" in printed
    assert "without these positions loss and gradients are finite" in printed
    found = json.loads(out.read_text())
    assert [line["status"] for line in found["findings"]] == ["cause", *["not checked"] * 7]


def test_a_weight_that_is_nan_is_named(a_run, tmp_path):
    one_nan = jnp.ones(16).at[3].set(jnp.nan)
    run = plant(a_run, tmp_path / "run", scaled("norm", "scale", by=one_nan))
    before = sorted((run / "checkpoints").rglob("*"))
    found, lines = found_in(case_of(run))
    assert found == lines["Are the weights in order?"]
    assert found.text == "the state before the step is not finite: params/norm/scale"
    assert found.evidence == ("params/norm/scale: 1 numbers",)
    assert sorted((run / "checkpoints").rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "compute=bf16", "compute=f16"])
def test_nothing_is_found_in_a_healthy_run(tmp_path, policy):
    run = trained(tmp_path / "run", policy=policy, num_steps=60, **RARELY)
    found, lines = found_in(case_of(run))
    assert found.status == "ok" and "nothing found" in found.text
    assert {line.status for line in lines.values()} <= {"ok", "not checked"}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "compute=bf16", "compute=f16"])
def test_nothing_is_found_before_the_first_step(tmp_path, policy):
    config = load_json("{}", "").model_copy(update={"policy": policy})
    found, _ = found_in(of_config(config, jaxamp.get_policy(policy)))
    assert found.status == "ok"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "rate"),
    # At 30 the weights grow until float16 overflows.
    [("float32", 0.2), ("compute=bf16", 0.2), ("compute=f16", 0.2), ("compute=f16", 30)],
)
def test_a_learning_rate_too_high_is_blamed_before_precision(tmp_path, policy, rate):
    rates = {"optimizer__learning_rate": rate, "optimizer__warmup_steps": 5}
    code = 1 if rate == 30 else 0  # its last loss is NaN
    run = trained(tmp_path / "run", code, policy=policy, num_steps=60, **rates, **RARELY)
    found, lines = found_in(case_of(run))
    assert found == lines["Is it the learning rate?"]
    assert f"float32 is not stable at {rate} and is at" in found.text
    fault = lines["Is it one operation of the model?"]
    assert fault.status == ("suspect" if rate == 30 else fault.status)
    assert "--optimizer.learning-rate 0.0" in found.advice
    assert lines["Is float32 stable with the same settings?"].status == "suspect"


@pytest.mark.slow
def test_an_overflow_is_blamed_on_its_operation(a_run, tmp_path, capsys):
    # Logits are in the millions then: finite in float32 and bfloat16.
    run = plant(a_run, tmp_path / "run", scaled("embed", "embedding", by=1e7))
    page, data = tmp_path / "page.html", tmp_path / "data.json"
    assert main([str(run), "--bisect", "--report", str(page), "--json", str(data)]) == 0
    found = json.loads(data.read_text())
    assert found["verdict"]["question"] == "Is it one operation of the model?"
    assert found["diagnosis"]["fault"]["scope"] == "head"
    flag = "--policy 'params=f32,compute=f16,output=f32,full=head'"
    assert flag in found["verdict"]["advice"] and "compute=bf16" in found["verdict"]["advice"]
    assert found["bisection"]["patterns"] == ["head"] and found["bisection"]["minimal"]
    printed = capsys.readouterr().out
    assert flag in printed and "checked: with it loss and gradients are finite" in printed
    # The remedy is one: with it the next step of the trainer is finite.
    again = [*flags(run, "--resume", policy=flag[10:-1], num_steps=7)]
    assert train(again) == 0 and np.isfinite(metrics(run)[-1]["train/grad_norm"])
    text = page.read_text()
    assert "https:" not in text and "http:" not in text and "<script" not in text
    assert text.count("<figure") == 2 and "ranges-gradient" in text


@pytest.mark.slow
def test_a_loss_scale_too_high_is_blamed(a_run, tmp_path):
    def change(state):
        scale = jaxamp.loss_scale(state.opt_state)
        scale = dataclasses.replace(scale, loss_scale=jnp.float32(2.0**24))
        return state._replace(opt_state=state.opt_state._replace(loss_scale=scale))

    run = plant(a_run, tmp_path / "run", change)
    lines = [line for line in metrics(run) if line["step"] < 7]  # no scale of the step itself
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    case = case_of(run)
    assert nonfinite_gradients(case.config, case.graphdef, case.policy, case.state, case.batch, 7)
    found, lines = found_in(case)
    assert found == lines["Is it the loss scale?"] and "2^24 overflows" in found.text
    assert lines["Is float32 stable with the same settings?"].status == "ok"
