"""`peers`: the same training step in other libraries, each in a process of its own.

All train the same architecture from the same weights on the same batch, with the same optimizer.
Before anything is timed their float32 losses are held against ours: the first says that the model
is the same, the second, after a step, that gradients and optimizer are.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Literal, NamedTuple, get_args

import jax
import numpy as np
import tyro

import train.peers
from train import measures
from train.benchmarks.options import BenchmarkOptions, config_of
from train.config import Config, ConfigError, ModelConfig
from train.data import load
from train.figures import Figure, Report, Target, ratio
from train.peers.serve import Task, write
from train.progress import note

ABOUT = """Measure what a user could take instead: jmp with optax, Flax's DynamicScale, mpx with
Equinox, Keras 3 on JAX, PyTorch's autocast with and without torch.compile. Each runs in a process
of its own, and in an environment of its own where --python says so; what is not installed is
skipped."""

Name = Literal["jmp", "flax", "mpx", "keras", "torch", "torch-compile"]
OURS = "jaxamp"


class Peer(NamedTuple):
    """A script of `train.peers`, its arguments, and how to install what it needs."""

    script: str
    install: str
    flags: tuple[str, ...] = ()


PEERS = {
    OURS: Peer("ours.py", ""),
    "jmp": Peer("with_jmp.py", ""),
    "flax": Peer("with_flax.py", ""),
    "mpx": Peer("with_mpx.py", "pip install jax mixed-precision-for-JAX"),
    "keras": Peer("with_keras.py", "pip install jax keras"),
    "torch": Peer("with_torch.py", "pip install torch==2.13.0 numpy"),
    "torch-compile": Peer("with_torch.py", "pip install torch==2.13.0 numpy", ("--compile",)),
}


@dataclasses.dataclass(frozen=True)
class Options(BenchmarkOptions):
    peers: tuple[Name, ...] = get_args(Name)
    """Which peers to run."""
    python: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """NAME=PATH: the interpreter of mpx, keras or torch (torch-compile too), such as
    torch=/opt/torch/bin/python; else this one. May be given several times."""
    compute: Literal["bf16", "f16"] = "bf16"
    """The 16-bit dtype."""
    threads: int = 2
    """Of each process."""
    rounds: int = 10
    """Rounds over which ratios are medians; each takes `steps` steps of every peer, one after the
    other, in float32 and in 16 bits."""
    steps: int = 2
    """Steps of one peer at a time."""
    training_steps: int = 20
    """Steps of ours in float32 that give the weights that all start from."""


class Absent(RuntimeError):
    """A peer that cannot run here; one line that says why."""


def measure(options: Options) -> Report:
    pythons = _pythons(options)
    config = config_of(options)
    task = make_task(config, options)
    report = Report([], [], [])
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        write(f"{place}/task.npz", task)
        servers: dict[str, Server] = {}
        for name in (OURS, *options.peers):
            note(f"starting {name} ...")
            python = pythons.get(name.removesuffix("-compile"), sys.executable)
            server = stack.enter_context(Server(name, python, place, options.threads))
            try:
                server.ask(options.compute, 2)  # some compile the second step anew
                server.float32_losses = server.ask("f32", 2)[1]
            except Absent as absent:
                report.skipped.append(f"{name}: {absent}")
                continue
            servers[name] = server
        if OURS not in servers:
            raise ChildProcessError(report.skipped[0])
        same = _same(report, servers, tolerances(config.model))
        _times(report, same, options)
    return report


def _pythons(options: Options) -> dict[str, str]:
    pythons = {}
    others = [name for name, peer in PEERS.items() if peer.install and not peer.flags]
    for pair in options.python:
        name, _, path = pair.partition("=")
        if name not in others or not path:
            raise ConfigError(f"--python {pair}: NAME=PATH, NAME one of {', '.join(others)}")
        if not os.access(path, os.X_OK):
            raise ConfigError(f"--python {pair}: {path} is not a program")
        pythons[name] = path
    return pythons


def make_task(config: Config, options: Options) -> Task:
    """The task of a config: weights after some training, and the batch that follows.

    At the start the loss is log(V) whatever the layers do; after some steps it shows what they do.

    Raises:
        ConfigError: a model or data that the peers are not written for.
    """
    plain = ModelConfig()
    for name in ("norm", "activation", "tie_embeddings", "n_kv_heads"):
        given, written = getattr(config.model, name), getattr(plain, name)
        if given != written:
            raise ConfigError(f"the peers are written for model.{name} {written}, not {given}")
    corpus = load(config.data, config.model.vocab_size)
    point = next(measures.trained(config, corpus, range(1), options.training_steps))
    if (point.batch["labels"] < 0).any():
        raise ConfigError("the peers count every label: --config needs documents = 'pack'")
    leaves = jax.tree_util.tree_leaves_with_path(point.params)
    weights = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }
    model = {name: getattr(config.model, name) for name in ("n_layers", "n_heads", "rope_theta")}
    names = ("learning_rate", "b1", "b2", "weight_decay", "max_grad_norm")
    optimizer = {name: getattr(config.optimizer, name) for name in names}
    # Keras adds eps before Adam's bias correction, all others after it: so small, it is nothing.
    optimizer["eps"] = 1e-14
    settings = model | optimizer | {"threads": options.threads}
    tokens, labels = (np.asarray(point.batch[name]) for name in ("tokens", "labels"))
    return Task(weights, tokens, labels, settings)


class Server:
    """A peer's process, which takes steps when it is asked to."""

    def __init__(self, name: str, python: str, place: str, count: int):
        self._peer = PEERS[name]
        self._errors: IO[str] = open(f"{place}/{name}.err", "w+")  # noqa: SIM115
        self.float32_losses: list[float] = []
        script = Path(train.peers.__file__).parent / self._peer.script
        threads = {f"{library}_NUM_THREADS": str(count) for library in ("OMP", "MKL", "OPENBLAS")}
        own = bool(self._peer.install)
        paths = {} if own else {"PYTHONPATH": os.pathsep.join(sys.path)}  # these import ours
        self._process = subprocess.Popen(
            [python, str(script), f"{place}/task.npz", *self._peer.flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | threads | paths | {"JAX_TRACEBACK_FILTERING": "off"},
        )

    def ask(self, compute: str, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and losses of so many steps."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there will be no answer
            print(json.dumps({"compute": compute, "steps": steps}), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise Absent(self._why())
        answer = json.loads(line)
        return answer["seconds"], answer["losses"]

    def _why(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        if "ModuleNotFoundError" in last and self._peer.install:
            return f"not installed ({last}): {self._peer.install}"
        return f"ended with {self._process.returncode}: {last}"

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.communicate()  # waits, and closes the pipes
        self._errors.close()


def tolerances(model: ModelConfig) -> tuple[float, float]:
    """By how much float32 losses before and after a step may differ, relative to the loss.

    A layer is some 20 operations deep, each of which rounds by 2^-24 at most; another 20 stand for
    the logits and the loss. A step adds a backward pass, twice as deep, and another forward pass.
    """
    forward = 20 * (model.n_layers + 1) * 2.0**-24
    return forward, 4 * forward


def _same(
    report: Report, servers: dict[str, Server], allowed: tuple[float, float]
) -> dict[str, Server]:
    """The servers whose float32 losses are ours; those of all go into the report."""
    same, ours = {}, servers[OURS].float32_losses
    for name, server in servers.items():
        off = [abs(a / b - 1) for a, b in zip(server.float32_losses, ours, strict=True)]
        if all(distance <= bound for distance, bound in zip(off, allowed, strict=True)):
            same[name] = server
            continue
        distances = " and ".join(
            f"{a:.1e} (allowed {b:.1e})" for a, b in zip(off, allowed, strict=True)
        )
        report.skipped.append(
            f"{name}: not the same training: float32 losses before and after a step are "
            f"{distances} off ours"
        )
    for k, when in enumerate(("before", "after")):
        losses = {name: server.float32_losses[k] for name, server in servers.items()}
        off = {name: 1e6 * abs(loss / ours[k] - 1) for name, loss in losses.items()}
        report.figures.append(Figure(f"float32 loss {when} a step", "nats", losses))
        report.figures.append(Figure(f"float32 loss {when} a step, off ours by", "1e-6", off))
    return same


def _times(report: Report, servers: dict[str, Server], options: Options) -> None:
    for compute in ("f32", options.compute):
        seconds: dict[str, list[float]] = {name: [] for name in servers}
        losses: dict[str, float] = {}
        for k in range(options.rounds):
            note(f"{compute}, round {k + 1} of {options.rounds}")
            for name in _alternating(servers, k):
                times, found = servers[name].ask(compute, options.steps)
                seconds[name].append(statistics.median(times))
                losses[name] = found[-1]
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        of_ours = {name: ratio(times, seconds[OURS]) for name, times in seconds.items()}
        report.figures.append(Figure(f"step, {compute}", "s", medians))
        report.figures.append(Figure(f"step, {compute}, of {OURS}", "1", of_ours))
        steps = options.rounds * options.steps + 2
        report.figures.append(Figure(f"loss of step {steps}, {compute}", "nats", losses))
        if compute != "f32" and "torch" in of_ours:
            name = f"step, {compute}, {OURS} of torch"
            report.targets.append(Target(name, ratio(seconds[OURS], seconds["torch"]), 1.0))


def _alternating(names: Any, k: int) -> Iterator[str]:
    return reversed(list(names)) if k % 2 else iter(list(names))
