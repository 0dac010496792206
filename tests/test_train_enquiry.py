"""The lines of the enquiry, each on made-up evidence."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxamp
from train.enquiry import any_precision, sixteen_bits
from train.enquiry.evidence import Evidence, Trained
from train.enquiry.finding import Finding, not_checked, ok
from train.enquiry.questions import verdict
from train.enquiry.trial import Gradient, Training

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
    assert ran(1, 1.4).stable and not ran(1, 2).stable and not ran(1, 1, skipped=1).stable
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


# The lines about 16 bits.

F16 = SimpleNamespace(
    policy=jaxamp.get_policy("compute=f16"),
    recorded=lambda name: None,
    series={},
    state=SimpleNamespace(opt_state=None),
)


def in_16_bits(losses, losses32=(2.0,) * 20, norm=1.0, **changes):
    exact = ran(*losses32, still=losses32)
    training = Training(np.array(losses, float), np.full(20, norm), 0, 1.0)
    one = {
        "has_16_bits": True,
        "gradient": FINITE,
        "gradient32": FINITE,
        "training16": training,
        "trained": lambda anew: exact,
        "unstable": {},
    }
    return SimpleNamespace(**(one | changes))


def test_16_bits_that_go_another_way_are_to_blame():
    same, apart = [2.0] * 20, [2.0] * 15 + [2.3] * 5
    assert sixteen_bits.only_16_bits(F16, in_16_bits(same)).status == "ok"
    found = sixteen_bits.only_16_bits(F16, in_16_bits(apart))
    assert found.status == "cause" and "float16 goes another way" in found.text
    assert sixteen_bits.only_16_bits(F16, in_16_bits([np.nan] * 20)).status == "cause"
    # Where float32 is unstable too, the two differ by chance.
    assert sixteen_bits.only_16_bits(F16, in_16_bits(apart, unstable={True: None})).status == "ok"
    none = SimpleNamespace(has_16_bits=False)
    assert sixteen_bits.only_16_bits(F16, none).status == "not checked"


def test_a_step_that_does_not_fail_again_is_said():
    case = SimpleNamespace(**(vars(F16) | {"recorded": lambda name: np.inf}))
    found = sixteen_bits.only_16_bits(case, in_16_bits([2.0] * 20))
    assert found.status == "suspect" and "does not fail again" in found.text


@pytest.mark.parametrize(
    ("other", "words"),
    [(FINITE, "the range of float16 ends at 65504"), (BAD, "both formats fail")],
)
def test_range_is_told_from_precision_by_the_other_format(other, words):
    fault = SimpleNamespace(diagnosis=SimpleNamespace(fault=None), other=("bfloat16", other))
    evidence = in_16_bits([], gradient=BAD, **vars(fault))
    found = sixteen_bits.only_16_bits(F16, evidence)
    assert found.status == "suspect" and words in found.text


def test_the_clip_must_see_unscaled_gradients():
    scale = jaxamp.get_loss_scale("compute=f16")
    state = jaxamp.apply_if_finite(optax.sgd(1.0), loss_scale=scale).init(jnp.ones(2))
    case = SimpleNamespace(**(vars(F16) | {"state": SimpleNamespace(opt_state=state)}))
    assert sixteen_bits.order(case, in_16_bits([2.0] * 20)).status == "ok"
    scaled = in_16_bits([2.0] * 20, norm=32768.0)
    assert sixteen_bits.order(case, scaled).status == "suspect"
    assert sixteen_bits.order(case, in_16_bits([], gradient=BAD)).status == "not checked"


def test_where_float32_fails_the_verdict_names_the_line():
    fault = SimpleNamespace(kind="overflow", primitive="mul", where="model.py:7:3 (f)")
    made = {"gradient32": BAD, "trained": lambda anew: None, "stable_rate": None, "unstable": False}
    found = any_precision.float32(CASE, evidence_of(**made, diagnosis=SimpleNamespace(fault=fault)))
    assert found.status == "cause" and found.text.endswith("overflow, made by mul")
    assert "model.py:7:3 (f)" in found.advice
    nothing = evidence_of(**made, diagnosis=SimpleNamespace(fault=None))
    assert "the data and the loss" in any_precision.float32(CASE, nothing).advice
