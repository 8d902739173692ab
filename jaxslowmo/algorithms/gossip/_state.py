"""The state of gossip, and how its replicas count."""

from typing import NamedTuple

import jax

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
      no state of `js.sgp` is in `opt_state`, so that all replicas count alike.

    Raises:
      ValueError: several states of `js.sgp`, each of which weighs leaves of its own.

    Communication: none.
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, SGPState))
    states = [x for x in leaves if isinstance(x, SGPState)]
    if not states:
        return None
    if len(states) > 1:
        raise ValueError(
            f"`state` must hold at most one state of js.sgp for one consensus, got {len(states)}: "
            "take the js.consensus of the leaves of each apart, with `shares` of its own transform."
        )
    (state,) = states
    return [(state.weight, None), *((a.weight, a.mean) for a in state.in_flight)]
