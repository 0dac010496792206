"""Trains a Transformer: `python -m train.run --policy params=f32,compute=bf16`."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import jaxamp
from train.checkpoint import CheckpointError
from train.config import Config, ConfigError, parse
from train.data import Corpus, DataError, load, train_batches
from train.generate import encode_prompt, generate
from train.loop import BadRun, Outcome, prepare, structure, train
from train.model import attention_implementation, count_params

DESCRIPTION = """Train a Transformer in mixed precision, on real text, with no dtype in the model.
Without arguments: the default config on the Python language reference, under two minutes on two
CPU cores."""


class RunExists(ValueError):
    """The run directory holds a run already."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs; the exit code is 0, 1 where training went bad, 2 for bad input."""
    try:
        return _run(parse(args, prog="python -m train.run", description=DESCRIPTION))
    except (ConfigError, DataError, CheckpointError, RunExists) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or "the run directory"
        print(f"error: {where}: {error.strerror}; go on with --resume", file=sys.stderr)
        return 2
    except BadRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(config: Config) -> int:
    policy = jaxamp.get_policy(config.policy)
    # Written down as what it came to: "auto" may mean something else on another device.
    config = config.model_copy(update={"policy": str(policy), "workdir": str(_workdir(config))})
    workdir = Path(str(config.workdir))
    _check_policy(policy)
    print(precision_line(policy))
    if not config.resume:
        _refuse_existing(workdir)
    corpus = load(config.data, config.model.vocab_size)
    train_batches(corpus, config.batch_size, config.seed)  # an impossible batch size fails here
    print(f"data: {corpus.description}")
    print(f"model: {_model_line(config, corpus, policy)}")
    start = prepare(config, corpus, policy, workdir)
    _write_config(config, workdir)
    print(f"run: {workdir}", flush=True)
    outcome = train(config, corpus, policy, workdir, start)
    if outcome.stopped_by:
        print(
            f"stopped by {outcome.stopped_by} at step {outcome.step}, which is saved; go on with: "
            f"python -m train.run --workdir {workdir} --resume"
        )
        return 0
    _sample(config, corpus, policy, outcome, workdir)
    print(f"wrote {workdir}: config.json, metrics.jsonl, checkpoints, tensorboard, sample.txt")
    print(_last_line(outcome))
    return 0


def _check_policy(policy: jaxamp.Policy) -> None:
    try:
        jaxamp.value_and_grad(abs, policy)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None


def precision_line(policy: jaxamp.Policy) -> str:
    """What was decided about precision, and why."""
    device = jax.devices()[0]
    kind = "" if device.device_kind == device.platform else f" ({device.device_kind})"
    reason = f"; {policy.reason}" if policy.reason else ""
    return (
        f"precision: params {policy.param_dtype}, compute {policy.compute_dtype}, "
        f"output {policy.output_dtype}; loss scale {_scale_words(policy)}; "
        f"device {device.platform}{kind}{reason}"
    )


def _scale_words(policy: jaxamp.Policy) -> str:
    scale = jaxamp.get_loss_scale(policy)
    if isinstance(scale, jaxamp.DynamicLossScale):
        return (
            f"dynamic from {float(scale.loss_scale):g} (float16 holds nothing below 2^-24 or "
            "above 65504)"
        )
    if policy.compute_dtype == "bfloat16":
        return "none (bfloat16 has float32's range)"
    return f"none ({policy.compute_dtype} needs none)"


def _model_line(config: Config, corpus: Corpus, policy: jaxamp.Policy) -> str:
    try:
        kernel, reason = attention_implementation(config.model, policy.compute_dtype)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _, state = structure(config, corpus, policy)
    return (
        f"{count_params(state.params):,} parameters, n_layers {config.model.n_layers}, "
        f"vocabulary {corpus.vocab_size}; attention {kernel} ({reason})"
    )


def _workdir(config: Config) -> Path:
    if config.workdir is not None:
        return Path(config.workdir)
    name = Path(config.config).stem if config.config else "tiny"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_existing(workdir: Path) -> None:
    if any((workdir / name).exists() for name in ("config.json", "metrics.jsonl", "checkpoints")):
        raise RunExists(
            f"--workdir {workdir} holds a run; go on with it by --resume, or name another directory"
        )


def _write_config(config: Config, workdir: Path) -> None:
    workdir.mkdir(parents=True, exist_ok=True)
    whole = workdir / "config.json.tmp"
    whole.write_text(config.model_dump_json(indent=2) + "\n")
    whole.replace(workdir / "config.json")


def _sample(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, outcome: Outcome, workdir: Path
) -> None:
    if not config.sample_tokens or corpus.tokenizer is None:
        return
    prompt_ids = encode_prompt(corpus.tokenizer, config.sample_prompt)
    ids = generate(
        outcome.graphdef,
        outcome.state.params,
        config.model,
        prompt_ids,
        config.sample_tokens,
        jax.random.key(config.seed),
        temperature=0.8,
        policy=policy,
    )
    text = corpus.tokenizer.decode(np.concatenate([prompt_ids, ids]))
    (workdir / "sample.txt").write_text(text + "\n")
    print(f"sample:\n{text}")


def _last_line(outcome: Outcome) -> str:
    metrics = outcome.metrics
    shown = lambda name, form: format(metrics[name], form) if name in metrics else "unknown"  # noqa: E731
    return (
        f"done: step {outcome.step}, train loss {shown('train/loss', '.4f')}, "
        f"eval loss {shown('eval/loss', '.4f')}, "
        f"skipped steps {shown('amp/skipped_steps', 'g')}, "
        f"{shown('perf/tokens_per_second', ',.0f')} tokens/s"
    )


if __name__ == "__main__":
    sys.exit(main())
