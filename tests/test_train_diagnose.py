"""`python -m train.diagnose`: the cause that was planted is named, and none where none was."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planted import incident, plant, scaled
from small_run import RARELY, flags, metrics

import jaxamp
from train.diagnose import diagnosed, main
from train.enquiry import any_precision, sixteen_bits
from train.enquiry.case import newest_incident, of_config, of_run
from train.enquiry.evidence import Evidence, Trained
from train.enquiry.finding import Finding, not_checked, ok
from train.enquiry.questions import verdict
from train.enquiry.trial import Gradient, Training, gradient_fn, training_fn
from train.parse import load_json
from train.run import main as train
from train.step import nonfinite_gradients


def trained(workdir, **changes):
    assert train(flags(workdir, **changes)) == 0
    return workdir


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A float16 run that was cut off: its checkpoint is of step 6, its metrics go on to step 8."""
    run = trained(tmp_path_factory.mktemp("runs") / "f16", policy="compute=f16", num_steps=8)
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
    gradient = gradient_fn(case, case.policy)(case.state.params, case.batch, case.key())
    # Another program: float32 sums in another order, of 10 matmuls in float16 (eps 2^-11).
    assert gradient.loss == pytest.approx(training.losses[0], rel=1e-3)
    assert gradient.norm == pytest.approx(training.norms[0], rel=1e-2)


@pytest.mark.slow
def test_the_dropout_key_is_that_of_the_step(tmp_path):
    run = trained(tmp_path / "run", policy="float32", model__dropout=0.5)
    shutil.rmtree(run / "checkpoints/6")
    case = case_of(run)
    one = gradient_fn(case, case.policy)(case.state.params, case.batch, case.key())
    # float32 sums in another order.
    assert one.loss == pytest.approx(metrics(run)[3]["train/loss"], rel=1e-5)
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


# The lines, on made-up evidence.

CASE = SimpleNamespace(
    batch={"tokens": np.arange(40).reshape(4, 10), "labels": np.arange(1, 41).reshape(4, 10)},
    vocab_size=50,
    state=SimpleNamespace(params=None),
    key=lambda: None,
)
FINITE, BAD = Gradient(1.0, 1.0, None), Gradient(np.nan, np.nan, None)


def evidence_of(**changes):
    one = {"still": np.ones(5), "float32_fn": lambda *_: FINITE} | changes
    return SimpleNamespace(**one)


@pytest.mark.parametrize("name", ["tokens", "labels"])
@pytest.mark.parametrize("value", [50, -1, 2**31 - 1])
def test_ids_out_of_range_are_found(name, value):
    batch = {key: array.copy() for key, array in CASE.batch.items()}
    batch[name][2, 3] = value
    case = SimpleNamespace(**(vars(CASE) | {"batch": batch}))
    seen = []
    found = any_precision.data(case, evidence_of(float32_fn=lambda *a: seen.append(a[1]) or FINITE))
    assert found.status == "cause" and f"{value} in row 2, position 3" in found.text
    assert seen[0]["labels"][2, 3] == -100 and np.count_nonzero(seen[0]["labels"] == -100) == 1
    # If leaving them out does not help, something else is wrong too.
    found = any_precision.data(case, evidence_of(float32_fn=lambda *_: BAD))
    assert found.status == "suspect"


def test_data_in_order_and_not():
    assert any_precision.data(CASE, evidence_of()).status == "ok"
    empty = SimpleNamespace(
        **(vars(CASE) | {"batch": CASE.batch | {"labels": np.full((4, 10), -100)}})
    )
    assert any_precision.data(empty, evidence_of()).status == "cause"
    same = {name: np.repeat(array[:1], 4, 0) for name, array in CASE.batch.items()}
    repeated = SimpleNamespace(**(vars(CASE) | {"batch": same}))
    assert "the same" in any_precision.data(repeated, evidence_of()).text
    unlike = any_precision.data(CASE, evidence_of(still=np.array([4.0, 1.9, 2.0, 2.1, 2.0])))
    assert unlike.status == "suspect" and "far above" in unlike.text


def ran(*losses, still=None, skipped=0):
    losses = np.array(losses, float)
    still = np.ones(len(losses)) if still is None else np.array(still, float)
    return Trained(Training(losses, losses, skipped, 1.0), still)


def test_rise_is_over_batches_made_equal():
    # A hard batch is no rise; a loss that leaves its least behind is.
    assert ran(2, 5, 2, still=[2, 5, 2]).rise == 0
    assert ran(5, 3, 4, 3.5, still=[5, 5, 5, 5]).rise == 1
    assert ran(2, np.nan).rise == np.inf
    assert ran(1, 1).stable and not ran(1, 2).stable and not ran(1, 1, skipped=1).stable
    # Of a large loss a rise of half a nat is nothing.
    assert ran(1000, 1050, still=[1000, 1000]).stable


def test_stable_rate_is_the_largest_that_is_stable():
    evidence = Evidence(SimpleNamespace(policy=jaxamp.get_policy("float32")))
    rises = {(False, 1.0): 0, (True, 1.0): 5, (True, 0.1): 3, (True, 0.01): 0}
    asked = []

    def trained(anew, rate=1.0):
        asked.append((anew, rate))
        return ran(1, 1 + rises[anew, rate])

    evidence.trained = trained
    assert evidence.stable_rate == (True, 0.01)
    assert (False, 0.1) not in asked  # from here it was stable as it is
    rises |= {(True, rate): 4 for rate in (0.01, 1e-3, 1e-4, 1e-5)}
    again = Evidence(evidence.case)
    again.trained = trained
    assert again.stable_rate is None and list(again.unstable) == [True]


def test_update_ratios_are_by_module():
    params = {"blocks": {"norm": {"scale": jnp.ones(4)}}, "embed": {"a": jnp.full(9, 2.0)}}
    params["blocks"]["zero"] = {"bias": jnp.zeros(4)}
    updates = jax.tree.map(lambda x: jnp.full_like(x, 0.5), params)
    assert any_precision.update_ratios(params, updates) == {"blocks/norm": 0.5, "embed": 0.25}


def test_the_first_cause_is_the_verdict():
    suspect, cause = Finding("suspect", "b"), Finding("cause", "c")
    lines = [ok("a"), suspect, not_checked("-"), cause, cause._replace(text="d")]
    assert verdict(lines) == cause
    assert verdict(lines[:3]) == suspect
    assert verdict(lines[:1]) is None


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ("full=head", "compute=f16,output=f32,full=blocks|head'"),
        ("rules=exp:full", "compute=f16,output=f32,full=blocks,rules=exp:full'"),
        ("compute=f32", "compute=f32,output=f32'"),
    ],
)
def test_remedies_can_be_pasted(setting, flag):
    policy = jaxamp.get_policy("compute=f16,full=blocks")
    shown = sixteen_bits.policy_flag(policy, setting)
    assert shown == f"--policy 'params=f32,{flag}"
    jaxamp.get_policy(shown.removeprefix("--policy '").rstrip("'"))


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
    run = plant(a_run, tmp_path / "run", scaled("norm", "scale", by=jnp.nan))
    before = sorted((run / "checkpoints").rglob("*"))
    found, lines = found_in(case_of(run))
    assert found == lines["Are the weights in order?"]
    assert found.text == "the state before the step is not finite: params/norm/scale"
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
    run = trained(tmp_path / "run", policy=policy, num_steps=60, **rates, **RARELY)
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
