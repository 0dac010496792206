"""Settings: defaults, TOML files, flags, and one line for each thing that cannot be."""

from pathlib import Path

import pytest

from train.config import Config, ConfigError, ModelConfig
from train.parse import load_toml, parse

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def parsed(*args):
    return parse(list(args), prog="python -m train.run", description="")


def error_of(*args):
    with pytest.raises(ConfigError) as error:
        parsed(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_arguments_are_the_defaults():
    assert parsed() == Config()


def test_flags_change_fields_at_every_depth():
    config = parsed("--num-steps", "7", "--model.n-layers", "6", "--data.path", "a b/*.txt")
    assert (config.num_steps, config.model.n_layers, config.data.path) == (7, 6, "a b/*.txt")
    assert config.model == ModelConfig(n_layers=6)


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("num_steps = 5\nseed = 3\n[model]\nn_layers = 2\n")
    config = parsed("--config", str(file), "--seed", "4")
    assert (config.num_steps, config.seed, config.model.n_layers) == (5, 4, 2)
    assert config.model.d_model == ModelConfig().d_model and config.config == str(file)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_say_what_to_expect(path):
    load_toml(str(path))
    header = path.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    for word in ("Command:", "Hardware:", "Time:", "Result:"):
        assert word in header


def test_tiny_is_the_default():
    tiny = load_toml(str(CONFIGS[0].parent / "tiny.toml"))
    assert tiny.model_copy(update={"config": None}) == Config()


def test_resume_starts_from_what_the_run_wrote_down(tmp_path):
    (tmp_path / "config.json").write_text(Config(num_steps=9, seed=5).model_dump_json())
    config = parsed("--workdir", str(tmp_path), "--resume", "--num-steps", "12")
    assert (config.seed, config.num_steps, config.resume) == (5, 12, True)


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--config", "--policy", "--workdir", "--num-steps", "--batch-size", "--seed"):
        assert flag in text
    for flag in ("--resume", "--data.path", "--model.n-layers", "--optimizer.learning-rate"):
        assert flag in text


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--model.n-layrs", "6"], ["--model.n-layrs", "--model.n-layers"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["--num-steps", "abc"], ["--num-steps", "abc"]),
        (["--num-steps", "0"], ["num_steps", "greater than 0", "0"]),
        (["--model.n-layers", "-1"], ["model.n_layers", "greater than 0", "-1"]),
        (["--model.n-heads", "3"], ["d_model 128", "n_heads 3"]),
        (["--model.n-kv-heads", "3"], ["n_heads 4", "n_kv_heads 3"]),
        (["--model.norm", "batchnorm"], ["--model.norm", "rmsnorm", "layernorm"]),
        (["--policy", "compute=bf61"], ["compute=bf61", "did you mean 'bf16'"]),
        (
            ["--batch-size", "10", "--grad-accum-steps", "3"],
            ["batch_size 10", "grad_accum_steps 3"],
        ),
        (["--resume"], ["resume", "workdir"]),
        (["--config"], ["--config"]),
        (["--config", "configs/tiyn.toml"], ["configs/tiyn.toml", "No such file"]),
    ],
)
def test_bad_flags(args, parts):
    message = error_of(*args)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[model]\nn_layrs = 3", ["unknown key 'model.n_layrs'", "did you mean 'n_layers'"]),
        ("zzz = 3", ["unknown key 'zzz'", "allowed:", "policy"]),
        ("num_steps = -3", ["num_steps", "greater than 0", "-3"]),
        ("num_steps = 'many'", ["num_steps", "integer", "'many'"]),
        ("[model\nx = 1", ["not TOML", "line 1"]),
        ("policy = 'f17'", ["unknown name 'f17'"]),
    ],
)
def test_bad_files(tmp_path, text, parts):
    file = tmp_path / "bad.toml"
    file.write_text(text)
    message = error_of("--config", str(file))
    for part in [str(file), *parts]:
        assert part in message
