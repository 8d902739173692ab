"""What jax has trained, back in the torch module."""

from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding

import jaxslowmo as js
from jaxslowmo.algorithms import shares_of_gossip

from ._arrays import jax_dtype, to_torch
from ._checks import check_module


def load_back(module: torch.nn.Module, state: js.TrainState, step: Any = None) -> None:
    """Write the consensus of all replicas into the module, in place.

    Args:
      module: the one that `on_jax.as_loss` was given, or one like it, on any device.
      state: that the training has reached.
      step: the `TrainStep` that made it. None reads the mesh off the arrays, and off the state
        how replicas count; only a parameter transform of your own that weighs them needs the step.

    Raises:
      ValueError: `step` is None, and the state lies on no mesh; tensors of other names, shapes or
        dtypes than the state's, all named; nothing is written then.

    Communication: that of `js.consensus`, of parameters and model state.
    """
    if step is None:
        where, shares = _mesh_of(state), shares_of_gossip(state.opt_state)
    else:
        where, shares = {"mesh": step.mesh, "axis_name": step.axis_name}, step.shares(state)
    params = js.consensus(state.params, shares=shares, **where)
    model_state = js.consensus(state.model_state, **where) if state.model_state else {}
    load_arrays(module, params, model_state)


def _mesh_of(state: js.TrainState) -> dict[str, Any]:
    """The mesh and the replica axis that stacked arrays lie on.

    Raises:
      ValueError: there is none.
    """
    sharding = getattr(next(iter(jax.tree.leaves(state.params)), None), "sharding", None)
    if not isinstance(sharding, NamedSharding) or not sharding.spec or sharding.spec[0] is None:
        raise ValueError(
            "load_back: `state` must have its replicas along an axis of a mesh, as a step leaves "
            f"them, got parameters on {sharding}; pass `step`, or one copy to load_arrays."
        )
    return {"mesh": sharding.mesh, "axis_name": sharding.spec[0]}


def load_arrays(module: torch.nn.Module, params: Any, model_state: Any = None) -> None:
    """Write one copy of parameters and model state into the module, in place.

    Tied weights stay tied, and what requires gradients stays so.

    Args:
      module: as `load_back` takes it.
      params: arrays by name, as `on_jax.as_loss` gives them.
      model_state: likewise; None is {}.

    Raises:
      ValueError: as `load_back`.
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
            wanted = tuple(tensor.shape), jax_dtype(tensor.dtype)
            if (shape, dtype) != wanted:
                problems.append(f"{name} is {dtype}{shape}, in the module {wanted[1]}{wanted[0]}")
    if problems:
        raise ValueError(
            "load_arrays: the arrays do not fit the module, which stays as it is (stacked replicas "
            f"need js.consensus): {'; '.join(problems)}."
        )
    host = jax.device_get(arrays)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(to_torch(host[name], tensor))
