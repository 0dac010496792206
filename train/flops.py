"""What a step costs in arithmetic, by PaLM's convention, and what the devices could do."""

import math
from typing import Any

import jax

from train.config import ModelConfig


def model_flops_per_token(params: Any, config: ModelConfig, seq_len: int) -> int:
    """FLOPs of the forward and the backward pass for one token: 6 N + 12 L E T.

    PaLM's convention (arXiv:2204.02311, appendix B), a multiplication and an addition being two:
    N are the parameters of matmuls, the output head among them and the gather of embeddings not;
    L is n_layers, E d_model, T seq_len. Attention counts all T x T scores, the half behind the
    causal mask too. What is recomputed to save memory does not count, nor does elementwise work.

    Args:
        params: Of the model; arrays or their shapes.
        config: Of the model.
        seq_len: Tokens in one sequence.
    """
    attention = 12 * config.n_layers * config.d_model * seq_len
    return 6 * count_matmul_params(params) + attention


def count_matmul_params(params: Any) -> int:
    """Parameters that multiply each token: all kernels, and the embedding where it is the head."""
    names = {"kernel"} if params.get("head") else {"kernel", "embedding"}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(leaf.shape) for path, leaf in leaves if path[-1].key in names)
