"""What every peer does: read the task, then take steps when told to, over its standard streams."""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

Step = Callable[[], float]  # takes one step; the loss before it


class Task(NamedTuple):
    """What all peers train.

    Attributes:
        weights: float32 arrays by path, such as `blocks/attention/query/kernel` [L, E, E]; kernels
            are [inputs, outputs], those of the layers stacked.
        tokens: int32[B, T].
        labels: int32[B, T], none ignored.
        settings: Of the model: `n_layers`, `n_heads`, `rope_theta`; of the optimizer:
            `learning_rate`, `b1`, `b2`, `eps`, `weight_decay` (kernels and the embedding only),
            `max_grad_norm`. And `threads`.
    """

    weights: dict[str, np.ndarray]
    tokens: np.ndarray
    labels: np.ndarray
    settings: dict[str, Any]

    def layer(self, k: int) -> dict[str, np.ndarray]:
        """The k-th layer's weights by the names of its modules: kernels have two axes, scales of
        norms have one."""
        stacked = {p.split("/")[-2]: w for p, w in self.weights.items() if p.startswith("blocks/")}
        return {name: weights[k] for name, weights in stacked.items()}

    def rotation(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of RoPE's angles, float32[T, D/2]."""
        width = self.weights["embed/embedding"].shape[1]
        half = width // self.settings["n_heads"] // 2
        frequencies = self.settings["rope_theta"] ** -(np.arange(half) / half)
        angles = np.outer(np.arange(self.tokens.shape[1]), frequencies.astype(np.float32))
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def write(path: str, task: Task) -> None:
    """Writes the file that `serve` is started with."""
    arrays: dict[str, Any] = {"tokens": task.tokens, "labels": task.labels, **task.weights}
    np.savez(path, settings=json.dumps(task.settings), **arrays)


def read(path: str) -> Task:
    with np.load(path) as arrays:
        weights = {name: arrays[name] for name in arrays.files if "/" in name}
        settings = json.loads(str(arrays["settings"]))
        return Task(weights, arrays["tokens"], arrays["labels"], settings)


def serve(make: Callable[[Task, str], Step]) -> None:
    """Answers lines {"compute": "f32" | "bf16" | "f16", "steps": n} with {"seconds": [...],
    "losses": [...]}, a number for each step, until there are no more.

    `make(task, compute)` starts a training; each compute dtype has one, which goes on where it was.
    The file of the task is the program's argument.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    task = read(sys.argv[1])
    if hasattr(os, "sched_setaffinity"):  # as many processors as threads: XLA counts them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: task.settings["threads"]])
    trainings: dict[str, Step] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        compute = asked["compute"]
        if compute not in trainings:
            trainings[compute] = make(task, compute)
        seconds, losses = [], []
        for _ in range(asked["steps"]):
            start = time.perf_counter()
            losses.append(trainings[compute]())
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds, "losses": losses}), file=answers, flush=True)
