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

EXECUTIONS = ("vmap", "shard_map")


class Case:
    """One recorded run."""

    def __init__(self, file: str, name: str) -> None:
        self.meta, self.arrays = cases(f"{file}.npz")[name]
        self.world: int = self.meta["world"]

    def leaves(self, what: str) -> dict[str, np.ndarray]:
        """`what` ("init", "G", "grad", "param", ...) of every parameter."""
        return parameters(self.arrays, what)

    def stacked_init(self) -> dict[str, np.ndarray]:
        """The initial parameters, one copy per rank."""
        return {k: np.stack([v] * self.world) for k, v in self.leaves("init").items()}


def case_names(file: str) -> list[str]:
    """All cases of a file."""
    return sorted(cases(f"{file}.npz"))


def over_ranks(fn: Callable[..., Any], axes: Mapping[str, int], execution: str) -> Any:
    """`fn` on every rank of `axes`; all arguments and results have one leading axis of ranks."""
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
    extra: Mapping[str, np.ndarray] | None = None,
) -> list[dict[str, np.ndarray]]:
    """Parameters (rank, ...) after each step.

    Args:
      tx: the chain.
      params: (rank, ...).
      grads: (rank, step, ...).
      axes: sizes by name; ranks are row-major over them.
      execution: one of `EXECUTIONS`.
      extra: extra arguments of `update`, (rank, step).
    """
    told = dict(extra or {})
    wide = optax.with_extra_args_support(tx)

    def step(params: Any, state: Any, grads: Any, told: Any) -> Any:
        updates, state = wide.update(grads, state, params, **told)
        return optax.apply_updates(params, updates), state

    state = over_ranks(tx.init, axes, execution)(params)
    program = over_ranks(step, axes, execution)
    history = []
    for t in range(next(iter(grads.values())).shape[1]):
        now = {name: g[:, t] for name, g in grads.items()}
        params, state = program(params, state, now, {k: v[:, t] for k, v in told.items()})
        history.append(jax.tree.map(np.asarray, params))
    return history
