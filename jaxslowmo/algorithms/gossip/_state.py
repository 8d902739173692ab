"""The state of gossip, and how its replicas count."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ..._typing import PyTree
from ...mesh import Shares
from ._exchange import Arrival


class SGPState(NamedTuple):
    """State of `sgp`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    exchanges: jax.Array  # () int32, exchanges so far; equal on all replicas
    weight: jax.Array  # () float32, push-sum weight w; with what is in flight, sums to the replicas
    in_flight: tuple[Arrival, ...]  # overlap - 1 of them, oldest first; () for overlap 0 and 1


def shares_of_gossip(opt_state: PyTree) -> Shares | None:
    """Return how the replicas of a state count in their consensus, as `js.consensus` takes it.

    Args:
      opt_state: stacked states of optax transforms, of any depth.

    Returns:
      Pairs of push-sum weights (replicas,) and parameters, None for the replicas' own; None where
      all replicas count alike: without a state of `js.sgp`, and where several, or some inside of
      `optax.masked` or `optax.partition`, have no weights but 1 and nothing in flight.

    Raises:
      ValueError: replicas that count differently in some leaves than in others.

    Communication: none where one state holds for all leaves; else one reduction of the weights, a
      few bytes per state, over the devices that hold them.
    """
    everywhere, in_some_leaves = _states_of_gossip(opt_state)
    states = [*everywhere, *in_some_leaves]
    if len(states) == 1 and everywhere:
        (state,) = states
        return [(state.weight, None), *((a.weight, a.mean) for a in state.in_flight)]
    if all(map(_counts_alike, states)):
        return None
    raise ValueError(
        "`state` holds js.sgp for some of its leaves, or several, and their replicas do not count "
        "alike there, so that no weights hold for all leaves: take the js.consensus of each part, "
        "with `shares` of its own transform."
    )


def _states_of_gossip(tree: PyTree) -> tuple[list[SGPState], list[SGPState]]:
    """The states of `js.sgp` in a tree, and those that belong to some leaves alone."""
    kinds = SGPState | optax.MaskedState
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds))
    everywhere = [x for x in nodes if isinstance(x, SGPState)]
    masked = [_states_of_gossip(x.inner_state) for x in nodes if isinstance(x, optax.MaskedState)]
    return everywhere, [state for pair in masked for states in pair for state in states]


def _counts_alike(state: SGPState) -> bool:
    """Whether all weights are 1 and nothing is in flight, so far as that can be read."""
    if state.in_flight or isinstance(state.weight, Tracer):
        return False
    return bool(jnp.all(jnp.asarray(state.weight) == 1))  # also of arrays over several processes
