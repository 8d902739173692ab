"""Checks of the arguments, states and layouts that updates of transforms receive."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._support.types import AxisName, PyTree
from .._support.varying import checks_varying, varying_axes
from ..mesh import axis_names, axis_size
from ..tree import kept_if, leaf_names
from ._replica_group import ReplicaGroup


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """Return `updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Select instead of multiplying: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: kept_if(alive, jnp.asarray(u)), updates)


_Value = TypeVar("_Value")
_LAYOUTS_KNOWN: ContextVar[bool] = ContextVar("_LAYOUTS_KNOWN", default=False)


@contextmanager
def setting(variable: ContextVar[Any], value: _Value) -> Iterator[_Value]:
    """Run the block with a context variable set to `value`, which is yielded."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def layouts_known() -> AbstractContextManager[bool]:
    """Make no `LayoutNotice` warn within the block, whose caller reads layouts from the arrays."""
    return setting(_LAYOUTS_KNOWN, True)


@dataclass
class LayoutNotice:
    """A warning that exchanges gather leaves because their shardings are unknown.

    Over Auto axes types do not show how leaves are sharded. `js.init` makes exactly those axes
    automatic over which leaves are sharded, so at `init` the warning is certain. In a loop that
    made its state without `js.init`, leaves may be whole over an automatic axis.

    Attributes:
      owner: public name of the transform, for messages.
      over: axes and layout of the exchange.
      warn: function that issues a warning once.
    """

    owner: str
    over: ReplicaGroup
    warn: Callable[[str], None]
    _seen_by_init: bool = field(default=False, init=False)

    def at_init(self) -> None:
        """Warn if `init`, where this is called, shows that leaves may be sharded."""
        if not _LAYOUTS_KNOWN.get():
            self._seen_by_init |= bool(jax.sharding.get_abstract_mesh().manual_axes)
            self._warn_of_gathers()

    def at_update(self) -> None:
        """Warn if `update`, where this is called, is the first to show that they may be."""
        if not (self._seen_by_init or _LAYOUTS_KNOWN.get()):
            self._warn_of_gathers()

    def _warn_of_gathers(self) -> None:
        if self.over.param_specs is not None:
            return
        mesh = jax.sharding.get_abstract_mesh()
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # Outside of shard_map, and under vmap, arrays are no blocks of one device.
        automatic = [name for name, kind in types if kind == AxisType.Auto and mesh.manual_axes]
        if wide := [name for name in automatic if mesh.shape[name] > 1]:
            self.warn(
                f"{self.owner}: no `param_specs` were given, and leaves that are sharded over "
                f"{wide} inside a replica are gathered for each exchange: pass `param_specs`, one "
                "PartitionSpec per leaf (P() for whole ones)."
            )


def check_varying(owner: str, params: PyTree, updates: PyTree, axis_name: AxisName) -> None:
    """Raise `ValueError` for new parameters whose types say that they are equal on all replicas.

    For parameters that are equal over an axis, `shard_map` with its default check sums gradients
    over that axis.
    """
    tracked = [a for a in axis_names(axis_name) if axis_size(a) > 1 and checks_varying(a)]
    if not tracked:
        return
    # If an update varies, so do the new parameters.
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=False)
    missing = {
        i: ", ".join(map(repr, axes))
        for i, (p, u) in enumerate(pairs)
        if (axes := [a for a in tracked if a not in varying_axes(p) | varying_axes(u)])
    }
    if missing:
        # Naming thousands of leaves is slow, so it is done for a message only.
        names = leaf_names(params)
        wrong = [f"{names[i]} (over {axes})" for i, axes in missing.items()]
        raise ValueError(
            f"{owner}: parameters and updates must differ between replicas, and by their types "
            f"these do not, so jax has summed their gradients over the replicas already: "
            f"{', '.join(wrong)}. Give every replica its own parameters (`js.replicate`, in_specs "
            "P(axis_name)), or mark them before differentiating: `jax.lax.pcast(params, axis_name, "
            'to="varying")`.'
        )


def check_weight(owner: str, weight: Any) -> jax.Array | None:
    """Return `weight` as a () float32 array, or None.

    Raises:
      ValueError: not a real scalar, or a number of Python or NumPy that is below 0 or not finite.
    """
    if weight is None:
        return None
    # Arrays of jax are checked by type, since their values may be traced.
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != () or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
        raise ValueError(
            f"{owner}: `weight` must be a real scalar, this replica's share in the mean, got "
            f"{dtype}{list(shape)}."
        )
    if not isinstance(weight, jax.Array) and not 0 <= float(weight) < math.inf:
        raise ValueError(f"{owner}: `weight` must be >= 0 and finite, got {weight}.")
    return jnp.asarray(weight).astype(jnp.float32)
