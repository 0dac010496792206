"""The task as JAX's arrays and the config of `train`, for peers that run in our environment."""

from collections.abc import Callable
from typing import Any

import jax
from serve import Step, Task

from train.config import Config, ModelConfig, OptimizerConfig
from train.measures import FLOAT32
from train.step import make_adamw, structure
from train.variants import make_variants


def config_of(task: Task) -> Config:
    vocab_size, width = task.weights["embed/embedding"].shape
    model = ModelConfig(
        vocab_size=vocab_size,
        d_model=width,
        d_ff=task.weights["blocks/feed_forward/up/kernel"].shape[2],
        **{name: task.settings[name] for name in ("n_layers", "n_heads", "rope_theta")},
    )
    names = ("learning_rate", "b1", "b2", "eps", "weight_decay", "max_grad_norm")
    chosen = {name: task.settings[name] for name in names}
    optimizer = OptimizerConfig(schedule="constant", warmup_steps=0, **chosen)
    return Config(model=model, optimizer=optimizer)


def params_of(task: Task) -> dict[str, Any]:
    params: dict[str, Any] = {}
    for path, weight in task.weights.items():
        *parents, name = path.split("/")
        place = params
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = jax.numpy.asarray(weight)
    return params


def batch_of(task: Task) -> dict[str, jax.Array]:
    return {"tokens": jax.numpy.asarray(task.tokens), "labels": jax.numpy.asarray(task.labels)}


def variant_of(task: Task, name: str, compute: str) -> tuple[Callable, Any]:
    """`(params, batch) -> loss` of one of `train.variants` (of float32 for "f32"), and AdamW."""
    config, is_full = config_of(task), compute == "f32"
    graphdef, _ = structure(config, config.model.vocab_size or 0, FLOAT32)
    variants = make_variants(config, graphdef, "bf16" if is_full else compute)
    loss_fn = variants["float32" if is_full else name].loss_fn
    return loss_fn, make_adamw(config.optimizer, config.num_steps)


def repeated(train_step: Callable, state: Any, batch: Any) -> Step:
    """Steps of `(state, batch) -> (state, loss)`."""

    def step() -> float:
        nonlocal state
        state, loss = train_step(state, batch)
        jax.block_until_ready(state)
        return float(loss)

    return step
