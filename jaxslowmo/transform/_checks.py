"""Checks of the arguments, states and layouts that updates of transforms receive."""

import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._support.checks import warn_once
from .._support.types import AxisName, Phase, PyTree
from .._support.varying import checks_varying, varying_axes
from ..mesh import (
    axis_names,
    axis_size,
    is_bound,
    require_axes,
    specs_key,
    typed_specs,
)
from ..tree import check_floating, kept_if, leaf_names
from ._due import Communicate, increment
from ._replica_exchange import Exchange
from ._sync import Now, Operand, Others, Sync, inner_changer


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """Return `updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Select instead of multiplying: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: kept_if(alive, jnp.asarray(u)), updates)


def require_bound(owner: str, over: Exchange, more: str = "") -> None:
    """Raise `ValueError` unless all axes are bound, and local axes differ from replica axes.

    `more` is appended to the message for an axis that is not bound.
    """
    # A collective over an unbound axis would fail with an empty AssertionError.
    require_axes(owner, "axis_name", over.axis_name, more)
    if over.local_axis_name is None:
        return
    require_axes(owner, "local_axis_name", over.local_axis_name, more)
    both = set(axis_names(over.axis_name)) & set(axis_names(over.local_axis_name))
    if both:
        raise ValueError(
            f"{owner}: `local_axis_name` must differ from `axis_name`, both name {min(both)!r}."
        )


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
    over: Exchange
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
                f"{wide} inside a replica are gathered for each exchange, sharded anchors in local "
                "steps too: pass `param_specs`, one PartitionSpec per leaf (P() for whole ones)."
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


_Form = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
"""Structure of a tree, and shape and dtype of every leaf."""


def _form(tree: PyTree) -> _Form:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


_NUM_LISTED = 6


def _described(form: _Form) -> str:
    treedef, types = form
    leaves = [f"{dtype}{list(shape)}" for shape, dtype in types]
    tree = treedef.unflatten(leaves)
    lines = [f"{name}: {leaf}" for name, leaf in zip(leaf_names(tree), leaves, strict=True)]
    more = f", and {len(lines) - _NUM_LISTED} more" if len(lines) > _NUM_LISTED else ""
    return f"{type(tree).__name__}({', '.join(lines[:_NUM_LISTED])}{more})"


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


class Checked:
    """The functions of a parameter transform, which check their arguments.

    Args:
      sync: the algorithm.
    """

    def __init__(self, sync: Sync) -> None:
        self._sync, self._warn = sync, warn_once()
        # What the outermost one packs has the layouts of what is inside, too.
        packing = [x for x in sync.layers() if x.packs][:1]
        self._notices = [LayoutNotice(x.owner, x.groups[-1], self._warn) for x in packing]
        # Types of the states that `init` makes, by the types of the parameters.
        self._forms: dict[Hashable, _Form] = {}

    def init(self, params: PyTree) -> PyTree:
        """Make the state of `params`."""
        sync = self._sync
        check_floating(sync.owner, params)
        for notice in self._notices:
            notice.at_init()
        state = sync.init(params)
        # With bound axes this is the state that updates expect, so `_check_state` need not trace.
        if all(map(is_bound, sync.bound_axes)):
            self._forms[self._kind(params)] = _form(state)
        return state

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """Return new updates and the new state, with the signature of optax."""
        updates, _, state = self.exchange(updates, [], state, params, **extra)
        return updates, state

    def exchange(
        self,
        updates: PyTree,
        others: Others,
        state: PyTree,
        params: PyTree | None,
        *,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        **extra: Any,
    ) -> Operand:
        """Return `(updates, others, state)` after one update, like `update`.

        An update that averages the parameters averages `others`, a list of floating arrays such as
        batch statistics, over the same axes and with the same weights; any other leaves them.
        """
        # Cheap checks come first, and checks that need an axis after the check that it is bound.
        sync = self._sync
        if params is None:
            raise ValueError(
                f"{sync.owner} moves parameters and needs them: call `update(updates, state, "
                "params)`."
            )
        check_floating(sync.owner, params)
        layer = inner_changer(sync)
        if layer is not None and not any(x is False for x in others):
            raise ValueError(
                f"{layer.owner}: `inner_state`={layer.inner_state!r} changes the state of the "
                "optimizer, which a transform alone does not see: use js.make_train_step or "
                'js.chain, not an optax.chain, or inner_state="keep".'
            )
        self._check_axes()
        for notice in self._notices:
            notice.at_update()
        share = check_weight(sync.owner, weight)
        self._check_state(state, params)
        sync = sync.on(params)  # some events are known once the parameters are
        self._check_phase(sync, phase)
        updates = unless_idle(updates, share)
        for layer in sync.layers():
            check_varying(layer.owner, params, updates, layer.groups[-1].axis_name)
        now = Now(params, increment(state.count), communicate, share, phase, extra)
        return sync.step((updates, others, state), now)

    def _check_axes(self) -> None:
        """Raise `ValueError` for axes that are not bound; warn if there is nothing to send."""
        warned = set[str]()
        for layer in self._sync.layers():
            for group in layer.groups:
                require_bound(layer.owner, group)
                names = axis_names(group.axis_name)
                if axis_size(names) == 1 and not set(names) <= warned:
                    axis = repr(names[0] if len(names) == 1 else names)
                    self._warn(
                        f"{layer.owner}: axis {axis} has size 1, so there is nothing to "
                        "communicate."
                    )
            warned |= {*layer.axes}

    @staticmethod
    def _check_phase(sync: Sync, phase: object) -> None:
        """Raise `ValueError` for a phase that this algorithm does not have."""
        if phase is None:
            return
        events = sync.events()
        names = phase if isinstance(phase, tuple) else ()
        found = [sum(map(event.is_called, names)) for event in events]
        if not isinstance(phase, tuple) or max(found, default=0) > 1 or sum(found) < len(names):
            raise ValueError(
                f"{sync.owner}: `phase` must come from `transform.phase(t)`, a tuple of "
                f"names of events out of {[event.named(0) for event in events]}, got {phase!r}."
            )

    def _check_state(self, state: PyTree, params: PyTree) -> None:
        """Raise `ValueError` for the state of another transform or configuration, by its types."""
        kind = self._kind(params)
        if kind not in self._forms:
            # A state that was restored or made by another object: trace what it should be.
            self._forms[kind] = _form(jax.eval_shape(self._sync.like_init, params))
        expected, actual = self._forms[kind], _form(state)
        if actual != expected:
            raise ValueError(
                f"{self._sync.owner}: `state` must be what this transform's `init` makes for these "
                f"parameters, {_described(expected)}, got {_described(actual)}: was it made by "
                "another transform, or with other arguments?"
            )

    def _kind(self, params: PyTree) -> Hashable:
        # For leaves that are sharded inside a replica the state's shards depend on the mesh, too,
        # which under vmap does not have the axes.
        mesh = jax.sharding.get_abstract_mesh()
        sizes = tuple(map(axis_size, self._sync.bound_axes))
        return _form(params), sizes, mesh, specs_key(typed_specs(params))
