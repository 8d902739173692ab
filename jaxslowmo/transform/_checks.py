"""What updates of transforms are checked for."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._typing import AxisName, Phase, PyTree
from ..mesh import (
    axis_names,
    axis_size,
    checks_varying,
    is_bound,
    match_varying,
    require_axes,
    specs_key,
    typed_specs,
    varying_axes,
)
from ..tree import check_floating, kept_if, leaf_names, widen_updates
from ._due import Communicate
from ._exchange import Exchange


def unless_idle(updates: PyTree, weight: jax.Array | None) -> PyTree:
    """`updates`, or zeros on a replica of weight 0, whose batch may hold anything."""
    if weight is None:
        return updates
    # Selected, not multiplied: 0 * NaN is NaN.
    alive = weight > 0
    return jax.tree.map(lambda u: kept_if(alive, jnp.asarray(u)), updates)


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


_outer_axes: contextvars.ContextVar[frozenset[str] | None] = contextvars.ContextVar(
    "outer_axes", default=None
)


@contextlib.contextmanager
def inside(axes: Iterable[str]) -> Iterator[None]:
    """Around the exchange of a transform inside another one over `axes`.

    What that one has checked and warned about is not for the inner one to say again.
    """
    token = _outer_axes.set((_outer_axes.get() or frozenset()) | frozenset(axes))
    try:
        yield
    finally:
        _outer_axes.reset(token)


@dataclass(frozen=True, eq=False)
class CheckedStep:
    """The functions of a parameter transform around its step.

    Attributes:
      owner: public name, for messages.
      step: see `js.parameter_transform`.
      over: likewise.
      events: the names that a phase may hold; None leaves that to a transform inside.
      check_state: of its states.
      notice: where it packs leaves.
      warn: issues a warning once.
      widens: whether the step is given updates of half-precision leaves as float32. The package's
        own steps do that where nothing is due: done before the optimizer's arithmetic has ended,
        the compiler would leave its last rounding out.
    """

    owner: str
    step: Callable[..., tuple[PyTree, list[jax.Array], PyTree]]
    over: Sequence[Exchange]
    events: tuple[str, ...] | None
    check_state: StateCheck
    notice: LayoutNotice | None
    warn: Callable[[str], None]
    widens: bool

    def init(self, params: PyTree) -> PyTree:
        """The state of given parameters."""
        check_floating(self.owner, params)
        if self.notice is not None:
            self.notice.at_init()
        return self.check_state.init(params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        """As optax calls it."""
        updates, _, state = self.exchange(updates, [], state, params, **extra)
        return updates, state

    def exchange(
        self,
        updates: PyTree,
        others: list[jax.Array],
        state: PyTree,
        params: PyTree | None,
        *,
        communicate: Communicate = True,
        weight: Any = None,
        phase: Phase | None = None,
        **extra: Any,
    ) -> tuple[PyTree, list[jax.Array], PyTree]:
        """See `ExchangeSpec.exchange`."""
        # Cheap checks first, and none that needs the axis before it is known to be bound.
        check_update_arguments(self.owner, params, phase, self.events)
        check_floating(self.owner, params)
        outer = _outer_axes.get()
        for group in self.over:
            require_bound(self.owner, group)
            if not set(axis_names(group.axis_name)) <= (outer or frozenset()):  # which has warned
                warn_if_alone(self.owner, group, self.warn)
        if self.notice is not None:
            self.notice.at_update()
        share = check_weight(self.owner, weight)
        # The one around it has looked at the whole state, and at updates of idle replicas.
        if outer is None:
            self.check_state(state, params)
            updates = unless_idle(updates, share)
        if self.widens:  # half precision could not hold the way to given parameters
            updates = widen_updates(updates)
        check_varying(self.owner, params, updates, self.over[-1].axis_name)
        now = {"communicate": communicate, "weight": share, "phase": phase}
        updates, others, after = self.step(updates, others, state, params, **now, **extra)
        # The types stay as they were, so that an update can be the body of a loop.
        return updates, others, match_varying(after, state)
