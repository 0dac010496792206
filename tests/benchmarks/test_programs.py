"""No program gets worse unnoticed: operations and bytes against those that are kept."""

import json

import jax
import pytest
from programs import KEPT, POLICIES, figures

# Casts are ours alone. Some equations are other libraries', and the compiled program is XLA's:
# their releases move some, and what is worth knowing moves more.
ALLOWED = {"equations": 1.02, "converts": 1, "bytes accessed": 1.01, "peak bytes": 1.01}


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e", marks=pytest.mark.tpu)])
def test_no_figure_is_above_the_one_that_is_kept(policy, target):
    kept = json.loads(KEPT.read_text()).get(jax.__version__, {}).get(target)
    if kept is None:
        pytest.skip(f"jax {jax.__version__} has none; python tests/benchmarks/programs.py adds it")
    found = figures(policy, target)
    above = {
        name: f"{found[name]}, kept {before}"
        for name, before in kept[policy].items()
        if found[name] > before * ALLOWED[name]
    }
    assert not above, "worse than before; where that is meant: python tests/benchmarks/programs.py"
