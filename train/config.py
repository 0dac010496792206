"""Every setting of a run, its one default, and how TOML files and the command line change it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


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
    """Hidden size of the feed-forward layer; None: 4 x d_model."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    activation: Literal["gelu", "swiglu"] = "swiglu"
    tie_embeddings: bool = True
    dropout: Fraction = 0.0
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto: cuDNN's flash kernel on a GPU that has it, else XLA's."""

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


class Config(_Frozen):
    """One training run."""

    policy: str = "auto"
    """Precision: auto, float32, mixed_bfloat16, mixed_float16, or params=f32,compute=bf16."""
    workdir: str | None = None
    """Where the run writes; None: runs/NAME-TIME."""
    resume: bool = False
    """Go on from the newest whole checkpoint in workdir, or start where there is none."""
    num_steps: Positive = 300
    batch_size: Positive = 16
    """Sequences a step, over all devices and processes."""
    seed: Natural = 0
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of mean(log Z squared), which keeps logits near zero."""
    eval_every_steps: Positive = 100
    eval_batches: Positive = 16
    """Most batches that one evaluation reads."""
    checkpoint_every_steps: Positive = 100
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept, beside the best one."""
    max_bad_steps: Positive = 50
    """Stop after so many non-finite steps in a row at the lowest loss scale."""
    sample_prompt: str = "The "
    sample_tokens: Natural = 200
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
