"""A mesh changes where numbers are, not what they are."""

import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_run import RARELY, flags, metrics
from two_processes import free_port, run_two, start, wait_for_step

from train.config import Config, ConfigError, MeshConfig, ModelConfig
from train.mesh import AXES, check_fits, make_mesh
from train.parse import parse


class Device:
    platform, device_kind = "cpu", "cpu"


@pytest.mark.parametrize(
    "sizes, wanted",
    [
        ({}, (8, 1, 1)),
        ({"fsdp": 4}, (2, 4, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_sizes(sizes, wanted):
    mesh = make_mesh(MeshConfig(**sizes), [Device() for _ in range(8)])
    assert tuple(mesh.shape[name] for name in AXES) == wanted


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"fsdp": 3}, "8 devices cannot be divided by 3"),
        ({"data": 2, "fsdp": 2}, "4 places for 8 devices"),
        ({"fsdp": -1}, "one of them may be -1"),
        ({"tensor": 0}, "1 or more"),
    ],
)
def test_sizes_that_cannot_be(sizes, message):
    with pytest.raises(ConfigError, match=message):
        make_mesh(MeshConfig(**sizes), [Device() for _ in range(8)])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"mesh": MeshConfig(tensor=8)}, "tensor 8 does not divide n_heads 4"),
        (
            {"mesh": MeshConfig(tensor=4), "model": ModelConfig(n_kv_heads=2)},
            "tensor 4 does not divide n_kv_heads 2",
        ),
        ({"batch_size": 4}, "use a batch_size that is a multiple of 8"),
        (
            {"batch_size": 8, "grad_accum_steps": 2},
            "use --grad-accum-steps 1, or a batch_size that is a multiple of 16",
        ),
    ],
)
def test_what_the_mesh_cannot_cut(settings, message):
    config = Config(**settings)
    with pytest.raises(ConfigError, match=message):
        check_fits(config, make_mesh(config.mesh, [Device() for _ in range(8)]))


@pytest.mark.parametrize(
    "given", [["--distributed.num-processes", "2"], ["--distributed.coordinator", "host"]]
)
def test_flags_that_go_together(given):
    from train.distributed import initialize

    with pytest.raises(ConfigError, match="go together"):
        initialize(parse(given, "test", "").distributed)


LOSSES = """
import dataclasses, jax, numpy as np
import jaxamp
from train.config import Config, DataConfig, MeshConfig, ModelConfig
from train.mesh import batch_sharding, make_mesh, state_shardings
from train.step import init_state, make_train_step

def losses(mesh_config, policy, **settings):
    config = Config(
        model=ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, vocab_size=64,
                          tie_embeddings=False),
        batch_size=16, mesh=mesh_config, **settings)
    policy = jaxamp.get_policy(policy)
    devices = jax.devices() if mesh_config.data else jax.devices()[:1]
    mesh = make_mesh(mesh_config if mesh_config.data else MeshConfig(), devices)
    init = lambda: init_state(config, 64, policy)[1]
    graphdef, _ = init_state(config, 64, policy)
    state = jax.jit(init, out_shardings=state_shardings(mesh, jax.eval_shape(init)))()
    step = make_train_step(config, graphdef, policy)
    rng = np.random.default_rng(0)
    found = []
    with jax.set_mesh(mesh):
        for k in range(4):
            ids = rng.integers(0, 64, (16, 17), dtype=np.int32)
            batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:]}
            batch = jax.device_put(batch, batch_sharding(mesh))
            state, metrics = step(state, batch)
            found.append([float(metrics["train/loss"]), float(metrics["train/grad_norm"])])
    held = state.params["blocks"]["feed_forward"]["up"]["kernel"]
    return np.array(found), held.addressable_shards[0].data.shape, state
"""


@pytest.mark.slow
def test_any_mesh_gives_the_losses_of_one_device(eight_devices):
    """In float32: sums in another order, 1e-5."""
    script = (
        LOSSES
        + """
one, _, _ = losses(MeshConfig(data=0), "float32")
for sizes in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)):
    mesh = MeshConfig(data=sizes[0], fsdp=sizes[1], tensor=sizes[2])
    many, shape, state = losses(mesh, "float32")
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert shape == (2, 32 // sizes[1], 128 // sizes[2]), shape
    moments = [x for p, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
               if "up" in jax.tree_util.keystr(p)]
    assert len(moments) == 2 and all(m.addressable_shards[0].data.shape == shape for m in moments)
    scale = jax.tree.leaves(state.opt_state.loss_scale) + [state.step]
    assert all(x.sharding.is_fully_replicated for x in scale)
accumulated, _, _ = losses(MeshConfig(data=2, fsdp=2, tensor=2), "float32", grad_accum_steps=4)
np.testing.assert_allclose(accumulated, one, rtol=1e-5)
print("equal")
"""
    )
    assert eight_devices(script) == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_all_devices_skip_where_one_shard_is_not_finite(eight_devices, sizes):
    """One row of the batch meets an embedding of inf; no device changes a bit but in the guard."""
    script = (
        LOSSES
        + f"""
config = Config(
    model=ModelConfig(n_layers=1, d_model=32, n_heads=4, vocab_size=64, tie_embeddings=False),
    batch_size=16, mesh=MeshConfig(data={sizes[0]}, fsdp={sizes[1]}, tensor={sizes[2]}))
"""
        + """
policy, mesh = jaxamp.get_policy("mixed_float16"), make_mesh(config.mesh)
ids = np.random.default_rng(0).integers(0, 63, (16, 17), dtype=np.int32)

def run(ids):
    def init():
        state = init_state(config, 64, policy)[1]
        embedding = state.params["embed"]["embedding"]
        state.params["embed"]["embedding"] = embedding.at[63].set(np.inf)
        return state
    state = jax.jit(init, out_shardings=state_shardings(mesh, jax.eval_shape(init)))()
    before = held(state)
    step = make_train_step(config, init_state(config, 64, policy)[0], policy)
    with jax.set_mesh(mesh):
        batch = {"tokens": ids[:, :-1], "labels": ids[:, 1:] % 63}
        batch = jax.device_put(batch, batch_sharding(mesh))
        state, _ = step(state, batch)
    return before, held(state), [s.data for s in batch["tokens"].addressable_shards]

def held(state):
    # The bytes that each device holds, by the path of the leaf.
    return {
        (jax.tree_util.keystr(path, simple=True, separator="/"), shard.device): np.array(shard.data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        for shard in leaf.addressable_shards
    }

def named(tree, name):
    found = [x for (path, _), x in tree.items() if path.endswith(name)]
    assert len(found) == 8
    return {x.item() for x in found}

before, after, _ = run(ids)
assert named(after, "skipped_steps") == {0} and named(after, "/loss_scale") == {2.0**15}
assert np.isfinite(named(after, "grad_norm").pop())

ids[5, 3] = 63
before, after, rows = run(ids)
assert sum(63 in np.unique(shard) for shard in rows) == config.mesh.tensor
assert named(after, "skipped_steps") == {1} and named(after, "/loss_scale") == {2.0**14}
kept = [key for key in before if key[0].startswith(("params/", "opt_state/inner_state/"))]
assert len(kept) > 8 * 20 and {device for _, device in kept} == set(jax.devices())
for key in kept:
    assert before[key].tobytes() == after[key].tobytes(), key
print("skipped")
"""
    )
    assert eight_devices(script) == "skipped"


def test_gradients_of_weights_leave_their_matmul_as_asked(eight_devices):
    """And so they are added up over devices; read from the program for a TPU, not compiled."""
    script = (
        LOSSES
        + """
import re
def dots_of_weights(reduce_dtype):
    config = Config(model=ModelConfig(n_layers=2, d_model=32, n_heads=4, vocab_size=64),
                    batch_size=16, mesh=MeshConfig(data=1, fsdp=8, reduce_dtype=reduce_dtype))
    policy = jaxamp.get_policy("compute=bf16")
    graphdef, _ = init_state(config, 64, policy)
    state = jax.eval_shape(lambda: init_state(config, 64, policy)[1])
    ids = jax.ShapeDtypeStruct((16, 16), np.int32)
    with jax.set_mesh(make_mesh(config.mesh)):
        step = make_train_step(config, graphdef, policy)
        traced = step.trace(state, {"tokens": ids, "labels": ids})
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    return {re.findall(r"x(f32|bf16)>", line.rsplit("->", 1)[1])[0]
            for line in text.splitlines() if "stablehlo.dot_general" in line
            and re.search(r"-> tensor<32x128x", line)}
print(dots_of_weights("f32"), dots_of_weights("compute"))
"""
    )
    assert eight_devices(script) == "{'f32'} {'bf16'}"


def test_a_dry_run_says_what_a_device_would_hold(tmp_path, eight_devices):
    more = [*flags(tmp_path / "run", "--dry-run", mesh__fsdp=4, mesh__tensor=2)]
    script = f"""
from train.run import main
assert main({more!r}) == 0
"""
    assert eight_devices(script, whole=True).splitlines()[-5:-4] == [
        "memory of one device, from the compiled train step:"
    ]
    assert not (tmp_path / "run").exists()


# Several processes.


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    codes, outputs = run_two(tmp_path / "two", "--mesh.fsdp", "2")
    assert codes == [0, 0], outputs
    # One of them speaks; gloo is not ours to hush.
    assert not [line for line in outputs[1][0].splitlines() if not line.startswith("[Gloo]")]
    train = [sys.executable, "-m", "train.run"]
    alone = {"capture_output": True, "text": True, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}
    subprocess.run([*train, *flags(tmp_path / "one", **RARELY)], check=True, **alone)
    losses = [[m["train/loss"] for m in metrics(tmp_path / name)] for name in ("one", "two")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    # The same checkpoint goes on in one process.
    more = ["--workdir", str(tmp_path / "two"), "--resume", "--num-steps", "8", "--mesh.fsdp", "1"]
    result = subprocess.run([*train, *more], **alone)
    assert "going on from step 6" in result.stdout, result.stderr
    assert [m["step"] for m in metrics(tmp_path / "two")] == list(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_sigterm_to_one_process_stops_both_after_the_same_step(tmp_path, number):
    def terminate(pair):
        wait_for_step(tmp_path, 5, pair)
        pair[number].send_signal(signal.SIGTERM)

    codes, outputs = run_two(tmp_path, "--num-steps", "100000", then=terminate)
    assert codes == [0, 0], outputs
    (step,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert f"stopped by SIGTERM at step {step}" in outputs[0][0]


@pytest.mark.slow
def test_a_killed_process_ends_the_other_with_a_word(tmp_path):
    killed = []

    def kill(pair):
        wait_for_step(tmp_path, 5, pair)
        pair[1].kill()
        killed.append(time.monotonic())

    codes, outputs = run_two(tmp_path, "--num-steps", "100000", then=kill)
    assert time.monotonic() - killed[0] < 60
    assert codes[0] == 3 and "another process of this run is gone" in outputs[0][1], outputs


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_coordinator_or_a_process_that_never_comes(tmp_path, number):
    process = start(tmp_path / "run", number, free_port(), "--distributed.timeout-seconds", "5")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in err, err
    assert err.strip().splitlines()[-1].startswith("error: the coordinator 127.0.0.1:"), err
    assert not (tmp_path / "run").exists()


def test_jax_is_asked_for_no_cluster_here():
    from train.distributed import _in_a_cluster

    assert not _in_a_cluster({})
    assert not _in_a_cluster({"SLURM_NTASKS": "4"})  # an interactive allocation, not srun
    assert _in_a_cluster({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert _in_a_cluster({"OMPI_COMM_WORLD_SIZE": "2"})
    assert _in_a_cluster({"TPU_WORKER_HOSTNAMES": "a,b"})
    assert not _in_a_cluster({"TPU_WORKER_HOSTNAMES": "localhost"})
    assert jax.process_count() == 1
