"""What the trials of a case gave; each is run when it is first asked for."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxamp
from jaxamp.operate import is_narrow
from train.enquiry.case import Case, of_config
from train.enquiry.trial import (
    Gradient,
    Training,
    counted,
    gradient_fn,
    in_float32,
    losses_without_updates,
    training_fn,
    update_of,
)
from train.exits import InputError
from train.step import make_loss_fn, step_policy

RISE = 0.5
"""Nats by which a loss may rise above its least within a few steps. A healthy run of the default
config rises by 0.03, at 100 times its learning rate by 1.1."""
RATES = {True: (0.1, 0.01, 1e-3, 1e-4, 1e-5), False: (0.1, 0.01)}
"""Parts of the learning rate that are tried where the whole of it is unstable, by whether anew; a
state that was led astray may not recover at any."""


class Trained(NamedTuple):
    """A training in float32, and the losses of the same steps without updates."""

    training: Training
    still: np.ndarray

    @property
    def rise(self) -> float:
        """The most that the loss rose above its least so far, in nats, batches made equal."""
        excess = self.training.losses - self.still
        if not np.isfinite(excess).all():
            return float("inf")
        return float(np.max(excess - np.minimum.accumulate(excess)))

    @property
    def stable(self) -> bool:
        """No step was bad, and the loss did not rise; a large loss may rise by a tenth of it."""
        allowed = max(RISE, 0.1 * float(np.median(self.still)))
        return self.training.skipped == 0 and self.rise <= allowed


class Evidence:
    """Of one case. `note` is told what is under way."""

    def __init__(self, case: Case, note: Callable[[str], None] = lambda line: None):
        self.case, self.note = case, note
        self.step_seconds: float | None = None  # of a compiled training step, once there was one
        self.float32 = in_float32(case.policy)
        self.trained = functools.cache(self._trained)
        self._training_fn = functools.cache(functools.partial(training_fn, case, self.float32))

    @property
    def has_16_bits(self) -> bool:
        return any(map(is_narrow, (self.case.policy.compute_dtype, self.case.policy.param_dtype)))

    @functools.cached_property
    def float32_fn(self) -> Callable[..., Gradient]:
        return gradient_fn(self.case, self.float32)

    @functools.cached_property
    def gradient32(self) -> Gradient:
        """Of the batch, in float32."""
        self.note("the batch in float32")
        return self.float32_fn(self.case.state.params, self.case.batch, self.case.key())

    @functools.cached_property
    def still(self) -> np.ndarray:
        """float64[N], losses of this batch and those after it in float32, at these parameters."""
        return losses_without_updates(self.case, self.float32_fn)

    @functools.cached_property
    def gradient(self) -> Gradient:
        """Of the batch, under the policy."""
        self.note(f"the batch under {self.case.policy}")
        return self._gradient(self.case.policy)

    @functools.cached_property
    def other(self) -> tuple[str, Gradient]:
        """The other 16-bit format, and what the batch gives in it."""
        was = self.case.policy.compute_dtype
        dtype = jnp.float16 if was == jnp.bfloat16 else jnp.bfloat16
        self.note(f"the batch in {jnp.dtype(dtype).name}")
        return jnp.dtype(dtype).name, self._gradient(self.case.policy.replace(compute_dtype=dtype))

    def _gradient(self, policy: jaxamp.Policy) -> Gradient:
        return gradient_fn(self.case, policy)(
            self.case.state.params, self.case.batch, self.case.key()
        )

    @functools.cached_property
    def initial(self) -> Case | None:
        """The first step of the same settings; None if it is this one or data cannot be read."""
        if self.case.step == 1:
            return None
        try:
            return of_config(self.case.config, self.case.policy)
        except InputError:
            return None

    def _trained(self, anew: bool, rate: float = 1.0) -> Trained | None:
        """In float32 from here, or from the first step on; None where there are no batches."""
        case = self.initial if anew else self.case
        if case is None or not case.following:
            return None
        start = "from the first step" if anew else "from here"
        part = "" if rate == 1 else f", {rate:g} of the learning rate"
        self.note(f"{1 + len(case.following)} steps {start} in float32{part}")
        still = losses_without_updates(case, self.float32_fn) if anew else self.still
        training = self._training_fn(rate)(case)
        self.step_seconds = self.step_seconds or training.step_seconds
        return Trained(training, still)

    @functools.cached_property
    def training16(self) -> Training | None:
        """From here under the policy."""
        if not self.case.following:
            return None
        self.note(f"{1 + len(self.case.following)} steps from here under {self.case.policy}")
        training = training_fn(self.case, self.case.policy)(self.case)
        self.step_seconds = training.step_seconds
        return training

    @functools.cached_property
    def unstable(self) -> dict[bool, Trained]:
        """Trainings in float32 that are not stable with the same settings, by whether anew."""
        trained = {anew: self.trained(anew) for anew in (False, True)}
        return {anew: one for anew, one in trained.items() if one and not one.stable}

    @property
    def float32_would_do(self) -> bool:
        """The step is finite in float32, and a lower learning rate is not what it wants."""
        return self.gradient32.finite and self.stable_rate is None

    @functools.cached_property
    def stable_rate(self) -> tuple[bool, float] | None:
        """Where a lower learning rate is stable and the whole is not: (whether anew, the part)."""
        for anew in sorted(self.unstable, reverse=True):
            for rate in RATES[anew]:
                lower = self.trained(anew, rate)
                if lower is not None and lower.stable:
                    return anew, rate
        return None

    @functools.cached_property
    def updates(self):
        """What the optimizer would add to the parameters; None where no gradient is finite."""
        for gradient in (self.gradient, self.gradient32):
            if gradient.finite:
                return update_of(self.case, gradient.grads)
        return None

    @functools.cached_property
    def diagnosis(self) -> jaxamp.Diagnosis:
        """Of `jaxamp.diagnose` on the whole batch, at the loss scale of the case."""
        self.note("the step operation by operation (jaxamp.diagnose)")
        case = self.case
        loss_fn = make_loss_fn(case.config, case.graphdef)
        diagnosed = jaxamp.diagnose(loss_fn, step_policy(case.policy, case.config), has_aux=True)
        batch = jax.tree.map(jnp.asarray, case.batch)
        return diagnosed(
            case.state.params, batch, case.key(), counted(batch),
            loss_scale=jaxamp.loss_scale(case.state.opt_state), updates=self.updates,
        )  # fmt: skip
