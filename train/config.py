"""Every setting of a run, its one default, and how a TOML file and the command line change it."""

import re
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

import jaxamp
from train.exits import InputError

T = TypeVar("T")

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Extent = Annotated[int, Field(ge=-1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(InputError):
    """A setting that cannot be, in one line for the user."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


Remat = Literal["none", "islands", "dots", "full"]  # by how much they recompute


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
    remat: Remat = "none"
    """What the backward pass recomputes: dots all but the results of matmuls, full each whole
    layer, islands what autocast keeps in float32."""
    scan_layers: bool | None = None
    """Whether the layers are compiled once and run in a loop. Each by itself compiles longer and
    leaves XLA more to fuse; None: no loop on a CPU with remat none, else a loop."""

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

    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Natural = 50
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
    auto: bool = False
    """Ask JAX to find the others: a Cloud TPU pod slice, whose hosts do not say it."""
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
    """So many non-finite steps in a row at the lowest loss scale are an incident."""
    on_incident: Literal["skip", "stop", "rollback"] = "skip"
    """After bad steps in a row, a loss of NaN or a loss spike. skip: go on, but stop after too many
    bad steps; rollback: go back to the last checkpoint from before, and on with other data."""
    max_rollbacks: Positive = 3
    """Stop at the incident after so many."""
    fallback_policy: str | None = None
    """Precision from a rollback on, such as float32; None: as before."""
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
        if self.policy.strip() != "auto":  # that one asks the device, which is for later
            jaxamp.get_policy(self.policy)
        if self.batch_size % self.grad_accum_steps:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of "
                f"grad_accum_steps {self.grad_accum_steps}"
            )
        if self.fallback_policy is not None:
            try:
                jaxamp.get_policy(self.fallback_policy)
            except ValueError as error:
                raise ValueError(f"fallback_policy: {error}") from None
            if self.on_incident != "rollback":
                raise ValueError(
                    f"fallback_policy {self.fallback_policy} is for on_incident rollback, and that "
                    f"is {self.on_incident}"
                )
        if self.on_incident == "rollback" and self.keep_checkpoints < 2:
            raise ValueError(
                f"on_incident rollback needs keep_checkpoints 2 or more, not "
                f"{self.keep_checkpoints}: the newest one may be of after an incident began"
            )
        if self.resume and self.workdir is None:
            raise ValueError("resume needs a workdir: the run to go on with")
        self.profile_window  # noqa: B018
        return self

    @property
    def profile_window(self) -> range:
        """The steps to trace; empty where there are none.

        Raises:
            ValueError: profile_steps is not START:STOP, or names steps that the run does not have.
        """
        given = self.profile_steps
        match = re.fullmatch(r"(\d+):(\d+)", "0:0" if given is None else given, re.ASCII)
        window = range(*map(int, match.groups())) if match else range(0)
        if given is not None and not (window and 0 < window.start <= self.num_steps):
            raise ValueError(
                f"profile_steps {given} must be START:STOP with 0 < START < STOP and START within "
                f"num_steps {self.num_steps}; 10:15 traces steps 10 to 14"
            )
        return window
