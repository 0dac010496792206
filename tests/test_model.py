"""Tolerances are eps x depth: eps of the dtype, times the layers, times the roundings in one.

Logits here are of order 0.1 to 1, so the tolerance is absolute. A layer rounds its residual stream
about 8 times one after another (norm, projection, kernel, projection, add; twice), and float32
sums of up to 128 terms count as at most sqrt(128) = 11 more each.
"""

import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import model
from train.config import ModelConfig

VOCAB = 61
SMALL = ModelConfig(n_layers=3, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48)
FLAVOURS = {
    "llama": SMALL,
    "gpt2": SMALL.model_copy(
        update={"norm": "layernorm", "activation": "gelu", "n_kv_heads": None, "d_ff": None}
    ),
    "untied": SMALL.model_copy(update={"tie_embeddings": False, "n_kv_heads": 1}),
}
SEEDS = (0, 1, 2)
TOLERANCE = {  # eps x 3 layers x 8 roundings, and for float32 x 11
    jnp.float32: 2**-23 * 3 * 8 * 11,
    jnp.float16: 2**-10 * 3 * 8,
    jnp.bfloat16: 2**-7 * 3 * 8,
}

# Most of the time here is XLA's: optimised programs would take three times as long to build.
quick = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)
run = quick(model.apply, static_argnums=0)
create = quick(model.create, static_argnums=(0, 1))


def mean_loss(graphdef, params, tokens, dropout_key=None):
    logits = model.apply(graphdef, params, tokens[:, :-1], dropout_key).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1).mean()


loss_and_grads = quick(jax.value_and_grad(mean_loss, argnums=1), static_argnums=0)


@functools.cache
def made(config, seed=0):
    """A model whose norms and embedding are not at their bland initial values."""
    graphdef, shapes = jax.eval_shape(
        functools.partial(model.create, config, VOCAB), jax.random.key(0)
    )
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        noise = rng.normal(size=leaf.shape).astype(np.float32)
        if path[-1].key == "kernel":
            return jnp.asarray(noise / math.sqrt(leaf.shape[-2]))
        return jnp.asarray((path[-1].key == "scale") + np.float32(0.2) * noise)

    return graphdef, jax.tree_util.tree_map_with_path(draw, shapes)


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def some_tokens(seed=0, batch=2, length=12):
    return jax.random.randint(jax.random.key(seed + 7), (batch, length), 0, VOCAB)


# The whole model again, in numpy and float64, one layer, head and position at a time.


def reference(config, params, tokens):
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embed"]["embedding"][np.asarray(tokens)]
    for layer in range(config.n_layers):
        block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"])
        y = reference_norm(config, block["attention_norm"], x)
        x = x + reference_attention(config, block["attention"], y)
        y = reference_norm(config, block["feed_forward_norm"], x)
        x = x + reference_feed_forward(config, block["feed_forward"], y)
    x = reference_norm(config, params["norm"], x)
    head = params["embed"]["embedding"].T if "head" not in params else params["head"]["kernel"]
    return x @ head


def reference_norm(config, params, x):
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["scale"] + params.get(
        "bias", 0
    )


def reference_feed_forward(config, params, x):
    up = x @ params["up"]["kernel"]
    if config.activation == "swiglu":
        gate = x @ params["gate"]["kernel"]
        return (gate / (1 + np.exp(-gate)) * up) @ params["down"]["kernel"]
    gelu = up / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return gelu @ params["down"]["kernel"]


def reference_attention(config, params, x):
    batch, length, _ = x.shape
    size = config.d_model // config.n_heads
    group = config.n_heads // (config.n_kv_heads or config.n_heads)
    query, key, value = (x @ params[name]["kernel"] for name in ("query", "key", "value"))
    out = np.zeros((batch, length, config.d_model))
    for head in range(config.n_heads):
        mine = slice(head * size, (head + 1) * size)
        shared = slice(head // group * size, (head // group + 1) * size)
        q, k = (reference_rope(config, y) for y in (query[..., mine], key[..., shared]))
        for t in range(length):
            scores = np.einsum("bd,bsd->bs", q[:, t], k[:, : t + 1]) / math.sqrt(size)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[:, t, mine] = np.einsum("bs,bsd->bd", weights, value[:, : t + 1, shared])
    return out @ params["out"]["kernel"]


def reference_rope(config, x):
    half = x.shape[-1] // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = np.arange(x.shape[1]) * config.rope_theta ** (-i / half)
        pair = (x[..., i] + 1j * x[..., half + i]) * np.exp(1j * angle)
        turned[..., i], turned[..., half + i] = pair.real, pair.imag
    return turned


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_equals_a_float64_numpy_model(flavour, seed):
    config = FLAVOURS[flavour]
    graphdef, params = made(config, seed)
    tokens = some_tokens(seed)
    expected = reference(config, params, tokens)
    np.testing.assert_allclose(
        run(graphdef, params, tokens), expected, rtol=0, atol=TOLERANCE[jnp.float32]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_runs_in_the_dtype_of_its_parameters(dtype):
    graphdef, params = made(SMALL)
    logits = run(graphdef, cast(params, dtype), some_tokens())
    assert logits.dtype == dtype
    expected = reference(SMALL, params, some_tokens())
    np.testing.assert_allclose(
        np.asarray(logits, np.float64), expected, rtol=0, atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_gradients_lower_in_every_dtype(flavour, dtype):
    config = FLAVOURS[flavour].model_copy(update={"dropout": 0.1})
    graphdef, params = made(config)
    lowered = loss_and_grads.lower(graphdef, cast(params, dtype), some_tokens(), jax.random.key(0))
    loss, grads = lowered.out_info
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position", (0, 5, 11))
def test_a_token_changes_no_earlier_logit(position, seed):
    graphdef, params = made(SMALL, seed)
    tokens = some_tokens(seed)
    other = tokens.at[:, position].set((tokens[:, position] + 1) % VOCAB)
    before, after = run(graphdef, params, tokens), run(graphdef, params, other)
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(-1).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_scan_equals_a_loop_over_layers(seed):
    config = SMALL.model_copy(update={"dropout": 0.3})
    graphdef, params = made(config, seed)
    tokens, key = some_tokens(seed), jax.random.key(seed)
    module = model.nnx.merge(graphdef, params)
    block_def, layers = model.nnx.split(module.blocks)
    keys = jax.random.split(key, config.n_layers + 1)
    x = module.dropout(module.embed(tokens), rngs=keys[0])
    rotation = model._rotation(config, 0, tokens.shape[1])
    for layer in range(config.n_layers):
        block = model.nnx.merge(block_def, jax.tree.map(lambda leaf, i=layer: leaf[i], layers))
        x, _ = block(x, rotation, None, 0, keys[layer + 1])
    expected = module.embed.attend(module.norm(x))
    np.testing.assert_allclose(
        run(graphdef, params, tokens, key), expected, rtol=0, atol=TOLERANCE[jnp.float32]
    )


def test_the_program_does_not_grow_with_depth():
    def equations(n_layers):
        update = {"n_layers": n_layers, "dropout": 0.1, "scan_layers": True}
        config = SMALL.model_copy(update=update)
        args = *made(config), some_tokens(), jax.random.key(1)
        return loss_and_grads.lower(*args).as_text().count("\n")

    assert equations(2) == equations(12)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_layers_are_the_same_in_a_loop_and_one_by_one(remat):
    """Float32 sums in another order, forward and backward."""
    found = []
    for scan_layers in (True, False):
        config = SMALL.model_copy(update={"scan_layers": scan_layers, "remat": remat})
        args = *made(config), some_tokens()
        found.append(jax.tree.leaves(loss_and_grads(*args)))
        barriers = loss_and_grads.lower(*args).as_text().count("optimization_barrier")
        # XLA would merge what a layer recomputes with what it computed.
        assert bool(barriers) == (remat != "none" and not scan_layers)
    for one, other in zip(*found, strict=True):
        tolerance = 2 * TOLERANCE[jnp.float32] * float(jnp.abs(one).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def test_without_a_say_layers_are_looped_over_but_on_a_cpu(monkeypatch):
    of = lambda **update: model.layers_at_once(SMALL.model_copy(update=update))  # noqa: E731
    assert of() == of(scan_layers=False) == SMALL.n_layers
    assert of(scan_layers=True) == of(remat="islands") == of(remat="dots") == 1
    monkeypatch.setattr(model, "target_device", lambda: mock.Mock(platform="tpu"))
    assert of() == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_grouped_queries_equal_repeated_key_value_heads(seed):
    full = SMALL.model_copy(update={"n_kv_heads": None})
    graphdef, params = made(SMALL, seed)
    full_graphdef, _ = made(full)

    def repeated(kernel):
        heads = kernel.reshape(*kernel.shape[:2], 2, 8)
        return jnp.repeat(heads, 2, axis=2).reshape(*kernel.shape[:2], 32)

    attention = dict(params["blocks"]["attention"])
    for name in ("key", "value"):
        attention[name] = {"kernel": repeated(attention[name]["kernel"])}
    full_params = params | {"blocks": params["blocks"] | {"attention": attention}}
    tokens = some_tokens(seed)
    np.testing.assert_allclose(
        run(graphdef, params, tokens),
        run(full_graphdef, full_params, tokens),
        rtol=0,
        atol=TOLERANCE[jnp.float32],
    )


def test_as_many_key_value_heads_as_heads_is_the_default():
    graphdef, params = made(SMALL.model_copy(update={"n_kv_heads": None}))
    spelled_graphdef, spelled = made(SMALL.model_copy(update={"n_kv_heads": 4}))
    np.testing.assert_array_equal(
        run(graphdef, params, some_tokens()), run(spelled_graphdef, spelled, some_tokens())
    )


@functools.partial(quick, static_argnums=(0, 3))
def decode(graphdef, params, tokens, prefix, cache):
    """Logits of a prefix in one pass and of the rest one token at a time."""
    head, cache = model.apply_with_cache(graphdef, params, tokens[:, :prefix], cache, 0)

    def step(carry, token_B):
        cache, position = carry
        logits, cache = model.apply_with_cache(graphdef, params, token_B[:, None], cache, position)
        return (cache, position + 1), logits[:, 0]

    (cache, _), tail = jax.lax.scan(step, (cache, prefix), tokens[:, prefix:].T)
    return jnp.concatenate([head, tail.swapaxes(0, 1)], axis=1), cache


@pytest.mark.parametrize(
    ("flavour", "dtype"),
    [(name, jnp.float32) for name in FLAVOURS] + [("llama", jnp.bfloat16), ("llama", jnp.float16)],
)
def test_decoding_with_the_cache_equals_the_full_forward(flavour, dtype):
    config = FLAVOURS[flavour]
    graphdef, params = made(config)
    params, tokens = cast(params, dtype), some_tokens()
    cache = model.init_cache(config, 2, 16, dtype)  # longer than needed: the rest stays masked
    decoded, cache = decode(graphdef, params, tokens, 5, cache)
    assert cache["key"].shape == (3, 2, 16, config.n_kv_heads or 4, 8)
    assert cache["key"].dtype == cache["value"].dtype == decoded.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(decoded, np.float64),
        np.asarray(run(graphdef, params, tokens), np.float64),
        rtol=0,
        atol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_rope_scores_depend_on_the_distance_alone(seed):
    q, k = jax.random.normal(jax.random.key(seed), (2, 1, 1, 1, 8))

    def score(m, n):
        turned_q = model._rotate(q, model._rotation(SMALL, m, 1))
        return (turned_q * model._rotate(k, model._rotation(SMALL, n, 1))).sum()

    # Angles below 1024 are rounded by 2**-14, their frequencies by 2**-24 x 1024: 2**-13 each
    # side, two sides, times |q| |k|.
    tolerance = 2**-12 * float(jnp.linalg.norm(q) * jnp.linalg.norm(k))
    near = score(9, 2)
    np.testing.assert_allclose(score(1007, 1000), near, rtol=0, atol=tolerance)
    assert abs(score(1008, 1000) - near) > 10 * tolerance


def test_rope_angles_are_float32_at_position_4095():
    config = ModelConfig(d_model=64, n_heads=1)
    cos, sin = (np.asarray(x, np.float64).ravel() for x in model._rotation(config, 4095, 1))
    exact = 4095 * 10000.0 ** (-np.arange(32) / 32)
    rounded = (np.float32(4095) * (exact / 4095).astype(np.float32)).astype(np.float64)
    # cos and sin of a float32 angle: an ulp of 1 and the argument's reduction.
    np.testing.assert_allclose(cos, np.cos(rounded), rtol=0, atol=1e-6)
    np.testing.assert_allclose(sin, np.sin(rounded), rtol=0, atol=1e-6)
    # The angle itself: rounded by 2**-13, its frequency by 2**-24 x 4095. bfloat16: by 8.
    np.testing.assert_allclose(cos, np.cos(exact), rtol=0, atol=2**-13 + 2**-12)


def test_rope_angles_are_float32_when_parameters_are_not():
    graphdef, params = made(SMALL)
    program = jax.make_jaxpr(model.apply, static_argnums=0)(
        graphdef, cast(params, jnp.bfloat16), some_tokens()
    )
    angles = [eqn.invars[0].aval.dtype for eqn in program.eqns if eqn.primitive.name == "cos"]
    assert angles == [jnp.float32]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tied_weight_gets_the_gradient_of_both_uses(seed):
    graphdef, params = made(SMALL, seed)
    assert "head" not in params
    untied, _ = made(SMALL.model_copy(update={"tie_embeddings": False}))
    embedding = params["embed"]["embedding"]
    tokens = some_tokens(seed)
    tied = loss_and_grads(graphdef, params, tokens)[1]["embed"]["embedding"]
    _, apart = loss_and_grads(untied, params | {"head": {"kernel": embedding.T}}, tokens)
    uses = apart["embed"]["embedding"], apart["head"]["kernel"].T
    assert all(jnp.abs(use).max() > 1e-3 for use in uses)
    np.testing.assert_allclose(tied, sum(uses), rtol=0, atol=TOLERANCE[jnp.float32])


def test_dropout_is_a_function_of_its_key_and_off_without_one():
    dropped = SMALL.model_copy(update={"dropout": 0.5})
    graphdef, params = made(dropped)
    tokens, key = some_tokens(), jax.random.key(3)
    once = run(graphdef, params, tokens, key)
    np.testing.assert_array_equal(once, run(graphdef, params, tokens, key))
    assert not jnp.array_equal(once, run(graphdef, params, tokens, jax.random.key(4)))
    plain_graphdef, _ = made(SMALL)
    off = run(graphdef, params, tokens)
    np.testing.assert_array_equal(off, run(plain_graphdef, params, tokens))
    np.testing.assert_array_equal(off, run(plain_graphdef, params, tokens, key))
    assert not jnp.array_equal(off, once)


def test_dropout_drops_its_rate_and_keeps_the_mean():
    config = SMALL.model_copy(update={"dropout": 0.25})
    graphdef, _ = made(config)
    x = jnp.ones((64, 256))
    dropped = model.nnx.merge(graphdef, made(config)[1]).dropout(x, rngs=jax.random.key(0))
    np.testing.assert_array_equal(jnp.unique(dropped), jnp.array([0, 1 / 0.75]))
    # 64 x 256 independent draws: five standard deviations.
    assert abs((dropped == 0).mean() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / x.size)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_every_dropout_mask_is_the_same_in_16_bits(dtype):
    graphdef, params = made(SMALL.model_copy(update={"dropout": 0.2}))
    tokens = some_tokens()
    float32 = run(graphdef, params, tokens, jax.random.key(0))
    narrow = run(graphdef, cast(params, dtype), tokens, jax.random.key(0))
    other = run(graphdef, params, tokens, jax.random.key(1))
    np.testing.assert_allclose(narrow.astype(jnp.float32), float32, atol=TOLERANCE[dtype])
    assert jnp.abs(other - float32).max() > 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("tie", (True, False))
def test_the_first_loss_is_that_of_a_uniform_guess(tie, seed):
    config = ModelConfig(tie_embeddings=tie)
    graphdef, params = create(config, 256, jax.random.key(seed))
    tokens = jax.random.randint(jax.random.key(seed), (4, 65), 0, 256)
    logits = np.asarray(run(graphdef, params, tokens[:, :-1]), np.float64)
    own = np.take_along_axis(logits, np.asarray(tokens[:, 1:, None]), -1)
    loss = np.mean(np.log(np.exp(logits).sum(-1)) - own[..., 0])
    # Logits have variance v = 128 x 0.02**2: log mean exp adds v/2 = 0.026; the mean of 256 own
    # logits has a standard deviation of sqrt(v / 256) = 0.014, taken five times.
    assert abs(loss - math.log(256) - 0.026) < 0.07


def test_initial_kernels_are_scaled_by_fan_in_and_residual_outputs_by_depth():
    _, params = create(ModelConfig(), 256, jax.random.key(0))
    attention, feed_forward = (params["blocks"][name] for name in ("attention", "feed_forward"))
    # A standard deviation of 4 x 16384 draws or more is known to 0.3 %; five times that.
    for layer, fan_in, terms in (
        (attention["query"], 128, 1),
        (feed_forward["up"], 128, 1),
        (attention["out"], 128, 2 * 4),
        (feed_forward["down"], 384, 2 * 4),
    ):
        assert float(layer["kernel"].std()) == pytest.approx((fan_in * terms) ** -0.5, rel=0.015)


def test_parameters_are_a_plain_dict_of_float32_with_stacked_layers():
    _, params = create(FLAVOURS["untied"], VOCAB, jax.random.key(0))
    shapes = {
        "/".join(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    assert shapes == {
        "embed/embedding": (VOCAB, 32),
        "blocks/attention_norm/scale": (3, 32),
        "blocks/attention/query/kernel": (3, 32, 32),
        "blocks/attention/key/kernel": (3, 32, 8),
        "blocks/attention/value/kernel": (3, 32, 8),
        "blocks/attention/out/kernel": (3, 32, 32),
        "blocks/feed_forward_norm/scale": (3, 32),
        "blocks/feed_forward/up/kernel": (3, 32, 48),
        "blocks/feed_forward/gate/kernel": (3, 32, 48),
        "blocks/feed_forward/down/kernel": (3, 48, 32),
        "norm/scale": (32,),
        "head/kernel": (32, VOCAB),
    }
    assert model.count_params(params) == sum(math.prod(shape) for shape in shapes.values())
    assert all(type(leaf) is type(jnp.ones(1)) for leaf in jax.tree.leaves(params))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    kernels = params["blocks"]["attention"]["query"]["kernel"]
    assert not jnp.array_equal(kernels[0], kernels[1])


def test_create_is_a_function_of_its_key_under_jit_and_eval_shape():
    key = jax.random.key(5)
    graphdef, params = create(SMALL, VOCAB, key)
    shape_graphdef, shapes = jax.eval_shape(functools.partial(model.create, SMALL, VOCAB), key)
    assert graphdef == shape_graphdef
    assert hash(graphdef) == hash(shape_graphdef)
    jax.tree.map(np.testing.assert_array_equal, params, create(SMALL, VOCAB, key)[1])
    embeddings = (create(SMALL, VOCAB, jax.random.key(s))[1]["embed"]["embedding"] for s in (5, 6))
    assert not jnp.array_equal(*embeddings)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, params)
    assert model.count_params(shapes) == model.count_params(params)


def test_jit_grad_and_vmap():
    graphdef, params = made(SMALL)
    tokens = jnp.stack([some_tokens(seed) for seed in SEEDS])
    of_each = jax.vmap(jax.value_and_grad(mean_loss, argnums=1), (None, None, 0))
    losses, grads = quick(of_each, static_argnums=0)(graphdef, params, tokens)
    assert all((leaf != 0).any() for leaf in jax.tree.leaves(grads))
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=TOLERANCE[jnp.float32])
    for i, one in enumerate(tokens):
        loss, grad = loss_and_grads(graphdef, params, one)
        close(losses[i], loss)
        jax.tree.map(close, jax.tree.map(lambda leaf, i=i: leaf[i], grads), grad)


def with_remat(remat):
    return made(SMALL.model_copy(update={"remat": remat, "dropout": 0.2}))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("remat", ("dots", "full"))
def test_recomputing_changes_no_bit_of_loss_and_gradients(remat, seed):
    _, params = made(SMALL, seed)
    args = params, some_tokens(seed), jax.random.key(seed)
    expected = loss_and_grads(with_remat("none")[0], *args)
    jax.tree.map(
        np.testing.assert_array_equal, expected, loss_and_grads(with_remat(remat)[0], *args)
    )


def test_recomputing_saves_less():
    """`full` saves the input of each layer, `dots` results of matmuls and no T x T logits."""
    batch, length = 2, 64
    tokens = some_tokens(batch=batch, length=length + 1)

    def saved(remat):
        graphdef, params = with_remat(remat)
        loss = functools.partial(mean_loss, graphdef, tokens=tokens)
        pullback = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        layers = [x for x in jax.tree.leaves(pullback) if x.shape[:2] == (3, batch)]
        return sum(x.size * x.dtype.itemsize for x in layers), {x.shape for x in layers}

    saved_bytes = {remat: saved(remat)[0] for remat in ("none", "dots", "full")}
    assert saved_bytes["full"] == 3 * batch * length * 32 * 4
    assert saved_bytes["full"] < saved_bytes["dots"] < saved_bytes["none"] / 2
    shapes = {remat: saved(remat)[1] for remat in ("none", "dots")}
    assert any(shape[-2:] == (length, length) for shape in shapes["none"])
    assert not any(shape[-2:] == (length, length) for shape in shapes["dots"])


def test_the_head_takes_some_of_the_tokens():
    graphdef, params = made(FLAVOURS["untied"])
    x = model.hidden(graphdef, params, some_tokens())
    assert x.shape == (2, 12, 32)
    np.testing.assert_array_equal(
        quick(model.head, static_argnums=0)(graphdef, params, x[:, 3:5]),
        quick(model.head, static_argnums=0)(graphdef, params, x)[:, 3:5],
    )
