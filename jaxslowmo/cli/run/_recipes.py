"""The model of a configuration, and its algorithm by a table of recipes."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jaxslowmo as js
from jaxslowmo.models import (
    GPTConfig,
    GPTLayers,
    gpt_layers,
    gpt_loss_fn,
    gpt_param_specs,
    gpt_preset,
    gpt_rules,
    gpt_types,
    init_gpt,
)
from jaxslowmo.pipeline.model import model_blocks
from jaxslowmo.topology import make_graph
from jaxslowmo.tree import leaf_names

from .._errors import island_errors
from ..config._cluster import ClusterOptions
from ..config._options import options_of
from ..config._training import (
    MOST_LOSS_SCALE,
    AlgorithmOptions,
    OptimizerOptions,
    TrainConfig,
    parse_codec,
    parse_mixing,
    train_config,
)
from ._agreement import saved_values

# Norm weights stay in float32: they multiply statistics that are float32 anyway.
_NORMS = ("norm", "blocks/*/norm_*")
# Descriptions of exchanges other than of gradients, in the order in which they are printed.
_AVERAGE = "average every {sync_every}"
_SLOW = "slow step every {slow_every}"
_GOSSIP = "gossip over {graph}"
_EXCHANGES = (_AVERAGE, _SLOW, _GOSSIP)


def policy_of(config: TrainConfig) -> js.Policy | None:
    """Return the policy for `--dtype`; None for float32, and with stages."""
    # A buffer of a stage holds norms and other weights, which names do not distinguish. The layers
    # compute in this dtype anyway: the policy only casts what they would cast.
    if config.dtype == "float32" or "stage" in config.model_axes:
        return None
    return js.Policy(config.dtype, keep=_NORMS)


def scaled(
    optimizer: optax.GradientTransformation, config: TrainConfig
) -> optax.GradientTransformation:
    """Return the optimizer with the loss scale of the configuration, if that has one."""
    if config.dtype != "float16" or not config.loss_scale:
        return optimizer
    return js.dynamic_loss_scale(
        optimizer,
        initial=config.loss_scale,
        growth_interval=config.loss_scale_interval,
        max_scale=MOST_LOSS_SCALE,
    )


@dataclasses.dataclass(frozen=True)
class Form:
    """The structure of the parameters of a run, and their placement inside a replica.

    Attributes:
      config: shape of the model.
      specs: a `PartitionSpec` per leaf; None if every device has all parameters, and with stages.
      layers: the model cut into layers; None without stages.
      layout: which stage holds which layers; None without stages.
    """

    config: GPTConfig
    specs: Any = None
    layers: GPTLayers | None = None
    layout: js.pipeline.StageLayout | None = None

    def join(self, tree: Any) -> Any:
        """Return a tree like that of `init_gpt`, from the one that `step.consensus` returns."""
        return tree if self.layers is None else self.layers.join(tree)

    def other_names(self) -> dict[str, str]:
        """Map parameters to their names in runs with stages if this is without, and the reverse.

        With stages parameters have the names of layers, without them those of flax's modules.
        """
        types = gpt_types(self.config)
        modules = jax.tree.structure(types).unflatten(leaf_names(types))
        split = (self.layers or gpt_layers(self.config)).split(modules)
        pairs = zip(leaf_names(split), jax.tree.leaves(split), strict=True)
        if self.layers is not None:
            return dict(pairs)
        # A tied table is in two layers, and the embedding's copy comes first.
        return {module: layer for layer, module in reversed([*pairs])}

    def init(self, seed: int, mesh: Mesh | js.mesh.VirtualMesh) -> Any:
        """Return one copy of the initial parameters, for `step.init`.

        They depend on the seed, not on the mesh.
        """
        params = init_gpt(self.config, seed)
        if self.layers is not None:
            # On the host, so that no device holds more than its stage.
            return self.layers.split(jax.tree.map(np.asarray, params))
        if self.specs is None:
            return params
        assert isinstance(mesh, Mesh), "devices share them"

        def place(x: Any, spec: Any) -> jax.Array:
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(place, jax.tree.map(np.asarray, params), self.specs)


def config_of(config: TrainConfig) -> GPTConfig:
    """Return the shape of the model of a run."""
    model = gpt_preset(config.preset, dtype=config.dtype, attention=config.attention)
    return dataclasses.replace(model, tied=config.tied)


def schedule_of(config: TrainConfig) -> js.pipeline.Schedule:
    """Return the pipeline schedule of a run.

    Raises:
      ValueError: the kind of schedule does not allow these numbers of stages or microbatches.
    """
    kind, chunks = config.pipeline, config.chunks
    # With one chunk the interleaved schedule would be one_f_one_b.
    chunks = 2 if kind == "interleaved" and chunks is None else chunks
    return js.schedules.by_name(kind, config.num_stages, config.num_microbatches, chunks)


def parts_of(config: TrainConfig, schedule: js.pipeline.Schedule) -> list[Any]:
    """Return the layers of each stage, with parameters divided as evenly as possible.

    Raises:
      ValueError: there are more stages than layers.
    """
    model = config_of(config)
    costs = js.pipeline.count_layer_params(gpt_layers(model).split(gpt_types(model)))
    return js.partition_by_cost(costs, schedule.num_stages, schedule.num_chunks)


def form_of(config: TrainConfig) -> Form:
    """Return the form of the parameters of a configuration, without touching a device.

    Raises:
      ValueError: the sizes of the mesh do not fit those of the model.
    """
    model, sizes = config_of(config), config.model_axes
    if not sizes:
        return Form(model)
    if "stage" in sizes and config.dtype == "float16":
        raise ValueError(
            f"--dtype float16 does not go with stages, between which small gradients would "
            f"vanish, in --mesh {config.mesh}; bfloat16 does"
        )
    mesh: Any = AbstractMesh(tuple(config.axes.values()), tuple(config.axes))
    specs = None
    if {"fsdp", "tensor"} & set(sizes):
        specs = gpt_param_specs(model, mesh, gpt_rules(mesh))
    if "stage" not in sizes:
        return Form(model, specs)
    schedule = schedule_of(config)
    layers, parts = gpt_layers(model), parts_of(config, schedule)
    stages = schedule.num_stages, schedule.num_chunks
    layout = js.pipeline.StageLayout(
        *_in_layers(layers, model),
        model_blocks(len(layers.layers), *stages, parts),
        schedule.placement,
        mesh=mesh,
        param_specs=None if specs is None else layers.split(specs),
    )
    return Form(model, layers=layers, layout=layout)


def _in_layers(layers: GPTLayers, model: GPTConfig) -> tuple[js.LayeredModel, list[Any]]:
    """Return the model as a `js.LayeredModel`, and the types of its parameters."""
    layered = js.LayeredModel(layers.layers, layers.loss, tied=layers.tied)
    return layered, layers.split(gpt_types(model))


def loss_fn_of(config: TrainConfig, form: Form, mesh: Any) -> Callable[[Any, jax.Array], Any]:
    """Return the loss function for parameters in a form and the windows of one replica."""
    shared = {"fsdp", "tensor"} & set(config.model_axes)
    rules = gpt_rules(mesh) if shared else None
    if form.layout is None:
        return gpt_loss_fn(form.config, rules)
    layers, schedule = gpt_layers(form.config, rules), schedule_of(config)
    specs = layers.split(gpt_param_specs(form.config, mesh, rules)) if shared else None
    return js.pipelined(
        *_in_layers(layers, form.config),
        schedule,
        parts=parts_of(config, schedule),
        mesh=mesh,
        executor=config.executor,  # pyright: ignore[reportArgumentType]
        data_axes=("fsdp",) if "fsdp" in shared else (),
        param_specs=specs,
    )


def saved_config(extra: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a checkpoint, without options of its processes and devices."""
    unused = {*options_of(ClusterOptions), "resume", "overwrite", "attention"}
    values = saved_values(extra["config"])
    return train_config({name: value for name, value in values.items() if name not in unused})


@dataclasses.dataclass(frozen=True)
class RecipeInputs:
    """The inputs from which a recipe builds its transforms.

    Attributes:
      config: settings of the algorithm.
      schedule: learning rate as a function of the 0-based update count.
      two_levels: whether several devices share the batch of a replica.
      specs: a `PartitionSpec` per leaf of the parameters, over axes that split the model, or None.
    """

    config: AlgorithmOptions
    schedule: optax.Schedule
    two_levels: bool
    specs: Any = None

    @property
    def levels(self) -> dict[str, Any]:
        """The arguments of parameter transforms about the devices inside a replica."""
        local = {"local_axis_name": "device"} if self.two_levels else {}
        return local if self.specs is None else {**local, "param_specs": self.specs}

    @property
    def codec(self) -> js.codecs.Codec | None:
        """The codec of the exchange; None without one."""
        return _codec_of(self.config)

    @property
    def shards_state(self) -> bool:
        """Whether the state of slow steps is sharded; with sparse codecs it is whole."""
        return self.config.shard_state and not (self.codec is not None and self.codec.is_sparse)


def _codec_of(config: AlgorithmOptions) -> js.codecs.Codec | None:
    name, fraction = parse_codec("--codec", config.codec)
    if fraction is not None:
        return js.codecs.top_k(fraction)
    return None if name == "none" else getattr(js.codecs, name)(error_feedback=True)


def _all_reduce(inputs: RecipeInputs) -> optax.GradientTransformation:
    size = round(inputs.config.bucket_mib * 2**20)
    return js.all_reduce_gradients(
        ("replica", "device") if inputs.two_levels else "replica",
        bucket_bytes=size,
        first_bucket_bytes=min(size, 2**20),
    )


def _local_sgd(inputs: RecipeInputs, **spread: Any) -> js.ParameterTransform:
    period, codec = inputs.config.sync_every, inputs.codec
    return js.local_sgd("replica", sync_every=period, codec=codec, **inputs.levels, **spread)


def _spread(inputs: RecipeInputs) -> dict[str, Any]:
    names = "fragments", "delay", "merge", "inner_state"
    return {name: getattr(inputs.config, name) for name in names}


def _sgp(inputs: RecipeInputs) -> js.ParameterTransform:
    config = inputs.config
    return js.sgp(
        "replica",
        # No function that closes over `config`, in which processes differ.
        graph=functools.partial(make_graph, config.graph, peers_per_step=config.peers_per_step),
        mixing=parse_mixing(config.mixing),
        overlap=config.overlap,
        codec=cast("js.codecs.Half | None", inputs.codec),  # others are refused by the options
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
        shard_state=inputs.shards_state and config.exact_average,
        exact_average=config.exact_average,
        nesterov=config.nesterov,
        codec=inputs.codec if config.exact_average else None,
        **inputs.levels,
        **_spread(inputs),
    )


def _outer_sgd(config: AlgorithmOptions) -> optax.GradientTransformation:
    rate, momentum = config.outer_learning_rate, config.outer_momentum
    return optax.sgd(rate, momentum=momentum, nesterov=True)


def _diloco(inputs: RecipeInputs) -> js.ParameterTransform:
    config = inputs.config
    return js.diloco(
        "replica",
        sync_every=config.slow_every,
        outer_optimizer=_outer_sgd(config),
        shard_state=inputs.shards_state,
        codec=inputs.codec,
        **inputs.levels,
        **_spread(inputs),
    )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A row of the table: one algorithm.

    Attributes:
      colour: colour of its line in pictures, a name in `COLOURS` of cli/_figures.py.
      marker: marker on that line, a code of matplotlib.
      exchanges: the entries of `_EXCHANGES` that describe it.
      gradients: builds its gradient transform; None if gradients are not exchanged.
      sync: builds its parameter transform; None if parameters are not exchanged.
    """

    colour: str
    marker: str
    exchanges: tuple[str, ...] = ()
    gradients: Callable[[RecipeInputs], optax.GradientTransformation] | None = None
    sync: Callable[[RecipeInputs], js.ParameterTransform] | None = None


RECIPES: Mapping[str, Recipe] = {
    "all_reduce": Recipe("black", "o", gradients=_all_reduce),
    "local_sgd": Recipe("blue", "s", (_AVERAGE,), sync=lambda s: _local_sgd(s, **_spread(s))),
    "sgp": Recipe("pink", "v", (_GOSSIP,), sync=_sgp),
    "slowmo": Recipe("vermilion", "D", (_AVERAGE, _SLOW), sync=lambda s: _slowmo(s, _local_sgd(s))),
    "slowmo_sgp": Recipe("orange", "P", (_GOSSIP, _SLOW), sync=lambda s: _slowmo(s, _sgp(s))),
    "diloco": Recipe("green", "^", (_SLOW,), sync=_diloco),
}


def join_islands(config: TrainConfig) -> "js.islands.Island | None":
    """Join the run of `--islands`, whose rounds are the algorithm's slow steps; None without it.

    Raises:
      ValueError: the library refuses an argument.
      CommandError: the store does not answer, or holds another run.

    Communication: two small requests to the store.
    """
    if config.islands is None or config.island is None:
        return None
    optimizer = _outer_sgd(config)
    if config.algorithm == "slowmo":
        # With a rate of 1, since islands are at different points of the schedule.
        optimizer = js.slow_momentum(
            config.slow_momentum, config.slow_learning_rate, nesterov=config.nesterov
        )
    logger = logging.getLogger("jaxslowmo.islands")
    if logging.lastResort is not None:  # its lines on stderr, as they are, and once
        logger.addHandler(logging.lastResort)
        logger.propagate = False
    with island_errors():
        return js.islands.join(
            config.islands,
            name=config.island,
            outer_optimizer=optimizer,
            sync_every=config.slow_every,
            delay=config.delay,
            quorum=config.quorum,
            deadline_seconds=config.deadline_seconds,
            codec=_codec_of(config),
            late=config.late,
            merge=config.merge,
        )


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The schedule and the transforms of an algorithm, for `js.make_train_step`.

    Attributes:
      schedule: learning rate as a function of the 0-based update count.
      optimizer: optimizer inside each replica.
      gradients: gradient transform, or None.
      sync: parameter transform, or None.
    """

    schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    gradients: optax.GradientTransformation | None
    sync: js.ParameterTransform | None

    def make_step(self, loss_fn: Any, config: TrainConfig, **options: Any) -> js.train.TrainStep:
        """Return the training step; `options` are further arguments of `js.make_train_step`."""
        return js.make_train_step(
            loss_fn,
            self.optimizer,
            sync=self.sync,
            gradients=self.gradients,
            accumulate=config.accumulate,
            **options,
        )

    def past_schedule(self, config: TrainConfig, step: int) -> tuple[str, ...]:
        """Return a note if a run that resumes at `step` trains past the end of its schedule."""
        end, has_end = config.schedule_length, config.schedule == "cosine"
        if not has_end or not end < config.steps or step >= config.steps:
            return ()
        rate = np.asarray(self.schedule(end)).item()
        stretch = f"--schedule-steps {config.steps} stretches it."
        return (f"The schedule ends at step {end}; then the rate stays {rate:.3g}. {stretch}",)


def build_algorithm(config: TrainConfig, specs: Any = None) -> Algorithm:
    """Return the transforms of a configuration, over the axes "replica" and perhaps "device".

    Args:
      config: configuration of the run.
      specs: a `PartitionSpec` per leaf of the parameters, over axes that split the model.

    Raises:
      ValueError: the library refuses a combination of options.
    """
    schedule = learning_rate_schedule(config, config.schedule_length)
    recipe = RECIPES[config.algorithm]
    two_levels = config.devices_per_replica > 1
    inputs = RecipeInputs(config, schedule, two_levels=two_levels, specs=specs)
    gradients = recipe.gradients(inputs) if recipe.gradients else None
    if config.islands is None:
        sync = recipe.sync(inputs) if recipe.sync else None
    else:
        # The codec is that of rounds: what replicas of an island send each other stays whole.
        whole = dataclasses.replace(inputs, config=dataclasses.replace(config, codec="none"))
        base = _local_sgd(whole) if config.algorithm == "slowmo" else None
        sync = js.islands.transform(base, inputs.codec)
    if config.check_parameters:
        assert sync is not None, "an option of algorithms that exchange parameters"
        sync = js.only_finite(sync)
    optimizer = scaled(_optimizer(config, schedule), config)
    return Algorithm(schedule, optimizer, gradients, sync)


def build_setting(
    config: TrainConfig, setting: Mapping[str, Any]
) -> tuple[optax.GradientTransformation, js.ParameterTransform]:
    """Return optimizer and sync of a configuration with one setting of its slow steps.

    Args:
      config: configuration of the run; its algorithm has slow steps.
      setting: "factor", which multiplies the learning rate, and "rate" and "momentum" of the slow
        step, or of diloco's outer optimizer: numbers, also traced ones.
    """
    schedule = learning_rate_schedule(config, config.schedule_length)

    def scaled_schedule(count: Any) -> Any:
        return setting["factor"] * schedule(count)

    # Without the checks of `AlgorithmOptions`, which traced values would not pass.
    algorithm: Any = SimpleNamespace(
        **vars(config)
        | dict.fromkeys(("slow_momentum", "outer_momentum"), setting["momentum"])
        | dict.fromkeys(("slow_learning_rate", "outer_learning_rate"), setting["rate"])
    )
    recipe = RECIPES[config.algorithm]
    assert recipe.sync is not None, "an algorithm with slow steps"
    sync = recipe.sync(RecipeInputs(algorithm, scaled_schedule, two_levels=False))
    return _optimizer(config, scaled_schedule), sync


def describe_exchanges(algorithms: Collection[str], config: AlgorithmOptions) -> list[str]:
    """Return in words what these algorithms exchange, and when."""
    used = {exchange for name in algorithms for exchange in RECIPES[name].exchanges}
    return [exchange.format_map(vars(config)) for exchange in _EXCHANGES if exchange in used]


def learning_rate_schedule(config: OptimizerOptions, steps: int) -> optax.Schedule:
    """Return a linear warm-up to the peak, then a cosine down to a tenth of it, or a constant."""
    peak = config.learning_rate
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, steps, 0.1 * peak)
    if not config.warmup:  # without steps to rise in, optax's warm-up stays at its first value, 0
        return optax.constant_schedule(peak)
    return optax.schedules.warmup_constant_schedule(0.0, peak, config.warmup)


def _optimizer(config: OptimizerOptions, schedule: optax.Schedule) -> optax.GradientTransformation:
    if config.optimizer == "adamw":
        inner = optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay)
    else:
        inner = optax.sgd(schedule, momentum=0.9)
    # Gradients are clipped after their average (all_reduce) and before the optimizer. The norm is
    # that of the whole model, also where the compiler shards it over axes inside a replica.
    if not config.clip:
        return inner
    return js.chain(js.clip_by_global_norm(config.clip), inner)
