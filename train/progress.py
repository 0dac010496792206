"""What a person sees while a run goes on: a progress bar, and the speed in it."""

import math
import sys
import time
from dataclasses import dataclass, field

from tqdm import tqdm


@dataclass
class Meter:
    """Speed of steps alone: compilation, evaluation, saving and tracing are not counted.

    `flops_per_token` is the model's arithmetic, `peak_flops` what all the devices could do in a
    second; without a peak there is no `perf/mfu` (model FLOPs utilization, 0 to 1).
    """

    tokens_per_step: int
    flops_per_token: int = 0
    peak_flops: float | None = None
    seconds: float = 0.0
    steps: int = 0
    since: float | None = None

    def lap(self) -> dict[str, float]:
        """Ends a step; its metrics, none for one that had other things in it."""
        now, since = time.perf_counter(), self.since
        self.since = now
        if since is None:
            return {}
        self.seconds += now - since
        self.steps += 1
        return self._metrics(now - since)

    def pause(self) -> None:
        self.since = None

    @property
    def average(self) -> dict[str, float]:
        """The metrics of all counted steps together."""
        return self._metrics(self.seconds / self.steps) if self.steps else {}

    def _metrics(self, step_seconds: float) -> dict[str, float]:
        speed = self.tokens_per_step / step_seconds
        values = {"perf/tokens_per_second": speed, "perf/step_seconds": step_seconds}
        if self.peak_flops:
            values["perf/mfu"] = self.flops_per_token * speed / self.peak_flops
        return values


@dataclass
class Progress:
    """A bar on a terminal; elsewhere a line now and then. On stderr, stdout is for results."""

    num_steps: int
    first_step: int
    bar: tqdm = field(init=False)
    speed: float = math.nan

    def __post_init__(self):
        self.bar = tqdm(
            total=self.num_steps, initial=self.first_step, unit="step", disable=None, leave=True
        )

    def show(self, step: int, values: dict[str, float]) -> None:
        self.speed = values.get("perf/tokens_per_second", self.speed)
        speed = {"tok/s": f"{self.speed:,.0f}"} if math.isfinite(self.speed) else {}
        shown = {
            "loss": f"{values['train/loss']:.3f}",
            **speed,
            "scale": f"{values['amp/loss_scale']:g}",
            "skipped": f"{values['amp/skipped_steps']:g}",
        }
        if "eval/loss" in values:
            self.say(f"step {step}: eval loss {values['eval/loss']:.4f}")
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(step - self.bar.n)
        if self.bar.disable and step % max(self.num_steps // 10, 1) == 0:
            words = ", ".join(f"{name} {value}" for name, value in shown.items())
            print(f"step {step}/{self.num_steps}: {words}", file=sys.stderr)

    def say(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        self.bar.close()


def note(line: str) -> None:
    """Says what is under way, where it takes a while; on stderr, as all that is no result."""
    print(line, file=sys.stderr, flush=True)
