import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_search import dtypes

import jaxamp
from train import generate as generate_module
from train import model
from train.config import Config, ModelConfig
from train.generate import generate, main
from train.resume import Saved
from train.step import TrainState

VOCAB = 257
CONFIG = ModelConfig(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, tie_embeddings=False)
PROMPT = [84, 104, 101, 32]
SEEDS = (0, 1, 2)


# Optimised programs take longer to build than to run here.
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
create = quick(model.create, static_argnums=(0, 1))
forward = quick(model.apply, static_argnums=0)


@functools.cache
def made(seed=0):
    """A model that has opinions: its logits have a standard deviation of 25 x 0.02 x 32**0.5 = 3.

    Not tied, because a fresh tied model repeats the token before, wherever it stands.
    """
    graphdef, params = create(CONFIG, VOCAB, jax.random.key(seed))
    params["head"]["kernel"] *= 25
    return graphdef, params


def ids(seed=0, key=0, num_tokens=8, prompt=PROMPT, **how):
    out = generate(*made(seed), CONFIG, prompt, num_tokens, jax.random.key(key), **how)
    assert out.shape == (num_tokens,)
    assert out.dtype == jnp.int32
    return out.tolist()


def without_cache(seed, key, choose, num_tokens=8):
    """The same text from the whole forward pass; causal, so padding at the end changes nothing."""
    tokens = np.zeros((1, len(PROMPT) + num_tokens), np.int32)
    tokens[0, : len(PROMPT)] = PROMPT
    for i, one_key in enumerate(jax.random.split(jax.random.key(key), num_tokens)):
        position = len(PROMPT) + i
        logits = forward(made(seed)[0], made(seed)[1], tokens)[0, position - 1]
        tokens[0, position] = choose(logits, one_key)
    return tokens[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_greedy_is_the_likeliest_token_whatever_the_key(seed):
    expected = without_cache(seed, 0, lambda logits, _: logits.argmax())
    assert ids(seed, key=0, temperature=0) == expected
    assert ids(seed, key=1, temperature=0) == expected
    assert ids(seed, key=2, top_k=1) == expected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.slow
def test_sampling_with_the_cache_equals_sampling_without(seed):
    def choose(logits, key):
        values, order = jax.lax.top_k(logits, VOCAB)
        return order[jax.random.categorical(key, values / 0.7)]

    assert ids(seed, key=seed, temperature=0.7) == without_cache(seed, seed, choose)


@pytest.mark.parametrize("seed", SEEDS)
def test_top_k_draws_from_the_k_likeliest(seed):
    drawn = {ids(seed, key=key, num_tokens=1, top_k=3, temperature=9.0)[0] for key in range(40)}
    logits = forward(*made(seed), np.array([PROMPT], np.int32))[0, -1]
    # Nearly uniform at this temperature: one of three never drawn is 3 (2/3)**40 = 3e-7.
    assert drawn == set(jax.lax.top_k(logits, 3)[1].tolist())


def test_the_text_is_a_function_of_the_key():
    assert ids(key=5) == ids(key=5)
    assert ids(key=5) != ids(key=6)


def test_top_k_beyond_the_vocabulary_leaves_every_token():
    assert ids(key=5, top_k=10 * VOCAB) == ids(key=5)


def test_temperature_narrows_the_choice():
    assert ids(key=5, temperature=1e-5) == ids(temperature=0)
    assert ids(key=5, temperature=100.0) != ids(temperature=0)


@pytest.mark.parametrize("policy", ("params=f32,compute=bf16", "mixed_float16"))
def test_runs_under_the_policy(policy):
    def text(params, prompt, key):
        return generate(made()[0], params, CONFIG, prompt, 3, key, top_k=2, policy=policy)

    dtype = jaxamp.get_policy(policy).compute_dtype
    dots = dtypes(lambda params, key: text(params, PROMPT, key), made()[1], jax.random.key(0))
    assert dots and all(operands[:2] == [dtype.name] * 2 for operands in dots)
    (token,) = ids(num_tokens=1, temperature=0, policy=policy)
    logits = forward(*made(), np.array([PROMPT], np.int32))[0, -1]
    # A logit is off by eps x 2 layers x 8 roundings at most, the likeliest and its rival both.
    tolerance = 2 * float(jnp.finfo(dtype).eps) * 2 * 8 * float(jnp.abs(logits).max())
    assert logits[token] >= logits.max() - tolerance


def test_a_second_call_compiles_nothing():
    ids(key=0, temperature=0.5)
    compiled = generate_module._generate._cache_size()
    assert compiled
    ids(key=1, temperature=0.9, prompt=np.array([1, 2, 3, 4]))
    other_graphdef = jax.eval_shape(lambda: model.create(CONFIG, VOCAB, jax.random.key(3)))[0]
    generate(other_graphdef, made(1)[1], CONFIG, PROMPT, 8, jax.random.key(0))
    assert generate_module._generate._cache_size() == compiled


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, r"temperature must be 0 \(greedy\) or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"prompt": []}, r"one token or more, int\[T\]; got shape \(0,\)"),
        ({"prompt": [[1, 2]]}, r"got shape \(1, 2\)"),
        ({"prompt": [1, 257]}, r"must be in 0..256, the model's vocabulary; got 1..257"),
        ({"prompt": [-1]}, "got -1..-1"),
    ],
)
def test_bad_input_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ids(**wrong)


@pytest.fixture
def a_run(monkeypatch):
    """A run that is nowhere on disk; train.checkpoint has its own tests."""
    config = Config(model=CONFIG, policy="float32")
    state = TrainState(jnp.int32(7), made()[1], None, jnp.zeros(2, jnp.uint32))
    loaded = Saved(7, config, {"vocab_size": VOCAB}, state)
    monkeypatch.setattr(generate_module, "load", lambda run: loaded)


@pytest.mark.parametrize(
    ("flags", "how"),
    [(["--seed", "5"], {"key": 5}), (["--top-k", "1"], {"top_k": 1})],
)
def test_the_command_prints_the_prompt_and_what_follows(a_run, capsys, flags, how):
    assert main(["RUN", "--prompt", "The ", "--num-tokens", "8", *flags]) == 0
    follow = bytes(i for i in ids(**how) if i < 256).decode(errors="replace")
    assert capsys.readouterr().out == f"The {follow}\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-tokens", "0"], "num_tokens must be at least 1"),
        (["--temperature", "-1"], "temperature must be"),
        (["--top-k", "0"], "top_k must be at least 1"),
        (["--num-tokens", "many"], "--num-tokens"),
        (["--tempo", "1"], "--tempo"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(a_run, capsys, args, message):
    assert main(["RUN", *args]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("made_directory", (True, False))
def test_a_directory_without_a_run_is_named(tmp_path, capsys, made_directory):
    run = tmp_path / "run"
    if made_directory:
        run.mkdir()
    assert main([str(run)]) == 2
    printed = capsys.readouterr()
    assert str(run) in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_the_module_runs_as_a_command(tmp_path):
    command = [sys.executable, "-m", "train.generate", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
