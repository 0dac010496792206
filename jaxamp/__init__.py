"""Mixed-precision training for JAX and Flax that needs no dtype in the model."""

from jaxamp.autocast import autocast
from jaxamp.policy import Policy, auto_policy, get_policy
from jaxamp.scopes import full_precision

__all__ = ["Policy", "auto_policy", "autocast", "full_precision", "get_policy"]
