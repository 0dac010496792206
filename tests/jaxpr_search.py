"""What a test asks of an emitted program."""

import jax
import jax.extend.core as jex_core


def equations(program):
    """All equations of a program, those of programs inside too."""
    for _, eqn in scoped_equations(program):
        yield eqn


def scoped_equations(program, scope=""):
    """(name scopes from the outermost program on, equation) of all equations of a program."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        inside = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        yield inside, eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                    yield from scoped_equations(item, inside)


def dtypes(fun, *args, primitive="dot_general"):
    """[operand dtypes ..., result dtype] of each equation of a primitive, in order.

    `rounded_dot` is a `dot_general` of operands that it rounds itself.
    """
    names = (primitive, "rounded_dot") if primitive == "dot_general" else (primitive,)
    program = jax.make_jaxpr(fun)(*args)
    return [_dtypes(eqn) for eqn in equations(program) if eqn.primitive.name in names]


def _dtypes(eqn):
    if eqn.primitive.name == "rounded_dot":
        return [str(eqn.params[name]) for name in ("dtype", "dtype", "out_dtype")]
    return [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]


def float32_matmuls(fun, *args):
    """Matmuls of a program in which both operands are float32."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general")
    found = [d for name in names for d in dtypes(fun, *args, primitive=name)]
    return [d for d in found if d[:2] == ["float32", "float32"]]
