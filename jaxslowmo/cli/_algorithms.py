"""Optimizers and synchronisation out of their configurations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import jaxslowmo as js
from jaxslowmo.topology import make_graph

from ._config import AlgorithmConfig, OptimizerConfig, TrainConfig
from ._mixing import parse_mixing


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What `js.make_train_step` is given.

    Attributes:
        schedule: learning rate of the 0-based update count.
        optimizer: inside each replica.
        gradients: gradient transform, or None.
        sync: parameter transform, or None.
    """

    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    gradients: optax.GradientTransformation | None
    sync: js.ParameterTransform | None


def build_algorithm(config: TrainConfig) -> Algorithm:
    """The transforms of a configuration, over the axes "replica" and, for two levels, "device".

    Raises:
        ValueError: for a combination that the library refuses.
    """
    two_levels = config.devices_per_replica > 1
    schedule = learning_rate_schedule(config.optimizer, config.steps)
    gradients = None
    if config.algorithm.algorithm == "all_reduce":
        size = round(config.algorithm.bucket_mib * 2**20)
        gradients = js.all_reduce_gradients(
            ("replica", "device") if two_levels else "replica",
            bucket_bytes=size,
            first_bucket_bytes=min(size, 2**20),
        )
    sync = _sync(config.algorithm, schedule, two_levels)
    if config.checkpoint.check_parameters:
        if sync is None:
            raise ValueError(
                "--check-parameters is for algorithms that exchange parameters; all_reduce "
                "exchanges gradients, and its loss tells"
            )
        sync = js.only_finite(sync)
    return Algorithm(
        schedule=schedule,
        optimizer=_optimizer(config.optimizer, schedule),
        gradients=gradients,
        sync=sync,
    )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up from 0 to the peak, then a cosine down to a tenth of it, or the peak."""
    peak = config.learning_rate
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, steps, 0.1 * peak)
    return optax.schedules.warmup_constant_schedule(0.0, peak, config.warmup)


def _optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    if config.optimizer == "adamw":
        inner = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    else:
        inner = optax.sgd(schedule, momentum=0.9)
    # Clipping stands after the gradients were averaged (all_reduce), before the optimizer.
    return optax.chain(optax.clip_by_global_norm(config.clip), inner) if config.clip else inner


def _sync(
    config: AlgorithmConfig, schedule: optax.Schedule, two_levels: bool
) -> js.ParameterTransform | None:
    levels: dict[str, Any] = {"local_axis_name": "device"} if two_levels else {}
    bases: dict[str, Callable[[], js.ParameterTransform]] = {
        "local_sgd": lambda: js.local_sgd("replica", sync_every=config.sync_every, **levels),
        "sgp": lambda: js.sgp(
            "replica",
            graph=lambda n: make_graph(config.graph, n, peers_per_step=config.peers_per_step),
            mixing=parse_mixing(config.mixing),
            overlap=config.overlap,
            **levels,
        ),
    }
    if config.algorithm in bases:
        return bases[config.algorithm]()
    if config.algorithm in ("slowmo", "slowmo_sgp"):
        return js.slowmo(
            "replica",
            base=bases["sgp" if config.algorithm == "slowmo_sgp" else "local_sgd"](),
            sync_every=config.slow_every,
            momentum=config.slow_momentum,
            slow_learning_rate=config.slow_learning_rate,
            learning_rate=schedule,
            shard_state=config.shard_state and config.exact_average,
            exact_average=config.exact_average,
            nesterov=config.nesterov,
            **levels,
        )
    if config.algorithm == "diloco":
        return js.diloco(
            "replica",
            sync_every=config.slow_every,
            outer_optimizer=optax.sgd(
                config.outer_learning_rate, momentum=config.outer_momentum, nesterov=True
            ),
            shard_state=config.shard_state,
            **levels,
        )
    return None
