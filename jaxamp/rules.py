"""The op table: how autocast treats each primitive, and why.

The kinds, with `compute` the policy's 16-bit dtype and *strong* a value that descends from a
matmul or from another op that autocast has given a dtype (see `jaxamp.autocast`):

    matmul      operands to compute, result in compute
    full        operands to float32, result in float32
    follow      the widest of the strong operands; float32 when there is none
    guarded     follow in bfloat16, full in float16, which ends at 65504
    structure   moves numbers without arithmetic: every result keeps its operand's dtype
    rigid       operands back to the dtypes of the trace: the op is compiled for those
    enter       has programs inside; autocast enters them

Primitives that are not in the table are rigid. `Policy.rules` overrides it, by name:

>>> from jaxamp.policy import get_policy
>>> kind_of("erf"), kind_of("erf", get_policy("c=bf16").replace(rules={"erf": "full"}).rules)
('follow', 'full')
>>> kind_of("somebodys_kernel")
'rigid'

The float32 list is that of `torch.autocast` on CUDA
(https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32), on every
backend.
"""

from collections.abc import Mapping

KINDS = ("matmul", "full", "follow", "guarded", "structure", "rigid", "enter")
# What a user may ask for: a primitive has programs inside or has not, nobody can decide that.
USER_KINDS = KINDS[:-1]

# (kind, why, names). Reasons are shown by `explain`.
_GROUPS: tuple[tuple[str, str, str], ...] = (
    (
        "matmul",
        "a matmul: 16-bit operands are what the matrix units are fast at",
        "dot_general conv_general_dilated ragged_dot_general ragged_dot",
    ),
    (
        "full",
        "grows or shrinks numbers fast: one rounding before it is many after it",
        "exp exp2 expm1 log log1p log2 pow rsqrt cbrt sinh cosh tan asin acos asinh acosh atanh "
        "erf_inv digamma lgamma polygamma zeta igamma igammac igamma_grad_a bessel_i0e bessel_i1e "
        "regularized_incomplete_beta random_gamma_grad rem atan2 polynomial",
    ),
    (
        "full",
        "adds or multiplies many terms: 8 or 11 bits of sum lose the small ones",
        "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum reduce_window reduce "
        "scatter-add scatter-sub scatter-mul scatter-min scatter-max select_and_scatter_add "
        "select_and_scatter select_and_gather_add",
    ),
    (
        "full",
        "reads a phase: rounding one of 100 moves it by a quarter of a radian in bfloat16",
        "sin cos",
    ),
    (
        "full",
        "the maximum that a softmax subtracts: with it in float32 the difference is float32 too",
        "reduce_max reduce_min cummax cummin",
    ),
    (
        "full",
        "linear algebra and FFT exist only from 32 bits up",
        "cholesky cholesky_update eig eigh hessenberg householder_product lu ormqr qr schur svd "
        "triangular_solve tridiagonal tridiagonal_solve symmetric_product fft geqrf geqp3",
    ),
    (
        "follow",
        "one rounding per element: as exact as its operands",
        "add add_any sub mul div max min neg abs sign floor ceil round tanh logistic erf erfc atan "
        "sqrt clamp select_n eq ne lt le gt ge eq_to lt_to le_to is_finite nextafter "
        "one_minus_square mul_add",
    ),
    (
        "guarded",
        "squares: 300 * 300 is already infinite in float16",
        "square integer_pow",
    ),
    (
        "structure",
        "moves numbers without arithmetic",
        "reshape transpose broadcast_in_dim broadcast squeeze expand_dims slice dynamic_slice "
        "dynamic_update_slice gather scatter concatenate pad rev tile "
        "split stack unstack copy copy_p name stop_gradient reduce_precision "
        "convert_element_type sort top_k approx_top_k argmax argmin reduce_window_max "
        "reduce_window_min optimization_barrier sharding_constraint mesh_cast reshard device_put "
        "pvary pcast pbroadcast layout_constraint",
    ),
    (
        "structure",
        "a collective adds one term per device; its cost is the bytes on the wire",
        "psum psum_invariant psum2 psum_scatter reduce_scatter pmax pmin ppermute pgather "
        "all_gather all_gather_invariant all_to_all ragged_all_to_all",
    ),
    (
        "rigid",
        "works on integers, bits, keys, references or complex numbers: no float32 result to narrow",
        "and or not xor shift_left shift_right_arithmetic shift_right_logical population_count clz "
        "mulhi iota real imag complex conj bitcast_convert_type axis_index reduce_and reduce_or "
        "reduce_xor reduce_argmax threefry2x32 random_bits random_fold_in random_seed random_split "
        "random_wrap random_unwrap random_clone random_gamma rng_bit_generator rng_uniform "
        "lu_pivots_to_permutation get swap addupdate after_all create_token empty empty2 ref_get "
        "ref_set new_ref freeze partition_id create_tokens",
    ),
    (
        "rigid",
        "compiled or called for the dtypes it was traced with",
        "pallas_call pure_callback io_callback debug_callback debug_print custom_lin "
        "custom_linear_solve call_hi_primitive custom_call ffi_call xla_call stage dce_sink "
        "run_state core_map mosaic_call tpu_custom_call triton_call cudnn_fusion rounded_dot",
    ),
    (
        "enter",
        "has a program inside, which is autocast too",
        "jit pjit closed_call core_call call eval_jaxpr remat remat2 checkpoint scan while cond "
        "custom_jvp_call custom_vjp_call shard_map custom_vmap_call linear_call",
    ),
)

RULES: Mapping[str, str] = {name: kind for kind, _, names in _GROUPS for name in names.split()}
_WHY: Mapping[str, str] = {name: why for _, why, names in _GROUPS for name in names.split()}

# The first group of `full`, and all that follows, give one number per number.
_ELEMENTWISE = frozenset(
    name
    for kind, _, names in (_GROUPS[1], *(g for g in _GROUPS if g[0] in ("follow", "guarded")))
    for name in names.split()
)

Overrides = tuple[tuple[str, str], ...]


def kind_of(primitive: str, overrides: Overrides = ()) -> str:
    """The kind of a primitive by name: the override, else the table, else `rigid`."""
    return dict(overrides).get(primitive) or RULES.get(primitive, "rigid")


def reason_of(primitive: str, overrides: Overrides = ()) -> str:
    """Why the primitive has its kind, in words for people.

    >>> reason_of("reduce_sum")
    'adds or multiplies many terms: 8 or 11 bits of sum lose the small ones'
    """
    if primitive in dict(overrides):
        return "policy.rules says so"
    return _WHY.get(primitive, "unknown to the op table, so left as it was traced")


def is_elementwise(primitive: str) -> bool:
    """Whether recomputing the primitive costs next to nothing.

    >>> is_elementwise("exp"), is_elementwise("reduce_sum")
    (True, False)
    """
    return primitive in _ELEMENTWISE


def checked_rules(rules: Mapping[str, str] | Overrides) -> Overrides:
    """Overrides as a sorted, hashable tuple of (primitive name, kind).

    >>> checked_rules({"erf": "full", "my_kernel": "follow"})
    (('erf', 'full'), ('my_kernel', 'follow'))
    >>> checked_rules({"erf": "fp32"})
    Traceback (most recent call last):
        ...
    ValueError: rules: 'erf' has the unknown kind 'fp32'; allowed: matmul, full, follow, guarded, \
structure, rigid

    Raises:
        ValueError: an unknown kind, or a primitive that has programs inside and is not rigid.
    """
    pairs = tuple(sorted(dict(rules).items()))
    for name, kind in pairs:
        if kind not in USER_KINDS:
            allowed = ", ".join(USER_KINDS)
            raise ValueError(f"rules: {name!r} has the unknown kind {kind!r}; allowed: {allowed}")
        if RULES.get(name) == "enter" and kind != "rigid":
            raise ValueError(
                f"rules: {name!r} has a program inside; it is entered, or left alone as 'rigid', "
                f"but it cannot be {kind!r}"
            )
    return pairs
