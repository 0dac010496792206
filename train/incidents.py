"""When something is wrong enough to be looked at: bad steps in a row, a loss of NaN, a loss spike.

Gradients that overflow while a dynamic loss scale finds its place are none of these.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

Kind = Literal["skips", "nan", "spike"]

_WINDOW = 64  # steps that say what is usual
_IN_A_ROW = 3  # losses: one of a heavy tail is no spike
_SPREADS = 6  # robust standard deviations
_NATS = 0.2  # at least, where losses hardly differ
_NORM_FACTOR = 10


class Incident(NamedTuple):
    """What was seen.

    Attributes:
        kind: "skips", "nan" or "spike".
        step: The one after which it was seen; its batch is kept.
        since: The first step of it; a state from before is good.
        message: In words, with numbers.
    """

    kind: Kind
    step: int
    since: int
    message: str


class BadSteps:
    """Counts non-finite steps in a row at the lowest loss scale.

    A bad step above the floor is how a dynamic scale finds its place, and is not counted. Without
    a scale every step is at the floor.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0

    def are_too_many(self, grads_finite: bool, at_floor: bool) -> bool:
        self.count = 0 if grads_finite else self.count + int(at_floor)
        return self.count >= self.limit


class Usual:
    """The last numbers, and whether another one is out of line with them."""

    def __init__(self):
        self._last: deque[float] = deque(maxlen=_WINDOW)

    def add(self, value: float) -> None:
        if math.isfinite(value):
            self._last.append(value)

    @property
    def is_known(self) -> bool:
        return len(self._last) == _WINDOW

    @property
    def median(self) -> float:
        return statistics.median(self._last)

    @property
    def highest(self) -> float:
        """What a loss may be: so many robust standard deviations (MAD) over the median."""
        middle = self.median
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self._last)
        return middle + max(_SPREADS * spread, _NATS)

    def clear(self) -> None:
        self._last.clear()


class Watch:
    """Looks at the metrics of each step, in order."""

    def __init__(self, max_bad_steps: int, earlier: Iterable[Mapping[str, float]] = ()):
        """`earlier` are rows of metrics.jsonl: what was usual before the first step."""
        self.bad_steps = BadSteps(max_bad_steps)
        self._losses, self._norms = Usual(), Usual()
        self._high = 0
        self._spikes = 0.0
        for row in earlier:
            self._losses.add(row.get("train/loss", math.nan))
            self._norms.add(row.get("train/grad_norm", math.nan))
            self._spikes = row.get("monitor/grad_norm_spikes", self._spikes)

    def norm_spikes(self, norm: float) -> float:
        """How many gradient norms so far were ten times the median of the 64 before them."""
        self._spikes += self._norms.is_known and _NORM_FACTOR * self._norms.median < norm < math.inf
        self._norms.add(norm)
        return float(self._spikes)

    def look(
        self, step: int, values: Mapping[str, float], grads_finite: bool, at_floor: bool
    ) -> Incident | None:
        """The incident that this step completes."""
        loss = values["train/loss"]
        if self.bad_steps.are_too_many(grads_finite, at_floor):
            limit, scale = self.bad_steps.limit, values["amp/loss_scale"]
            message = f"gradients were not finite {limit} times in a row at loss scale {scale:g}; "
            message += f"loss {loss:g}"
            return Incident("skips", step, step - limit + 1, message)
        if not math.isfinite(loss):
            return Incident("nan", step, step, f"the loss, without a loss scale, is {loss:g}")
        return self._spike(step, loss)

    def _spike(self, step: int, loss: float) -> Incident | None:
        if not self._losses.is_known or loss <= self._losses.highest:
            self._high = 0
            self._losses.add(loss)
            return None
        self._high += 1
        if self._high < _IN_A_ROW:
            return None
        message = (
            f"the loss is {loss:.4g}, and over {self._losses.highest:.4g} for {_IN_A_ROW} steps; "
            f"the median of {_WINDOW} steps before is {self._losses.median:.4g}"
        )
        self._losses.clear()
        self._high = 0
        return Incident("spike", step, step - _IN_A_ROW + 1, message)
