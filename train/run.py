"""Trains a Transformer: `python -m train.run --policy params=f32,compute=bf16`."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import jaxamp
from train.attention import attention_implementation
from train.config import Config, ConfigError
from train.data import Corpus, load, train_batches
from train.distributed import ending_with_the_others, initialize, is_writer, say
from train.dry_run import mesh_line, shown
from train.exits import exit_code, leave
from train.generate import encode_prompt, generate
from train.loop import BadRun, Outcome, train
from train.mesh import check_fits, make_mesh
from train.model import count_params
from train.parse import parse
from train.rollback import Log
from train.start import prepare
from train.step import make_loss_fn, make_optimizer, step_policy, structure
from train.workdir import refuse_existing, write_config

DESCRIPTION = """Train a Transformer in mixed precision, on real text, with no dtype in the model.
Without arguments: the default config on the Python language reference, under two minutes on two
CPU cores."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs; the exit code is 0, 1 where training went bad, 2 for bad input, 3 to start again."""

    def program() -> int:
        with ending_with_the_others():
            return _run(parse(args, prog="python -m train.run", description=DESCRIPTION))

    try:
        return exit_code(program, "the run directory", "go on with --resume")
    except BadRun as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(config: Config) -> int:
    if initialize(config.distributed) and config.workdir is None:
        raise ConfigError("--workdir is needed where several processes share a run")
    workdir = _workdir(config)
    log = Log(workdir)
    policy, fallback = log.policy_in_force(jaxamp.get_policy(config.policy))
    # Written down as what it came to: "auto" may mean something else on another device.
    config = config.model_copy(update={"policy": str(policy), "workdir": str(workdir)})
    say(precision_line(policy))
    if fallback:
        say(f"resume: {fallback}")
    for line in warnings(config, policy):
        say(line)
    mesh = make_mesh(config.mesh)
    check_fits(config, mesh)
    if not config.resume:
        refuse_existing(workdir)
    corpus = load(config.data, config.model.vocab_size)
    train_batches(corpus, config.batch_size, config.seed)  # an impossible batch size fails here
    say(f"data: {corpus.description}")
    say(f"model: {model_line(config, corpus, policy)}")
    if mesh.size > 1:
        say(mesh_line(mesh))
    loss_fn, args = loss_and_shapes(config, corpus, policy)
    check_policy(policy, loss_fn, args)
    if config.fallback_policy is not None:
        fallback_policy = jaxamp.get_policy(config.fallback_policy)
        model_line(config, corpus, fallback_policy)  # its attention kernel can run
        fallback_loss = loss_and_shapes(config, corpus, fallback_policy)
        check_policy(fallback_policy, *fallback_loss, flag="--fallback-policy")
    if config.explain:
        say(explained(config, policy, loss_fn, args))
        return 0
    if config.dry_run:
        params = structure(config, corpus.vocab_size, policy)[1].params
        say(shown(config, params, corpus.vocab_size, policy, mesh))
        return 0
    multihost_utils.sync_global_devices("all have looked at workdir")
    start = prepare(config, corpus, policy, workdir, mesh, log)
    for note in start.notes:
        say(f"resume: {note}")
    if is_writer():
        write_config(config, workdir)
    say(f"run: {workdir}")
    outcome = train(config, corpus, policy, workdir, start)
    policy, _ = log.policy_in_force(policy)
    if outcome.stopped_by:
        say(
            f"stopped by {outcome.stopped_by} at step {outcome.step}, which is saved; go on with: "
            f"python -m train.run --workdir {workdir} --resume"
        )
        return 0
    written = ["config.json", "metrics.jsonl", "checkpoints", "tensorboard"]
    if _sample(config, corpus, policy, outcome, workdir):
        written.append("sample.txt")
    if log.entries:
        written.append(f"incidents ({len(log.entries)}, see log.jsonl there)")
    say(f"wrote {workdir}: {', '.join(written)}")
    say(_last_line(outcome))
    eval_loss = outcome.metrics.get("eval/loss", 0.0)
    if math.isfinite(eval_loss):
        return 0
    raise BadRun(
        "nan",
        f"the run ends with an eval loss of {eval_loss:g}; python -m train.diagnose {workdir} "
        "looks into it",
    )


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


def warnings(config: Config, policy: jaxamp.Policy) -> list[str]:
    """Settings that have no effect on this run."""
    if policy.compute_dtype != "float32" or step_policy(policy, config).residuals != "compute":
        return []
    setting = "--model.remat islands" if config.model.remat == "islands" else "residuals=compute"
    return [
        f"warning: {setting} has no effect with compute=float32: it recomputes what autocast lifts "
        "to float32 from 16-bit values, and here there are none; --model.remat dots and full work"
    ]


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


def model_line(config: Config, corpus: Corpus, policy: jaxamp.Policy) -> str:
    try:
        kernel, reason = attention_implementation(
            config.model, policy.compute_dtype, length=config.data.seq_len
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _, state = structure(config, corpus.vocab_size, policy)
    return (
        f"{count_params(state.params):,} parameters, n_layers {config.model.n_layers}, "
        f"vocabulary {corpus.vocab_size}; attention {kernel} ({reason})"
    )


def loss_and_shapes(
    config: Config, corpus: Corpus, policy: jaxamp.Policy
) -> tuple[Callable, tuple]:
    """The loss of a microbatch, and the shapes of its arguments."""
    graphdef, state = structure(config, corpus.vocab_size, policy)
    rows = config.batch_size // config.grad_accum_steps
    ids = jax.ShapeDtypeStruct((rows, config.data.seq_len), np.int32)
    key = jax.eval_shape(jax.random.key, 0)
    count = jax.ShapeDtypeStruct((), np.int32)
    return make_loss_fn(config, graphdef), (
        state.params,
        {"tokens": ids, "labels": ids},
        key,
        count,
    )


def explained(config: Config, policy: jaxamp.Policy, loss_fn: Callable, args: tuple) -> str:
    """What autocast decided for the loss, and what of the optimizer will hurt."""
    explanation = jaxamp.explain(loss_fn, step_policy(policy, config))(*args)
    tx = make_optimizer(config.optimizer, config.num_steps, policy)
    notes = jaxamp.check_optimizer(tx, args[0], policy)
    return "\n".join([str(explanation), *(f"note: {note}" for note in notes)])


def check_policy(
    policy: jaxamp.Policy, loss_fn: Callable, args: tuple, flag: str = "--policy"
) -> None:
    """A policy that cannot be met is found by tracing, before anything is written."""
    try:
        jax.eval_shape(jaxamp.autocast(loss_fn, policy), *args)
    except ValueError as error:
        raise ConfigError(f"{flag} {policy}: {' '.join(str(error).split())}") from None


def _workdir(config: Config) -> Path:
    if config.workdir is not None:
        return Path(config.workdir)
    name = Path(config.config).stem if config.config else "tiny"
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _sample(
    config: Config, corpus: Corpus, policy: jaxamp.Policy, outcome: Outcome, workdir: Path
) -> bool:
    """Prints and writes what the model says; whether it could."""
    # No process of several has all of the parameters.
    if not config.sample_tokens or corpus.tokenizer is None or jax.process_count() > 1:
        return False
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
    return True


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
    leave(main())
