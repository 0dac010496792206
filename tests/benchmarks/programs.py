"""Figures of the small train step that are the same on every machine, and those that are kept.

    python tests/benchmarks/programs.py

rewrites those of the jax that is installed, in `programs.json`; those of a TPU too where its
compiler is installed. Look at the difference before you commit it.
"""

import json
from pathlib import Path

import jax
from small_step import make_small_step

from train import compiled
from train.chips import NoCompiler, find_target
from train.config import MeshConfig
from train.mesh import batch_sharding, make_mesh, placed

KEPT = Path(__file__).with_suffix(".json")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# As for a processor with AVX2 and no more, by the kernels that every one has.
ANY_CPU = {"xla_cpu_max_isa": "AVX2", "xla_cpu_experimental_ynn_fusion_type": ""}


def figures(policy, target):
    """Operations of the traced program; bytes of the compiled one."""
    device = find_target(target).devices[0]
    mesh = make_mesh(MeshConfig(), [device])
    step, state, batch = make_small_step(policy)
    with jax.set_mesh(mesh):
        sharding = batch_sharding(mesh)
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for name, x in batch.items()
        }
        traced = step.trace(placed(mesh, state), batch)
        options = ANY_CPU if device.platform == "cpu" else {}
        program = traced.lower().compile(compiler_options=options)
    operations = compiled.primitive_counts(traced.jaxpr)
    found = compiled.figures_of(program, device.platform)
    return {
        "equations": operations.total(),
        "converts": operations["convert_element_type"],
        "bytes accessed": int(found.accessed_bytes),
        "peak bytes": found.peak_bytes,
    }


def main():
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for target in ("cpu", "v5e"):
        try:
            found = {policy: figures(policy, target) for policy in POLICIES}
        except NoCompiler as error:
            print(f"{target}: {error}")
            continue
        kept.setdefault(jax.__version__, {})[target] = found
    KEPT.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
