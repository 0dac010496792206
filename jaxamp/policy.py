"""Which dtype is used where: `Policy`, its string grammar, its presets, and `auto`."""

import dataclasses
import difflib
from typing import Any, Self

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from jaxamp.rules import checked_rules

_DTYPE_NAMES = {
    "f32": "float32",
    "full": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "f64": "float64",
} | {name: name for name in ("float32", "bfloat16", "float16", "float64")}
_SHORT_NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
_KEYS = {"p": "params", "c": "compute", "o": "output"} | {
    key: key
    for key in ("params", "compute", "output", "full", "matmul", "rules", "residuals", "reduce")
}
_MATMULS = ("tf32", "f8", "mxfp8", "nvfp4")
_RESIDUALS = _REDUCE = ("float32", "compute")
PRESETS = {
    "float32": "params=f32,compute=f32",
    "mixed_bfloat16": "params=f32,compute=bf16",
    "mixed_float16": "params=f32,compute=f16",
}


@dataclasses.dataclass(frozen=True)
class Policy(jmp.Policy):
    """Precision of parameters, computation and output; a `jmp.Policy` with more fields.

    Attributes:
        param_dtype: dtype of parameters and of the optimizer's view of them.
        compute_dtype: dtype of matmuls and activations.
        output_dtype: dtype of floating results.
        full: globs of parameter or scope paths whose ops stay in float32.
        matmul: a narrower matmul (`tf32`, `f8`, `mxfp8`, `nvfp4`), or None.
        rules: kinds of primitives that differ from `jaxamp.rules`, as a mapping or sorted pairs.
        residuals: `float32` saves what the backward pass needs as it is; `compute` saves only
            16-bit values and recomputes the float32 ones.
        reduce: in which dtype the gradient of a float32 weight leaves its matmul, and is added up
            over devices: `float32` gives the accumulator as it is, `compute` rounds it and moves
            half the bytes.
        reason: why this policy was chosen, for people to read. Not compared.

    `str(policy)` parses back with `get_policy`. jmp's own `__str__` drops what it does not know.

    >>> policy = Policy(jnp.float32, jnp.bfloat16, jnp.float32)
    >>> str(policy)
    'params=f32,compute=bf16,output=f32'
    >>> get_policy(str(policy)) == policy
    True

    Raises:
        ValueError: a dtype that is not floating, an empty glob, an unknown matmul, rule,
            residuals or reduce.
    """

    # Anything that names a dtype is taken; a numpy dtype is kept.
    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any
    full: tuple[str, ...] = ()
    matmul: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    residuals: str = "float32"
    reduce: str = "float32"
    reason: str = dataclasses.field(default="", compare=False)

    def __post_init__(self):
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            object.__setattr__(self, name, _floating_dtype(name, getattr(self, name)))
        object.__setattr__(self, "full", _checked_globs(self.full))
        if self.matmul is not None and self.matmul not in _MATMULS:
            raise ValueError(_unknown("matmul", self.matmul, _MATMULS))
        object.__setattr__(self, "rules", checked_rules(self.rules))
        if self.residuals not in _RESIDUALS:
            raise ValueError(_unknown("residuals", self.residuals, _RESIDUALS))
        if self.reduce not in _REDUCE:
            raise ValueError(_unknown("reduce", self.reduce, _REDUCE))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed.

        >>> str(get_policy("mixed_float16").replace(full=("*/head",)))
        'params=f32,compute=f16,output=f32,full=*/head'
        """
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        parts = {
            "params": _short_name(self.param_dtype),
            "compute": _short_name(self.compute_dtype),
            "output": _short_name(self.output_dtype),
            "full": "|".join(self.full),
            "matmul": self.matmul,
            "rules": "|".join(f"{name}:{kind}" for name, kind in self.rules),
            "residuals": "" if self.residuals == "float32" else self.residuals,
            "reduce": "" if self.reduce == "float32" else self.reduce,
        }
        return ",".join(f"{key}={value}" for key, value in parts.items() if value)


def get_policy(policy: "str | jmp.Policy") -> Policy:
    """A `Policy` from a string, a preset's name, `auto`, or any `jmp.Policy`.

    The grammar is jmp's: `key=dtype` parts joined by commas, with the keys `params` (`p`),
    `compute` (`c`) and `output` (`o`), or one dtype for all three. Dtypes are `f32`, `bf16`, `f16`,
    `f64`, their long names, and `full`. Spaces are allowed. Presets are Keras's `float32`,
    `mixed_bfloat16` and `mixed_float16`. `auto` asks the first device, see `auto_policy`.

    Two departures from `jmp.get_policy`: `output` defaults to the *param* dtype rather than to the
    compute dtype, because losses and logits want range; and there are the keys `full` (globs joined
    by `|`), `matmul`, `rules` (`name:kind`, joined by `|`), `residuals` and `reduce`.

    >>> get_policy("c=bf16,rules=erf:full|tan:follow,residuals=compute").rules
    (('erf', 'full'), ('tan', 'follow'))

    >>> get_policy("params=f32, compute=bf16").output_dtype
    dtype('float32')
    >>> get_policy("mixed_float16") == get_policy("c=f16")
    True
    >>> get_policy("compute=bf61")
    Traceback (most recent call last):
        ...
    ValueError: policy 'compute=bf61': unknown dtype 'bf61' for 'compute'; did you mean 'bf16'? \
allowed: f32, full, bf16, f16, f64, float32, bfloat16, float16, float64

    Raises:
        ValueError: an unknown key, dtype or preset, a key given twice, an empty value. The message
            has the whole string, the bad part, the allowed ones and the nearest match.
        TypeError: neither a string nor a policy.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    if not isinstance(policy, str):
        raise TypeError(f"expected a policy or its string, got {type(policy).__name__}: {policy!r}")
    try:
        return _parse(policy.strip())
    except ValueError as error:
        raise ValueError(f"policy {policy!r}: {error}") from None


def auto_policy(device: Any = None) -> Policy:
    """The mixed policy that `device` (default: the first one) is good at, with the reason.

    | device                              | policy           |
    | ----------------------------------- | ---------------- |
    | TPU                                 | `mixed_bfloat16` |
    | NVIDIA, compute capability 8.0 + | `mixed_bfloat16` |
    | NVIDIA, compute capability 7.x      | `mixed_float16`  |
    | AMD Instinct MI200 and later        | `mixed_bfloat16` |
    | CPU and everything else             | `float32`        |

    Source: NVIDIA's CUDA programming guide, table of tensor-core dtypes by compute capability.

    >>> auto_policy(jax.devices("cpu")[0]).reason
    'auto: a CPU gains little speed from 16 bits'
    """
    device = jax.devices()[0] if device is None else device
    preset, reason = _good_at(device)
    return get_policy(preset).replace(reason=f"auto: {reason}")


def _good_at(device: Any) -> tuple[str, str]:
    if device.platform == "tpu":
        return "mixed_bfloat16", f"{device.device_kind} multiplies bfloat16 natively"
    if device.platform == "cpu":
        return "float32", "a CPU gains little speed from 16 bits"
    capability = str(getattr(device, "compute_capability", None) or "")
    name = f"{device.device_kind} (compute capability {capability or 'unknown'})"
    if capability.startswith(("gfx90a", "gfx94", "gfx95")):
        return "mixed_bfloat16", f"{name} has bfloat16 matrix cores"
    major = capability.split(".")[0]
    if major.isdigit() and int(major) >= 8:
        return "mixed_bfloat16", f"{name} has bfloat16 tensor cores"
    if major == "7":
        return "mixed_float16", f"{name} has float16 tensor cores and no bfloat16 ones"
    return "float32", f"{name} is not known to gain from 16 bits"


def _parse(text: str) -> Policy:
    if text == "auto":
        return auto_policy()
    if text in PRESETS:
        return _parse(PRESETS[text])
    if "=" not in text:
        if text not in _DTYPE_NAMES:
            raise ValueError(_unknown("name", text, ["auto", *PRESETS, *_DTYPE_NAMES]))
        dtype = _DTYPE_NAMES[text]
        return Policy(param_dtype=dtype, compute_dtype=dtype, output_dtype=dtype)
    fields = _split(text)
    dtypes = {
        key: _parse_dtype(key, fields[key])
        for key in ("params", "compute", "output")
        if key in fields
    }
    params = dtypes.get("params", "float32")
    return Policy(
        param_dtype=params,
        compute_dtype=dtypes.get("compute", params),
        output_dtype=dtypes.get("output", params),
        full=tuple(glob.strip() for glob in fields["full"].split("|")) if "full" in fields else (),
        matmul=fields.get("matmul"),
        rules=_parse_rules(fields["rules"]) if "rules" in fields else (),
        residuals=fields.get("residuals", "float32"),
        reduce=fields.get("reduce", "float32"),
    )


def _parse_rules(text: str) -> Any:
    pairs = [part.partition(":")[::2] for part in text.split("|")]
    return {name.strip(): kind.strip() for name, kind in pairs}


def _split(text: str) -> dict[str, str]:
    fields = {}
    for part in text.split(","):
        given, equals, value = (piece.strip() for piece in part.partition("="))
        if given not in _KEYS:
            raise ValueError(_unknown("key", given, _KEYS))
        if not equals or not value:
            raise ValueError(f"key {given!r} has no value; write {given}=VALUE")
        if _KEYS[given] in fields:
            raise ValueError(f"key {_KEYS[given]!r} is given twice")
        fields[_KEYS[given]] = value
    return fields


def _parse_dtype(key: str, value: str) -> str:
    if value not in _DTYPE_NAMES:
        raise ValueError(_unknown("dtype", value, _DTYPE_NAMES, where=f" for {key!r}"))
    return _DTYPE_NAMES[value]


def _unknown(what: str, given: str, allowed, where: str = "") -> str:
    nearest = difflib.get_close_matches(given, list(allowed), n=1)
    hint = f" did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {what} {given!r}{where};{hint} allowed: {', '.join(dict.fromkeys(allowed))}"


def _floating_dtype(name: str, dtype: Any) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in _SHORT_NAMES:
        raise ValueError(f"{name} must be one of {', '.join(_SHORT_NAMES)}, got {dtype.name}")
    return dtype


def _short_name(dtype: Any) -> str:
    return _SHORT_NAMES[jnp.dtype(dtype).name]


def _checked_globs(globs: Any) -> tuple[str, ...]:
    globs = (globs,) if isinstance(globs, str) else tuple(globs)
    for glob in globs:
        if not isinstance(glob, str) or not glob or set(glob) & set(",|="):
            raise ValueError(
                f"full: {glob!r} is no glob; give paths such as '*/head', joined by '|'"
            )
    return globs
