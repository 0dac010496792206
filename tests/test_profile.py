"""`--profile-steps`: what is in the trace, which steps, and what a run does about it."""

import gzip
import json
import re

import jax
import jax.numpy as jnp
import pytest
from small_run import RARELY, flags

from train.config import Config, ConfigError
from train.parse import parse
from train.profile import Profiler
from train.run import main

SCOPES = ("embed", "blocks", "attention", "feed_forward", "head")


def trace_events(workdir):
    """The events that Perfetto shows, of the one trace there is."""
    (path,) = (workdir / "profile").glob("plugins/profile/*/*.trace.json.gz")
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def traced_steps(workdir):
    """The numbers of the steps in the trace; jaxlib 0.12 dies of reading its own xplane.pb."""
    named = [event for event in trace_events(workdir) if event.get("name") == "train"]
    return sorted(int(event["args"]["step_num"]) for event in named)


def train_tiny(workdir, window, *more):
    return main(flags(workdir, *more, profile_steps=window, **RARELY))


@pytest.mark.slow
def test_a_run_leaves_a_trace_with_its_steps_and_scopes(tmp_path):
    assert train_tiny(tmp_path, "3:5") == 0
    assert traced_steps(tmp_path) == [3, 4]
    events = trace_events(tmp_path)
    assert {e["args"]["step_num"] for e in events if e.get("name") == "train"} == {"3", "4"}
    # XProf takes the scopes from the program that the trace carries.
    (path,) = (tmp_path / "profile").glob("plugins/profile/*/*.xplane.pb")
    names = set(re.findall(rb"jit\(train_step\)/([\w/().]+)", path.read_bytes()))
    # For Perfetto: each op of the trace is in the text of the program, with its scope.
    program = (tmp_path / "profile" / "train_step.hlo.txt").read_text()
    for scope in SCOPES:
        assert any(scope in name.decode() for name in names), scope
        assert re.search(rf'op_name="[^"]*\b{scope}\b', program), scope
    ops = {e["args"]["hlo_op"] for e in events if "hlo_op" in e.get("args", {})}
    assert ops and all(f"{op} = " in program for op in ops)


def double(state, batch):
    return state * 2 + batch


@pytest.fixture
def profiler(tmp_path):
    return lambda start, stop: Profiler(range(start, stop), tmp_path, lambda: None)


def run_steps(profiler, first, last):
    step_fn, state = jax.jit(double), jnp.ones(3)
    for step in range(first, last + 1):
        state = profiler.run(step, step_fn, state, state)
    profiler.close(state)
    return state


def test_a_window_longer_than_the_run_ends_with_it(tmp_path, profiler):
    run_steps(profiler(2, 100), 1, 4)
    assert traced_steps(tmp_path) == [2, 3, 4]


def test_a_run_that_goes_on_inside_the_window_traces_the_rest(tmp_path, profiler):
    run_steps(profiler(2, 7), 5, 9)
    assert traced_steps(tmp_path) == [5, 6]


def test_without_a_window_nothing_is_written_and_nothing_changes(tmp_path, profiler):
    plain, traced = run_steps(profiler(0, 0), 1, 4), run_steps(profiler(2, 4), 1, 4)
    assert jnp.array_equal(plain, traced)
    run_steps(profiler(20, 30), 1, 4)
    assert len(list((tmp_path / "profile").glob("plugins/profile/*"))) == 1


def test_the_program_is_compiled_once(tmp_path, profiler):
    traces = []

    def counted(state, batch):
        traces.append(1)
        return double(state, batch)

    step_fn, state = jax.jit(counted), jnp.ones(3)
    tracer = profiler(2, 3)
    for step in range(1, 4):
        state = tracer.run(step, step_fn, state, state)
    tracer.close(state)
    assert len(traces) == 1


def test_a_trace_that_cannot_be_written_does_not_stop_the_run(
    tmp_path, profiler, monkeypatch, capsys
):
    real = jax.profiler.stop_trace

    def full_disk():
        real()
        raise RuntimeError("RESOURCE_EXHAUSTED: no space left on device\nand more")

    monkeypatch.setattr(jax.profiler, "stop_trace", full_disk)
    assert jnp.array_equal(run_steps(profiler(1, 3), 1, 4), jnp.full(3, 81.0))
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "warning" in warned and "no space left" in warned


@pytest.mark.parametrize("given", ["5", "0:3", "3:3", "5:2", "a:b", "1:2:3", "-1:4", "", "1:٣"])
def test_a_window_that_cannot_be_is_one_line(given):
    with pytest.raises(ConfigError, match="START:STOP") as error:
        parse([f"--profile-steps={given}"], prog="", description="")
    assert "\n" not in str(error.value) and given in str(error.value)


def test_a_window_after_the_end_is_refused():
    with pytest.raises(ValueError, match="num_steps 10"):
        Config(num_steps=10, profile_steps="11:12")
    assert Config(num_steps=10, profile_steps="10:99").profile_window == range(10, 99)
    assert not Config().profile_window
