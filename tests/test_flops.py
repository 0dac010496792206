"""Model FLOPs against what the compiler counts, and the speed that is made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxamp
from train import metrics, progress
from train.config import Config, DataConfig, ModelConfig
from train.flops import count_matmul_params, model_flops_per_token
from train.progress import Meter
from train.step import init_state, make_loss_fn

BATCH = 2
MODELS = [
    ({"d_model": 64, "n_heads": 4}, 64, 256),
    ({"d_model": 128, "n_heads": 2, "norm": "layernorm"}, 32, 512),
    ({"d_model": 128, "n_heads": 4, "n_kv_heads": 1, "activation": "gelu"}, 128, 64),
    ({"d_model": 128, "n_heads": 2, "tie_embeddings": False}, 32, 384),
]


def shapes(model, vocab_size, seq_len):
    config = Config(batch_size=BATCH, model=model, data=DataConfig(seq_len=seq_len))
    policy = jaxamp.get_policy("float32")
    graphdef, state = nnx.eval_shape(lambda: init_state(config, vocab_size, policy))
    return config, graphdef, state.params


def compiler_flops(config, graphdef, params):
    """Of the forward and the backward pass in float32. The body of a scan is counted once."""
    ids = jax.ShapeDtypeStruct((BATCH, config.data.seq_len), jnp.int32)
    args = params, {"tokens": ids, "labels": ids}, jax.random.key(0), jnp.int32(1)
    grad_fn = jax.jit(jax.value_and_grad(make_loss_fn(config, graphdef), has_aux=True))
    return grad_fn.lower(*args).cost_analysis()["flops"]


@pytest.mark.parametrize("settings, seq_len, vocab_size", MODELS)
def test_model_flops_are_those_of_the_compiler_but_for_elementwise_work(
    settings, seq_len, vocab_size
):
    model = ModelConfig(n_layers=1, attention="xla", **settings)
    config, graphdef, params = shapes(model, vocab_size, seq_len)
    counted = compiler_flops(config, graphdef, params) / (BATCH * seq_len)
    expected = model_flops_per_token(params, model, seq_len)
    # Elementwise work: for each token 8 vectors of d_model (2 norms, 2 residual sums, query, key,
    # value, attention's result), 3 of the feed-forward size (up, gate, product), n_heads rows of
    # scores and of their softmax, the logits; less than 10 operations for each of these numbers,
    # both passes together. That is 1 to 6 % of the matmuls here.
    d_ff, scores = model.feed_forward_size, model.n_heads * seq_len
    elements = 8 * model.d_model + 3 * d_ff + 2 * scores + vocab_size
    assert expected < counted < expected + 10 * elements


def test_each_layer_costs_the_same():
    costs = []
    for n_layers in (1, 2, 3):
        model = ModelConfig(n_layers=n_layers, d_model=16, n_heads=2)
        costs.append(model_flops_per_token(shapes(model, 32, 8)[2], model, 8))
    assert costs[2] - costs[1] == costs[1] - costs[0] > 0


def test_the_head_counts_and_the_gather_of_embeddings_does_not():
    count = {}
    for tied in (True, False):
        model = ModelConfig(n_layers=1, d_model=16, n_heads=2, tie_embeddings=tied)
        params = shapes(model, 32, 8)[2]
        count[tied] = count_matmul_params(params)
    assert count[True] == count[False]
    # By hand: four 16 x 16 of the attention, three 16 x 64 of swiglu, the head of 32 x 16.
    assert count[True] == 4 * 16 * 16 + 3 * 16 * 64 + 32 * 16


@pytest.fixture
def clock(monkeypatch):
    times = []
    monkeypatch.setattr(progress.time, "perf_counter", lambda: times.pop(0))
    return times


def test_speed_is_of_whole_steps_alone(clock):
    clock += [10.0, 12.0, 30.0, 31.0]
    meter = Meter(tokens_per_step=100, flops_per_token=6, peak_flops=1200.0)
    assert meter.lap() == {}
    # 100 tokens in 2 s are 50 a second, 300 FLOPs a second, a quarter of the peak.
    expected = {"perf/tokens_per_second": 50.0, "perf/step_seconds": 2.0, "perf/mfu": 0.25}
    assert meter.lap() == expected
    meter.pause()
    assert meter.lap() == {}
    assert meter.lap()["perf/step_seconds"] == 1.0
    np.testing.assert_allclose(meter.average["perf/tokens_per_second"], 200 / 3, rtol=1e-15)


def test_no_mfu_without_a_peak(clock):
    clock += [0.0, 1.0]
    meter = Meter(tokens_per_step=8, flops_per_token=6, peak_flops=None)
    assert meter.average == {}
    meter.lap()
    assert set(meter.lap()) == {"perf/tokens_per_second", "perf/step_seconds"}


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(
    "stats, expected",
    [
        ([None], {}),
        ([{}], {}),
        (
            [{"peak_bytes_in_use": 5}, {"peak_bytes_in_use": 7}, None],
            {"perf/peak_memory_bytes": 7},
        ),
    ],
)
def test_peak_memory_is_of_the_fullest_device_where_the_runtime_tells(monkeypatch, stats, expected):
    monkeypatch.setattr(metrics.jax, "local_devices", lambda: [Device(s) for s in stats])
    assert metrics.memory_metrics() == expected
