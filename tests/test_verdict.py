"""Verdict: its statistics are those of the books, its words no more than they carry."""

import json
import math

import numpy as np
import pytest
from scipy import stats
from synthetic_runs import judged, metrics, pairs, write

from train.reports.conditions import Comparison
from train.reports.paired import outcome, t_interval
from train.reports.results import results
from train.reports.runs import ReportError
from train.reports.tables import notes


def test_interval_is_students():
    values = [0.013, -0.004, 0.021, 0.007]
    found = t_interval(values)
    sem = stats.sem(values)
    np.testing.assert_allclose(found[1:3], stats.t.interval(0.95, 3, np.mean(values), sem))
    # By hand: mean 2, s 1, n 3, t(0.975; 2) = 4.30265
    mean, low, high, count = t_interval([1.0, 2.0, 3.0])
    assert (mean, count) == (2, 3)
    assert high - 2 == pytest.approx(4.30265 / math.sqrt(3), rel=1e-6)
    assert 2 - low == pytest.approx(high - 2)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_interval_covers_the_truth_as_often_as_it_says(count):
    trials = 4000
    draws = np.random.default_rng(count).normal(0.3, 2.0, (trials, count))
    found = [t_interval(list(draw)) for draw in draws]
    covered = sum(low <= 0.3 <= high for _, low, high, _ in found)
    # Binomial: four standard deviations.
    assert abs(covered / trials - 0.95) < 4 * math.sqrt(0.95 * 0.05 / trials)


@pytest.mark.parametrize(
    "low, high, expected",
    [
        (-0.01, 0.02, "within"),
        (0.005, 0.015, "within"),
        (0.03, 0.05, "beyond"),
        (-0.05, -0.021, "beyond"),
        (0.01, 0.03, "undecided"),
        (-0.03, 0.0, "undecided"),
        (-1, 1, "undecided"),
        (None, None, "undecided"),
    ],
)
def test_outcome(low, high, expected):
    interval = t_interval([0.0])._replace(low=low, high=high)
    assert outcome(interval, 0.02) == expected


@pytest.mark.parametrize(
    "differences, expected, words",
    [
        ([-0.001, 0.002, 0.0], "within", "matches float32 within 0.02 nats: no difference in"),
        ([0.010, 0.011, 0.012], "within", "eval loss higher by 0.0110 (95 % interval 0.0085 to"),
        ([0.1, 0.11, 0.12], "beyond", "is beyond 0.02 nats of float32: eval loss higher by 0.1100"),
        ([-0.1, -0.11, -0.12], "beyond", "eval loss lower by 0.1100"),
        ([-0.1, 0.1, 0.02], "undecided", "more seeds needed: no difference in eval loss seen"),
        ([0.015, 0.02, 0.025], "undecided", "more seeds needed: eval loss higher by 0.0200"),
        ([0.001], "undecided", "one seed gives no interval; eval loss differs by 0.0010"),
    ],
)
def test_verdict_says_what_the_differences_carry(tmp_path, differences, expected, words):
    (verdict,) = judged(pairs(tmp_path / "runs", differences))
    assert verdict.outcome == expected
    assert words in verdict.sentence
    assert ("no difference in eval" in verdict.sentence) == (words.count("no difference") > 0)


@pytest.mark.parametrize(
    "ratios, words",
    [
        ([1.8, 1.81], "1.80 times the speed on cpu (1.80 to 1.81, 2 seeds)"),
        ([1.1, 1.3], "no difference in speed seen on cpu (1.20 times, 1.10 to 1.30, 2 seeds)"),
        ([0.9, 1.1, 1.3], "no difference in speed seen on cpu (1.10 times, 0.90 to 1.30, 3 seeds)"),
        ([1.2], "1.20 times the speed on cpu (one seed)"),
    ],
)
def test_speed_is_claimed_where_seeds_agree(tmp_path, ratios, words):
    runs = []
    for seed, ratio in enumerate(ratios):
        for policy, seconds in (("float32", 0.1), ("mixed_bfloat16", 0.1 / ratio)):
            rows = [row | {"perf/step_seconds": seconds} for row in metrics(policy, seed, 20)]
            runs.append(write(tmp_path / f"{policy}-{seed}", policy, seed, 20, rows))
    (verdict,) = judged(runs)
    assert words in verdict.sentence


def test_skips_after_the_first_update_are_no_calibration(tmp_path):
    rows = metrics("mixed_float16", 0, 20)
    for row in rows[9:]:
        row["amp/skipped_steps"] += 1
    path = write(tmp_path / "run", "mixed_float16", 0, 20, rows)
    stability = results(Comparison("", [path])).base.stability
    assert (stability.skipped_steps, stability.skipped_at_start) == (3, 2)


def test_a_run_that_broke_off_at_bad_gradients_is_no_match(tmp_path):
    rows = metrics("mixed_bfloat16", 0)[:50]
    for row in rows[44:]:
        row["train/grad_norm"] = math.nan
    runs = [
        write(tmp_path / "base", "float32"),
        write(tmp_path / "run", "mixed_bfloat16", rows=rows),
    ]
    (verdict,) = judged(runs)
    assert verdict.outcome == "diverged"
    assert "train/grad_norm from step 45 on); stopped at step 50 of 60" in verdict.sentence


def test_nothing_is_compared_with_a_diverged_base(tmp_path):
    runs = [
        write(tmp_path / "base", "float32", diverges=50),
        write(tmp_path / "run", "mixed_bfloat16"),
    ]
    base, other = judged(runs)
    assert (base.outcome, other.outcome) == ("diverged", "not compared")


def test_half_finished_runs_are_compared_at_a_step_that_all_have(tmp_path):
    runs = pairs(tmp_path / "runs", [0.001, 0.001])
    whole = (runs[0] / "metrics.jsonl").read_text().splitlines(keepends=True)
    (runs[0] / "metrics.jsonl").write_text("".join(whole[:14]) + whole[14][:20])
    (verdict,) = judged(runs)
    assert "; this is at step 10 of 20;" in verdict.sentence
    base, other = results(Comparison("", runs)).policies
    assert other.difference is not None and other.difference.step == 10
    at_ten = [one.group.runs[0].series["eval/loss"].values[0] for one in (other, base)]
    assert other.difference.by_seed[0] == pytest.approx(at_ten[0] - at_ten[1])
    assert base.stability.unfinished == {0: 14}


def test_seeds_are_compared_with_themselves_only(tmp_path):
    runs = [write(tmp_path / "a", "float32", 0), write(tmp_path / "b", "mixed_bfloat16", 1)]
    (verdict,) = judged(runs)
    assert verdict.outcome == "not compared"
    assert "no seed in common" in verdict.sentence
    assert "Seeds without a pair" in notes(results(Comparison("", runs)))[0]


def test_one_policy_alone_is_reported_without_a_claim(tmp_path):
    (verdict,) = judged([write(tmp_path / "a", "mixed_bfloat16")])
    assert verdict.outcome == "base"
    assert "mixed_bfloat16 is alone" in verdict.sentence


def test_unequal_lengths_devices_and_doubles_are_refused(tmp_path):
    one = write(tmp_path / "one", "float32")
    longer = write(tmp_path / "longer", "mixed_bfloat16", num_steps=80)
    with pytest.raises(ReportError, match="num_steps 60"):
        judged([one, longer])
    with pytest.raises(ReportError, match="two runs of float32 with seed 0"):
        judged([one, one])
    other = write(tmp_path / "other", "mixed_bfloat16")
    figures = json.loads((other / "figures.json").read_text()) | {"device_kind": "H200"}
    (other / "figures.json").write_text(json.dumps(figures))
    with pytest.raises(ReportError, match="device_kind cpu"):
        judged([one, other])
