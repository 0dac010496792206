"""Two real models with four places in them where a fault can be planted.

    activation  x -> x, of the same shape, between two layers of a block
    norm        x[..., C] -> x, of the same shape, before or after a layer of a block
    weights     (scores[..., N], mask, broadcastable bool) -> the weights of a weighted mean
    losses      (logits[..., V], labels[...]) -> one per label

The Transformer is that of the trainer, whose own lines stay where no fault is planted.
"""

import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import model, step
from train.config import Config, DataConfig, ModelConfig


class Planted(NamedTuple):
    """A loss, what it is differentiated by, and the other arguments."""

    loss: Any
    params: Any
    args: tuple


def softmax_where(scores, mask):
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)


def cross_entropy(logits, labels):
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def line_of(fun, mark="here"):
    """`file:line:` of the line of `fun` that has the mark in a comment."""
    lines, start = inspect.getsourcelines(fun)
    (at,) = [k for k, line in enumerate(lines) if f"# {mark}" in line]
    return f"{inspect.getsourcefile(inspect.unwrap(fun))}:{start + at}:"


# The Transformer.

CONFIG = Config(
    model=ModelConfig(n_layers=2, d_model=16, n_heads=2), data=DataConfig(seq_len=16), batch_size=4
)
VOCAB = 256


def transformer(patch, activation=None, norm=None, weights=None, losses=None) -> Planted:
    """The trainer's model and loss; `patch` is pytest's monkeypatch."""
    if activation:
        feed = lambda self, x: self.down(activation(self.up(x)))  # noqa: E731
        patch.setattr(model.FeedForward, "__call__", feed)
    if norm:
        patch.setattr(model.nnx, "RMSNorm", lambda size, rngs: Norm(norm))
    if weights:
        patch.setattr(model, "causal_attention", lambda *qkv: _attention(weights, *qkv[:3]))
    if losses:
        patch.setattr(step, "cross_entropy", lambda logits, labels: _sums(losses, logits, labels))
    graphdef, params = model.create(CONFIG.model, VOCAB, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 17), 0, VOCAB)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    loss_fn = step.make_loss_fn(CONFIG, graphdef)

    def loss(params, batch):
        return loss_fn(params, batch, jax.random.key(2), jnp.int32(64))[0]

    return Planted(loss, params, (batch,))


class Norm(nnx.Module):
    """A norm without parameters."""

    def __init__(self, fun):
        self.fun = fun

    def __call__(self, x):
        return self.fun(x)


def _attention(weights, query, key, value):
    """Causal, but that the first token is padding and sees nothing."""
    scores = jnp.einsum("bthd,bshd->bhts", query, key) / query.shape[-1] ** 0.5
    mask = jnp.tri(scores.shape[-1], k=-1, dtype=bool)[None, None]
    return jnp.einsum("bhts,bshd->bthd", weights(scores, mask).astype(value.dtype), value)


def _sums(losses, logits, labels):
    nll = losses(logits, labels)
    return jnp.sum(nll.astype(jnp.float32)), jnp.float32(0), jnp.int32(labels.size)


# The ResNet.


class ResNet(nnx.Module):
    """A stem, residual blocks, a mean over positions weighted by learned scores, and a head."""

    def __init__(self, rngs, size=8, labels=100, activation=nnx.relu, norm=None, weights=None):
        self.stem = nnx.Conv(3, size, (3, 3), use_bias=False, rngs=rngs)
        self.blocks = nnx.List([Residual(size, rngs, activation, norm) for _ in range(2)])
        self.score = nnx.Linear(size, 1, use_bias=False, rngs=rngs)
        self.head = nnx.Linear(size, labels, use_bias=False, rngs=rngs)
        self.weights = weights or softmax_where

    def __call__(self, image_BxHxWx3, seen_BxHW):
        with jax.named_scope("stem"):
            x = self.stem(image_BxHxWx3)
        for k, block in enumerate(self.blocks):
            with jax.named_scope(f"block{k}"):
                x = block(x)
        x_BxHWxC = x.reshape(x.shape[0], -1, x.shape[-1])
        with jax.named_scope("pool"):
            weights_BxHW = self.weights(self.score(x_BxHWxC)[..., 0], seen_BxHW)
            x_BxC = jnp.einsum("bs,bsc->bc", weights_BxHW.astype(x.dtype), x_BxHWxC)
        with jax.named_scope("head"):
            return self.head(x_BxC)  # logits


class Residual(nnx.Module):
    def __init__(self, size, rngs, activation, norm):
        make_norm = lambda: Norm(norm) if norm else nnx.BatchNorm(size, rngs=rngs)  # noqa: E731
        self.first = nnx.Conv(size, size, (3, 3), use_bias=False, rngs=rngs)
        self.second = nnx.Conv(size, size, (3, 3), use_bias=False, rngs=rngs)
        self.norms = nnx.List([make_norm(), make_norm()])
        self.activation = activation

    def __call__(self, x):
        y = self.activation(self.norms[0](self.first(x)))
        return x + self.norms[1](self.second(y))


def resnet(patch, losses=cross_entropy, **places) -> Planted:
    """An image of the batch is padding alone: nothing of it is seen."""
    net = ResNet(nnx.Rngs(0), **places)
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    keys = jax.random.split(jax.random.key(1), 2)
    batch = {
        "image": jax.random.normal(keys[0], (4, 6, 6, 3)),
        "seen": jnp.ones((4, 36), bool).at[3].set(False),
        "labels": jax.random.randint(keys[1], (4,), 0, 100),
    }

    def loss(params, batch, rest):
        net = nnx.merge(graphdef, params, rest)
        logits = net(batch["image"], batch["seen"])
        with jax.named_scope("loss"):
            return jnp.mean(losses(logits, batch["labels"]).astype(jnp.float32))

    return Planted(loss, nnx.to_pure_dict(params), (batch, nnx.to_pure_dict(rest)))


def is_all_finite(tree) -> bool:
    return all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(tree))
