"""Training steps of GPTs whose replicas are pipelines in one program, compiled for TPU slices.

What `benchmarks/tpu_sharded.py` prints as the rows with stages.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_sharded_steps import SlicesSharded

import jaxslowmo as js
from jaxslowmo.models import gpt_layers, gpt_param_specs, gpt_rules, gpt_types

MICROBATCHES = 4  # per stage


@dataclass(frozen=True)
class Staged(SlicesSharded):
    """A model on a mesh of replicas that are cut into stages, and perhaps sharded over "fsdp".

    Stages are those of `jaxslowmo train`: as evenly as possible by their parameters.

    Attributes:
      schedule_name: kind of the schedule, of four microbatches per stage, each of which has `rows`
        windows on each device along "fsdp".
    """

    schedule_name: str = "one_f_one_b"

    @functools.cached_property
    def pipe(self) -> Any:
        stages = dict(self.axes)["stage"]
        schedule = js.schedules.by_name(self.schedule_name, stages, MICROBATCHES * stages)
        rules = gpt_rules(self.mesh) if self._inside else None
        layers = gpt_layers(self.config, rules)
        types = layers.split(gpt_types(self.config))
        specs = gpt_param_specs(self.config, self.mesh, rules) if self._inside else None
        return js.pipelined(
            js.LayeredModel(layers.layers, layers.loss, tied=layers.tied),
            types,
            schedule,
            parts=js.partition_by_cost(js.pipeline.count_layer_params(types), stages),
            mesh=self.mesh,
            data_axes=self._inside,
            param_specs=None if specs is None else layers.split(specs),
        )

    @property
    def _inside(self) -> tuple[str, ...]:
        return ("fsdp",) if "fsdp" in dict(self.axes) else ()

    @property
    def specs(self) -> Any:
        return self.pipe.layout.specs

    @property
    def params(self) -> Any:
        """The shapes and dtypes of one copy of the parameters, stacked by stages."""
        return self.pipe.layout.types

    def loss_fn(self) -> Callable[..., Any]:
        return self.pipe

    def batch(self) -> jax.ShapeDtypeStruct:
        """Return the shape of a batch, whole on each device of a replica: a byte per symbol."""
        sizes = dict(self.axes)
        windows = self.replicas * self.pipe.schedule.num_microbatches * sizes.get("fsdp", 1)
        lies = NamedSharding(self.mesh, P("replica"))
        shape = (windows * self.rows, self.config.context_length + 1)
        return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=lies)
