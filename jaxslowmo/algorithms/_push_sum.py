"""Push-sum: the state of gossip, values with weights, and parameters as their quotient."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._support.types import PyTree
from ..collectives.codecs import Codec
from ..mesh import Shares
from ..transform import Exchange, packing_of
from ..tree import Buffer, added, at_least_float32, by_dtype, cast, subtracted
from ._gossip import Arrival


def over(tree: PyTree, weight: jax.Array) -> PyTree:
    """`tree / weight` leaf by leaf, for a scalar weight > 0, in the leaves' dtypes (not half)."""
    # Half precision never gets here: updates and numerators are at least float32.
    in_dtype = by_dtype(weight)
    return jax.tree.map(lambda x: x / in_dtype(x.dtype), tree)


def pulled(updates: PyTree, own: PyTree, arrival: Arrival, share: jax.Array) -> PyTree:
    """`updates` that also move `own` by `share` of the way to what arrived.

    With share = (weight that arrived) / (weight afterwards) this is push-sum's new estimate: the
    mean of own and received values, each with its weight. Where both are equal nothing moves.
    """
    in_dtype = by_dtype(share)

    def pull(u: jax.Array, mine: jax.Array, theirs: jax.Array) -> jax.Array:
        # The difference first: nodes that agree then move by exactly 0.
        wide = at_least_float32(u.dtype)
        away = subtracted(cast(theirs, wide), cast(mine, wide))
        return added(cast(u, wide), in_dtype(wide) * away)

    return jax.tree.map(pull, updates, own, arrival.mean)


def together(kept: jax.Array, weight: jax.Array, arrival: Arrival) -> jax.Array:
    """The push-sum weight after an exchange, in the dtype of the share that was kept."""
    return kept * weight.astype(kept.dtype) + arrival.weight.astype(kept.dtype)


def total_mass(
    values: PyTree, weight: jax.Array, in_flight: Sequence[Arrival]
) -> tuple[PyTree, jax.Array]:
    """Numerators and weight of a node, what was sent to it and not yet mixed in included.

    Returns:
      `(x, w)`, in at least float32; over all nodes sum x / sum w is the mean that gossip tends to.
    """

    def numerator(own: jax.Array, *arrived: jax.Array) -> jax.Array:
        wide = at_least_float32(own.dtype)
        # x = w z of what this node holds, and of each message under way to it.
        x = weight.astype(wide) * own.astype(wide)
        for arrival, mean in zip(in_flight, arrived, strict=True):
            x += arrival.weight.astype(wide) * mean.astype(wide)
        return x

    x = jax.tree.map(numerator, values, *(arrival.mean for arrival in in_flight))
    total = weight + sum((a.weight for a in in_flight), start=jnp.zeros_like(weight))
    return x, total


def unsent(values: PyTree, over: Exchange, codec: Codec, like: PyTree) -> PyTree:
    """Return what a node does not send of `values`, in the dtypes of `like`.

    Communication: none.
    """

    def of(buffer: Buffer, flat: jax.Array) -> jax.Array:
        narrowed = codec.narrows(buffer.dtype)
        return codec.encode(flat)[1] if narrowed else jnp.zeros_like(flat)

    return packing_of(like, over).through(of, values)


def pulled_with_residual(
    updates: PyTree,
    own: PyTree,
    residual: PyTree,
    arrival: Arrival,
    codec: Codec,
    *,
    share: jax.Array,
    given: jax.Array,
) -> PyTree:
    """`pulled`, for a node that keeps what it has not sent of the share that it gave away.

    With z = `own` and r = `residual` the others have got z - r, and the numerator keeps r times the
    weight that they got it with, so that the sum over all nodes is as it was:

        z + share (z_arrived - z) + given r

    Where nodes give as much weight as they get, that is r + what z - r becomes. A codec that
    `rounds_mixtures` rounds the latter.

    Args:
      updates: the updates of the parameters, in at least float32.
      own: z.
      residual: r; leaves that travel as they are have none, and tell it by their dtype.
      arrival: what the node got.
      codec: the codec in whose form it came.
      share: () weight that arrived over the weight afterwards.
      given: () weight that the node gave away over the weight afterwards.
    """
    of_arrived, of_residual = by_dtype(share), by_dtype(given - share)

    def pull(u: jax.Array, mine: jax.Array, left: jax.Array, theirs: jax.Array) -> jax.Array:
        wide = at_least_float32(u.dtype)
        r = cast(left, wide)
        sent = subtracted(cast(mine, wide), r)
        away = of_arrived(wide) * subtracted(cast(theirs, wide), sent)
        if codec.rounds_mixtures and codec.narrows(left.dtype):
            away = subtracted(codec.rounded(added(sent, away)), sent)
        return added(cast(u, wide), away + of_residual(wide) * r)

    return jax.tree.map(pull, updates, own, residual, arrival.mean)


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
