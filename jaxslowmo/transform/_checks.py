"""What updates of transforms are checked for."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from .._support.types import AxisName, Phase, PyTree
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
from ._replica_exchange import Exchange


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


_Value = TypeVar("_Value")
_LAYOUTS_KNOWN: ContextVar[bool] = ContextVar("_LAYOUTS_KNOWN", default=False)
_OUTER_AXES: ContextVar[frozenset[str] | None] = ContextVar("_OUTER_AXES", default=None)


@contextmanager
def setting(variable: ContextVar[Any], value: _Value) -> Iterator[_Value]:
    """Set a context variable to a value, which is yielded, and back at the end."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def layouts_known() -> AbstractContextManager[bool]:
    """Around what reads layouts off the arrays itself, and says itself what it cannot mend."""
    return setting(_LAYOUTS_KNOWN, True)


def inside(axes: Iterable[str]) -> AbstractContextManager[frozenset[str]]:
    """Around the exchange of a transform inside another one over `axes`.

    What that one has checked and warned about is not for the inner one to say again.
    """
    return setting(_OUTER_AXES, (_OUTER_AXES.get() or frozenset()) | frozenset(axes))


@dataclass
class LayoutNotice:
    """A warning where exchanges gather leaves because nobody told how these are sharded.

    Types do not tell over Auto axes. `js.init` leaves those to the compiler over which leaves are
    sharded, and no others, so it shows; in a loop that made its state otherwise they may be whole.

    Attributes:
      owner: public name, for messages.
      over: what is exchanged over.
      warn: issues a warning once.
    """

    owner: str
    over: Exchange
    warn: Callable[[str], None]
    _seen_by_init: bool = field(default=False, init=False)

    def at_init(self) -> None:
        """Called where a state is made."""
        if not _LAYOUTS_KNOWN.get():
            self._seen_by_init |= bool(jax.sharding.get_abstract_mesh().manual_axes)
            self._look()

    def at_update(self) -> None:
        """Called where an update is traced."""
        if not (self._seen_by_init or _LAYOUTS_KNOWN.get()):
            self._look()

    def _look(self) -> None:
        if self.over.param_specs is not None:
            return
        mesh = jax.sharding.get_abstract_mesh()
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        # Outside of shard_map, as under vmap, nothing is a block of one device.
        automatic = [name for name, kind in types if kind == AxisType.Auto and mesh.manual_axes]
        if wide := [name for name in automatic if mesh.shape[name] > 1]:
            self.warn(
                f"{self.owner}: no `param_specs` were given, and leaves that are sharded over "
                f"{wide} inside a replica are gathered for each exchange, sharded anchors in local "
                "steps too: pass `param_specs`, one PartitionSpec per leaf (P() for whole ones)."
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
    missing = {
        i: ", ".join(map(repr, axes))
        for i, (p, u) in enumerate(pairs)
        if (axes := [a for a in tracked if a not in varying_axes(p) | varying_axes(u)])
    }
    if missing:
        # Names of thousands of leaves take their time: only for a message.
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


@dataclass(frozen=True, eq=False)
class CheckedStep:
    """The functions of a parameter transform around its step.

    Attributes:
      owner: public name, for messages.
      make: makes the state.
      like_make: as `make`, of which only types matter, where that is sooner traced.
      step: see `js.parameter_transform`.
      over: likewise.
      events: the names that a phase may hold; None leaves that to a transform inside.
      notice: where it packs leaves.
      warn: issues a warning once.
      widens: whether the step is given updates of half-precision leaves as float32. The package's
        own steps do that where nothing is due: done before the optimizer's arithmetic has ended,
        the compiler would leave its last rounding out.
      forms: what `make` makes, for each kind of parameters that was looked at.
    """

    owner: str
    make: Callable[[PyTree], PyTree]
    like_make: Callable[[PyTree], PyTree]
    step: Callable[..., tuple[PyTree, list[jax.Array], PyTree]]
    over: Sequence[Exchange]
    events: tuple[str, ...] | None
    notice: LayoutNotice | None
    warn: Callable[[str], None]
    widens: bool
    forms: dict[Hashable, _Form] = field(default_factory=dict)

    def init(self, params: PyTree) -> PyTree:
        """The state of given parameters."""
        check_floating(self.owner, params)
        if self.notice is not None:
            self.notice.at_init()
        state = self.make(params)
        # Where the axes are bound an update need not ask again what the state should be.
        if all(map(is_bound, self._axes())):
            self.forms[self._kind(params)] = _form(state)
        return state

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
        self.check_arguments(params, phase)
        outer = _OUTER_AXES.get()
        for group in self.over:
            require_bound(self.owner, group)
            names = axis_names(group.axis_name)
            # An outer one over these axes has warned.
            if axis_size(names) == 1 and not set(names) <= (outer or frozenset()):
                axis = repr(names[0] if len(names) == 1 else names)
                self.warn(
                    f"{self.owner}: axis {axis} has size 1, so there is nothing to communicate."
                )
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

    def check_arguments(self, params: PyTree | None, phase: object) -> None:
        """Raise `ValueError` for parameters that are missing or not floating, or another phase."""
        if params is None:
            raise ValueError(
                f"{self.owner} moves parameters and needs them: call `update(updates, state, "
                "params)`."
            )
        events = self.events
        is_one = isinstance(phase, tuple) and (events is None or {*phase} <= {*events})
        if phase is not None and not is_one:
            raise ValueError(
                f"{self.owner}: `phase` must come from `transform.phase(t)`, a tuple of event names"
                f"{'' if events is None else f' out of {list(events)}'}, got {phase!r}."
            )
        check_floating(self.owner, params)

    def check_state(self, state: PyTree, params: PyTree) -> None:
        """At trace time: raise `ValueError` for the state of another transform or configuration."""
        kind = self._kind(params)
        if kind not in self.forms:
            # A state that was restored, or made by another object: what it should be is traced.
            self.forms[kind] = _form(jax.eval_shape(self.like_make, params))
        wanted, found = self.forms[kind], _form(state)
        if found != wanted:
            raise ValueError(
                f"{self.owner}: `state` must be what this transform's `init` makes for these "
                f"parameters, {_described(wanted)}, got {_described(found)}: was it made by "
                "another transform, or with other arguments?"
            )

    def _axes(self) -> tuple[str, ...]:
        everyone = self.over[-1]
        return (*axis_names(everyone.axis_name), *axis_names(everyone.local_axis_name or ()))

    def _kind(self, params: PyTree) -> Hashable:
        # Shards of leaves that are sharded inside a replica depend on the mesh, too.
        mesh = jax.sharding.get_abstract_mesh()
        sizes = tuple(map(axis_size, self._axes()))  # under vmap no mesh tells them
        return _form(params), sizes, mesh, specs_key(typed_specs(params))
