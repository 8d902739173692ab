"""How a loss scale follows overflows: pure arithmetic, without gradients."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._support.checks import checked_int

_OWNER = "dynamic_loss_scale"


class Scale(NamedTuple):
    """What the rule remembers."""

    scale: jax.Array  # () float32, by which the loss is multiplied
    growth_count: jax.Array  # () int32, updates without overflow since the last one or growth
    hysteresis_left: jax.Array  # () int32, overflows until the scale falls; 0 once it has


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """The arguments of `dynamic_loss_scale` that decide about the scale; see there."""

    initial: float
    growth_interval: int
    growth: float
    backoff: float
    hysteresis: int
    min_scale: float
    max_scale: float

    def __post_init__(self) -> None:
        """Raise `ValueError` for what would let the scale fall to 0, rise to infinity or stay."""
        for name in ("growth_interval", "hysteresis"):
            number = checked_int(f"{_OWNER}: `{name}`", getattr(self, name), 1)
            object.__setattr__(self, name, number)  # as a plain int, whatever it was
        for name in ("initial", "growth", "backoff", "min_scale", "max_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ValueError(f"{_OWNER}: `{name}` must be a number, got {value!r}.")
        tiny, huge = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)
        least, most, growth = self.min_scale, self.max_scale, self.growth
        between = f"`min_scale`={least} and `max_scale`={most}"
        for holds, rule, value in (
            (1 < growth < math.inf, "`growth` must be > 1 and finite", growth),
            (0 < self.backoff < 1, "`backoff` must be in (0, 1)", self.backoff),
            (least >= tiny, f"`min_scale` must be > 0 in float32, {tiny:g} at least", least),
            # One growth may lead beyond `max_scale`, and must not lead to infinity.
            (
                most * growth <= huge,
                "`max_scale` * `growth` must be finite in float32",
                f"{most} * {growth}",
            ),
            (least <= self.initial <= most, f"`initial` must be between {between}", self.initial),
        ):
            if not holds:
                raise ValueError(f"{_OWNER}: {rule}, got {value}.")

    def start(self) -> Scale:
        """Before the first update."""
        return Scale(
            jnp.asarray(self.initial, jnp.float32),
            jnp.zeros([], jnp.int32),
            jnp.asarray(self.hysteresis, jnp.int32),
        )

    def after(self, old: Scale, overflow: jax.Array) -> Scale:
        """After an update with or without an overflow, a () bool array."""
        left = jnp.maximum(old.hysteresis_left - 1, 0)
        fallen = jnp.maximum(old.scale * jnp.float32(self.backoff), jnp.float32(self.min_scale))
        # Not restored by an overflow: the next one lowers the scale again, at once.
        after_overflow = Scale(
            jnp.where(left <= 0, fallen, old.scale), jnp.zeros_like(old.growth_count), left
        )
        count = old.growth_count + 1
        grows = count >= self.growth_interval
        risen = jnp.where(
            old.scale < jnp.float32(self.max_scale), old.scale * jnp.float32(self.growth), old.scale
        )
        otherwise = Scale(
            jnp.where(grows, risen, old.scale),
            jnp.where(grows, 0, count),
            jnp.where(grows, jnp.int32(self.hysteresis), old.hysteresis_left),
        )
        return jax.tree.map(lambda a, b: jnp.where(overflow, a, b), after_overflow, otherwise)
