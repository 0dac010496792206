"""Whether a run may go on from a checkpoint, and what a change of precision does to its state."""

from typing import NamedTuple

import jaxamp
from train.config import Config
from train.exits import InputError
from train.step import TrainState


class CheckpointError(InputError):
    """A checkpoint that cannot be written or used, in one line for the user."""


class Saved(NamedTuple):
    """A checkpoint as it was written; `meta` is what lies beside the state."""

    step: int
    config: Config
    meta: dict
    state: TrainState


def refuse_other_run(
    step: int, saved: Config, meta: dict, config: Config, vocab_size: int, fingerprint: str
) -> None:
    """Raises `CheckpointError` where model, data, batch size or seed are not those of `saved`."""
    free = {"dropout", "attention", "remat", "scan_layers", "vocab_size"}
    was = saved.model.model_dump(exclude=free) | {"vocab_size": meta["vocab_size"]}
    now = config.model.model_dump(exclude=free) | {"vocab_size": vocab_size}
    other = [f"model.{k} was {was[k]} and is {now[k]}" for k in now if was[k] != now[k]]
    if meta["fingerprint"] != fingerprint:
        other.append(f"the data were {meta['fingerprint']} and are {fingerprint}")
    for key in ("batch_size", "seed"):
        if getattr(saved, key) != getattr(config, key):
            other.append(f"{key} was {getattr(saved, key)} and is {getattr(config, key)}")
    if other:
        raise CheckpointError(
            f"checkpoint {step} is of another run: {'; '.join(other)}; "
            "resume with the same settings, or start anew in another --workdir"
        )


def convert(state: TrainState, saved: Config, config: Config) -> tuple[TrainState, list[str]]:
    """The state under another precision, and a line that says so."""
    old, new = jaxamp.get_policy(saved.policy), jaxamp.get_policy(config.policy)
    if (old.param_dtype, old.compute_dtype) == (new.param_dtype, new.compute_dtype):
        return state, []
    before, fresh = jaxamp.loss_scale(state.opt_state), jaxamp.get_loss_scale(new)
    if type(before) is type(fresh):
        fresh, what = before, "the loss scale stays as it was"
    elif isinstance(fresh, jaxamp.NoOpLossScale):
        what = f"the loss scale of {float(before.loss_scale):g} is dropped"
    else:
        what = f"the loss scale starts at {float(fresh.loss_scale):g}"
    note = f"precision changed from {old} to {new}: {what}"
    opt_state = state.opt_state._replace(loss_scale=fresh)
    return state._replace(params=new.cast_to_param(state.params), opt_state=opt_state), [note]
