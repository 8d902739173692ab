"""Exchanges around the training step of any library: `with_exchange`."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .._support.checks import check_choice, checks_flags, warn_once
from .._support.types import AxisName, Phase, PyTree, axis_names
from ..mesh import (
    AnyMesh,
    MapWith,
    Shares,
    VirtualMesh,
    consensus,
    inner_specs,
    map_replicas,
    model_axes,
    replica_count,
    replicate,
    replicate_as,
)
from ..transform import (
    ExchangeState,
    ParameterTransform,
    StackedReplicas,
    first_states,
    increment,
    number_of_all,
    of_one,
    over_stacked,
    phase_name,
    spec_of,
    unless_idle,
)
from ..transform import init as make_states
from ..tree import check_floating
from ._batches import Placing
from ._train_state import StepExchange, with_own_keys
from .step._in_flight import StepsInFlight
from .step._local_traffic import LocalTraffic
from .step._optimized import Averaging, Weights, accepted_arguments, optimizer_rate
from .step._parts import with_layouts
from .step._runner import Mode, Recent, UpdateCounts
from .step._states import is_gone, of_one_replica
from .step._transforms import check_axes


class ReplicaState(NamedTuple):
    """The states of all replicas of a step of another library; made by `init`.

    Attributes:
      step: (replicas,) int32, updates so far; equal on all replicas.
      state: the library's state, stacked over the replicas.
      exchange: what the exchanges remember.
    """

    step: jax.Array
    state: PyTree
    exchange: StepExchange = StepExchange()


class Access(NamedTuple):
    """Functions that read a part of a library's state, and return the state with another one."""

    get: Callable[[PyTree], PyTree]
    put: Callable[[PyTree, PyTree], PyTree]


_NOTHING = Access(lambda state: (), lambda state, part: state)


class ExchangingStep:
    """A step of all replicas; made by `with_exchange`.

    Attributes:
      mesh, axis_name, mode: the arguments of `with_exchange`.
      sync: the exchange, sized for the mesh.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        sync: ParameterTransform,
        *,
        mesh: AnyMesh,
        axis_name: AxisName,
        parts: tuple[Access, Access, Access],
        gradients: optax.GradientTransformationExtraArgs | None,
        in_axes: Any,
        mode: Mode,
        map_with: MapWith,
        donate: bool,
    ) -> None:
        self.mesh, self.axis_name, self.mode = mesh, axis_name, mode
        self.sync = sync.bound(dict(mesh.shape))
        self._train_step, self._in_axes = train_step, in_axes
        self._map_with: MapWith = map_with
        self._params, self._moments, self._statistics = parts
        self._gradients, self._donates = gradients, donate
        self._where: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
        self._placing = Placing(mesh, axis_name, "local", None)
        self._programs: dict[Any, Any] = {}
        self._traffic: LocalTraffic | None = None
        if map_with == "vmap" and gradients is None:
            self._traffic = LocalTraffic(mesh, axis_name)
        self._counts, self._in_flight, self._warn = Recent(), StepsInFlight(), warn_once()

    def init(self, state: PyTree) -> ReplicaState:
        """Make the states of all replicas from that of one.

        Args:
          state: the library's state of one replica, a tree of arrays and numbers; leaves that are
            sharded over other axes of the mesh stay so. Typed PRNG keys in it become each replica's
            own.

        Raises:
          ValueError: leaves that are no arrays, parameters that are no floating-point arrays, or
            trees that differ between processes.

        Communication: none between replicas.
        """
        state = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), state)
        check_floating("with_exchange", self._params.get(state))
        stacked = with_own_keys(replicate_as("state", state, **self._where), **self._where)
        params = self._params.get(stacked)
        local, shared = first_states(
            self._bound(params), params, param_specs=self._specs(params), **self._where
        )
        gradients: PyTree = ()
        if self._gradients is not None:
            gradients = make_states(with_layouts(self._gradients), params, **self._where)
        step = replicate(jnp.zeros([], jnp.int32), **self._where)
        self._counts.note(UpdateCounts(0, 0), step)
        return ReplicaState(step, stacked, StepExchange(local, shared, gradients))

    def __call__(
        self,
        state: ReplicaState,
        *args: PyTree,
        weight: Any = None,
        communicate: bool | jax.Array = True,
    ) -> tuple[ReplicaState, PyTree]:
        """Run the library's step on every replica, and what is due after it.

        Args:
          state: the states of all replicas; its buffers are donated if the step donates.
          *args: further arguments of the library's step; see `in_axes`.
          weight: (replicas,) each replica's weight in averages, >= 0; one of weight 0 follows the
            others, and keeps its state where gradients are not averaged over all replicas. None:
            all equal.
          communicate: False, or a () bool array that is False, skips a due exchange.

        Returns:
          The new states, and what the library's step returns beside, stacked over the replicas.

        Raises:
          ValueError: a state of another kind; arguments that do not split evenly.

        Communication: that of `sync`, and what `reduce_gradients` sends.
        """
        _check_state(state)
        if isinstance(communicate, np.bool_):
            communicate = bool(communicate)
        if not isinstance(communicate, bool | jax.Array) or jnp.ndim(communicate):
            raise ValueError(
                f"`communicate` must be True, False or a () bool array, got {communicate!r}."
            )
        args, weight = self._placed(args, weight)
        so_far, phase = self._counts.get(state.step), None
        if self.mode == "host":
            so_far = self._so_far(state)
            phase = self._phase(state, so_far)
        program = self._program(phase, state, communicate)
        if self._traffic is not None and not phase:
            self._traffic.read(program, state, args, weight)
        new, results = program(state, args, weight)
        for result in jax.tree.leaves(results)[:1]:
            self._in_flight.admit(result)
        if so_far is not None and communicate is True:
            self._counts.note(so_far._replace(updates=so_far.updates + 1), new.step)
        return new, results

    step = __call__

    def scan(
        self, state: ReplicaState, *batches: PyTree, weight: Any = None
    ) -> tuple[ReplicaState, PyTree]:
        """Run an update for each of K batches, in one program; with `mode="host"` in one per phase.

        Args:
          state: the states of all replicas; its buffers are donated if the step donates.
          *batches: the further arguments of the library's step, with a first dimension of K more
            where they are split.
          weight: (replicas,) as in a call, for all updates.

        Returns:
          The new states, and what the K updates return beside, with a first dimension of K.

        Communication: that of K calls.
        """
        _check_state(state)
        split = [np.shape(x) for x, role in self._leaves(batches) if role == "batch"]
        length = split[0][0] if split and all(split) else None
        if not length:
            raise ValueError(
                "scan: `batches` need a first dimension, the number of updates, on every leaf that "
                "is split, got none."
            )
        replicas, mesh = axis_names(self.axis_name), self.mesh

        def put(x: Any, role: str) -> Any:
            if role == "shared" or isinstance(x, jax.Array) or isinstance(mesh, VirtualMesh):
                return x
            return jax.device_put(x, NamedSharding(mesh, P(None, replicas)))

        roles = self._roles(batches)
        batches = jax.tree.map(put, batches, roles)
        so_far = self._so_far(state) if self.mode == "host" else None
        results = []
        for phase, start, stop in self._spans(state, so_far, length):
            part = slice(start, stop)
            span = jax.tree.map(lambda x, r, p=part: x if r == "shared" else x[p], batches, roles)
            program = self._program(phase, state, True, scans=True)
            state, result = program(state, span, weight)
            results.append(result)
        if so_far is not None:
            self._counts.note(so_far._replace(updates=so_far.updates + length), state.step)
        return state, jax.tree.map(lambda *x: x[0] if len(x) == 1 else jnp.concatenate(x), *results)

    def _spans(
        self, state: ReplicaState, so_far: UpdateCounts | None, length: int
    ) -> list[tuple[Phase | None, int, int]]:
        """Return the phase, begin and end of each run of updates that one program holds."""
        if so_far is None:
            return [(None, 0, length)]
        sync = self._bound(self._params.get(state.state))
        first = so_far.updates + 1
        phases = [sync.algorithm.phase(first + i, so_far.skipped) for i in range(length)]
        spans, start = [], 0
        for phase, run in itertools.groupby(phases):
            stop = start + len(list(run))
            spans.append((phase, start, stop))
            start = stop
        return spans

    # What the host knows of a state.

    def phase(self, t: int) -> Phase:
        """Return the phase of update t = 1, 2, ...: the names of the exchanges."""
        return self.sync.phase(t)

    def next_phase(self, state: ReplicaState, later: int = 0) -> Phase:
        """Return the phase of the update `later` updates after the next one, as a host value."""
        return self._phase(state, self._so_far(state), later)

    def shares(self, state: ReplicaState) -> Shares:
        """Return the replicas' weights in the consensus, `shares=` of `js.consensus`."""
        return self.sync.shares(state.exchange)

    def consensus(self, state: ReplicaState) -> PyTree:
        """Return one exact copy of the parameters: the mean to which the exchange tends.

        Communication: that of `js.consensus`.
        """
        return consensus(self._params.get(state.state), shares=self.shares(state), **self._where)

    def _phase(self, state: ReplicaState, so_far: UpdateCounts, later: int = 0) -> Phase:
        sync = self._bound(self._params.get(state.state))
        return sync.algorithm.phase(so_far.updates + 1 + later, so_far.skipped)

    def _so_far(self, state: ReplicaState) -> UpdateCounts:
        known = self._counts.get(state.step)
        if known is None:
            if isinstance(state.step, Tracer):
                raise ValueError(
                    '`mode`="host" reads the counter in `state`, which has no value inside of '
                    'jax.jit, lax.scan and the like: call it outside, or use mode="traced".'
                )
            updates = int(of_one_replica(state.step))
            local = jax.tree.map(of_one_replica, state.exchange.local)
            sync = self._bound(self._params.get(state.state))
            known = UpdateCounts(updates, int(sync.algorithm.skipped(local, updates)))
            self._counts.note(known, state.step)
        return known

    def _bound(self, params: PyTree) -> ParameterTransform:
        if not self.sync.algorithm.needs:
            return self.sync
        return self.sync.bound(dict(self.mesh.shape), of_one(params))

    # Programs.

    def lower(self, state: ReplicaState, *args: PyTree, weight: Any = None) -> jax.stages.Lowered:
        """Return the lowered program of a call; nothing runs."""
        args, weight = self._placed(args, weight)
        phase = self.next_phase(state) if self.mode == "host" else None
        return self._program(phase, state).lower(state, args, weight)

    def compiled(
        self, state: ReplicaState, *args: PyTree, weight: Any = None
    ) -> jax.stages.Compiled:
        """Return the compiled program of a call; nothing runs."""
        return self.lower(state, *args, weight=weight).compile()

    def traced_by_phase(
        self, state: ReplicaState, *args: PyTree
    ) -> dict[str | None, jax.stages.Traced]:
        """Trace the step's programs: by phase name when host-scheduled, else one under None."""
        args, _ = self._placed(args, None)
        if self.mode == "traced":
            return {None: self._program(None, state).trace(state, args, None)}
        phases = self._bound(self._params.get(state.state)).phases()
        return {phase_name(p): self._program(p, state).trace(state, args, None) for p in phases}

    def _placed(self, args: tuple[PyTree, ...], weight: Any) -> tuple[tuple[PyTree, ...], Any]:
        """Return arguments and weight on the devices, split where `in_axes` says so."""
        leaves, treedef = jax.tree.flatten(args)
        roles = jax.tree.leaves(self._roles(args))
        split = [x for x, role in zip(leaves, roles, strict=True) if role == "batch"]
        placed, weight = self._placing.compared(split, weight, axis_names(self.axis_name))
        parts = iter(placed)
        new = [next(parts) if r == "batch" else x for x, r in zip(leaves, roles, strict=True)]
        return treedef.unflatten(new), weight

    def _roles(self, args: tuple[PyTree, ...]) -> PyTree:
        """Return the role of each leaf of the arguments."""
        axes = self._in_axes if isinstance(self._in_axes, tuple) else (self._in_axes,) * len(args)
        if len(axes) != len(args):
            raise ValueError(
                f"with_exchange: `in_axes` must be 0, None or a tuple with an entry for each of "
                f"the step's {len(args)} further arguments, got {self._in_axes!r}."
            )
        named = jax.tree.map(
            lambda axis: "shared" if axis is None else "batch", axes, is_leaf=lambda x: x is None
        )
        return tuple(map(jax.tree.broadcast, named, args))

    def _leaves(self, args: tuple[PyTree, ...]) -> list[tuple[Any, str]]:
        roles = jax.tree.leaves(self._roles(args))
        return list(zip(jax.tree.leaves(args), roles, strict=True))

    def _specs(self, params: PyTree) -> PyTree | None:
        axes = model_axes(params, self.mesh, self.axis_name)
        return inner_specs(params, axes) if axes else None

    def _program(
        self,
        phase: Phase | None,
        state: ReplicaState,
        communicate: bool | jax.Array = True,
        *,
        scans: bool = False,
    ) -> Any:
        """Return the program of a phase, whose results lie where those of its first state lie."""
        is_static = isinstance(communicate, bool)
        key = phase, communicate if is_static else None, scans
        if key not in self._programs:
            self._programs[key] = self._built(phase, state, key[1], scans)
        program = self._programs[key]
        return program if is_static else functools.partial(program, communicate=communicate)

    def _built(
        self, phase: Phase | None, state: ReplicaState, communicate: bool | None, scans: bool
    ) -> Any:
        where = None
        if not isinstance(self.mesh, VirtualMesh):
            places = jax.tree.map(lambda x: getattr(x, "sharding", None), state)
            if all(isinstance(x, NamedSharding) for x in jax.tree.leaves(places)):
                where = places, None
        params = self._params.get(state.state)
        sync = self._bound(params)
        specs = self._specs(params)
        sync = sync if specs is None else sync.with_specs(specs)
        fixed: dict[str, Any] = {"phase": phase, "sync": sync}
        if communicate is not None:
            fixed["communicate"] = communicate
        update = self._scanned if scans else self._update
        return jax.jit(
            functools.partial(update, **fixed),
            donate_argnums=0 if self._donates else (),
            out_shardings=where,
        )

    def _scanned(
        self, state: ReplicaState, batches: tuple[PyTree, ...], weight: Any, **fixed: Any
    ) -> tuple[ReplicaState, PyTree]:
        """Run an update for each of several batches."""
        leaves, treedef = jax.tree.flatten(batches)
        roles = jax.tree.leaves(self._roles(batches))
        split = [x if role == "batch" else None for x, role in zip(leaves, roles, strict=True)]

        def one(state: ReplicaState, split: list[Any]) -> tuple[ReplicaState, PyTree]:
            args = [x if y is None else y for x, y in zip(leaves, split, strict=True)]
            return self._update(state, treedef.unflatten(args), weight, **fixed)

        return lax.scan(one, state, split)

    def _update(
        self,
        state: ReplicaState,
        args: tuple[PyTree, ...],
        weight: jax.Array | None,
        *,
        communicate: bool | jax.Array,
        phase: Phase | None,
        sync: ParameterTransform,
    ) -> tuple[ReplicaState, PyTree]:
        """Run one update of all replicas."""
        roles = tuple(self._roles(args))
        shared, local = state.exchange.shared, state.exchange._replace(shared=())

        def one(state: PyTree, memory: PyTree, weight: Any, *args: PyTree) -> Any:
            return self._stepped(state, memory, weight, args, sync.param_specs)

        step = increment(state.step)
        count = number_of_all(step, **self._where)
        mapped = map_replicas(
            one,
            **self._where,
            in_roles=("stacked",) * 3 + roles,
            out_roles=("stacked",) * 4,
            automatic=frozenset(self.mesh.axis_names) - {*axis_names(self.axis_name)},
            map_with=self._map_with,
        )
        new, memory, weight, results = mapped(state.state, local.gradients, weight, *args)

        def exchange(replicas: StackedReplicas, own: Any, shared: PyTree) -> Any:
            old, new, local, weight = own
            before, after = self._params.get(old), self._params.get(new)
            moments, means = self._moments.get(new), self._statistics.get(new)
            leaves, structure = jax.tree.flatten(means)
            extra: dict[str, Any] = {}
            if sync.algorithm.needs_rate:
                extra["learning_rate"] = optimizer_rate(moments)
            params, leaves, done, moments = sync.exchange(
                None,
                leaves,
                ExchangeState(count - 1, local, shared),
                before,
                after=after,
                moments=moments,
                init=lambda params: jax.tree.map(jnp.zeros_like, moments),
                communicate=communicate,
                phase=phase,
                weight=weight,
                stacked=replicas,
                **extra,
            )
            new = self._params.put(new, params)
            new = self._moments.put(new, moments)
            new = self._statistics.put(new, structure.unflatten(leaves))
            return (new, done.local), done.shared

        own = state.state, new, local.local, weight
        (new, local_state), shared = over_stacked(exchange, own, shared, **self._where)
        return ReplicaState(step, new, StepExchange(local_state, shared, memory)), results

    def _stepped(
        self,
        state: PyTree,
        memory: PyTree,
        weight: jax.Array | None,
        args: tuple[PyTree, ...],
        specs: PyTree | None,
    ) -> tuple[PyTree, PyTree, jax.Array | None, PyTree]:
        """Return what the library's step of one replica makes.

        That is its state, the memory of reductions, its weight in the exchange, and its results.
        """
        params, weights = self._params.get(state), Weights(weight, weight)
        if self._gradients is None:
            new, results = self._train_step(state, *args)
        else:
            reduction, held = self._gradients, [memory]

            def reduce_gradients(grads: PyTree) -> PyTree:
                """Return the gradients reduced over the replicas."""
                is_alike = jax.tree.structure(grads) == jax.tree.structure(params)
                given = {"weight": weight, "param_specs": specs if is_alike else None}
                given = accepted_arguments(spec_of(reduction), held[0], **given)
                grads, held[0] = reduction.update(grads, held[0], params, **given)
                return grads

            weights = weights.after(Averaging.of(reduction, memory, self.axis_name))
            new, results = self._train_step(state, *args, reduce_gradients=reduce_gradients)
            (memory,) = held
        if weight is not None:  # the batch of a replica without data counts nowhere
            results = unless_idle(results, weight)
            means = _if_takes(weight > 0, *map(self._statistics.get, (new, state)))
            new = self._statistics.put(new, means)
        if weights.update is not None:
            new = _if_takes(weights.update > 0, new, state)
        return new, memory, weights.exchange, results


def _if_takes(takes: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(takes, n, o), new, old)


def _check_state(state: object) -> None:
    if not isinstance(state, ReplicaState):
        raise ValueError(
            "`state` must be what `init(state)` of js.with_exchange makes, and what the step "
            f"returns, got {type(state).__name__}."
        )
    if is_gone(state.step):  # jax 0.10 may crash with it
        raise ValueError(
            "`state` was given to a step before, which reuses its buffers (donate=True): go on "
            "with the state that this step returned, or make the step with donate=False."
        )


@checks_flags("with_exchange")
def with_exchange(
    train_step: Callable[..., tuple[PyTree, PyTree]],
    sync: ParameterTransform,
    *,
    mesh: AnyMesh,
    axis_name: AxisName = "replica",
    get_params: Callable[[PyTree], PyTree],
    set_params: Callable[[PyTree, PyTree], PyTree],
    get_opt_state: Callable[[PyTree], PyTree] | None = None,
    set_opt_state: Callable[[PyTree, PyTree], PyTree] | None = None,
    statistics: tuple[Callable[[PyTree], PyTree], Callable[[PyTree, PyTree], PyTree]] | None = None,
    gradients: optax.GradientTransformation | None = None,
    in_axes: Any = 0,
    mode: Mode = "traced",
    map_with: MapWith = "shard_map",
    donate: bool = True,
) -> ExchangingStep:
    """Make a step of all replicas of any library's training step of one replica.

        step = js.with_exchange(
            train_step, js.diloco("replica", sync_every=48), mesh=mesh,
            get_params=lambda s: s.params, set_params=lambda s, p: s.replace(params=p),
        )
        state = step.init(state)
        for batch in batches:
            state, metrics = step(state, batch)

    Args:
      train_step: `train_step(state, *args) -> (state, metrics)` of one replica; trees of arrays.
      sync: the exchange of parameters after the step, such as `js.slowmo("replica")`.
      mesh: `js.make_mesh({"replica": R})`, whose axes inside a replica are the compiler's, or
        `js.virtual_mesh`.
      axis_name: the mesh axis of the replicas, or several.
      get_params: `get_params(state)`: the parameters, a tree of floating-point arrays.
      set_params: `set_params(state, params)`: the state with other parameters.
      get_opt_state: `get_opt_state(state)`: the state of an optax optimizer, for `inner_state=`,
        `learning_rate="optimizer"`, and copies of parameters in it.
      set_opt_state: `set_opt_state(state, opt_state)`: the state with another one.
      statistics: two functions, which read floating arrays that are averaged with the parameters,
        such as batch statistics, and return the state with others; None: there are none.
      gradients: a reduction of gradients, such as `js.all_reduce_gradients("replica")`, which
        `train_step` takes as `reduce_gradients=` and calls before its optimizer.
      in_axes: for each further argument 0 where its leading dimension, replicas * local batch, is
        split over the replicas, or None where each receives all of it; one for all, or a tuple.
      mode: `"traced"`: one program decides which exchanges are due. `"host"`: one per phase.
      map_with: `"vmap"` is for libraries with `shard_map`s on a mesh of their own.
      donate: whether to reuse the state's buffers for the new state.

    Returns:
      An `ExchangingStep`, called as `step(state, *args, weight=None, communicate=True)`.

    Raises:
      ValueError: an invalid argument, or one that `sync` needs and that is missing.
      UserWarning: once, for a local step that sends between replicas.

    Communication: that of `sync` after each step, and of `gradients`.
    """
    owner = "with_exchange"
    replica_count(owner, mesh, axis_name)
    if not callable(train_step):
        raise ValueError(f"{owner}: `train_step` must be a function, got {train_step!r}.")
    if not isinstance(sync, ParameterTransform):
        raise ValueError(
            f"{owner}: `sync` must be a js.ParameterTransform such as js.diloco(...), got {sync!r}."
        )
    if gradients is not None and not isinstance(gradients, optax.GradientTransformation):
        raise ValueError(
            f"{owner}: `gradients` must be None or a reduction such as "
            f"js.all_reduce_gradients(...), got {gradients!r}."
        )
    check_axes((gradients, optax.identity(), sync), mesh, axis_name)
    each = in_axes if isinstance(in_axes, tuple) else (in_axes,)
    if wrong := [x for x in jax.tree.leaves(each) if isinstance(x, bool) or x != 0]:
        raise ValueError(
            f"{owner}: `in_axes` must hold 0, for what is split along its first dimension, and "
            f"None, for what every replica receives whole, got {wrong[0]!r}."
        )
    for name, value, kind in (("mode", mode, Mode), ("map_with", map_with, MapWith)):
        check_choice(name, value, kind)
    functions = {"get_params": get_params, "set_params": set_params}
    if (get_opt_state is None) != (set_opt_state is None):
        given, lacking = "get_opt_state", "set_opt_state"
        if get_opt_state is None:
            given, lacking = lacking, given
        raise ValueError(f"{owner}: `{given}` was given, and `{lacking}` must be given too.")
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(f"{owner}: `{name}` must be a function, got {value!r}.")
    inner = {n for n, size in mesh.shape.items() if size > 1} - {*axis_names(axis_name)}
    if gradients is not None and map_with == "vmap" and inner:
        raise ValueError(
            f'{owner}: `gradients` needs the axis of the replicas, which `map_with`="vmap" does '
            f"not bind on a mesh that also has the axes {sorted(inner)}: use "
            'map_with="shard_map".'
        )
    algorithm = sync.algorithm
    if get_opt_state is None:
        changes = algorithm.inner_state
        needs = "" if changes == "keep" else f"`inner_state`={changes!r}"
        needs = '`learning_rate`="optimizer"' if algorithm.needs_rate else needs
        if needs:
            raise ValueError(
                f"{owner}: `sync` was made with {needs}, which reads the state of the optimizer: "
                "give `get_opt_state` and `set_opt_state`."
            )
    is_pair = isinstance(statistics, tuple) and len(statistics) == 2
    if statistics is not None and not (is_pair and all(map(callable, statistics))):
        raise ValueError(
            f"{owner}: `statistics` must be two functions, (get, set), or None, got {statistics!r}."
        )
    moments = _NOTHING
    if get_opt_state is not None and set_opt_state is not None:
        moments = Access(get_opt_state, set_opt_state)
    return ExchangingStep(
        train_step,
        sync,
        mesh=mesh,
        axis_name=axis_name,
        parts=(
            Access(get_params, set_params),
            moments,
            _NOTHING if statistics is None else Access(*statistics),
        ),
        gradients=None if gradients is None else optax.with_extra_args_support(gradients),
        in_axes=in_axes,
        mode=mode,
        map_with=map_with,
        donate=donate,
    )
