"""Recorded runs of torch's DistributedDataParallel, and the same runs here.

The recorded model's gradient of parameter i on rank r at step t is exactly the array G[r, t]; the
optimizer is SGD.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxslowmo as js
from support.golden_peers import cases, parameters


class Case:
    """One recorded run."""

    def __init__(self, file: str, name: str) -> None:
        self.name = name
        self.meta, self.arrays = cases(f"{file}.npz")[name]
        self.world: int = self.meta["world"]

    def leaves(self, what: str) -> dict[str, np.ndarray]:
        """Return the array `what` ("init", "G", "grad", "param", ...) of every parameter."""
        return parameters(self.arrays, what)

    def stacked_init(self) -> dict[str, np.ndarray]:
        """Return the initial parameters, one copy per rank."""
        return {k: np.stack([v] * self.world) for k, v in self.leaves("init").items()}


def over_ranks(fn: Callable[..., Any], axes: Mapping[str, int], execution: str) -> Any:
    """Return `fn` over all ranks of `axes`; arguments and results have a leading axis of ranks."""
    sizes, names = tuple(axes.values()), tuple(axes)
    if execution == "shard_map":
        spec = P(names)

        def one_rank(*args: Any) -> Any:
            out = fn(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: x[None], out)

        return jax.jit(
            jax.shard_map(one_rank, mesh=js.make_mesh(axes), in_specs=spec, out_specs=spec)
        )
    for name in reversed(names):
        fn = jax.vmap(fn, axis_name=name)

    def on_grid(*args: Any) -> Any:
        grid = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), args)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(sizes) :]), fn(*grid))

    return jax.jit(on_grid)


def replay(
    tx: optax.GradientTransformation,
    params: dict[str, np.ndarray],
    grads: dict[str, np.ndarray],
    *,
    axes: Mapping[str, int],
    execution: str,
    extra: Mapping[str, Any] | None = None,
) -> list[tuple[Any, Any]]:
    """Train on `grads`; return parameters and state (rank, ...) after each step.

    Args:
      tx: the chain.
      params: initial parameters (rank, ...).
      grads: gradients (rank, step, ...).
      axes: sizes of the axes by name; ranks are row-major over them.
      execution: "vmap" or "shard_map".
      extra: extra arguments of `update`, trees of arrays (rank, step).
    """
    extra = dict(extra or {})
    wide = optax.with_extra_args_support(tx)

    def step(params: Any, state: Any, grads: Any, extra: Any) -> Any:
        updates, state = wide.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    state = over_ranks(tx.init, axes, execution)(params)
    program = over_ranks(step, axes, execution)
    history = []
    for t in range(next(iter(grads.values())).shape[1]):
        now = jax.tree.map(lambda x, t=t: x[:, t], (grads, extra))
        params, state = program(params, state, *now)
        history.append(jax.tree.map(np.asarray, (params, state)))
    return history
