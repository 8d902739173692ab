"""The algorithms of the command line, a row for each: how it is built, described and drawn."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import optax

import jaxslowmo as js
from jaxslowmo.topology import make_graph

from ..config._algorithms import ALGORITHMS, AlgorithmConfig, parse_mixing
from ..config._training import OptimizerConfig, TrainConfig
from ._model import scaled

# What replicas exchange besides gradients, in words; in this order where there are several.
_AVERAGE = "average every {sync_every}"
_SLOW = "slow step every {slow_every}"
_GOSSIP = "gossip over {graph}"
_EXCHANGES = (_AVERAGE, _SLOW, _GOSSIP)


@dataclasses.dataclass(frozen=True)
class RecipeInputs:
    """What a row builds from.

    Attributes:
      config: of the algorithm.
      schedule: learning rate of the 0-based update count.
      two_levels: whether a replica has several devices that share its batch.
      specs: how parameters lie over the axes that share the model.
    """

    config: AlgorithmConfig
    schedule: optax.Schedule
    two_levels: bool
    specs: Any = None

    @property
    def levels(self) -> dict[str, Any]:
        """Arguments of parameter transforms about the devices of a replica."""
        local = {"local_axis_name": "device"} if self.two_levels else {}
        return local if self.specs is None else {**local, "param_specs": self.specs}

    @property
    def codec(self) -> js.codecs.Codec | None:
        """In which form parameters travel."""
        name = self.config.codec
        return None if name == "none" else getattr(js.codecs, name)(error_feedback=True)


def _all_reduce(inputs: RecipeInputs) -> optax.GradientTransformation:
    size = round(inputs.config.bucket_mib * 2**20)
    return js.all_reduce_gradients(
        ("replica", "device") if inputs.two_levels else "replica",
        bucket_bytes=size,
        first_bucket_bytes=min(size, 2**20),
    )


def _local_sgd(inputs: RecipeInputs) -> js.ParameterTransform:
    return js.local_sgd(
        "replica", sync_every=inputs.config.sync_every, codec=inputs.codec, **inputs.levels
    )


def _sgp(inputs: RecipeInputs) -> js.ParameterTransform:
    config = inputs.config
    return js.sgp(
        "replica",
        graph=lambda n: make_graph(config.graph, n, peers_per_step=config.peers_per_step),
        mixing=parse_mixing(config.mixing),
        overlap=config.overlap,
        codec=inputs.codec,
        **inputs.levels,
    )


def _slowmo(inputs: RecipeInputs, base: js.ParameterTransform) -> js.ParameterTransform:
    config = inputs.config
    return js.slowmo(
        "replica",
        base=base,
        sync_every=config.slow_every,
        momentum=config.slow_momentum,
        slow_learning_rate=config.slow_learning_rate,
        learning_rate=inputs.schedule,
        shard_state=config.shard_state and config.exact_average and inputs.codec is None,
        exact_average=config.exact_average,
        nesterov=config.nesterov,
        codec=inputs.codec if config.exact_average else None,
        **inputs.levels,
    )


def _diloco(inputs: RecipeInputs) -> js.ParameterTransform:
    config = inputs.config
    return js.diloco(
        "replica",
        sync_every=config.slow_every,
        outer_optimizer=optax.sgd(
            config.outer_learning_rate, momentum=config.outer_momentum, nesterov=True
        ),
        shard_state=config.shard_state and inputs.codec is None,
        codec=inputs.codec,
        **inputs.levels,
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An algorithm.

    Attributes:
      colour: of its line in a picture, by its name in `COLOURS` of cli/_figures.py.
      marker: on that line, for print.
      exchanges: those of `_EXCHANGES` that describe it.
      gradients: builds its gradient transform; None where gradients are not exchanged.
      sync: builds its parameter transform; None where parameters are not exchanged.
    """

    colour: str
    marker: str
    exchanges: tuple[str, ...] = ()
    gradients: Callable[[RecipeInputs], optax.GradientTransformation] | None = None
    sync: Callable[[RecipeInputs], js.ParameterTransform] | None = None


RECIPES: Mapping[str, Recipe] = {
    "all_reduce": Recipe("black", "o", gradients=_all_reduce),
    "local_sgd": Recipe("blue", "s", (_AVERAGE,), sync=_local_sgd),
    "sgp": Recipe("pink", "v", (_GOSSIP,), sync=_sgp),
    "slowmo": Recipe("vermilion", "D", (_AVERAGE, _SLOW), sync=lambda s: _slowmo(s, _local_sgd(s))),
    "slowmo_sgp": Recipe("orange", "P", (_GOSSIP, _SLOW), sync=lambda s: _slowmo(s, _sgp(s))),
    "diloco": Recipe("green", "^", (_SLOW,), sync=_diloco),
}
# Not after all training, when the first entry is missed.
assert tuple(RECIPES) == ALGORITHMS, f"a recipe for each of {ALGORITHMS}, got {tuple(RECIPES)}"


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

    def make_step(self, loss_fn: Any, config: TrainConfig, **options: Any) -> js.TrainStep:
        """Return the step that trains with it; `options` are those of `js.make_train_step`."""
        return js.make_train_step(
            loss_fn,
            self.optimizer,
            sync=self.sync,
            gradients=self.gradients,
            accumulate=config.accumulate,
            **options,
        )

    def beyond(self, config: TrainConfig, step: int) -> tuple[str, ...]:
        """What to say of a run that goes on from a step to one beyond the end of its schedule."""
        end, has_end = config.schedule_length, config.optimizer.schedule == "cosine"
        if not has_end or not end < config.steps or step >= config.steps:
            return ()
        rate = np.asarray(self.schedule(end)).item()
        stretch = f"--schedule-steps {config.steps} stretches it."
        return (f"The schedule ends at step {end}; then the rate stays {rate:.3g}. {stretch}",)


def build_algorithm(config: TrainConfig, specs: Any = None) -> Algorithm:
    """The transforms of a configuration, over the axes "replica" and, for two levels, "device".

    Args:
      config: of the run.
      specs: a `PartitionSpec` per leaf of the parameters, over axes that share the model.

    Raises:
      ValueError: for a combination that the library refuses.
    """
    schedule = learning_rate_schedule(config.optimizer, config.schedule_length)
    recipe = RECIPES[config.algorithm.algorithm]
    two_levels = config.devices_per_replica > 1
    inputs = RecipeInputs(config.algorithm, schedule, two_levels=two_levels, specs=specs)
    gradients = recipe.gradients(inputs) if recipe.gradients else None
    sync = recipe.sync(inputs) if recipe.sync else None
    if config.checkpoint.check_parameters:
        if sync is None:
            raise ValueError(
                "--check-parameters is for algorithms that exchange parameters; all_reduce "
                "exchanges gradients, and its loss tells"
            )
        sync = js.only_finite(sync)
    optimizer = scaled(_optimizer(config.optimizer, schedule), config)
    return Algorithm(schedule, optimizer, gradients, sync)


def describe_exchanges(algorithms: Collection[str], config: AlgorithmConfig) -> list[str]:
    """What any of the algorithms exchanges, and when, in words."""
    told = {exchange for name in algorithms for exchange in RECIPES[name].exchanges}
    return [exchange.format_map(vars(config)) for exchange in _EXCHANGES if exchange in told]


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
    # Of the whole model: what the compiler shards over axes inside a replica is in the norm.
    if not config.clip:
        return inner
    return js.chain(js.clip_by_global_norm(config.clip), inner)
