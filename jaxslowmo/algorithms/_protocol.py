"""The protocol of parameter transforms."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import optax

from .._typing import Phase, PyTree
from ._carry import Carry, Shares, carry_plainly
from ._schedule import Every, instants

Others = list[jax.Array]
"""Floating arrays that are no parameters and travel with them, such as batch statistics."""

Exchange = Callable[..., tuple[PyTree, Others, PyTree]]
"""`exchange(updates, others, state, params, ...)`: see `ParameterTransform.exchange`."""


class ParameterTransform(optax.GradientTransformationExtraArgs):
    """An optax transform that comes last in a chain and moves the parameters themselves.

    With y = params + updates, `update` returns the update that lands on the new parameters: y where
    nothing is due. `update(updates, state, params, communicate=True, weight=None, phase=None)`:

    * `communicate`: False, or an array that is False on all replicas, skips what is due.
    * `weight`: () number >= 0, this replica's share in averages, such as its number of samples; 0
      for one that has run out of data: its updates are dropped and averages leave it out (gossip
      passes on what it holds), so it follows the others. None: all alike.
    * `phase=None` decides inside the program (`lax.cond` on the counter in the state); a given
      phase is static, and the program holds that phase's collectives only.

    Beside optax's pair it has what other transforms and the step builder need:

    Attributes:
      axes: names of all mapped axes over which it exchanges.
      phase: `phase(t, skipped=0)` on the host: the events of update t = 1, 2, ... as a hashable
        tuple of names; `()` exchanges nothing. `skipped`: in how many updates before t its exchange
        was skipped (`communicate=False`); gossip does not rotate in those. Slow steps with an exact
        average do not count: gossip does not rotate in them anyway.
      skipped: `skipped(state)`: that number, from the state of one replica; None where phases do
        not ask for it.
      due: `due(t)`: whether update t exchanges anything, for an int or an array.
      exchange: `exchange(updates, others, state, params, ...)`, `update` that also takes a list of
        other floating arrays, such as batch statistics, and returns `(updates, others, state)`. In
        an update that averages the parameters, these are averaged too, over the same axes and with
        the same weights; in others they stay as they are. `js.make_train_step` calls it.
      numerator: `numerator(state, y) -> (x, w)`: the weighted parameters and their weight, whose
        sums over replicas give the exact mean; w is None where it is always 1.
      reset: `reset(state)`: the state after all replicas were set to one mean.
      permit: `permit(state, y, others, axes) -> (allowed, state)`: asked by who wraps it before an
        exchange of its own over `axes`, which takes place if all allow it; None allows all.
      schedules: when it exchanges by itself, then what else its phases repeat with.
      anchor: `anchor(state, params)`: the anchor as a tree, under the axis; None without one.
      sized: `sized(axis_sizes)`: the same transform for axes of known sizes, by name. That fixes
        what depends on them: the graph that `js.sgp` chooses by itself.
      with_specs: `with_specs(param_specs)`: the same transform for parameters of which the layout
        over automatic axes is known; specs that it was made with stay, and so does the layout of
        its state.
      shards_whole_leaves: whether it keeps shards of leaves and was given no specs, so that it
        gathers leaves that are sharded over Auto axes inside a replica (types tell of others).
      carry: `carry(state, params, old, new)` on the host, for checkpoints: the state of all
        replicas, NumPy arrays stacked on placement `old`, as it is on `new` once all parameters are
        the consensus; where the number of replicas is the same, in another layout only. Given
        shapes and dtypes of one copy of the parameters.
      shares: `shares(state)` likewise: pairs of weights (replicas,) and stacked parameters, None
        for the replicas' own, whose weighted mean is the consensus.

    The state is a NamedTuple with a field `count`: () int32, updates so far.
    """

    axes: tuple[str, ...]
    phase: Callable[..., Phase]
    skipped: Callable[[PyTree], Any] | None
    due: Callable[[Any], Any]
    exchange: Exchange
    numerator: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]]
    reset: Callable[[PyTree], PyTree]
    permit: Callable[[PyTree, PyTree, Others, Sequence[str]], tuple[Any, PyTree]] | None
    schedules: tuple[Every, ...]
    anchor: Callable[[PyTree, PyTree], PyTree] | None
    sized: Callable[[Mapping[str, int]], "ParameterTransform"]
    with_specs: Callable[[PyTree], "ParameterTransform"]
    shards_whole_leaves: bool
    carry: Carry
    shares: Shares

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        *,
        phase: Callable[..., Phase],
        due: Callable[[Any], Any],
        schedules: tuple[Every, ...],
        axes: tuple[str, ...] = (),
        exchange: Exchange | None = None,
        skipped: Callable[[PyTree], Any] | None = None,
        numerator: Callable[[PyTree, PyTree], tuple[PyTree, jax.Array | None]] | None = None,
        reset: Callable[[PyTree], PyTree] | None = None,
        permit: Callable[..., tuple[Any, PyTree]] | None = None,
        anchor: Callable[[PyTree, PyTree], PyTree] | None = None,
        sized: "Callable[[Mapping[str, int]], ParameterTransform] | None" = None,
        with_specs: "Callable[[PyTree], ParameterTransform] | None" = None,
        shards_whole_leaves: bool = False,
        carry: Carry = carry_plainly,
        shares: Shares | None = None,
    ) -> "ParameterTransform":
        """Make one from its functions; `numerator` and `reset` default to plain parameters."""
        self = super().__new__(cls, cast("optax.TransformInitFn", init), update)
        self.axes = axes
        self.phase = phase
        self.skipped = skipped
        self.due = due
        self.schedules = schedules
        self.anchor = anchor
        self.exchange = exchange or _parameters_only(update)
        self.numerator = numerator or (lambda state, y: (y, None))
        self.reset = reset or (lambda state: state)
        self.permit = permit
        self.sized = sized or (lambda axis_sizes: self)
        self.with_specs = with_specs or (lambda param_specs: self)
        self.shards_whole_leaves = shards_whole_leaves
        self.carry = carry
        self.shares = shares or (lambda state: [(1.0, None)])
        return self

    def phases(self) -> list[Phase]:
        """All phases that occur, in order of first appearance."""
        return list(dict.fromkeys(self.phase(t) for t in instants(self.schedules)))

    # Tuples are copied from their items alone, without what they have beside these.

    def __copy__(self) -> "ParameterTransform":
        return self._replace()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParameterTransform":
        return self._replace()  # functions, which are shared by copies of any depth

    def _replace(self, **changed: Any) -> "ParameterTransform":
        """A copy with another `init` or `update`."""
        unknown = sorted(set(changed) - set(self._fields))
        if unknown:
            raise ValueError(f"`_replace` takes {list(self._fields)}, got {unknown}.")
        pair = [changed.get(name, own) for name, own in zip(self._fields, self, strict=True)]
        new = tuple.__new__(type(self), pair)
        new.__dict__.update(self.__dict__)
        if "update" in changed:  # the step builder shall not go past it
            new.exchange = _parameters_only(changed["update"])
        if changed:  # what is derived from it has the same functions
            sized, with_specs = self.sized, self.with_specs
            new.sized = lambda axis_sizes: sized(axis_sizes)._replace(**changed)
            new.with_specs = lambda specs: with_specs(specs)._replace(**changed)
        return new


def _parameters_only(update: Callable[..., tuple[PyTree, PyTree]]) -> Exchange:
    """`exchange` of a transform that knows nothing of other arrays."""

    def exchange(
        updates: PyTree, others: Others, state: PyTree, params: PyTree, **extra: Any
    ) -> tuple[PyTree, Others, PyTree]:
        if others:
            raise ValueError(
                "a ParameterTransform of your own needs an `exchange` to average model state with "
                'the parameters: give it one, or train with model_state="local".'
            )
        updates, state = update(updates, state, params, **extra)
        return updates, others, state

    return exchange


def phase_name(phase: Phase) -> str:
    """Name of a phase in reports: `"local"`, `"average"`, `"slow"`, `"average+slow"`, ...

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
