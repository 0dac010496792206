"""What a test asks of an emitted program."""

import jax
import jax.extend.core as jex_core


def equations(program):
    """All equations of a program, those of programs inside too."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                    yield from equations(item)


def dtypes(fun, *args, primitive="dot_general"):
    """[operand dtypes ..., result dtype] of each equation of a primitive, in order."""
    program = jax.make_jaxpr(fun)(*args)
    found = [eqn for eqn in equations(program) if eqn.primitive.name == primitive]
    return [[str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)] for eqn in found]


def float32_matmuls(fun, *args):
    """Matmuls of a program in which both operands are float32."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    found = [d for name in names for d in dtypes(fun, *args, primitive=name)]
    return [d for d in found if d[:2] == ["float32", "float32"]]
