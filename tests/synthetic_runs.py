"""Run directories as `train.run` and `train.compare` leave them, made up in milliseconds."""

import json
import math

import numpy as np

from train.config import Config
from train.reports.conditions import Comparison
from train.reports.results import results
from train.reports.verdict import verdicts

BATCH_SIZE, SEQ_LEN = 8, 128
SPEED = {"float32": 1.0, "mixed_bfloat16": 1.8, "mixed_float16": 1.7}
HALVES = {"float32": 1.0, "mixed_bfloat16": 0.5, "mixed_float16": 0.5}


def metrics(policy, seed, num_steps=60, *, shift=0.0, eval_every=20, diverges=None):
    """The lines of a run: the same data noise for each policy of a seed, plus `shift` nats.

    From step `diverges` on the losses are NaN.
    """
    data = np.random.default_rng(seed)
    own = np.random.default_rng([seed, sum(map(ord, policy))])
    rows, skipped = [], 0
    for step in range(1, num_steps + 1):
        bad = diverges is not None and step >= diverges
        calibrates = policy == "mixed_float16" and step <= 2
        skipped += bad or calibrates
        curve = 1.8 + 3.7 * math.exp(-4 * step / num_steps)
        norm = math.exp(data.normal(-0.3, 0.25))
        loss = curve + data.normal(0, 0.08) + own.normal(0, 0.004) + shift * step / num_steps
        row = {
            "step": step,
            "train/loss": math.nan if bad else loss,
            "train/grad_norm": math.inf if bad or calibrates else norm,
            "amp/loss_scale": _scale(policy, step, num_steps),
            "amp/skipped_steps": skipped,
        }
        if step % (eval_every or num_steps) != 1:
            seconds = 0.09 / SPEED.get(policy, 1.0) * math.exp(own.normal(0, 0.04))
            row |= {"perf/step_seconds": seconds}
            row |= {"perf/tokens_per_second": BATCH_SIZE * SEQ_LEN / seconds}
        if eval_every and (step % eval_every == 0 or step == num_steps):
            noise = seed * 0.01 + own.normal(0, 0.001)
            row["eval/loss"] = math.nan if bad else curve + 0.06 + noise + shift * step / num_steps
        rows.append(row)
    return rows


def _scale(policy, step, num_steps):
    if policy != "mixed_float16":
        return 1.0
    return 2.0 ** (16 - min(step - 1, 2) + (step > num_steps // 2))


def figures(policy):
    mib, half = 2**20, HALVES.get(policy, 1.0)
    parts = {"params": 3.4, "moments": 6.8, "activations": 120 * half, "other": 9 * half}
    memory = {f"{name}_bytes": int(size * mib) for name, size in parts.items()}
    return {
        "device": "cpu",
        "device_kind": "cpu",
        "versions": {"python": "3.11.7", "jax": "0.10.2", "flax": "0.12.0", "jaxamp": "0.1.0"},
        "commit": "0123abc",
        "command": f"python -m train.run --policy {policy} --seed 0 --config configs/tiny.toml",
        "compile_seconds": 3.5 * half + 1,
        "memory": {"peak_bytes": sum(memory.values()), **memory},
        "flops": 1.6e10,
        "bytes_accessed": 4.1e9 * half,
        "device_peak_bytes": None,
        "largest_batch_size": int(48 / half),
    }


def write(path, policy, seed=0, num_steps=60, rows=None, with_figures=True, settings=(), **how):
    """A run directory; `settings` are those of `Config` that differ from the usual."""
    path.mkdir(parents=True)
    rows = metrics(policy, seed, num_steps, **how) if rows is None else rows
    given = {"policy": policy, "seed": seed, "num_steps": num_steps, "batch_size": BATCH_SIZE}
    config = Config.model_validate(given | dict(settings))
    (path / "config.json").write_text(config.model_dump_json(indent=2))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if with_figures:
        (path / "figures.json").write_text(json.dumps(figures(policy)))
    return path


def with_end(policy, seed, end, num_steps=20):
    """Metrics whose last eval loss is `end`."""
    rows = metrics(policy, seed, num_steps, eval_every=10)
    rows[-1]["eval/loss"] = end
    return rows


def pairs(tmp_path, differences, **how):
    """float32 and bfloat16 runs, a seed for each difference of the last eval losses."""
    for seed, by in enumerate(differences):
        for policy, end in (("float32", 2 + seed / 8), ("mixed_bfloat16", 2 + seed / 8 + by)):
            rows = with_end(policy, seed, end)
            write(tmp_path / f"{policy}-{seed}", policy, seed, 20, rows, **how)
    return sorted(tmp_path.iterdir())


def judged(runs, **how):
    """The verdicts alone; drawing takes seconds."""
    return verdicts(results(Comparison("Runs", runs, **how)), 0.02)
