"""The smallest run of the trainer: its flags, what it wrote, and whether two of them are equal."""

import json

import jax
import numpy as np

from train.checkpoint import Checkpointer
from train.parse import load_json

SMALL = {
    "--model.n-layers": "1",
    "--model.d-model": "16",
    "--model.n-heads": "2",
    "--data.seq-len": "32",
    "--batch-size": "4",
    "--num-steps": "6",
    "--eval-every-steps": "3",
    "--eval-batches": "2",
    "--checkpoint-every-steps": "3",
    "--sample-tokens": "5",
}

# Nothing but steps, until the last one.
RARELY = {"eval_every_steps": 1000, "checkpoint_every_steps": 1000, "sample_tokens": 0}


def flags(workdir, *more, **changes):
    """`changes` are flags by name, with _ for -, and __ for a point."""
    settings = SMALL | {
        "--" + name.replace("__", ".").replace("_", "-"): str(value)
        for name, value in changes.items()
    }
    return [*[part for pair in settings.items() for part in pair], "--workdir", str(workdir), *more]


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def newest_step(workdir):
    """The last step in `metrics.jsonl`, 0 where there is none; a kill may have cut its line."""
    path = workdir / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return json.loads(whole[-1])["step"] if whole else 0


def checkpoints(workdir):
    """The names in `checkpoints/`: the steps, and whatever else is there."""
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def final_state(workdir):
    """The newest checkpoint of a run: state and position in the data."""
    config = load_json((workdir / "config.json").read_text(), "config.json")
    checkpointer = Checkpointer(workdir, 9)
    meta, state = checkpointer._read(checkpointer.latest_step)
    checkpointer.close()
    assert config.policy in meta["config"]
    return state, meta["data_state"]


def assert_same_run(a, b):
    """Parameters, moments, scale, counters, key, data position and logged numbers, bit for bit."""
    (state_a, data_a), (state_b, data_b) = final_state(a), final_state(b)
    assert data_a == data_b
    for x, y in zip(jax.tree.leaves(state_a), jax.tree.leaves(state_b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
    timeless = lambda line: {k: v for k, v in line.items() if not k.startswith("perf/")}  # noqa: E731
    assert [*map(timeless, metrics(a))] == [*map(timeless, metrics(b))]
