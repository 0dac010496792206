"""Text from a trained model: `python -m train.generate RUN --prompt "..."`."""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import tyro
from flax import nnx
from jax.typing import ArrayLike

import jaxamp
from train import model
from train.checkpoint import load
from train.config import ModelConfig
from train.exits import leave
from train.parse import parse_flags
from train.tokenizer import Tokenizer, load_tokenizer

ABOUT = "Go on from a prompt with the model of a run of train.run."


@dataclasses.dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """Directory of a run of train.run; its newest whole checkpoint is used."""
    prompt: str = "The "
    """Text to go on from; empty: from the start of a document."""
    num_tokens: int = 200
    """Tokens to add."""
    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token each time."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    seed: int = 0
    """The same seed gives the same text."""


def main(args: Sequence[str] | None = None) -> int:
    """Prints the prompt and what follows; the exit code is 2 for bad input."""
    try:
        print(_text(parse_flags(Options, args, "python -m train.generate", ABOUT)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _text(options: Options) -> str:
    _check(options.num_tokens, options.temperature, options.top_k)
    _, config, meta, state = load(options.run)
    # Only the structure: the parameters are those of the checkpoint.
    graphdef, _ = jax.eval_shape(
        functools.partial(model.create, config.model, meta["vocab_size"]), jax.random.key(0)
    )
    if config.data.tokenizer is None and str(config.data.path).endswith((".bin", ".npy")):
        raise ValueError(
            f"{options.run}: it was trained on token ids without --data.tokenizer, so there is "
            "no text to make of them"
        )
    tokenizer = load_tokenizer(config.data.tokenizer)
    prompt_ids = encode_prompt(tokenizer, options.prompt)
    ids = generate(
        graphdef,
        state.params,
        config.model,
        prompt_ids,
        options.num_tokens,
        jax.random.key(options.seed),
        temperature=options.temperature,
        top_k=options.top_k,
        policy=config.policy,
    )
    # Decoded in one piece: a character's bytes may straddle the end of the prompt.
    return tokenizer.decode(np.concatenate([prompt_ids, ids]))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> np.ndarray:
    """int32[T] of a prompt; the end of the document before where it is empty."""
    return np.asarray(tokenizer.encode(prompt) if prompt else [tokenizer.end_of_document], np.int32)


def generate(
    graphdef: nnx.GraphDef,
    params: model.Params,
    config: ModelConfig,
    prompt_ids: Sequence[int] | ArrayLike,
    num_tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
    policy: jmp.Policy | str = "float32",
) -> jax.Array:
    """The int32[num_tokens] that follow the prompt, int[T]; a function of `key` alone.

    Token i is drawn with the i-th of `num_tokens` keys split from `key`, in float32 whatever the
    policy. Temperature 0 takes the likeliest token.

    Raises:
        ValueError: an empty prompt, an id beyond the vocabulary, a number out of range.
    """
    _check(num_tokens, temperature, top_k)
    vocab_size = params["embed"]["embedding"].shape[0]
    prompt_T = _checked_prompt(prompt_ids, vocab_size)
    return _generate(
        graphdef,
        params,
        prompt_T,
        key,
        temperature or 1.0,  # one of one likeliest token is drawn where it is 0
        config=config,
        num_tokens=num_tokens,
        top_k=1 if temperature == 0 else min(top_k or vocab_size, vocab_size),
        policy=jaxamp.get_policy(policy),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "config", "num_tokens", "top_k", "policy"))
def _generate(graphdef, params, prompt_T, key, temperature, *, config, num_tokens, top_k, policy):
    forward = jaxamp.autocast(functools.partial(model.apply_with_cache, graphdef), policy)
    length = prompt_T.shape[0] + num_tokens
    cache = model.init_cache(config, 1, length, params["embed"]["embedding"].dtype)

    def next_token(tokens_T, cache, position, key):
        logits_BxTxV, cache = forward(params, tokens_T[None], cache, position)
        return _sample(logits_BxTxV[0, -1], key, temperature, top_k), cache

    def next_step(carry, key):
        token, cache, position = carry
        token, cache = next_token(token[None], cache, position, key)
        return (token, cache, position + 1), token

    keys = jax.random.split(key, num_tokens)
    first, cache = next_token(prompt_T, cache, 0, keys[0])
    _, rest = jax.lax.scan(next_step, (first, cache, prompt_T.shape[0]), keys[1:])
    return jnp.concatenate([first[None], rest])


def _sample(logits_V, key, temperature, top_k: int):
    """One id, int32[]; of equal logits the lowest ids count as the likeliest."""
    values, ids = jax.lax.top_k(logits_V.astype(jnp.float32), top_k)
    return ids[jax.random.categorical(key, values / temperature)]


def _check(num_tokens: int, temperature: float, top_k: int | None) -> None:
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}; leave it out for all tokens")


def _checked_prompt(prompt_ids, vocab_size: int) -> np.ndarray:
    prompt_T = np.asarray(prompt_ids)
    if prompt_T.ndim != 1 or not prompt_T.size:
        raise ValueError(
            f"prompt_ids must be one token or more, int[T]; got shape {prompt_T.shape}"
        )
    if prompt_T.min() < 0 or prompt_T.max() >= vocab_size:
        raise ValueError(
            f"prompt_ids must be in 0..{vocab_size - 1}, the model's vocabulary; "
            f"got {prompt_T.min()}..{prompt_T.max()}"
        )
    return prompt_T.astype(np.int32)


if __name__ == "__main__":
    leave(main())
