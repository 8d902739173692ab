"""The model of a run: its parameters, their placement on devices, and its precision."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import jaxslowmo as js
from jaxslowmo.checkpoint import SavedForm
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

from ..config._cluster import ClusterOptions
from ..config._options import options_of
from ..config._training import MOST_LOSS_SCALE, TrainConfig, train_config
from ._agreement import saved_values

# Norm weights stay in float32: they multiply statistics that are float32 anyway.
_NORMS = ("norm", "blocks/*/norm_*")


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

    def stack(self, tree: Any) -> Any:
        """Return parameters in this form, from a tree like that of `init_gpt`.

        Leaves are NumPy arrays or types, with a leading axis of replicas or without.
        """
        if self.layers is None or self.layout is None:
            return tree
        return self.layout.stack_like(self.layers.split(tree))

    def unstack(self, tree: Any) -> Any:
        """Undo `stack`: return a tree like that of `init_gpt`."""
        return tree if self.layout is None else self.join(self.layout.unstack(tree))

    def join(self, tree: Any) -> Any:
        """Return a tree like that of `init_gpt`, from the one that `step.consensus` returns."""
        return tree if self.layers is None else self.layers.join(tree)

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
    model, stages, chunks = config_of(config), schedule.num_stages, schedule.num_chunks
    if stages * chunks > (count := model.num_layers + 2):
        raise ValueError(
            f"--mesh {config.mesh}: {stages} stages of {chunks} chunks need as many layers, "
            f"--preset {config.preset} has {count}: an embedding, the blocks and an output layer"
        )
    costs = js.pipeline.count_layer_params(gpt_layers(model).split(gpt_types(model)))
    return js.partition_by_cost(costs, stages, chunks)


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


def saved_form(extra: Mapping[str, Any], now: Form) -> SavedForm | None:
    """Return the form of the parameters in a checkpoint; None if its names fit `now`.

    Args:
      extra: extra data of the checkpoint.
      now: form in which the parameters are needed.
    """
    saved = form_of(saved_config(extra))
    # With stages parameters have the names of layers, without them those of flax's modules. The
    # checkpoint itself converts between different stages.
    if (saved.layout is None) == (now.layout is None):
        return None
    types = saved.stack(gpt_types(saved.config))
    return SavedForm(types, lambda tree: now.stack(saved.unstack(tree)))
