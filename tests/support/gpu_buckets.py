"""Beside which work GPUs exchange the gradients of a step, read from the compiled schedule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from jaxslowmo.models import GPTConfig, gpt_loss_fn, gpt_param_specs, gpt_rules, gpt_types
from support.described import shapes_on
from support.gpu_schedule import Transfer

# Instructions that launch no kernel.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


@dataclass(frozen=True)
class Beside:
    """The bytes of transfers, by what runs beside each of them.

    Attributes:
      backward: bytes beside at least one product of the backward pass.
      other: bytes beside kernels, none of which is such a product.
      nothing: bytes beside no kernel.
    """

    backward: int
    other: int
    nothing: int

    @property
    def total(self) -> int:
        return self.backward + self.other + self.nothing

    @property
    def share(self) -> float:
        """The share of the bytes that travel beside products of the backward pass."""
        return self.backward / self.total


def what_runs_beside(transfers: tuple[Transfer, ...]) -> Beside:
    """Return the bytes of transfers by what runs beside them."""
    backward = other = nothing = 0
    for transfer in transfers:
        if any(product.is_backward for product in transfer.products):
            backward += transfer.bytes
        elif set(transfer.beside) - _NO_KERNEL:
            other += transfer.bytes
        else:
            nothing += transfer.bytes
    return Beside(backward, other, nothing)


def lowered_average(
    loss: Callable[..., Any],
    params: Any,
    batch: jax.ShapeDtypeStruct,
    mesh: Mesh,
    *,
    gradients: optax.GradientTransformation,
    optimizer: optax.GradientTransformation,
    specs: Any = None,
    windowed: bool = False,
    **options: Any,
) -> jax.stages.Lowered:
    """Return the program of a step that averages gradients on described GPUs.

    Args:
      loss: `loss(params, batch)`.
      params: shapes of one copy of the parameters.
      batch: shape of the batch of one device, for each of the `accumulate` parts.
      mesh: a mesh whose first axis is "replica"; the devices along all others share a replica.
      gradients: the gradient transform.
      optimizer: the optimizer.
      specs: `PartitionSpec` of each parameter; None: a device holds a whole replica.
      windowed: whether the gradients of the batch are added to those of a window of
        `step.collect`; the step then decides in its program what is due.
      **options: further arguments of `js.make_train_step`.
    """

    def step_on(where: Any) -> js.train.TrainStep:
        mode = "traced" if windowed else "host"
        options_of_step = {"gradients": gradients, "mode": mode, **options}
        return js.make_train_step(loss, optimizer, mesh=where, **options_of_step)

    # The state's shapes do not depend on where it lies, and no array can be placed on this mesh.
    virtual = step_on(js.virtual_mesh({"replica": mesh.shape["replica"]}))
    state = jax.eval_shape(virtual.init, params)
    rows, *others = batch.shape
    rows *= mesh.size * options.get("accumulate", 1)
    batch = jax.ShapeDtypeStruct((rows, *others), batch.dtype)
    window = jax.eval_shape(virtual.collect, state, batch)[0] if windowed else None
    state, step = _placed(state, specs, mesh), step_on(mesh)
    batch = shapes_on(batch, mesh, P(mesh.axis_names))
    if not windowed:
        return step.traced_by_phase(state, batch)["every"].lower()
    window = shapes_on(window, mesh, P("replica"))
    return jax.jit(lambda *args: step(*args[:2], window=args[2])).lower(state, batch, window)


def lowered_gpt(
    config: GPTConfig, mesh: Mesh, gradients: optax.GradientTransformation, **options: Any
) -> jax.stages.Lowered:
    """Return the program of a step of a GPT with AdamW, with 8 windows per device.

    Args:
      config: sizes of the model, whose products are in bfloat16.
      mesh: a mesh of replicas, which are sharded over its axis "fsdp" if there is one.
      gradients: the gradient transform.
      **options: further arguments of `lowered_average`, or others in place of these.
    """
    is_sharded = mesh.axis_names != ("replica",)
    options = {
        "optimizer": optax.adamw(6e-4),
        "policy": js.gradients.Policy("bfloat16"),
        "specs": gpt_param_specs(config, mesh) if is_sharded else None,
        **options,
    }
    loss = gpt_loss_fn(config, gpt_rules(mesh) if is_sharded else None)
    windows = jax.ShapeDtypeStruct((8, config.context_length + 1), jnp.uint8)
    return lowered_average(loss, gpt_types(config), windows, mesh, gradients=gradients, **options)


def _placed(state: Any, specs: Any, mesh: Mesh) -> Any:
    """Return the shapes of a state on a mesh; what is like the parameters lies as they do."""
    by_path = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, P))

    def placed(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = next((spec for end, spec in by_path if path[-len(end) :] == end), P())
        return shapes_on(x, mesh, P("replica", *spec))

    return jax.tree_util.tree_map_with_path(placed, state)
