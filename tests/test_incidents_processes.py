"""An incident of a run of two processes: both decide alike, and one bundle has all of it."""

import numpy as np
import pytest
from small_run import metrics
from two_processes import run_two

from train.checkpoint import load
from train.rollback import Log

# The second update throws the weights so far that float16 overflows in the forward pass.
ASTRAY = {"optimizer__learning_rate": 300, "policy": "mixed_float16", "checkpoint_every_steps": 1}


@pytest.mark.slow
def test_two_processes_go_back_together(tmp_path):
    given = {"on_incident": "rollback", "fallback_policy": "float32", "max_rollbacks": 9}
    codes, outputs = run_two(tmp_path, **ASTRAY, **given)
    assert codes == [0, 0], outputs
    first = Log(tmp_path).entries[0]
    assert (first["kind"], first["action"]) == ("nan", "rollback")
    assert first["to_step"] < first["step"]
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 7))
    assert "compute=f32" in load(tmp_path).config.policy
    bundle = tmp_path / "incidents" / f"step-{first['step']:06d}"
    rows = [np.load(bundle / f"batch-{k}.npz")["tokens"] for k in (0, 1)]
    assert [part.shape for part in rows] == [(2, 32), (2, 32)]
    assert load(bundle).config.policy == "params=f32,compute=f16,output=f32"


@pytest.mark.slow
def test_two_processes_stop_together(tmp_path):
    codes, outputs = run_two(tmp_path, **ASTRAY, on_incident="stop")
    assert codes == [1, 1], outputs
    assert all("error: step" in errors for _, errors in outputs)
    assert [entry["action"] for entry in Log(tmp_path).entries] == ["stop"]


FULL_DISK = """
import sys
import jax, numpy
from train import bundle
from train.run import main

def full(*args, **more):
    if jax.process_index() == {process}:
        raise OSError(28, "No space left on device")

{module}.{name} = full
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_one_that_cannot_write_its_part_holds_up_none(tmp_path):
    """Both stop for the incident, and neither waits for the other's part of the bundle."""
    program = FULL_DISK.format(process=1, module="numpy", name="savez")
    given = {"on_incident": "stop", "program": ("-c", program)}
    codes, outputs = run_two(tmp_path, **ASTRAY, **given)
    assert codes == [1, 1], outputs
    assert "nothing is kept of it: process 1 could not write it" in outputs[0][1]
    assert not list((tmp_path / "incidents").glob("step-*"))
    assert Log(tmp_path).entries[0]["bundle"] is None


@pytest.mark.slow
def test_a_checkpoint_of_an_incident_that_one_cannot_write_ends_both(tmp_path):
    """What orbax does it does together: who is left would wait for ever."""
    program = FULL_DISK.format(process=0, module="bundle", name="Checkpointer")
    codes, outputs = run_two(tmp_path, **ASTRAY, on_incident="skip", program=("-c", program))
    assert 0 not in codes, outputs
