"""What updates of transforms are checked for."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from .._integers import as_int
from .._typing import AxisName, PyTree
from ..codecs import Codec
from ..mesh import (
    axis_names,
    axis_size,
    checks_varying,
    is_bound,
    require_axes,
    specs_key,
    typed_specs,
    varying_axes,
)
from ..tree import kept_if, leaf_names
from ._exchange import Exchange


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """`updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Selected, not multiplied: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: kept_if(alive, jnp.asarray(u)), updates)


def check_axis_argument(owner: str, argument: str, axis_name: object) -> None:
    """Raise `ValueError` unless `axis_name` is a name or a tuple of distinct names."""
    # Before anything is traced: a misspelt name is found at trace time, a wrong type here.
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(n, str) and n for n in names):
        raise ValueError(
            f"{owner}: `{argument}` must be the name of a mapped axis or a tuple of names, "
            f"got {axis_name!r}."
        )
    if len(set(names)) != len(names):
        raise ValueError(f"{owner}: `{argument}` names an axis twice, got {axis_name!r}.")


def checked_bytes(owner: str, argument: str, size: object) -> int:
    """Return a size in bytes as an int; raise `ValueError` unless it is an integer >= 0."""
    number = as_int(size, 0)
    if number is None:
        raise ValueError(
            f"{owner}: `{argument}` is a size in bytes and must be an int >= 0, got {size!r}."
        )
    return number


def checked_exchange(
    owner: str,
    axis_name: AxisName,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
    codec: Codec | None = None,
) -> Exchange:
    """The `Exchange` of these arguments.

    Raises:
      ValueError: axes that are no names, specs that are none or of stacked leaves, a negative
        size, or a codec that is none.
    """
    check_axis_argument(owner, "axis_name", axis_name)
    if local_axis_name is not None:
        check_axis_argument(owner, "local_axis_name", local_axis_name)
    if bucket_bytes is not None:
        bucket_bytes = checked_bytes(owner, "bucket_bytes", bucket_bytes)
    specs = jax.tree.leaves(param_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    if wrong := [x for x in specs if not isinstance(x, PartitionSpec)]:
        raise ValueError(
            f"{owner}: `param_specs` must be a tree of PartitionSpec, got a leaf of type "
            f"{type(wrong[0]).__name__}."
        )
    replicas = set(axis_names(axis_name))
    if stacked := [x for x in specs if replicas & {n for e in x for n in axis_names(e or ())}]:
        raise ValueError(
            f"{owner}: `param_specs` are of one copy of the parameters and must not name the axis "
            f"of the replicas, {axis_name!r}, got {stacked[0]}. Off stacked leaves they are read "
            "as `P(*leaf.sharding.spec[1:])`."
        )
    if codec is not None and not isinstance(codec, Codec):
        raise ValueError(
            f"{owner}: `codec` must be None or one of js.codecs, such as js.codecs.bfloat16() or "
            f"js.codecs.float16(error_feedback=True), got {codec!r}."
        )
    return Exchange(axis_name, local_axis_name, param_specs, bucket_bytes, codec)


def require_bound(owner: str, over: Exchange) -> None:
    """At trace time: raise `ValueError` unless its axes are bound, and no name is in both."""
    # Asked first, since a collective over an unbound axis dies with an empty AssertionError.
    require_axes(owner, "axis_name", over.axis_name)
    if over.local_axis_name is None:
        return
    require_axes(owner, "local_axis_name", over.local_axis_name)
    both = set(axis_names(over.axis_name)) & set(axis_names(over.local_axis_name))
    if both:
        raise ValueError(
            f"{owner}: `local_axis_name` must differ from `axis_name`, both name {min(both)!r}."
        )


def warn_if_alone(owner: str, over: Exchange, warn: Callable[[str], None]) -> None:
    """At trace time: warn about a replica axis of size 1."""
    if axis_size(over.axis_name) == 1:
        names = axis_names(over.axis_name)
        axis = repr(names[0] if len(names) == 1 else names)
        warn(f"{owner}: axis {axis} has size 1, so there is nothing to communicate.")


_layouts_known: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "layouts_known", default=False
)


@contextlib.contextmanager
def layouts_known() -> Iterator[None]:
    """Around what reads layouts off the arrays itself, and says itself what it cannot mend."""
    token = _layouts_known.set(True)
    try:
        yield
    finally:
        _layouts_known.reset(token)


class LayoutNotice:
    """A warning where exchanges gather leaves because nobody told how these are sharded.

    Types do not tell over Auto axes. `js.init` leaves those to the compiler over which leaves are
    sharded, and no others, so it shows; in a loop that made its state otherwise they may be whole.

    Args:
      owner: public name, for messages.
      over: what is exchanged over.
      warn: issues a warning once.
    """

    def __init__(self, owner: str, over: Exchange, warn: Callable[[str], None]) -> None:
        self._owner, self._over, self._warn = owner, over, warn
        self._seen_by_init = False

    def at_init(self) -> None:
        """Called where a state is made."""
        if not _layouts_known.get():
            self._seen_by_init |= bool(jax.sharding.get_abstract_mesh().manual_axes)
            self._look()

    def at_update(self) -> None:
        """Called where an update is traced."""
        if not (self._seen_by_init or _layouts_known.get()):
            self._look()

    def _look(self) -> None:
        if self._over.param_specs is not None:
            return
        mesh = jax.sharding.get_abstract_mesh()
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # Outside of shard_map, as under vmap, nothing is a block of one device.
        automatic = [name for name, kind in types if kind == AxisType.Auto and mesh.manual_axes]
        if wide := [name for name in automatic if mesh.shape[name] > 1]:
            self._warn(
                f"{self._owner}: no `param_specs` were given, and leaves that are sharded over "
                f"{wide} inside a replica are gathered for each exchange, sharded anchors in local "
                "steps too: pass `param_specs`, one PartitionSpec per leaf (P() for whole ones)."
            )


def check_update_arguments(
    owner: str,
    params: PyTree | None,
    phase: object,
    events: tuple[str, ...] | None,
) -> None:
    """Raise `ValueError` for missing parameters, or a phase of something else.

    `events` are the names that a phase may hold; None leaves that to a base transform.
    """
    if params is None:
        raise ValueError(
            f"{owner} moves parameters and needs them: call `update(updates, state, params)`."
        )
    if phase is None:
        return
    if not isinstance(phase, tuple) or (events is not None and not set(phase) <= set(events)):
        raise ValueError(
            f"{owner}: `phase` must come from `transform.phase(t)`, a tuple of event names"
            f"{'' if events is None else f' out of {list(events)}'}, got {phase!r}."
        )


def check_varying(owner: str, params: PyTree, updates: PyTree, axis_name: AxisName) -> None:
    """At trace time: the new parameters differ between replicas, by their types.

    Where they do not, the gradients were summed over the replicas by jax: `shard_map` with its
    default check does that for parameters that are equal over an axis.
    """
    tracked = [a for a in axis_names(axis_name) if axis_size(a) > 1 and checks_varying(a)]
    if not tracked:
        return
    # An update that varies is enough: the new parameters then do.
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=False)
    missing = [
        (i, [a for a in tracked if a not in varying_axes(p) | varying_axes(u)])
        for i, (p, u) in enumerate(pairs)
    ]
    # Names of thousands of leaves take their time: only for a message.
    names = leaf_names(params) if any(axes for _, axes in missing) else []
    wrong = [f"{names[i]} (over {', '.join(map(repr, axes))})" for i, axes in missing if axes]
    if wrong:
        raise ValueError(
            f"{owner}: parameters and updates must differ between replicas, and by their types "
            f"these do not, so jax has summed their gradients over the replicas already: "
            f"{', '.join(wrong)}. Give every replica its own parameters (`js.replicate`, in_specs "
            "P(axis_name)), or mark them before differentiating: `jax.lax.pcast(params, axis_name, "
            'to="varying")`.'
        )


class StateCheck:
    """Whether a state is what `init` makes: each kind of parameters is looked at once.

    Args:
      owner: public name, for messages.
      init: makes the state.
      like_init: as `init`, of which only types matter, where that is sooner traced.
      over: what is exchanged over.
    """

    def __init__(
        self,
        owner: str,
        init: Callable[[PyTree], PyTree],
        like_init: Callable[[PyTree], PyTree] | None,
        over: Exchange,
    ) -> None:
        self._owner, self._init, self._like_init = owner, init, like_init or init
        self._axes = (*axis_names(over.axis_name), *axis_names(over.local_axis_name or ()))
        self._known: dict[Hashable, _Form] = {}

    def init(self, params: PyTree) -> PyTree:
        """`init(params)`, remembered where the axes are bound: an update need not ask again."""
        state = self._init(params)
        if all(map(is_bound, self._axes)):
            self._known[self._kind(params)] = _form(state)
        return state

    def __call__(self, state: PyTree, params: PyTree) -> None:
        """At trace time: raise `ValueError` for the state of another transform or configuration."""
        kind = self._kind(params)
        if kind not in self._known:
            # A state that was restored, or made by another object: what it should be is traced.
            self._known[kind] = _form(jax.eval_shape(self._like_init, params))
        wanted, found = self._known[kind], _form(state)
        if found != wanted:
            raise ValueError(
                f"{self._owner}: `state` must be what this transform's `init` makes for these "
                f"parameters, {_described(wanted)}, got {_described(found)}: was it made by "
                "another transform, or with other arguments?"
            )

    def _kind(self, params: PyTree) -> Hashable:
        # Shards of leaves that are sharded inside a replica depend on the mesh, too.
        mesh = jax.sharding.get_abstract_mesh()
        sizes = tuple(map(axis_size, self._axes))  # under vmap no mesh tells them
        return _form(params), sizes, mesh, specs_key(typed_specs(params))


_Form = tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
"""Structure of a tree, and shape and dtype of every leaf."""


def _form(tree: PyTree) -> _Form:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


_NUM_LISTED = 6


def _described(form: _Form) -> str:
    treedef, types = form
    tree = treedef.unflatten([f"{dtype}{list(shape)}" for shape, dtype in types])
    lines = [
        f"{name}: {what}"
        for name, what in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)
    ]
    more = f", and {len(lines) - _NUM_LISTED} more" if len(lines) > _NUM_LISTED else ""
    return f"{type(tree).__name__}({', '.join(lines[:_NUM_LISTED])}{more})"


def check_weight(owner: str, weight: Any) -> jax.Array | None:
    """`weight` as a () float32 array, or None.

    Raises:
      ValueError: not a real scalar; a number below 0 or not finite, where that is known.
    """
    if weight is None:
        return None
    # Traced values are checked by type; of numbers the value is known, too.
    shape, dtype = jnp.shape(weight), jnp.result_type(weight)
    if shape != () or not (jnp.issubdtype(dtype, jnp.floating) or dtype.kind in "biu"):
        raise ValueError(
            f"{owner}: `weight` must be a real scalar, this replica's share in the mean, got "
            f"{dtype}{list(shape)}."
        )
    if isinstance(weight, int | float) and not 0 <= weight < math.inf:
        raise ValueError(f"{owner}: `weight` must be >= 0 and finite, got {weight}.")
    return jnp.asarray(weight).astype(jnp.float32)
