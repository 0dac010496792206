"""The lines of the enquiry about 16 bits: range or precision, loss scale, order, one operation."""

import numpy as np

import jaxamp
from jaxamp.diagnosis import Fault
from train.enquiry.case import Case
from train.enquiry.evidence import Evidence
from train.enquiry.finding import Finding, Status, not_checked, ok
from train.step import at_floor

DRIFT = 0.1
"""Nats by which losses in 16 bits may differ from those in float32 after a few steps; in a healthy
run of the default config it is 0.001."""
MANY_ZEROS = 0.1
"""Share of 16-bit gradients that a better scale would keep from being zero; healthy: 0.005."""
NO_16_BITS = "the policy has no 16 bits"


def only_16_bits(case: Case, evidence: Evidence) -> Finding:
    """Whether the step fails under the policy and not in float32, and in the other format."""
    if not evidence.has_16_bits:
        return not_checked(NO_16_BITS)
    here, exact = evidence.gradient, evidence.gradient32
    name = str(case.policy.compute_dtype)
    shown = [f"{name}: loss {here.loss:.5g}, float32: {exact.loss:.5g}"]
    then = case.recorded("train/grad_norm")
    if here.finite and then is not None and not np.isfinite(then):
        shown.append(f"the run wrote a gradient norm of {then:g}, now it is {here.norm:.4g}")
        advice = "look at the machine, and at what differs from the versions in incident.json"
        return Finding("suspect", "the step does not fail again", tuple(shown), advice)
    if here.finite:
        return _drift(case, evidence, name, shown)
    if not exact.finite:
        return ok("float32 fails on this batch too", *shown)
    other_name, other = evidence.other
    shown.append(f"{other_name}: {'finite' if other.finite else 'not finite either'}")
    range_ends = name == "float16" and other.finite
    why = "the range of float16 ends at 65504" if range_ends else "both formats fail"
    text = f"loss or gradients are not finite in {name} and are in float32: {why}"
    advice = "see the operation below" if evidence.diagnosis.fault else "try --policy float32"
    return Finding("suspect", text, tuple(shown), advice)


def _drift(case: Case, evidence: Evidence, name: str, shown: list[str]) -> Finding:
    ran, exact = evidence.training16, evidence.trained(False)
    if ran is None or exact is None:
        return ok("the batch is finite in 16 bits too", *shown)
    losses, losses32 = ran.losses[-5:].mean(), exact.training.losses[-5:].mean()
    skipped = f", bad steps: {ran.skipped}" if ran.skipped else ""
    shown.append(
        f"mean loss of the last 5 of {len(ran.losses)} steps from here: {losses:.4f} in {name}"
        f"{skipped}, {losses32:.4f} in float32"
    )
    apart = not abs(losses - losses32) <= max(DRIFT, 0.1 * losses32)
    if not apart or evidence.unstable:
        return ok("16 bits train as float32 does", *shown)
    text = f"{name} goes another way than float32 from the same state"
    advice = "try --policy float32, or let --bisect find what has to stay in it"
    return Finding("cause", text, tuple(shown), advice)


def scale(case: Case, evidence: Evidence) -> Finding:
    """Whether the loss scale loses gradients or makes them overflow."""
    held = jaxamp.loss_scale(case.state.opt_state)
    if isinstance(held, jaxamp.NoOpLossScale):
        return not_checked("the policy has no loss scale")
    now, best, fault = float(held.loss_scale), evidence.diagnosis.scale, evidence.diagnosis.fault
    floor = ", which is its floor" if at_floor(held) else ""
    shown = [f"it is {_power(now)}{floor}", *_skips(case)]
    if best is not None:
        top = best.loss_scale * 2.0**best.margin_log2
        shown.append(
            f"16-bit gradients fit up to {_power(top)}; zero are {best.flushed_now:.2%} of them "
            f"now, {best.flushed:.2%} at {_power(best.loss_scale)}"
        )
    if fault is not None and fault.remedy.setting.startswith("loss_scale="):
        lower = float(fault.remedy.setting.partition("=")[2])
        text = f"the loss scale is too high: {_power(now)} overflows and {_power(lower)} does not"
        halvings = round(np.log2(now / lower))
        advice = (
            f"go on: each bad step halves it, so {halvings} more are skipped, which is how a "
            "dynamic scale finds its place"
        )
        shown.append(f"checked: {fault.remedy.checked}")
        return Finding(_status(evidence), text, tuple(shown), advice)
    if fault is not None:
        return not_checked("what is wrong here is not the scale's doing: see the operation below")
    if best is not None and best.flushed_now > best.flushed + MANY_ZEROS:
        text = f"the loss scale is too low: {_power(now)} makes more gradients zero than need be"
        advice = f"{_power(best.loss_scale)} would keep them; a dynamic scale rises by itself"
        return Finding("suspect", text, tuple(shown), advice)
    return ok("the loss scale keeps the gradients", *shown)


def _power(scale: float) -> str:
    return f"2^{np.log2(scale):g}"


def _skips(case: Case) -> list[str]:
    skipped = case.series.get("amp/skipped_steps")
    if skipped is None:
        return []
    last = skipped.values[-100:]
    return [f"skipped steps so far: {last[-1]:g}, in the last {len(last)}: {last[-1] - last[0]:g}"]


def order(case: Case, evidence: Evidence) -> Finding:
    """Whether the norm that the clip sees is that of the unscaled gradients."""
    exact = evidence.gradient32
    if not (evidence.gradient.finite and exact.finite):
        return not_checked("the gradients of this batch are not finite")
    here = evidence.training16
    if here is None:
        return not_checked("there are no batches to train on")
    held = float(jaxamp.loss_scale(case.state.opt_state).loss_scale)
    shown = [
        f"the clip sees {here.norms[0]:.4g}, float32 without a scale {exact.norm:.4g}; "
        f"the scale is {_power(held)}"
    ]
    then = case.recorded("train/grad_norm")
    if then is not None:
        shown.append(f"the run wrote {then:.4g}")
    if abs(here.norms[0] / exact.norm - 1) < 0.5:
        return ok("gradients are unscaled before the clip", *shown)
    text = "the norm that the clip sees is not that of the float32 gradients"
    return Finding("suspect", text, tuple(shown), "see the operations below")


def one_operation(case: Case, evidence: Evidence) -> Finding:
    """Which operation made what is not finite, else which scopes lose the precision."""
    if not evidence.has_16_bits and evidence.gradient32.finite:
        return not_checked(NO_16_BITS)
    found = evidence.diagnosis
    if found.fault is not None:
        return _fault(case, evidence, found.fault)
    shown = []
    if found.error is not None:
        shown.append(f"gradient error against float32: {found.error:.3g}")
        shown += [
            f"{one.scope} in float32 takes away {one.removed:.0%}"
            for one in found.contributions
            if one.removed >= 0.01
        ]
    still = [one for one in found.frozen if one.share > 0.5]
    if still:
        names = ", ".join(f"{one.path} ({one.share:.0%})" for one in still[:3])
        text = f"most updates are less than half an ulp of their weights: {names}"
        return Finding("suspect", text, tuple(shown), "keep the weights in float32: params=f32")
    return ok("every operation is finite", *shown)


def _fault(case: Case, evidence: Evidence, fault: Fault) -> Finding:
    shown, remedy = tuple(str(fault).splitlines()), fault.remedy
    scope = f" in scope {fault.scope}" if fault.scope else ""
    made = f"made by {fault.primitive or 'a constant'} at {fault.where or 'no line'}"
    text = f"{fault.kind}{scope}, {made}"
    if remedy.setting.startswith("loss_scale="):
        return Finding("suspect", text, shown, "lower the loss scale: see above")
    setting = f"try {policy_flag(case.policy, remedy.setting)}: " if remedy.setting else ""
    advice = f"{setting}{remedy.advice}; checked: {remedy.checked}"
    if case.policy.compute_dtype == np.float16 and evidence.gradient32.finite:
        advice += ", and so they are with compute=bf16" if evidence.other[1].finite else ""
    return Finding(_status(evidence), text, shown, advice)


def _status(evidence: Evidence) -> Status:
    """Where float32 fails too, the lines about any precision have the cause."""
    return "cause" if evidence.float32_would_do else "suspect"


def policy_flag(policy: jaxamp.Policy, setting: str) -> str:
    """A remedy of `jaxamp.diagnose` as a flag that can be pasted.

    >>> policy_flag(jaxamp.get_policy("compute=f16"), "full=head")
    "--policy 'params=f32,compute=f16,output=f32,full=head'"
    """
    key, _, value = setting.partition("=")
    if key == "full":
        policy = policy.replace(full=(*policy.full, value))
    elif key == "rules":
        name, _, kind = value.partition(":")
        policy = policy.replace(rules={**dict(policy.rules), name: kind})
    elif setting == "compute=f32":
        policy = policy.replace(compute_dtype=np.float32, full=())
    else:
        return setting
    return f"--policy '{policy}'"
