"""Every setting of a run, its one default, and how a TOML file and the command line change it."""

import argparse
import contextlib
import difflib
import io
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

import jaxamp

T = TypeVar("T")

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Extent = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """A setting that cannot be, in one line for the user."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ModelConfig(_Frozen):
    """The Transformer. Sizes are counts."""

    vocab_size: Positive | None = None
    """Rows of the embedding; None: as many as the tokenizer has."""
    n_layers: Positive = 4
    d_model: Positive = 128
    n_heads: Positive = 4
    n_kv_heads: Positive | None = None
    """Key-value heads (grouped-query attention); None: as many as n_heads."""
    d_ff: Positive | None = None
    """Hidden size of the feed-forward layer; None: 4 x d_model for gelu, and for swiglu, which has
    a third matrix, 8/3 x d_model rounded up to a multiple of 64."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    tie_embeddings: bool = True
    dropout: Fraction = 0.0
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    attention: Literal["auto", "xla", "cudnn", "splash"] = "auto"
    """Attention kernel; auto: cuDNN's flash kernel on a GPU that has it, JAX's Pallas splash kernel
    on a TPU, else XLA's."""
    remat: Literal["none", "dots", "full", "islands"] = "none"
    """What the backward pass recomputes: dots all but the results of matmuls, full each whole
    layer, islands what autocast keeps in float32."""

    @property
    def feed_forward_size(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.activation == "gelu" else -(-8 * self.d_model // 192) * 64

    @model_validator(mode="after")
    def _heads_divide(self):
        kv_heads = self.n_kv_heads or self.n_heads
        if self.d_model % self.n_heads or (self.d_model // self.n_heads) % 2:
            raise ValueError(
                f"d_model {self.d_model} must be an even multiple of n_heads {self.n_heads} (RoPE)"
            )
        if self.n_heads % kv_heads:
            raise ValueError(f"n_heads {self.n_heads} must be a multiple of n_kv_heads {kv_heads}")
        return self


class DataConfig(_Frozen):
    """The corpus and how it becomes sequences."""

    path: str | None = None
    """Text files, a glob, .jsonl, .bin or .npy; None: the Python language reference, 465 kB."""
    eval_path: str | None = None
    """Held-out corpus of the same kind; None: eval_fraction of the documents of path."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    seq_len: Positive = 128
    """Tokens in one sequence."""
    documents: Literal["pack", "pad"] = "pack"
    """pack: documents joined end to end; pad: one document a sequence, padding labelled -100."""
    text_key: str = "text"
    """The field of a JSONL line that holds the text."""
    tokenizer: str | None = None
    """A Hugging Face tokenizer.json; None: bytes."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Of .bin files."""


class OptimizerConfig(_Frozen):
    """AdamW, its schedule and the clip before it."""

    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Natural = 20
    final_learning_rate_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where the cosine ends, as a fraction of learning_rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled; not on norms, biases."""
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global norm to which the unscaled gradients are clipped."""


class MeshConfig(_Frozen):
    """Devices in a grid with three axes; their sizes multiply up to the number of devices."""

    data: Extent = -1
    """Copies of the parameters, each on its part of the batch; -1: what the others leave."""
    fsdp: Extent = 1
    """Parts into which parameters, moments and the batch are cut."""
    tensor: Extent = 1
    """Parts into which heads, feed-forward and vocabulary are cut."""
    reduce_dtype: Literal["f32", "compute"] = "f32"
    """In which dtype gradients of weights are added up over devices; compute moves half the bytes
    and rounds them."""


class DistributedConfig(_Frozen):
    """For jax.distributed; Cloud TPU, Slurm and Open MPI say it by themselves."""

    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: Positive | None = None
    process_id: Natural | None = None
    timeout_seconds: Positive = 300
    """How long to wait for the coordinator and the other processes."""


class Config(_Frozen):
    """One training run."""

    config: str | None = None
    """TOML file with the settings to start from, such as configs/tiny.toml; flags change them."""
    policy: str = "auto"
    """Precision: auto, float32, mixed_bfloat16, mixed_float16, or such as params=f32,compute=bf16;
    compute=f16 turns dynamic loss scaling on."""
    workdir: str | None = None
    """Directory that the run writes; None: runs/NAME-TIME, NAME from the config file."""
    resume: bool = False
    """Go on from the newest whole checkpoint in workdir, or start where there is none."""
    explain: bool = False
    """Print what autocast decides for this config, op by op and why, and stop."""
    dry_run: bool = False
    """Print the settings, the mesh, the shardings and the memory of each device, and stop."""
    num_steps: Positive = 300
    """Optimizer steps, skipped ones included."""
    batch_size: Positive = 8
    """Sequences a step, over all devices and processes."""
    grad_accum_steps: Positive = 1
    """Microbatches that a batch is cut into, to save memory; the gradients stay the same."""
    seed: Natural = 0
    """Of the initial parameters, the order of the data and the dropout."""
    loss_chunk: Positive | None = None
    """Tokens of a row whose logits exist at a time; None: all of them."""
    profile_steps: str | None = None
    """Steps to trace for XProf or Perfetto, such as 10:15; the last one is not included."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of mean(log Z squared), which keeps logits near zero."""
    eval_every_steps: Positive = 100
    """Steps between evaluations; there is one at the end too."""
    eval_batches: Positive = 16
    """Most batches that one evaluation reads."""
    checkpoint_every_steps: Positive = 100
    """Steps between checkpoints; there is one at the end too."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept, beside the best one."""
    max_bad_steps: Positive = 50
    """Stop after so many non-finite steps in a row at the lowest loss scale."""
    sample_prompt: str = "The "
    """What the sample at the end starts with."""
    sample_tokens: Natural = 200
    """Tokens generated at the end; 0: none."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    distributed: DistributedConfig = DistributedConfig()

    @model_validator(mode="after")
    def _is_possible(self):
        jaxamp.get_policy(self.policy)
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of "
                f"grad_accum_steps {self.grad_accum_steps}"
            )
        if self.resume and self.workdir is None:
            raise ValueError("resume needs a workdir: the run to go on with")
        return self


def parse(args: Sequence[str] | None, prog: str, description: str) -> Config:
    """The config of a command line: defaults, then the file of `--config`, then the flags.

    With `--resume` and no `--config` it starts from what the run wrote down.

    Raises:
        ConfigError: an unknown key or a value that cannot be; one line.
        SystemExit: `--help` was asked for, and printed.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument("--config")
    finder.add_argument("--workdir")
    finder.add_argument("--resume", action="store_true")
    try:
        default = _start(finder.parse_known_args(args)[0])
    except argparse.ArgumentError:
        default = Config()  # a flag without its value: tyro says so
    return parse_flags(Config, args, prog, description, default)


def parse_flags(
    kind: type[T], args: Sequence[str] | None, prog: str, about: str, start: T | None = None
) -> T:
    """A `kind` from command-line flags; a flag that is not given is as in `start`.

    Raises:
        ConfigError: a flag that is unknown or has a value that cannot be; one line.
        SystemExit: `--help` was asked for, and printed.
    """
    printed = io.StringIO()
    default: Any = tyro.MISSING_NONPROP if start is None else start
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(kind, args=args, prog=prog, description=about, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ConfigError(_one_line(printed.getvalue(), stop)) from None


def _start(flags: argparse.Namespace) -> Config:
    if flags.config is not None:
        return load_toml(flags.config)
    if flags.resume and flags.workdir is not None:
        written = Path(flags.workdir) / "config.json"
        if written.is_file():
            return load_json(written.read_text(), str(written))
    return Config()


def load_toml(path: str) -> Config:
    """The config of a TOML file.

    Raises:
        ConfigError: no such file, no TOML, an unknown key, a value that cannot be.
    """
    try:
        settings = tomllib.loads(Path(path).read_text())
    except OSError as error:
        near = difflib.get_close_matches(path, map(str, Path("configs").glob("*.toml")), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--config {path}: {error.strerror}{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not TOML: {error}") from None
    try:
        return Config.model_validate(settings | {"config": path})
    except ValidationError as error:
        raise ConfigError(f"--config {path}: {describe(error)}") from None


def load_json(text: str, where: str) -> Config:
    """The config that a run wrote down.

    Raises:
        ConfigError: it is not one of this version.
    """
    try:
        return Config.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error)}") from None


def describe(error: ValidationError) -> str:
    """The first problem of a validation, in one line: key, what is wrong, what was given."""
    problem = error.errors()[0]
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(problem['loc'])}"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = "" if isinstance(given, dict | BaseModel) else f", got {given!r}"
    return f"{key}: {message}{shown}" if key else message


def _nearest(location: Sequence[Any]) -> str:
    model: Any = Config
    for name in location[:-1]:
        model = model.model_fields[name].annotation
    names = list(model.model_fields)
    near = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; allowed: {', '.join(names)}"


def _one_line(printed: str, stop: BaseException) -> str:
    cause = stop.__context__
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__context__
    # tyro prints a box: its words without the title, the frame and the pointer to --help.
    body = printed.partition("\n")[2] or printed
    text = " ".join(re.split(r"For full helptext|Argument helptext", body)[0].split())
    text = " ".join(re.sub(r"[^\x00-\x7f]", " ", text).split())
    if cause is None:
        return text
    part = re.search(r"Error parsing (\w+):", text)
    inside = part is not None and part[1] in Config.model_fields
    return f"{part[1]}.{describe(cause)}" if inside and part else describe(cause)
