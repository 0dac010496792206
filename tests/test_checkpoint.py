"""Checkpoints: bit-equal, whole or not there, verified, and honest about what changed."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_run import checkpoints

import jaxamp
from train.checkpoint import Checkpointer, CheckpointError, checksum, load
from train.config import Config, ModelConfig
from train.step import init_state

VOCAB = 31
CONFIG = Config(
    policy="params=f32,compute=f16,output=f32",
    model=ModelConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16),
    batch_size=4,
)
DATA_STATE = {"next_index": 7}


def random_state(config=CONFIG, seed=0):
    """A state as after some steps: every leaf of it random, of the right dtype."""
    policy = jaxamp.get_policy(config.policy)
    state = jax.eval_shape(lambda: init_state(config, VOCAB, policy)[1])
    rng = np.random.default_rng(seed)

    def leaf(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=x.shape), x.dtype)
        return jnp.asarray(rng.integers(0, 2, x.shape), x.dtype)

    return jax.tree.map(leaf, state)


def save(workdir, *steps, config=CONFIG, keep=5, eval_losses=None):
    checkpointer, states = Checkpointer(workdir, keep), {}
    for i, step in enumerate(steps):
        states[step] = random_state(config, step)._replace(step=jnp.int32(step))
        loss = eval_losses[i] if eval_losses else None
        checkpointer.save(states[step], config, VOCAB, DATA_STATE, "data", loss)
    checkpointer.wait()
    checkpointer.close()
    return states


def restore(workdir, config=CONFIG, fingerprint="data", vocab_size=VOCAB):
    checkpointer = Checkpointer(workdir, 5)
    try:
        return checkpointer.restore(config, vocab_size, fingerprint)
    finally:
        checkpointer.close()


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("policy", ["f32", "params=f32,compute=f16", "bf16"])
def test_comes_back_bit_for_bit(tmp_path, policy):
    config = CONFIG.model_copy(update={"policy": policy})
    states = save(tmp_path, 3, config=config)
    restored = restore(tmp_path, config)
    assert_same_bits(restored.state, states[3])
    assert restored.data_state == DATA_STATE and restored.notes == []


def test_case_restore_is_pure(tmp_path):
    """accelerate#4289: restored twice, the same state; nothing is stepped or written."""
    save(tmp_path, 3)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    assert_same_bits(restore(tmp_path).state, restore(tmp_path).state)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files


def test_case_dtype_is_kept(tmp_path):
    """pytorch#43706: bf16 params with a float32 moment of 1.001: 1.001 in float32 after restore."""
    config = CONFIG.model_copy(update={"policy": "bf16"})
    state = random_state(config)
    inner = jax.tree.map(
        lambda x: jnp.full_like(x, 1.001) if x.dtype == jnp.float32 else x,
        state.opt_state.inner_state,
    )
    state = state._replace(opt_state=state.opt_state._replace(inner_state=inner))
    checkpointer = Checkpointer(tmp_path, 2)
    checkpointer.save(state, config, VOCAB, DATA_STATE, "data", None)
    checkpointer.wait()
    back = checkpointer.restore(config, VOCAB, "data").state
    checkpointer.close()
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(back.params))
    nu = jax.tree.leaves(optax.tree_utils.tree_get(back.opt_state, "nu"))
    assert all((leaf == np.float32(1.001)).all() and leaf.dtype == jnp.float32 for leaf in nu)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mixed_float16", "mixed_bfloat16", "is dropped"),
        ("mixed_bfloat16", "mixed_float16", "starts at 32768"),
        ("mixed_bfloat16", "float32", "stays as it was"),
    ],
)
def test_case_precision_changes_at_resume(tmp_path, old, new, words):
    """Works, with one line that says what happened to the scale."""
    before = CONFIG.model_copy(update={"policy": old})
    after = CONFIG.model_copy(update={"policy": new})
    state = save(tmp_path, 3, config=before)[3]
    restored = restore(tmp_path, after)
    assert len(restored.notes) == 1 and words in restored.notes[0]
    assert_same_bits(restored.state.params, state.params)
    assert_same_bits(restored.state.opt_state.inner_state, state.opt_state.inner_state)
    fresh = jax.eval_shape(lambda: init_state(after, VOCAB, jaxamp.get_policy(new))[1])
    assert jax.tree.structure(restored.state) == jax.tree.structure(fresh)


def test_params_change_their_dtype_at_resume(tmp_path):
    state = save(tmp_path, 3)[3]
    restored = restore(tmp_path, CONFIG.model_copy(update={"policy": "bf16"}))
    assert_same_bits(restored.state.params, jaxamp.get_policy("bf16").cast_to_param(state.params))
    assert "params=f32,compute=f16" in restored.notes[0]


def test_none_where_there_is_none(tmp_path):
    assert restore(tmp_path) is None


def test_keeps_the_newest_and_the_best(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5, keep=2, eval_losses=[3.0, 1.0, 2.0, float("nan"), None])
    assert checkpoints(tmp_path) == ["2", "4", "5"]


def test_keeps_the_newest_and_the_best_after_a_restart(tmp_path):
    """Whatever the best one was before; also where a deletion was cut short by a kill."""
    save(tmp_path, 1, 2, 3, keep=2, eval_losses=[1.0, 3.0, 2.0])
    assert checkpoints(tmp_path) == ["1", "2", "3"]
    shutil.rmtree(tmp_path / "checkpoints/2/meta")
    save(tmp_path, 4, 5, keep=2, eval_losses=[4.0, 5.0])
    assert checkpoints(tmp_path) == ["1", "4", "5"]
    save(tmp_path, 6, 7, keep=2, eval_losses=[0.5, 5.0])
    assert checkpoints(tmp_path) == ["6", "7"]


@pytest.mark.parametrize(
    ("config", "fingerprint", "vocab_size", "words"),
    [
        (
            CONFIG.model_copy(update={"model": ModelConfig(n_layers=2, d_model=8, n_heads=2)}),
            "data",
            VOCAB,
            "model.n_layers was 1 and is 2",
        ),
        (CONFIG, "other", VOCAB, "the data were data and are other"),
        (CONFIG, "data", 99, "model.vocab_size was 31 and is 99"),
        (CONFIG.model_copy(update={"batch_size": 8}), "data", VOCAB, "batch_size was 4 and is 8"),
        (CONFIG.model_copy(update={"seed": 1}), "data", VOCAB, "seed was 0 and is 1"),
    ],
)
def test_another_run_is_refused(tmp_path, config, fingerprint, vocab_size, words):
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match=words) as error:
        restore(tmp_path, config, fingerprint, vocab_size)
    assert "\n" not in str(error.value)


def test_a_rollback_moves_later_checkpoints_away(tmp_path):
    for _ in range(2):  # the second time their places are taken
        save(tmp_path, 3, 4, 5, keep=9)
        checkpointer = Checkpointer(tmp_path, 9)
        checkpointer.set_aside_after(3)
        assert checkpointer.steps == [3]
        checkpointer.close()
        assert sorted(path.name for path in (tmp_path / "rolled-back").iterdir()) == ["4", "5"]
        shutil.rmtree(tmp_path / "checkpoints")


def test_how_the_layers_are_run_may_change(tmp_path):
    save(tmp_path, 3)
    model = CONFIG.model.model_copy(update={"remat": "dots", "scan_layers": True})
    assert int(restore(tmp_path, CONFIG.model_copy(update={"model": model})).state.step) == 3


@pytest.mark.slow
def test_one_flipped_bit_in_any_file_is_seen(tmp_path):
    """The state that comes back is the written one or the one before; never a third."""
    states = save(tmp_path / "good", 3, 5)
    files = sorted(p for p in (tmp_path / "good/checkpoints/5").rglob("*") if p.is_file())
    rng, fell_back = np.random.default_rng(0), 0
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if not content:
            continue
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        workdir = tmp_path / str(number)
        shutil.copytree(tmp_path / "good", workdir)
        (workdir / file.relative_to(tmp_path / "good")).write_bytes(content)
        restored = restore(workdir)
        step = int(restored.state.step)
        assert_same_bits(restored.state, states[step])
        assert bool(restored.notes) == (step == 3)
        fell_back += step == 3
    assert fell_back > 2


@pytest.mark.parametrize("how", ["cut short", "emptied", "gone"])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path, how):
    states = save(tmp_path, 3, 5)
    data = max((tmp_path / "checkpoints/5/state").rglob("*"), key=lambda p: p.stat().st_size)
    if how == "gone":
        data.unlink()
    else:
        data.write_bytes(data.read_bytes()[: 100 if how == "cut short" else 0])
    restored = restore(tmp_path)
    assert_same_bits(restored.state, states[3])
    assert len(restored.notes) == 1 and "checkpoint 5 is damaged" in restored.notes[0]
    assert (tmp_path / "damaged/5").is_dir() and not (tmp_path / "checkpoints/5").exists()
    save(tmp_path, 5)  # its place is free again


def test_all_damaged_is_an_error(tmp_path):
    save(tmp_path, 3)
    for file in (tmp_path / "checkpoints/3/state").rglob("*"):
        if file.is_file():
            file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        restore(tmp_path)
    assert (tmp_path / "checkpoints/3").is_dir()


def test_a_save_that_was_cut_short_is_not_there(tmp_path):
    """orbax writes under another name and renames at the end; what a kill leaves is removed."""
    states = save(tmp_path, 3, 5)
    whole = tmp_path / "checkpoints/5"
    whole.rename(tmp_path / "checkpoints/5.orbax-checkpoint-tmp")
    assert_same_bits(restore(tmp_path).state, states[3])
    assert checkpoints(tmp_path) == ["3"]


def test_unwritable_is_one_line(tmp_path):
    checkpointer = Checkpointer(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("a file where the directory was")
    with pytest.raises(CheckpointError, match="cannot write a checkpoint") as error:
        checkpointer.save(random_state(), CONFIG, VOCAB, DATA_STATE, "data", None)
        checkpointer.wait()
    assert "\n" not in str(error.value) and "--resume" in str(error.value)


@pytest.mark.parametrize("seed", range(3))
def test_checksum_sees_every_bit(seed):
    rng = np.random.default_rng(seed)
    tree = {
        "f": rng.normal(size=(5, 3)).astype(np.float32),
        "h": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
        "i": rng.integers(0, 9, 4).astype(np.int32),
        "b": np.array([True, False]),
    }
    before = int(checksum(tree))
    for name, leaf in tree.items():
        raw = bytearray(np.asarray(leaf).tobytes())
        bit = 0 if name == "b" else int(rng.integers(8))
        raw[rng.integers(len(raw))] ^= 1 << bit
        flipped = np.frombuffer(bytes(raw), np.asarray(leaf).dtype).reshape(leaf.shape)
        assert int(checksum(tree | {name: flipped})) != before
    assert int(checksum({**tree, "f": tree["f"].copy()})) == before


def test_load(tmp_path):
    states = save(tmp_path, 3)
    step, config, meta, state = load(tmp_path)
    assert_same_bits(state, states[3])
    assert (config, meta["vocab_size"], step) == (CONFIG, VOCAB, 3)
    with pytest.raises(CheckpointError, match="no checkpoints there"):
        load(tmp_path / "nowhere")


def test_description_is_readable_by_people(tmp_path):
    save(tmp_path, 3)
    text = (tmp_path / "checkpoints/3/meta/metadata").read_text()
    assert "batch_size" in json.loads(text)["text"]
