"""The lines of the enquiry that 16 bits have no part in: data, weights, float32, learning rate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.data import IGNORE, Batch
from train.enquiry.case import Case
from train.enquiry.evidence import Evidence, Trained
from train.enquiry.finding import Finding, not_checked, ok

UNLIKE = 6.0
"""Standard deviations by which the loss of a batch may lie above that of its neighbours."""
LARGE_UPDATE = 0.3
"""Norm of an update over that of its weight; of the default config 0.002."""


def data(case: Case, evidence: Evidence) -> Finding:
    """Whether tokens and labels are what a corpus gives."""
    tokens, labels = case.batch["tokens"], case.batch["labels"]
    size, counted = case.vocab_size, labels != IGNORE
    bad = {
        "tokens": (tokens < 0) | (tokens >= size),
        "labels": counted & ((labels < 0) | (labels >= size)),
    }
    repeated = len(tokens) - len(np.unique(np.concatenate([tokens, labels], axis=1), axis=0))
    shown = [
        f"tokens {tokens.min()} to {tokens.max()} of a vocabulary of {size}",
        f"{np.count_nonzero(counted):,} of {labels.size:,} labels are counted",
        f"{repeated} of {len(tokens)} rows are repeated",
    ]
    for name, where in bad.items():
        if where.any():
            return _out_of_range(case, evidence, name, where, shown)
    if not counted.any():
        text = "no label of the batch is counted: its loss is 0 and nothing is learnt"
        return Finding("cause", text, tuple(shown), "look at the labels of these rows")
    if repeated > len(tokens) // 2:
        text = "more than half of the rows of the batch are the same"
        return Finding("suspect", text, tuple(shown), "look at the data of that step")
    return _neighbours(evidence, shown)


def _out_of_range(case, evidence, name: str, where: np.ndarray, shown: list[str]) -> Finding:
    row, position = np.argwhere(where)[0]
    value = case.batch[name][row, position]
    left_out = evidence.float32_fn(case.state.params, _without(case.batch, where), case.key())
    result = "are finite" if left_out.finite else "are not finite either"
    shown.append(f"without these positions loss and gradients {result} in float32")
    text = (
        f"{np.count_nonzero(where)} of the {name} are not in 0 to {case.vocab_size - 1}: the first "
        f"is {value} in row {row}, position {position}"
    )
    advice = (
        "mend the file or the tokenizer that the ids are from, or raise --model.vocab-size; "
        f"a label that is not to count is {IGNORE}"
    )
    return Finding("cause" if left_out.finite else "suspect", text, tuple(shown), advice)


def _without(batch: Batch, where: np.ndarray) -> Batch:
    return {
        "tokens": np.where(where, 0, batch["tokens"]),
        "labels": np.where(where, IGNORE, batch["labels"]),
    }


def _neighbours(evidence: Evidence, shown: list[str]) -> Finding:
    loss, others = evidence.still[0], evidence.still[1:]
    others = others[np.isfinite(others)]
    if not len(others) or not np.isfinite(loss):
        return ok("the batch is in order", *shown)
    shown.append(
        f"its loss in float32 is {loss:.4g}, that of {len(others)} batches after it "
        f"{others.min():.4g} to {others.max():.4g}"
    )
    if loss > others.mean() + max(UNLIKE * others.std(), 0.1 * others.mean()):
        text = "the batch is unlike those after it: its loss is far above theirs"
        return Finding("suspect", text, tuple(shown), "look at the text of that step")
    return ok("the batch is in order and like those after it", *shown)


def weights(case: Case, evidence: Evidence) -> Finding:
    """Whether what the step starts from is finite."""
    parts = {"params": case.state.params, "opt_state": case.state.opt_state}
    leaves = jax.tree_util.tree_leaves_with_path(parts)
    bad = {
        jax.tree_util.keystr(path, simple=True, separator="/"): int(jnp.sum(~jnp.isfinite(leaf)))
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not jnp.isfinite(leaf).all()
    }
    # The norm of the last gradients is what it was: a bad step has written it there.
    bad.pop("opt_state/grad_norm", None)
    if not bad:
        return ok(f"all {len(leaves)} arrays of parameters and optimizer are finite")
    paths = list(bad)
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return Finding(
        "cause",
        f"the state before the step is not finite: {', '.join(paths[:3])}{more}",
        tuple(f"{path}: {count} numbers" for path, count in list(bad.items())[:10]),
        "go on from an older checkpoint: move this one out of checkpoints/ and --resume; the guard "
        "applies no bad update, so look for what else wrote this state",
    )


def float32(case: Case, evidence: Evidence) -> Finding:
    """Whether float32 fails with the same settings, on this batch or within a few steps."""
    one = evidence.gradient32
    shown = [f"this batch: loss {one.loss:.4g}, gradient norm {one.norm:.4g}"]
    for anew in (False, True):
        shown += _shown(evidence.trained(anew), anew)
    if one.finite and not evidence.unstable:
        return ok("float32 is stable with the same settings", *shown)
    if evidence.stable_rate is not None:
        text = "float32 is not stable with the same settings either, so 16 bits are not to blame"
        return Finding("suspect", text, tuple(shown), "see the learning rate below")
    if one.finite and not evidence.gradient.finite:
        text = "float32 is not stable over some steps, but gives a finite one here"
        return Finding("suspect", text, tuple(shown), "see the lines about 16 bits first")
    advice = "no lower learning rate helps from here: go on from an older checkpoint, and look at "
    if one.finite or evidence.diagnosis.fault is None:
        text = f"float32 {'is not stable' if one.finite else 'gives no finite step'} either"
        return Finding("cause", text, tuple(shown), advice + "the data and the loss")
    fault = evidence.diagnosis.fault
    text = f"float32 gives no finite step either: {fault.kind}, made by {fault.primitive}"
    place = f"{fault.where or 'no line'}: what it reads, and the settings that it depends on"
    return Finding("cause", text, (*shown, *str(fault).splitlines()[:2]), advice + place)


def _shown(trained: Trained | None, anew: bool, rate: float = 1.0) -> list[str]:
    if trained is None:
        return []
    losses, skipped = trained.training.losses, trained.training.skipped
    start = "from the first step" if anew else "from here"
    part = "" if rate == 1 else f", {rate:g} of the learning rate"
    bad = f", bad steps: {skipped}" if skipped else ""
    return [
        f"{len(losses)} steps {start}{part}: loss {losses[0]:.4g} to {losses[-1]:.4g}, "
        f"risen by {trained.rise:.2g} at most{bad}"
    ]


def learning_rate(case: Case, evidence: Evidence) -> Finding:
    """Whether a lower learning rate is stable where this one is not."""
    peak = case.config.optimizer.learning_rate
    shown = [f"peak of the schedule {peak:g}"]
    ratios = update_ratios(case.state.params, evidence.updates)
    if ratios:
        named = ", ".join(f"{name} {ratio:.2g}" for name, ratio in ratios.items())
        shown.append(f"norm of the next update over that of its weights: {named}")
    shown += _norms(case)
    if evidence.stable_rate is not None:
        anew, rate = evidence.stable_rate
        shown += _shown(evidence.unstable[anew], anew)
        shown += _shown(evidence.trained(anew, rate), anew, rate)
        start = "a new run" if anew else "the run"
        return Finding(
            "cause",
            f"the learning rate is too high: float32 is not stable at {peak:g} and is at "
            f"{peak * rate:.3g}",
            tuple(shown),
            f"try --optimizer.learning-rate {peak * rate:.3g} for {start}"
            + ("; the weights as they are now may not recover" if anew else ""),
        )
    if evidence.trained(False) is None:
        return not_checked("there are no batches to train on")
    if max(ratios.values(), default=0) > LARGE_UPDATE:
        text = "the next update is large beside its weights"
        return Finding("suspect", text, tuple(shown), "try a lower --optimizer.learning-rate")
    return ok("the learning rate is not to blame", *shown)


def _norms(case: Case) -> list[str]:
    """What the run wrote of the gradients beside the clip."""
    norms, clip = case.series.get("train/grad_norm"), case.config.optimizer.max_grad_norm
    if norms is None:
        return []
    last = norms.values[-100:]
    finite = last[np.isfinite(last)]
    if not len(finite):
        return [f"no gradient norm of the last {len(last)} steps is finite"]
    return [
        f"gradient norm over the last {len(last)} steps: finite in {len(finite)}, median "
        f"{np.median(finite):.3g}, most {finite.max():.3g}; {np.mean(finite > clip):.0%} of these "
        f"clipped to {clip:g}"
    ]


def update_ratios(params: Any, updates: Any) -> dict[str, float]:
    """||update|| / ||weights|| by module, down to the parts of a block; zero weights left out."""
    if updates is None:
        return {}
    groups: dict[str, list[tuple[Any, Any]]] = {}
    for (path, weight), update in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(updates), strict=True
    ):
        names = [entry.key for entry in path[:-1]]
        groups.setdefault("/".join(names[: 2 if names[0] == "blocks" else 1]), []).append(
            (weight, update)
        )
    norms = {
        name: [float(optax.tree.norm(column)) for column in zip(*pairs, strict=True)]
        for name, pairs in groups.items()
    }
    return {name: update / weight for name, (weight, update) in norms.items() if weight}
