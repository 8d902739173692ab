"""Stochastic gradient push: gossip with a few peers in every update."""

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._typing import AxisName, Phase, PyTree
from .._warn import warn_once
from ..mesh import axis_names, axis_size, is_bound, vary_over
from ..topology import Graph, Mixing, check_graph, check_mixing, npeer_directed_exponential
from ..tree import check_floating, landing, widen_updates
from ._builder import parameter_transform
from ._carry import Carried, Placement, carry_leaf, stacked
from ._checks import check_exchange_arguments
from ._due import Communicate, decide, increment, run_if
from ._gossip import Arrival, Gossip, round_event, round_number
from ._gossip_plan import GossipPlan, gossip_plan
from ._packing import Packing
from ._protocol import Others, ParameterTransform
from ._push_sum import over, pulled, total_mass
from ._schedule import every

_OWNER = "sgp"


class SGPState(NamedTuple):
    """State of `sgp`."""

    count: jax.Array  # () int32, updates so far; equal on all replicas
    exchanges: jax.Array  # () int32, exchanges so far; equal on all replicas
    weight: jax.Array  # () float32, push-sum weight w; with what is in flight, sums to the replicas
    in_flight: tuple[Arrival, ...]  # overlap - 1 of them, oldest first; () for overlap 0 and 1


def sgp(
    axis_name: AxisName,
    *,
    graph: Graph | Callable[[int], Graph] | None = None,
    mixing: Mixing | None = None,
    push_sum: bool = True,
    overlap: int = 0,
    local_axis_name: AxisName | None = None,
    param_specs: PyTree | None = None,
    bucket_bytes: int | None = None,
) -> ParameterTransform:
    """Gossip: in every update send the parameters to a few peers and mix in what arrives.

    Comes last in a chain. With push-sum weight w (starts at 1), numerator x = w * params, updates u
    and P the mixing matrix of the exchange, whose columns sum to 1:

        x <- P (x + u);   w <- P w;   params = x / w                                  (overlap=0)
        x <- P x + u;     w <- P w;   params = x / w                                  (overlap=1)

    The graph rotates through its phone book with every exchange, starting at 0; an exchange that is
    skipped does not rotate. The sums of x and of w over the replicas are kept by every exchange, so
    params approach the mean also where nodes send and receive different numbers of messages.

    Args:
      axis_name: mapped axis of the replicas.
      graph: who sends to whom, of the axis' size, from `js.topology`; or its constructor, such as
        `js.topology.ring`, to be called with the axis' size. None is
        `js.topology.npeer_directed_exponential`.
      mixing: callable `(graph, step) -> P[destination, source]`; None is uniform: every node splits
        its value evenly between itself and its peers. It must repeat with the graph's rotation
        (a static graph: not depend on the step); the steps of two rotations are compared.
      push_sum: False (PushPull) promises that P is doubly stochastic, so that w stays 1.
      overlap: 0 mixes the new parameters. 1 (OSGP) sends those of before the update, so the
        exchange waits for no gradient and can run beside their computation: with a static graph,
        or programs per round (`mode="host"`), and not inside a traced `js.slowmo`; on some TPUs
        with a flag or the right graph (docs/tpu.md). k > 1 applies what was sent k - 1 exchanges
        earlier.
      local_axis_name: axis of the devices inside a replica, which hold equal parameters: each then
        sends 1/L of them.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica; each device sends its own block.
      bucket_bytes: None sends one buffer per dtype, else buffers that close at this size.

    Returns:
      A `ParameterTransform` with state `SGPState`. As `base` of `js.slowmo` its exchange is skipped
      in exact slow steps, which average x and w (also what is in flight) and set w to 1. Memory
      beyond the parameters: (overlap - 1) N for overlap > 1.

    Raises:
      ValueError: no graph, mixing or overlap, or functions of other arguments; a mixing with
        negative weights, columns that don't sum to 1, or weights where there is no edge, checked
        for a whole rotation, or that does not repeat with it; push_sum=False
        where P is not doubly stochastic; overlap > 1 with a node that keeps nothing; push-sum
        weights that would fall below 1e-30. At trace time
        a graph of another size than the axis, an unbound axis, missing params, non-float leaves.
      UserWarning: once, if the axis has size 1; once for phases of an unknown number of replicas.

    Communication: in every update, for each permutation of the round (`graph.permutations(step)`:
      `peers_per_step` of them where the graph is regular), one collective-permute over `axis_name`
      per dtype buffer, N bytes together, N the bytes of the parameters in their own dtypes, and 4
      bytes of w where weights can differ between nodes. With `local_axis_name` N / L per device,
      and one all-gather of N over that axis. Nothing in updates with `communicate=False`.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
      algorithms 1 and 2; FairScale 0.4.13.
    """
    check_exchange_arguments(_OWNER, axis_name, local_axis_name, bucket_bytes)
    overlap = _check_arguments(graph, mixing, push_sum, overlap)
    warn = warn_once()

    def like(**other: Any) -> ParameterTransform:
        """The same transform but for some arguments."""
        given: dict[str, Any] = {
            "graph": graph,
            "mixing": mixing,
            "push_sum": push_sum,
            "overlap": overlap,
            "local_axis_name": local_axis_name,
            "param_specs": param_specs,
            "bucket_bytes": bucket_bytes,
        }
        return sgp(axis_name, **{**given, **other})

    def graph_for(num_nodes: int) -> Graph:
        if isinstance(graph, Graph):
            return graph
        made = (npeer_directed_exponential if graph is None else graph)(num_nodes)
        if not isinstance(made, Graph):
            raise ValueError(
                "sgp: `graph` must be a function that makes a js.topology.Graph, and the function "
                f"returned a {type(made).__name__}."
            )
        return made

    @functools.cache
    def plan_for(num_nodes: int) -> GossipPlan:
        chosen = graph_for(num_nodes)
        if chosen.num_nodes != num_nodes:
            raise ValueError(
                f"sgp: `graph` must have as many nodes as axis {axis_name!r}, which has size "
                f"{num_nodes}, got {chosen.name}({chosen.num_nodes})."
            )
        return gossip_plan(_OWNER, chosen, mixing, push_sum=push_sum, overlap=overlap)

    known = plan_for(graph.num_nodes) if isinstance(graph, Graph) else None

    def phase_of(t: int, skipped: int = 0) -> Phase:
        number = t - 1 - skipped
        if known is None:
            warn(
                "sgp: `graph` is chosen when the number of replicas is known, so phases asked for "
                "before do not repeat, and each compiles a program of its own: ask "
                "`transform.sized({axis: size})`, or pass a graph."
            )
            return (round_event(number),)
        return (round_event(number % len(known.rounds)),) if known.rounds else ()

    def sized(axis_sizes: Mapping[str, int]) -> ParameterTransform:
        names = axis_names(axis_name)
        if not set(names) <= set(axis_sizes):
            return transform  # which says at trace time that the axis is not bound
        num_nodes = math.prod(axis_sizes[name] for name in names)
        if isinstance(graph, Graph):
            plan_for(num_nodes)  # refuses another size
            return transform
        return like(graph=graph_for(num_nodes)).sized(axis_sizes)

    def with_specs(specs: PyTree) -> ParameterTransform:
        return transform if param_specs is not None else like(param_specs=specs)

    def init_fn(params: PyTree) -> SGPState:
        check_floating(_OWNER, params)
        # Arrays of their own, so that all of a state can be donated.
        in_flight = tuple(
            Arrival(jax.tree.map(jnp.zeros_like, params), differing(jnp.zeros([], jnp.float32)))
            for _ in range(overlap - 1)
        )
        return SGPState(
            count=jnp.zeros([], jnp.int32),
            exchanges=jnp.zeros([], jnp.int32),
            weight=differing(jnp.ones([], jnp.float32)),
            in_flight=in_flight,
        )

    def differing(weight: jax.Array) -> jax.Array:
        """Equal on all nodes at first, and typed as what it will be."""
        return vary_over(weight, filter(is_bound, axis_names(axis_name)))

    def exchange(
        updates: PyTree,
        others: Others,
        state: SGPState,
        params: PyTree,
        *,
        communicate: Communicate,
        weight: jax.Array | None,
        phase: Phase | None,
        **extra: Any,
    ) -> tuple[PyTree, Others, SGPState]:
        del weight, extra  # an idle node passes on what it holds
        state = state._replace(count=increment(state.count))
        updates = widen_updates(updates)
        plan = plan_for(axis_size(axis_name))
        number = round_number(_OWNER, phase, state.exchanges) if phase else state.exchanges
        if not plan.rounds or phase == ():
            communicate = False
        gossip = Gossip(axis_name, local_axis_name, plan)
        # The numerator x = w * params moves by the updates, so the parameters move by u / w.
        moves = plan.weight_moves

        def alone(
            operand: tuple[PyTree, Others, SGPState],
        ) -> tuple[PyTree, Others, SGPState]:
            u, o, s = operand
            return over(u, s.weight) if moves else u, o, s

        def exchanged(
            operand: tuple[PyTree, Others, SGPState],
        ) -> tuple[PyTree, Others, SGPState]:
            u, o, s = operand
            own = params if overlap else landing(params, alone(operand)[0])
            before = s.weight if moves else jnp.ones([], jnp.float32)
            packing = Packing(params, param_specs, bucket_bytes)
            arrival, kept = gossip.exchange(number, own, before, packing)
            if o:
                o = _mixed(gossip, number, o, before, kept)
            if overlap > 1:
                (arrival, *late), fresh = s.in_flight, arrival
                s = s._replace(in_flight=(*late, fresh))
            after = _together(kept, before, arrival) if moves else before
            u = over(u, after if overlap else before) if moves else u
            u = pulled(u, own, arrival, arrival.weight.astype(after.dtype) / after)
            s = s._replace(exchanges=increment(s.exchanges), weight=after.astype(jnp.float32))
            return u, o, s

        return run_if(decide(True, communicate), exchanged, alone, (updates, others, state))

    def numerator(state: SGPState, y: PyTree) -> tuple[PyTree, jax.Array | None]:
        plan = plan_for(axis_size(axis_name))
        if not plan.weight_moves:
            return y, None
        x, total = total_mass(y, state.weight, state.in_flight)
        # Where all nodes have the same weight, the division needs no sum over them.
        return (x, total) if plan.weight_differs else (over(x, total), None)

    def reset(state: SGPState) -> SGPState:
        return state._replace(
            weight=jnp.ones_like(state.weight),
            in_flight=jax.tree.map(jnp.zeros_like, state.in_flight),
        )

    def carry(state: SGPState, params: PyTree, old: Placement, new: Placement) -> Carried:
        del params
        if old.replicas == new.replicas:
            return Carried(state)

        def zeros(x: Any) -> Any:
            return stacked(np.zeros(x.shape[1:], x.dtype), new)

        fresh = SGPState(
            count=carry_leaf(state.count, old, new),
            exchanges=carry_leaf(state.exchanges, old, new),
            weight=stacked(np.float32(1), new),
            in_flight=jax.tree.map(zeros, state.in_flight),
        )
        return Carried(
            fresh,
            (
                "Push-sum weights are 1 and nothing is in flight: both are part of the consensus. "
                "The rotation of the graph goes on.",
            ),
        )

    def shares(state: SGPState) -> list[tuple[Any, PyTree | None]]:
        return [(state.weight, None), *((a.weight, a.mean) for a in state.in_flight)]

    rotation = () if known is None else (every(max(1, len(known.rounds))),)
    transform = parameter_transform(
        _OWNER,
        (axis_name,),
        init=init_fn,
        exchange=exchange,
        events=None,
        local_axis_name=local_axis_name,
        phase=phase_of,
        skipped=lambda state: state.count - state.exchanges,
        due=lambda t: known is None or bool(known.rounds),
        schedules=(every(1), *rotation),
        numerator=numerator,
        reset=reset,
        sized=sized,
        with_specs=with_specs,
        carry=carry,
        shares=shares,
    )
    return transform


def _mixed(
    gossip: Gossip,
    number: int | jax.Array,
    others: Others,
    weight: jax.Array,
    kept: jax.Array,
) -> Others:
    """What travels with the parameters, mixed with the weights of this exchange, never later.

    An exchange of its own: with `overlap` that of the parameters waits for no forward pass, of
    which these are results.

    Communication: as an exchange of the parameters.
    """
    arrival, _ = gossip.exchange(number, others, weight, Packing(others, None, None))
    after = _together(kept, weight, arrival)
    moved = pulled(others, others, arrival, arrival.weight.astype(after.dtype) / after)
    return [new.astype(old.dtype) for new, old in zip(moved, others, strict=True)]


def _together(kept: jax.Array, weight: jax.Array, arrival: Arrival) -> jax.Array:
    """The push-sum weight after an exchange, in the dtype of the share that was kept."""
    return kept * weight.astype(kept.dtype) + arrival.weight.astype(kept.dtype)


def _check_arguments(graph: object, mixing: object, push_sum: object, overlap: Any) -> int:
    """Raise `ValueError` for what is none of these; returns `overlap` as an int."""
    check_graph(_OWNER, graph)
    check_mixing(mixing)
    try:
        count = -1 if isinstance(overlap, bool) else operator.index(overlap)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(
            f"sgp: `overlap` counts exchanges and must be an int >= 0, got {overlap!r}."
        )
    if not isinstance(push_sum, bool):
        raise ValueError(f"sgp: `push_sum` must be True or False, got {push_sum!r}.")
    return count
