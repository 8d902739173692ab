"""Writes arrays that jax has trained into the torch module."""

from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

import jaxslowmo as js
from jaxslowmo.algorithms import shares_of_gossip

from ..tensors import separate
from ._arrays import jax_dtype, to_torch
from ._functional import check_module


def load_back(module: torch.nn.Module, state: js.TrainState, step: Any = None) -> None:
    """Write the consensus of all replicas into the module, in place.

    Args:
      module: module of `on_jax.as_loss`, or one with the same tensors, on any device.
      state: state of the training.
      step: the `TrainStep` that made the state. With None, the mesh is read from the arrays, and
        the weights of replicas from the state; only your own parameter transform that weighs
        replicas needs the step.

    Raises:
      ValueError: `step` is None, and the state is on no mesh; tensors of other names, shapes or
        dtypes than the state's, all named. Then nothing is written.

    Communication: `js.consensus` of parameters and model state.
    """
    if step is None:
        layout = _mesh_of(state)
        shares = shares_of_gossip((state.opt_state, state.exchange.local))
    else:
        layout, shares = {"mesh": step.mesh, "axis_name": step.axis_name}, step.shares(state)
    params = js.consensus(state.params, shares=shares, **layout)
    model_state = js.consensus(state.model_state, **layout) if state.model_state else {}
    load_arrays(module, params, model_state)


def _mesh_of(state: js.TrainState) -> dict[str, Any]:
    """Return the mesh and the replica axis of stacked arrays.

    Raises:
      ValueError: the arrays are on no mesh.
    """
    sharding = getattr(next(iter(jax.tree.leaves(state.params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        raise ValueError(
            "load_back: `state` must have its replicas along an axis of a mesh, got parameters on "
            f"{sharding}: pass `step`, or one copy to load_arrays."
        )
    return {"mesh": sharding.mesh, "axis_name": sharding.spec[0]}


def load_arrays(module: torch.nn.Module, params: Any, model_state: Any = None) -> None:
    """Write one copy of parameters and model state into the module, in place.

    Tied weights stay tied, and `requires_grad` does not change.

    Args:
      module: module with the tensors of these names, on any device.
      params: arrays by name, as `on_jax.as_loss` returns them.
      model_state: arrays by name, as `on_jax.as_loss` returns them; None is {}.

    Raises:
      ValueError: tensors of other names, shapes or dtypes than the arrays', all named. Then nothing
        is written.
    """
    check_module("load_arrays", module)
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    arrays = {**params, **(model_state or {})}
    problems = [f"{name} is missing" for name in tensors if name not in arrays]
    problems += [f"{name} is not in the module" for name in arrays if name not in tensors]
    for name, tensor in tensors.items():
        if name in arrays:
            shape, dtype = np.shape(arrays[name]), np.dtype(arrays[name].dtype)
            target = tuple(tensor.shape), jax_dtype(tensor.dtype)
            if (shape, dtype) != target:
                problems.append(f"{name} is {dtype}{shape} and must be {target[1]}{target[0]}")
    if problems:
        raise ValueError(
            "load_arrays: the arrays do not fit the module, which stays as it is (stacked replicas "
            f"need js.consensus): {'; '.join(problems)}."
        )
    host = jax.device_get(arrays)
    separate(tensors.values())
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(to_torch(host[name], tensor))
