"""The train step of the smallest model that has every kind of layer."""

import jax
import numpy as np
from flax import nnx

import jaxamp
from train.config import Config, ModelConfig
from train.step import init_state, make_train_step

VOCAB, SEQ_LEN = 64, 32
CONFIG = Config(model=ModelConfig(n_layers=2, d_model=32, n_heads=2, d_ff=64), batch_size=4)


def make_small_step(policy):
    """The jitted step, the shapes of its state, and those of a batch."""
    chosen = jaxamp.get_policy(policy)
    graphdef, state = nnx.eval_shape(lambda: init_state(CONFIG, VOCAB, chosen))
    ids = jax.ShapeDtypeStruct((CONFIG.batch_size, SEQ_LEN), np.int32)
    return make_train_step(CONFIG, graphdef, chosen), state, {"tokens": ids, "labels": ids}


def first_state(policy):
    return jax.jit(lambda: init_state(CONFIG, VOCAB, jaxamp.get_policy(policy))[1])()


def first_batch():
    shape = (2, CONFIG.batch_size, SEQ_LEN)
    tokens, labels = np.random.default_rng(0).integers(0, VOCAB, shape, np.int32)
    return {"tokens": tokens, "labels": labels}
