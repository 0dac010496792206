"""Keras 3 on JAX with the policy `mixed_bfloat16` or `mixed_float16`."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras  # pyright: ignore[reportMissingImports]
from keras import layers, ops  # pyright: ignore[reportMissingImports]
from serve import Step, Task, serve

POLICIES = {"f32": "float32", "bf16": "mixed_bfloat16", "f16": "mixed_float16"}


class Block(layers.Layer):
    def __init__(self, task: Task):
        super().__init__()
        settings = task.settings
        width = task.weights["embed/embedding"].shape[1]
        d_ff = task.weights["blocks/feed_forward/up/kernel"].shape[2]
        self.n_heads, (self.cos, self.sin) = settings["n_heads"], task.rotation()
        self.attention_norm = layers.RMSNormalization(epsilon=1e-6)
        self.feed_forward_norm = layers.RMSNormalization(epsilon=1e-6)
        dense = lambda size: layers.Dense(size, use_bias=False)  # noqa: E731
        self.query, self.key, self.value, self.out = (dense(width) for _ in range(4))
        self.up, self.gate, self.down = dense(d_ff), dense(d_ff), dense(width)

    def call(self, x):
        x = x + self.attend(self.attention_norm(x))
        y = self.feed_forward_norm(x)
        return x + self.down(ops.silu(self.gate(y)) * self.up(y))

    def attend(self, x):
        heads = lambda y: ops.reshape(y, (*y.shape[:2], self.n_heads, -1))  # noqa: E731
        query, key = self.rotate(heads(self.query(x))), self.rotate(heads(self.key(x)))
        y = ops.dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.out(ops.reshape(y, x.shape))

    def rotate(self, x):
        cos, sin = self.cos[None, :, None], self.sin[None, :, None]
        left, right = ops.split(ops.cast(x, "float32"), 2, axis=-1)
        turned = ops.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        return ops.cast(turned, x.dtype)


class Transformer(keras.Model):
    def __init__(self, task: Task):
        super().__init__()
        self.embed = layers.Embedding(*task.weights["embed/embedding"].shape)
        self.blocks = [Block(task) for _ in range(task.settings["n_layers"])]
        self.norm = layers.RMSNormalization(epsilon=1e-6)
        self.to_float32 = layers.Activation("linear", dtype="float32")

    def call(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        table = ops.cast(self.embed.embeddings, x.dtype)
        return self.to_float32(ops.matmul(x, ops.transpose(table)))


def make(task: Task, compute: str) -> Step:
    keras.mixed_precision.set_global_policy(POLICIES[compute])
    model, settings = Transformer(task), task.settings
    model(task.tokens)  # makes the weights
    model.embed.embeddings.assign(task.weights["embed/embedding"])
    model.norm.scale.assign(task.weights["norm/scale"])
    for k, block in enumerate(model.blocks):
        for name, weight in task.layer(k).items():
            layer = getattr(block, name)
            (layer.kernel if weight.ndim == 2 else layer.scale).assign(weight)
    optimizer = keras.optimizers.AdamW(
        settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        beta_1=settings["b1"],
        beta_2=settings["b2"],
        epsilon=settings["eps"],
        global_clipnorm=settings["max_grad_norm"],
    )
    optimizer.exclude_from_weight_decay(var_names=["scale"])
    model.compile(
        optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True
    )

    def step() -> float:
        model.reset_metrics()  # else it is the mean of all losses so far
        return float(model.train_on_batch(task.tokens, task.labels))

    return step


if __name__ == "__main__":
    serve(make)
