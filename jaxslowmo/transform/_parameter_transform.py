"""Parameter transforms: optax's pair of an algorithm that exchanges parameters."""

from collections.abc import Callable, Mapping
from typing import Any, cast, get_args

import optax

from .._support.settings import Settings
from .._support.types import Phase, PyTree
from ._checks import Checked
from ._due import instants
from ._state_classes import WithSpec
from ._sync import InnerState, Operand, Sync


class ParameterTransform(WithSpec):
    """An optax transform that comes last in a chain and sets the parameters themselves.

    Let y = params + updates. `update` returns the difference of the new parameters and `params`; if
    no exchange is due, the new parameters are y. Its signature is
    `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips a due exchange.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples. Use
      0 for a replica that has run out of data: its updates are dropped and averages leave it out
      (gossip passes on what it holds), so it follows the others. None weighs all replicas equally.
    * `phase`: the events of this update, a static tuple; the program then holds the collectives of
      these events only. With None the program decides (`lax.cond` on the counter in the state).

    What it does is said by the algorithm that it holds, whose attributes and methods can be read
    from the transform: `tx.phase(t)` is `tx.sync.phase(t)`.

    Args:
      sync: the algorithm, a `js.spec.Sync`.

    Attributes:
      sync: the algorithm.
      exchange: `exchange(updates, others, state, params, **extra)`: like `update`, with a list of
        other floating arrays, such as batch statistics, and returns `(updates, others, state)`. An
        update that averages the parameters averages the other arrays, too, over the same axes and
        with the same weights. `js.make_train_step` calls it.

    Raises:
      ValueError: `sync` that is no `js.spec.Sync`, lacks what has no default, or has an unknown
        `inner_state`.
    """

    sync: Sync
    exchange: Callable[..., Operand]
    anchor: Callable[[PyTree, PyTree], PyTree]

    def __new__(cls, sync: Sync, settings: Settings | None = None) -> "ParameterTransform":
        """Make the transform of an algorithm."""
        if not isinstance(sync, Sync):
            raise ValueError(f"ParameterTransform: `sync` must be a js.spec.Sync, got {sync!r}.")
        if missing := sync.missing():
            raise ValueError(
                f"ParameterTransform: `sync` must be an algorithm that says {', '.join(missing)}, "
                f"got a {type(sync).__name__} without."
            )
        if sync.inner_state not in get_args(InnerState):
            raise ValueError(
                f"{sync.owner}: `inner_state` must be one of {get_args(InnerState)}, got "
                f"{sync.inner_state!r}."
            )
        checked = Checked(sync)
        self = super().__new__(cls, cast("optax.TransformInitFn", checked.init), checked.update)
        self.sync, self.exchange, self.settings = sync, checked.exchange, settings
        self.anchor = sync.anchor  # one object, by which compiled programs are found again
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the algorithm."""
        # Python calls this for missing attributes only, and pickle does so before `sync` is set.
        if name.startswith("_") or name in ("sync", "exchange", "settings"):
            raise AttributeError(name, name=name, obj=self)
        return getattr(self.sync, name)

    def __repr__(self) -> str:
        """Return the factory, its arguments, and where the state is stored."""
        settings, stored = self.settings, self.sync.stored
        text = repr(self.sync)
        if settings is not None:
            given = {name: x for name, x in settings.arguments.items() if x is not None}
            arguments = ", ".join(f"{name}={x!r}" for name, x in given.items())
            text = f"js.{settings.factory}({arguments})"
        return f"<{text}; state: {stored}>" if stored else f"<{text}>"

    def sized(self, axis_sizes: Mapping[str, int]) -> "ParameterTransform":
        """Return the transform for axes of these sizes by name."""
        return ParameterTransform(self.sync.sized(axis_sizes), self.settings)

    def with_specs(self, param_specs: PyTree, *, of_state: bool = False) -> "ParameterTransform":
        """Return the transform for parameters with these layouts; see `Sync.with_specs`."""
        return ParameterTransform(
            self.sync.with_specs(param_specs, of_state=of_state), self.settings
        )

    def phases(self) -> list[Phase]:
        """Return all phases that occur, in order of first appearance."""
        return list(dict.fromkeys(map(self.sync.phase, instants(self.sync.schedules))))

    def _replace(self, **changed: Any) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(**{**self._asdict(), **changed})


def phase_name(phase: Phase) -> str:
    """Return the name of a phase in reports: `"local"`, `"average"`, `"average+slow"`, ...

    Args:
      phase: events, as `transform.phase(t)` returns them.

    Returns:
      The events joined by "+"; "local" for none.

    Example:
      >>> phase_name(()), phase_name(("average", "slow"))
      ('local', 'average+slow')

    Communication: none.
    """
    return "+".join(phase) or "local"
