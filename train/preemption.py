"""A signal asks for a clean end: one process stops after its step, several after the same step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextmanager
def stop_signals() -> Iterator[Callable[[int], str | None]]:
    """A function that says, after a step, by which signal the run is to stop, or None.

    With several processes it is SIGTERM to any of them, as a cluster sends it before it takes the
    machine, and JAX's coordinator tells all of them the same step. Every process must ask after
    every step.
    """
    if jax.process_count() > 1:
        yield (
            lambda step: "SIGTERM" if multihost_utils.reached_preemption_sync_point(step) else None
        )
        return
    with _received_signals() as received:
        yield lambda step: received[0] if received else None


@contextmanager
def _received_signals() -> Iterator[list[str]]:
    """Names of the signals received inside. The first asks for a clean end, a second insists."""
    received: list[str] = []

    def note(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
