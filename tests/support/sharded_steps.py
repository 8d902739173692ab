"""Training steps of GPTs whose replicas are sharded, to be compiled for described devices."""

import abc
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_loss_fn, gpt_param_specs, gpt_rules


@dataclass(frozen=True)
class Sharded(abc.ABC):
    """A model on a mesh of replicas that are sharded over "fsdp" and "tensor".

    Attributes:
      config: sizes of the model.
      hardware: topology of a TPU slice, or kind of the GPUs.
      axes: names and sizes of the mesh's axes, "replica" first.
      num_groups: number of slices, or of hosts.
      rows: windows per update on each device along "fsdp".
      shard_state: `shard_state` of slowmo; None stands for `js.local_sgd` without slowmo.
    """

    config: GPTConfig
    hardware: str
    axes: tuple[tuple[str, int], ...]
    num_groups: int = 1
    rows: int = 1
    shard_state: bool | None = True

    @property
    @abc.abstractmethod
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh of described devices."""

    @property
    def replicas(self) -> int:
        return dict(self.axes)["replica"]

    @property
    def parts(self) -> int:
        """The number of devices of a replica."""
        return math.prod(size for name, size in self.axes if name != "replica")

    @functools.cached_property
    def specs(self) -> Any:
        return gpt_param_specs(self.config, self.mesh)

    @functools.cached_property
    def params(self) -> Any:
        """The shapes and dtypes of one copy of the parameters."""
        from flax import nnx

        from jaxslowmo.models import GPT

        with nnx.logical_axis_rules(gpt_rules(self.mesh)):
            model = nnx.eval_shape(lambda: GPT(self.config, rngs=nnx.Rngs(0)))
        types = nnx.to_pure_dict(nnx.state(model))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)

    def on_a_device(self) -> int:
        """Return the number of elements of the parameters that one device holds."""
        sizes = dict(self.axes)

        def local_size(x: Any, spec: P) -> int:
            names = itertools.chain(*((e if isinstance(e, tuple) else (e,)) for e in spec if e))
            return x.size // functools.reduce(int.__mul__, (sizes[n] for n in names), 1)

        return sum(jax.tree.leaves(jax.tree.map(local_size, self.params, self.specs)))

    def between_replicas(self) -> int:
        """Return the bytes that a device should send in a slow step: a scatter and a gather."""
        return round(2 * (self.replicas - 1) / self.replicas * 4 * self.on_a_device())

    def step(self) -> js.train.TrainStep:
        return self.step_on(self.mesh)

    def step_on(self, mesh: Any) -> js.train.TrainStep:
        sync: Any = js.local_sgd("replica", sync_every=12)
        if self.shard_state is not None:
            sync = js.slowmo("replica", base=sync, sync_every=48, shard_state=self.shard_state)
        return js.make_train_step(
            self.loss_fn(), optax.adamw(3e-4), sync=sync, mesh=mesh, mode="host"
        )

    def loss_fn(self) -> Callable[..., Any]:
        return gpt_loss_fn(self.config, gpt_rules(self.mesh))

    def state(self, step: js.train.TrainStep) -> js.TrainState:
        """Return the shapes of the state, placed as `step.init` places it."""
        mesh = self.mesh

        def stacked(x: Any, spec: P) -> Any:
            lies = NamedSharding(mesh, P("replica", *spec))
            return jax.ShapeDtypeStruct((self.replicas, *x.shape), x.dtype, sharding=lies)

        params = jax.tree.map(stacked, self.params, self.specs)
        virtual = self.step_on(js.virtual_mesh({"replica": self.replicas}))
        # The step says where types without a place shall lie.
        types = jax.eval_shape(virtual.init, self.params)._replace(params=params)
        return step.placed(types)

    def batch(self) -> jax.ShapeDtypeStruct:
        rows = self.replicas * dict(self.axes)["fsdp"] * self.rows
        lies = NamedSharding(self.mesh, P(("replica", "fsdp")))
        shape = (rows, self.config.context_length + 1)
        return jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=lies)

    def lowered(self, kind: str) -> jax.stages.Lowered:
        """Return the program of a kind of step."""
        step = self.step()
        return step.traced_by_phase(self.state(step), self.batch())[kind].lower()

    def argument_bytes(self) -> int:
        """Return the bytes of a step's arguments on a device: parameters, all states, the batch."""

        def local_bytes(x: Any) -> int:
            item = 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
            return math.prod(x.sharding.shard_shape(x.shape)) * item

        types = self.state(self.step()), self.batch()
        return sum(map(local_bytes, jax.tree.leaves(types)))

    def of_blocks(self, num_layers: int) -> Self:
        """Return the same case with another number of blocks."""
        return replace(self, config=replace(self.config, num_layers=num_layers))
