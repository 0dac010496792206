"""Plan: its figures are those of a step compiled by hand, and of chips as their makers say."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp
from train import chips, fit, plan, roofline, traffic
from train.config import Config, ConfigError, DataConfig, ModelConfig
from train.flops import model_flops_per_token
from train.mesh import batch_sharding, make_mesh, state_shardings
from train.step import init_state, make_train_step

TINY = {"n_layers": 2, "d_model": 16, "n_heads": 2, "vocab_size": 64}
FLAGS = [f"--model.{name.replace('_', '-')}={size}" for name, size in TINY.items()]
FLAGS += ["--data.seq-len=16", "--batch-size=4"]


def run(tmp_path, *flags):
    out = tmp_path / "plan.json"
    code = plan.main([*flags, "--json", str(out)])
    return code, json.loads(out.read_text())


def by_hand(config, policy, devices):
    """Memory of the step of `train.run`, compiled without the plan."""
    mesh = make_mesh(config.mesh, devices)
    vocab_size = config.model.vocab_size
    with jax.set_mesh(mesh):
        graphdef, state = nnx.eval_shape(lambda: init_state(config, vocab_size, policy))
        place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        state = jax.tree.map(place, state, state_shardings(mesh, state))
        shape = (config.batch_size, config.data.seq_len)
        ids = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
        step = make_train_step(config, graphdef, policy)
        stats = step.lower(state, {"tokens": ids, "labels": ids}).compile().memory_analysis()
    return stats, state


@pytest.mark.slow
def test_memory_on_a_cpu_is_that_of_a_step_compiled_by_hand(tmp_path, capsys):
    flags = ("--target", "cpu", "--no-largest-batch-size", *FLAGS)
    code, found = run(tmp_path, *flags, "--policy", "float32", "--policy", "mixed_bfloat16")
    assert code == 0
    config = Config(model=ModelConfig(**TINY), data=DataConfig(seq_len=16), batch_size=4)
    stats, state = by_hand(config, jaxamp.get_policy("mixed_bfloat16"), jax.devices())
    one, other = found["policies"].values()
    extra = stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes + extra
    assert other["peak_bytes"] == peak != one["peak_bytes"]
    held = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))  # noqa: E731
    for planned in (one, other):
        assert planned["params_bytes"] == held(state.params) > 0
        assert planned["moments_bytes"] == held(state.opt_state) > 0
        assert planned["fits"] and planned["largest_batch_size"] is None
    # FLOPs of the model and no others: nothing is recomputed.
    flops = 4 * 16 * model_flops_per_token(state.params, config.model, 16)
    assert one["flops"] == other["flops"] == flops
    out = capsys.readouterr().out
    assert "fits" in out and "yes" in out and f"{flops:.4g}" in out


@pytest.mark.slow
def test_accumulation_holds_the_activations_of_one_microbatch():
    model = ModelConfig(n_layers=2, d_model=32, n_heads=2, vocab_size=64)
    mesh = make_mesh(Config().mesh, jax.devices()[:1])

    def memory(rows, microbatches):
        config = Config(
            model=model,
            data=DataConfig(seq_len=256),
            batch_size=rows,
            grad_accum_steps=microbatches,
        )
        return fit.attempt(config, jaxamp.get_policy("mixed_bfloat16"), mesh, 2**40).memory

    one, whole, sixteen = memory(2, 1), memory(32, 1), memory(32, 16)
    # Beside those of one microbatch: the sum of the gradients and the gradients that are added to
    # it, in float32, and the batch in the order of its microbatches.
    extra = 2 * one.params + 2 * 32 * 256 * 4
    assert sixteen.activations < one.activations + extra
    # 16 times the rows: what does not grow with them is less than a third of one's activations.
    assert whole.activations > 10 * one.activations


def test_a_step_that_does_not_fit_says_by_how_much_and_what_would(tmp_path, capsys, monkeypatch):
    tried = []

    def attempt(config, *_):
        tried.append(config.model.remat)
        memory = fit.Memory(7 * 2**30, 2**30, 2**30, 5 * 2**30, 0, 4 * 2**30)
        return fit.Attempt(config, memory, jax.make_jaxpr(jnp.sin)(1.0), None)

    monkeypatch.setattr(fit, "attempt", attempt)
    flags = ("--target", "cpu", "--no-largest-batch-size", "--policy", "float32", *FLAGS)
    code, found = run(tmp_path, *flags)
    assert code == 1 and tried == ["none", "dots", "full"]
    assert not found["policies"]["float32"]["fits"]
    out = capsys.readouterr().out
    assert "no, 3.000 GiB over" in out
    # 4 rows one after another instead of together: a quarter of the activations.
    assert "to make float32 fit: --grad-accum-steps 4 saves up to 3.8 GiB of activations" in out
    assert "about 2 devices, with --mesh.fsdp" in out


@pytest.mark.parametrize(
    ("fitting", "islands", "chosen"),
    [
        ("none", True, "none"),
        ("islands", True, "islands"),
        ("dots", False, "dots"),
        ("", True, "full"),
    ],
)
def test_the_remat_that_fits_and_recomputes_least(fitting, islands, chosen):
    # Peaks fall along the order, and all from `fitting` on fit.
    first = fit.REMATS.index(fitting) if fitting else 4

    def attempt(config):
        cost = fit.REMATS.index(config.model.remat)
        memory = fit.Memory(90 - cost if cost >= first else 200 - cost, 1, 2, 0, 0, 100)
        return fit.Attempt(config, memory, None, None)

    assert fit.with_least_remat(attempt, Config(), islands).config.model.remat == chosen


def test_islands_are_not_tried_where_all_is_float32():
    tried = []

    def attempt(config):
        tried.append(config.model.remat)
        return fit.Attempt(config, fit.Memory(200, 1, 2, 0, 0, 100), None, None)

    fit.with_least_remat(attempt, Config(), islands=False)
    assert tried == ["none", "dots", "full"]


@pytest.mark.parametrize("seed", range(20))
def test_largest_count_is_that_of_a_search_one_by_one(seed):
    rng = np.random.default_rng(seed)
    fixed, slope, power = rng.integers(1, 500), rng.integers(1, 60), rng.uniform(0.7, 1.4)
    peak = lambda count: int(fixed + slope * count**power)  # noqa: E731
    counts = []
    start = int(rng.integers(1, 40))
    found = fit.largest(
        lambda count: counts.append(count) or peak(count), {0: fixed, start: peak(start)}, 1000
    )
    assert found == max(count for count in range(5000) if count == 0 or peak(count) <= 1000)
    assert len(counts) == len(set(counts)) <= 12


@pytest.mark.parametrize(("most", "found"), [(5, 5), (30, 30), (31, 30), (4, 4), (100, 30)])
def test_largest_count_stays_below_what_there_is(most, found):
    tried = []
    peak = lambda k: tried.append(k) or 10 + 3 * k  # noqa: E731
    assert fit.largest(peak, {0: 10, 4: 22}, 100, most) == found
    assert max(tried, default=0) <= most


def test_nothing_fits_where_the_state_alone_does_not():
    tried = []
    assert fit.largest(lambda k: tried.append(k) or 300 + k, {0: 200, 4: 304}, 100) == 0
    assert tried == []


@pytest.mark.parametrize(
    ("message", "needed", "has_inputs"),
    [
        (
            "total memory required for HLO temporaries (26.00G) exceeds available HBM (15.75G).",
            26,
            False,
        ),
        ("Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm. Exceeded", 20.5, True),
    ],
)
def test_what_a_tpu_compiler_says_of_a_shortage(message, needed, has_inputs):
    expected = fit.Shortage(int(needed * 2**30), int(15.75 * 2**30), has_inputs)
    assert fit.read_shortage(message) == expected
    assert fit.read_shortage("something else") is None


HLO = """
HloModule step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: bf16[8,64]) -> bf16[2,64] {
  %input = bf16[8,64]{1,0} parameter(0)
  %all-reduce.9 = bf16[8,64]{1,0} all-reduce(%input), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice.9 = bf16[2,64]{1,0} dynamic-slice(%all-reduce.9, %input), dynamic_slice_sizes={2,64}
}

%piece (p: bf16[2,64]) -> bf16[8,64] {
  %p = bf16[2,64]{1,0} parameter(0)
  ROOT %all-gather.7 = bf16[8,64]{1,0} all-gather(%p), channel_id=7, replica_groups=[1,4]<=[4], dimensions={0}
}

%body (carry: (s32[], f32[6,8], bf16[2,64])) -> (s32[], f32[6,8], bf16[2,64]) {
  %carry = (s32[], f32[6,8]{1,0}, bf16[2,64]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[2,64]{1,0:T(8,128)(2,1)} get-tuple-element(%carry), index=2
  %start = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%piece
  %done = bf16[8,64]{1,0} fusion(%x), kind=kCustom, calls=%piece
  %scattered = bf16[2,64]{1,0} fusion(%done), kind=kCustom, calls=%all-reduce-scatter.1
  %n = s32[] get-tuple-element(%carry), index=0
  %by = s32[] constant(1)
  %next = s32[] add(%n, %by)
  %kept = f32[6,8]{1,0} get-tuple-element(%carry), index=1
  ROOT %tuple = (s32[], f32[6,8]{1,0}, bf16[2,64]{1,0}) tuple(%next, %kept, %scattered)
}

%condition (carry.1: (s32[], f32[6,8], bf16[2,64])) -> pred[] {
  %carry.1 = (s32[], f32[6,8]{1,0}, bf16[2,64]{1,0}) parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  %i = s32[] get-tuple-element(%carry.1), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (w: f32[6,8]) -> f32[6,8] {
  %w = f32[6,8]{1,0} parameter(0)
  %while = (s32[], f32[6,8]{1,0}, bf16[2,64]{1,0}) while(%w), condition=%condition, body=%body
  %start.1 = ((f32[6,8]{1,0}), (f32[12,8]{1,0})) all-gather-start(%w), channel_id=1, replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}
  %done.1 = f32[12,8]{1,0} all-gather-done(%start.1)
  %fast = f32[6,8]{1,0:T(8,128)S(1)} negate(%w)
  ROOT %reduced = f32[6,8]{1,0} all-reduce(%w), replica_groups={}, to_apply=%add
}
"""  # noqa: E501


def test_collectives_of_a_program_by_hand():
    found = traffic.read(HLO, devices=4)
    assert found.unknown_loops == 0
    assert found.collective_bytes() == {
        "all-gather": {"bf16": 5 * 8 * 64 * 2, "f32": 12 * 8 * 4},  # pieces of a channel are one
        "all-reduce": {"f32": 6 * 8 * 4},
        "reduce-scatter": {"bf16": 5 * 8 * 64 * 2},
    }
    sent = 2 * 5 * 8 * 64 * 2 * 3 / 4 + 12 * 8 * 4 / 2 + 2 * 6 * 8 * 4 * 3 / 4
    assert found.sent_bytes == sent


def test_a_loop_is_counted_as_xla_says_else_once():
    said = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert traffic.read(said, 4).collective_bytes()["reduce-scatter"] == {"bf16": 3 * 1024}
    unrolled = traffic.read(HLO.replace("constant(1)", "constant(2)"), 4)
    assert unrolled.collective_bytes()["reduce-scatter"] == {"bf16": 3 * 1024}  # 0, 2, 4 of 5
    unknown = traffic.read(HLO.replace("direction=LT", "direction=NE"), 4)
    assert unknown.unknown_loops == 1
    assert unknown.collective_bytes()["reduce-scatter"] == {"bf16": 1024}


OVERLAPPED = """
%start (p: bf16[16,64]) -> (bf16[16,64], bf16[64,64], u32[]) {
  %p = bf16[16,64]{1,0} parameter(0)
  %all-gather.1 = bf16[64,64]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %begun = (bf16[16,64]{1,0}, bf16[64,64]{1,0}, u32[]{:S(2)}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.1: bf16[16,64], q.1: bf16[64,64], x: f32[8,8]) -> (f32[8,8], bf16[16,64], bf16[64,64]) {
  %p.1 = bf16[16,64]{1,0} parameter(0)
  %q.1 = bf16[64,64]{1,0} parameter(1)
  %x = f32[8,8]{1,0} parameter(2)
  %all-gather.2 = bf16[64,64]{1,0} all-gather(%p.1), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}
  %y = f32[8,8]{1,0} negate(%x)
  ROOT %on = (f32[8,8]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}, bf16[64,64]{1,0}) tuple(%y, %p.1, %q.1, %all-gather.2)
}

%finish (p.2: bf16[16,64], q.2: bf16[64,64]) -> bf16[64,64] {
  %p.2 = bf16[16,64]{1,0} parameter(0)
  %q.2 = bf16[64,64]{1,0} parameter(1)
  ROOT %whole = bf16[64,64]{1,0} custom-call(%p.2, %q.2), custom_call_target="AsyncCollectiveDone"
}

%body (carry: (f32[8,8], bf16[16,64], bf16[64,64])) -> (f32[8,8], bf16[16,64], bf16[64,64]) {
  %carry = (f32[8,8]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}) parameter(0)
  %x.3 = f32[8,8]{1,0} get-tuple-element(%carry), index=0
  %p.3 = bf16[16,64]{1,0} get-tuple-element(%carry), index=1
  %q.3 = bf16[64,64]{1,0} get-tuple-element(%carry), index=2
  ROOT %round = (f32[8,8]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}) fusion(%p.3, %q.3, %x.3), kind=kLoop, calls=%meanwhile
}

%condition (carry.1: (f32[8,8])) -> pred[] {
  %carry.1 = (f32[8,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (w: bf16[16,64]) -> bf16[64,64] {
  %w = bf16[16,64]{1,0} parameter(0)
  %first = (bf16[16,64]{1,0}, bf16[64,64]{1,0}, u32[]{:S(2)}) fusion(%w), kind=kCustom, calls=%start
  %loop = (f32[8,8]{1,0}, bf16[16,64]{1,0}, bf16[64,64]{1,0}) while(%first), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %p.4 = bf16[16,64]{1,0} get-tuple-element(%loop), index=1
  %q.4 = bf16[64,64]{1,0} get-tuple-element(%loop), index=2
  %near = (bf16[16,64]{1,0:S(1)}, bf16[16,64]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %slice-start = ((bf16[64,64]{1,0}), bf16[8,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%q.4), slice={[0:8], [0:64]}
  ROOT %last = bf16[64,64]{1,0} fusion(%p.4, %q.4), kind=kCustom, calls=%finish
}
"""  # noqa: E501


def test_a_collective_that_runs_while_a_loop_computes_counts_once():
    """As a TPU's compiler writes it: in parts that hand its buffers through."""
    found = traffic.read(OVERLAPPED, devices=4)
    part, whole, x = 16 * 64 * 2, 64 * 64 * 2, 8 * 8 * 4
    assert found.collective_bytes() == {"all-gather": {"bf16": whole}}
    copied = part + 8 * 64 * 2  # to vector memory: read, and not written
    assert found.accessed_bytes == part + whole + 5 * 2 * x + copied


def test_bytes_of_a_scan_read_each_slice_of_its_operand_once():
    def step(x, w):
        return jnp.sin(x @ w), None

    rng = np.random.default_rng(0)
    x, ws = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 64), (9, 64, 64)))
    compiled = jax.jit(lambda x, ws: jax.lax.scan(step, x, ws)[0]).lower(x, ws).compile()
    accessed = traffic.read(compiled.as_text()).accessed_bytes
    # Each slice may be copied out first: read, written, read. x is small, but it is there.
    assert ws.nbytes < accessed < 4 * ws.nbytes


def test_flops_of_loops_branches_and_shards():
    x = jnp.ones((8, 8))
    one = 2 * 8**3

    def program(x):
        y = jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=3)[0]
        y = jax.lax.cond(x[0, 0] > 0, lambda y: y @ x @ x, lambda y: y @ x, y)
        return jnp.sum(jax.checkpoint(lambda y: jnp.sin(y @ x))(y))

    assert roofline.matmul_flops(jax.make_jaxpr(program)(x), 1) == (3 + 2 + 1) * one
    mesh = Mesh(np.asarray(jax.devices()[:1]), "d")
    spec = PartitionSpec("d")
    sharded = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=spec, out_specs=spec)
    assert roofline.matmul_flops(jax.make_jaxpr(sharded)(x), 4) == one  # already of one device


def test_the_roofline_is_the_slowest_of_three():
    chip = chips._BY_NAME["v5e"]
    policy = jaxamp.get_policy("mixed_bfloat16")
    found = roofline.roofline(chip, policy, 197e12 * 2, 819e9 * 3, 200e9)
    assert found is not None and found.limit == "memory" and found.seconds == 3
    assert tuple(found) == (2, 3, 1)
    assert roofline.roofline(chips._cpu(), policy, 1.0, 1.0, 1.0) is None


def test_peak_flops_by_kind_and_dtype():
    assert chips.peak_flops("TPU v5 lite", jnp.bfloat16) == 197e12
    h100 = "NVIDIA H100 80GB HBM3"
    assert chips.peak_flops(h100, jnp.float16) == 2 * chips.peak_flops(h100, jnp.float32)
    assert chips.peak_flops("TPU v5 lite", jnp.float16) is None
    assert chips.peak_flops("cpu", jnp.float32) is None
    kinds = [kind for chip in chips._CHIPS for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))
    assert all(chip.source.startswith("https://") for chip in chips._CHIPS)


def test_microbatches_that_the_mesh_cannot_cut_are_made_larger():
    target = chips.Target("cpu", chips._cpu(), jax.devices()[:1])
    config = Config(batch_size=6, grad_accum_steps=3)
    assert fit.prepared(config, target)[0] is config
    target = target._replace(devices=[jax.devices()[0]] * 2)
    changed, mesh, notes = fit.prepared(config, target)
    assert changed is config and mesh.size == 2 and notes == []
    changed, _, (note,) = fit.prepared(Config(batch_size=6, grad_accum_steps=6), target)
    assert changed.grad_accum_steps == 3 and "3 instead of 6" in note
    with pytest.raises(ConfigError, match="do not divide among"):
        fit.prepared(Config(batch_size=3), target)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--target", "v5f:4x4"), "did you mean 'v5p'? allowed: v4, v5e"),
        (("--target", "v5e:2x2x2"), "a slice of v5e has 2 sizes, such as v5e:4x4"),
        (("--target", "h100:16"), "a host has 1 to 8 GPUs"),
        ((), "--target is needed"),
        (("--target",), "expected one argument"),
        (("--target", "cpu", "--policy", "bf61"), "did you mean 'bf16'?"),
        (("--target", "cpu", "--mesh.fsdp", "3"), "cannot be divided by 3"),
        (("--target", "cpu", "--batch", "3"), "--batch"),
        (("--target", "cpu", "--json", "no/such/place.json"), "no such directory"),
        (("--target", "cpu", "--config", "no-such.toml"), "no-such.toml"),
    ],
)
def test_bad_input_is_one_line(flags, message, capsys):
    assert plan.main(flags) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.parametrize(
    ("target", "install"), [("v5e:2x2", "'jax[tpu]=="), ("h100", "jax-cuda13-")]
)
def test_a_missing_compiler_is_one_line(target, install, capsys, monkeypatch):
    def missing(**_):
        raise RuntimeError("libtpu.so\nnot found")

    monkeypatch.setattr(chips.topologies, "get_topology_desc", missing)
    assert plan.main(("--target", target)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"pip install {install}" in line


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("v4:2x2x1", 4),
        ("v5e", 1),
        ("v5e:2x4", 8),
        ("v5e:4x4", 16),
        ("v5p:2x2x2", 8),
        ("v6e:4x4", 16),
        ("tpu7x:2x2x1", 8),
    ],
)
def test_slices_are_of_the_chip(name, size):
    target = tpu(name)
    assert len(target.devices) == size
    assert {device.device_kind for device in target.devices} <= set(target.chip.device_kinds)
    host = 8 if name.startswith(("v5e:2", "tpu7x")) else 4
    assert len({device.process_index for device in target.devices}) == math.ceil(size / host)


@pytest.mark.tpu
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_plan_for_a_tpu_is_that_of_a_step_compiled_by_hand(tmp_path):
    target = tpu("v5e:2x2")
    flags = ("--target", "v5e:2x2", "--mesh.fsdp=4", "--no-largest-batch-size", *FLAGS)
    code, found = run(tmp_path, *flags, "--policy", "mixed_bfloat16")
    assert code == 0
    config = Config.model_validate(found["config"])
    stats, _ = by_hand(config, jaxamp.get_policy("mixed_bfloat16"), target.devices)
    planned = found["policies"]["mixed_bfloat16"]
    assert planned["peak_bytes"] == stats.peak_memory_in_bytes
    assert planned["collective_bytes"] and planned["roofline"]["limit"] in ("memory", "network")


@pytest.mark.tpu
@pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
def test_weights_are_gathered_in_sixteen_bits():
    """Half of what float32 moves where its matmuls are really float32: a TPU's default precision
    rounds their operands, and its compiler then gathers them rounded."""
    target = tpu("v5e:2x2")
    model = ModelConfig(
        n_layers=2, d_model=512, n_heads=4, vocab_size=8192, tie_embeddings=False, norm="layernorm"
    )
    config = Config(model=model, batch_size=8, mesh={"fsdp": 4})  # type: ignore[arg-type]
    mesh = make_mesh(config.mesh, target.devices)
    moved = {}
    with jax.default_matmul_precision("highest"):
        for name in ("float32", "mixed_bfloat16"):
            attempt = fit.attempt(config, jaxamp.get_policy(name), mesh, 2**34)
            # Some gathers are rings of permutes that a matmul overlaps.
            moved[name] = {
                dtype: sum(
                    c.sent_bytes * c.times
                    for c in traffic.read(attempt.program.as_text(), 4).collectives
                    if c.kind in ("all-gather", "collective-permute") and c.dtype == dtype
                )
                for dtype in ("f32", "bf16")
            }
    layers = 4 * 512**2 + 3 * 512 * model.feed_forward_size
    weights = 2 * 2 * layers + 512 * 8192  # of two layers forward and backward, and of the head
    found = 8 * 128 * 512  # of the embedding, looked up in float32
    sent, found = weights * 3 / 4, found * 4 * 3 / 4  # by each of four
    assert moved["float32"] == {"f32": 4 * sent + found, "bf16": 0}
    assert moved["mixed_bfloat16"] == {"f32": found, "bf16": 2 * sent}


@pytest.mark.tpu
def test_a_tpu_compiler_that_finds_no_room_says_by_how_much():
    target = tpu("v5e:2x2")
    mesh = make_mesh(Config().mesh, target.devices)
    sharding = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((70_000, 70_000), jnp.float32, sharding=sharding)  # 18 GiB
    lowered = jax.jit(lambda x: jnp.sort(x) + jnp.sin(x @ x)).lower(x)
    program, shortage = fit._compiled(lowered)
    assert program is None and shortage is not None
    assert shortage.needed > shortage.capacity > 15 * 2**30


def tpu(name):
    try:
        return chips.find_target(name)
    except chips.NoCompiler as missing:
        pytest.skip(str(missing))
