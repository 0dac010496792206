"""Which checkpoints stay: the newest few, and the best one by evaluation loss."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orbax.checkpoint.checkpoint_managers import (
    PolicyCheckpointInfo,
    PreservationContext,
    PreservationPolicy,
)


@dataclass(frozen=True)
class NewestAndBest(PreservationPolicy):
    """The newest `newest`, and of those with a loss in `eval_losses` the one with the least.

    Without any loss there is no best one. A loss that is not finite is never the best.
    """

    newest: int
    eval_losses: Mapping[int, float | None]  # by step

    def should_preserve(
        self, checkpoints: Sequence[PolicyCheckpointInfo], *, context: PreservationContext
    ) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self.newest :], self._best(steps)}
        return [step in kept for step in steps]

    def _best(self, steps: Sequence[int]) -> int | None:
        losses = {step: self.eval_losses.get(step) for step in steps}
        known = {s: loss for s, loss in losses.items() if loss is not None and math.isfinite(loss)}
        return min(known, key=known.__getitem__, default=None)
