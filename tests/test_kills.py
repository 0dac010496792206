"""Runs that are stopped again and again end as the run that nobody stopped."""

import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from small_run import assert_same_run, checkpoints, flags, metrics, newest_step
from two_processes import run_two, wait_for_step

# float16 and dropout: with a loss scale that moves and a key, the state is the richest.
SETTINGS = {
    "policy": "mixed_float16",
    "model.dropout": 0.1,
    "z_loss": 100,  # overflows now and then at this learning rate, so the scale moves
    "optimizer.learning_rate": 0.1,
    "num_steps": 300,
    "checkpoint_every_steps": 3,
    "eval_every_steps": 30,
    "sample_tokens": 0,
}
COMMAND = [sys.executable, "-m", "train.run"]


@pytest.fixture
def env(tmp_path):
    """Each start of a run finds what the first one compiled."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | {"JAX_PLATFORMS": "cpu"} | cache | always


@pytest.mark.slow
def test_stopped_20_times_at_random_and_resumed_ends_as_the_unbroken_run(tmp_path, env):
    """Half by SIGTERM, half by SIGKILL, in the middle of saves too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(COMMAND + flags(whole, **SETTINGS), env=env, check=True, capture_output=True)
    rng = np.random.default_rng(0)
    for number in rng.permutation([signal.SIGTERM, signal.SIGKILL] * 10):
        before = newest_step(parts)
        out = run_until(before + int(rng.integers(1, 12)), number, parts, env)
        assert before - 6 <= first_step(out) <= before, out
        assert (number == signal.SIGTERM) == ("stopped by SIGTERM" in out), out
    out = run_until(None, None, parts, env)
    assert "done: step 300" in out
    assert [line["step"] for line in metrics(parts)] == list(range(1, 301))
    assert len({line["amp/loss_scale"] for line in metrics(parts)}) > 1
    assert checkpoints(parts) == checkpoints(whole)
    assert_same_run(whole, parts)


def first_step(out):
    """The step that a run went on from."""
    found = re.search(r"going on from step (\d+)", out)
    return int(found[1]) if found else 0


def run_until(step, number, workdir, env):
    """Goes on with the run and sends it a signal when it has done `step`; what it printed."""
    process = subprocess.Popen(
        COMMAND + flags(workdir, "--resume", **SETTINGS),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if step is not None:
        while newest_step(workdir) < step:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(number)
    out, _ = process.communicate(timeout=120)
    assert "Traceback" not in out, out
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 0), out
    return out


# Each process says what it holds at the end; arrays that are cut are put together first.
TELLING = """
import hashlib, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from train import run

train = run.train

def train_and_tell(*args):
    outcome = train(*args)
    state = multihost_utils.process_allgather(outcome.state, tiled=True)
    held = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))
    print("holds", hashlib.sha256(held).hexdigest())
    return outcome

run.train = train_and_tell
sys.exit(run.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis, killed", [("data", 1), ("fsdp", 0)])
def test_two_processes_hold_the_same_bits_also_after_one_was_killed(tmp_path, env, axis, killed):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    changes = {"num_steps": 150, "checkpoint_every_steps": 10, f"mesh.{axis}": 2}
    settings = SETTINGS | changes | {"program": ("-c", TELLING), "env": env}

    def kill(pair):
        wait_for_step(parts, 50, pair)
        pair[killed].kill()

    held = what_both_hold(run_two(whole, **settings))
    codes, outputs = run_two(parts, then=kill, **settings)
    # The other ends with 3; where it was waiting for a save, JAX may be faster, with an abort.
    assert codes[killed] == -signal.SIGKILL and codes[1 - killed] in (3, -signal.SIGABRT), outputs
    assert what_both_hold(run_two(parts, "--resume", **settings)) == held
    assert checkpoints(parts) == checkpoints(whole)
    assert_same_run(whole, parts)


def what_both_hold(ended):
    """The hash that both processes printed."""
    codes, outputs = ended
    assert codes == [0, 0], outputs
    (held,) = {re.search("^holds .*$", out, re.MULTILINE)[0] for out, _ in outputs}
    return held


@pytest.mark.slow
def test_a_run_that_cannot_save_ends_at_once(tmp_path, env):
    """orbax's threads, which wait ten minutes for what they could not write, do not hold it."""
    folder = tmp_path / "checkpoints"
    more = {"num_steps": 100_000, "checkpoint_every_steps": 50, "sample_tokens": 0}
    process = subprocess.Popen(
        COMMAND + flags(tmp_path, **more), env=env, stderr=subprocess.PIPE, text=True
    )
    while not (folder / "50").exists():
        assert process.poll() is None
        time.sleep(0.02)
    folder.rename(tmp_path / "elsewhere")
    folder.touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: cannot write a checkpoint" in err and "Traceback" not in err
