"""Exchanges around the training step of any library: `with_exchange`.

Access to the parts of its state, one update of all replicas, and the step that runs it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._support.checks import check_choice, checks_flags, warn_user
from .._support.types import AxisName, Phase, PyTree, axis_names
from ..mesh import (
    AnyMesh,
    MapWith,
    Shares,
    consensus,
    inner_specs,
    map_replicas,
    mesh_text,
    model_axes,
    replica_count,
    replicate,
    replicate_argument,
)
from ..transform import (
    ExchangeState,
    ParameterTransform,
    StackedReplicas,
    first_states,
    increment,
    replica_types,
    spec_of,
    unless_idle,
    unreplicate_number,
    vmap_replicas,
)
from ..transform import init as make_states
from ..tree import check_arrays, leaf_names, not_floating
from ._batches import BatchPlacer
from ._train_state import ReplicaState, StepExchange, TrainState, with_own_keys
from .step._averaging import Averaging, Weights, accepted_arguments, optimizer_rate
from .step._checks import check_axes, check_not_donated, check_same_model
from .step._first_run import program_checks
from .step._gradients import old_if_idle, restore_statistics_if, statistics, with_statistics
from .step._in_flight import StepsInFlight
from .step._programs import Mode, Phases


class Access(NamedTuple):
    """Functions that read a part of a library's state, and return the state with another one."""

    name: str
    get: Callable[[PyTree], PyTree]
    set: Callable[[PyTree, PyTree], PyTree]

    def check(self, state: PyTree) -> None:
        """Raise `ValueError` unless what was set is what is then read."""

        def set_and_get(part: PyTree) -> PyTree:
            new = self.get(self.set(state, part))
            is_new = all(isinstance(x, Tracer) for x in jax.tree.leaves(new))
            if not is_new or jax.tree.structure(new) != jax.tree.structure(part):
                what = "arrays in another form" if is_new else "old arrays"
                raise ValueError(
                    f"with_exchange: the functions for `{self.name}` must get what they set, got "
                    f"{what}."
                )
            return new

        jax.eval_shape(set_and_get, self.get(state))


NO_ACCESS = Access("", lambda state: (), lambda state, part: state)


@dataclass(frozen=True)
class LibraryUpdate:
    """One update of all replicas, which programs run.

    Attributes:
      train_step, in_axes, mesh, axis_name, map_with: the arguments of `with_exchange`.
      params, opt_state, statistics: access to the parts of a library's state.
      gradients: the reduction of gradients; None without one.
    """

    train_step: Callable[..., Any]
    in_axes: Any
    mesh: AnyMesh
    axis_name: AxisName
    map_with: MapWith
    params: Access
    opt_state: Access
    statistics: Access
    gradients: optax.GradientTransformationExtraArgs | None

    def check(self, state: PyTree) -> None:
        """Raise `ValueError` unless the functions get and set parts of a state of one replica."""
        if wrong := not_floating(self.params.get(state)):
            raise ValueError(
                "with_exchange: `get_params` must return real floating-point arrays, got "
                f"{', '.join(wrong)}."
            )
        for access in (self.params, self.opt_state, self.statistics):
            access.check(state)
        jax.eval_shape(self._check_parts, state)

    def _check_parts(self, state: PyTree) -> PyTree:
        """Raise `ValueError` for parameters among the statistics; warn of arrays in no part.

        In a traced state each leaf is an object of its own.
        """
        params, *others = (
            {id(x) for x in jax.tree.leaves(access.get(state))}
            for access in (self.params, self.opt_state, self.statistics)
        )
        names = dict(zip(map(id, jax.tree.leaves(state)), leaf_names(state), strict=True))
        if both := sorted(names.get(x, "?") for x in params & others[-1])[:6]:
            raise ValueError(
                f"with_exchange: `statistics` must not be parameters, which `get_params` returns, "
                f"got {both}."
            )
        left = [
            names[id(x)]
            for x in jax.tree.leaves(state)
            if id(x) not in params.union(*others)
            and jnp.ndim(x)
            and jnp.issubdtype(x.dtype, jnp.floating)
        ]
        # Without `get_opt_state` they may be the optimizer's.
        if left and self.opt_state is not NO_ACCESS:
            warn_user(
                f"with_exchange: {', '.join(left[:6])} of the state are never averaged. Batch "
                "statistics belong into `statistics`; of other arrays nothing is wrong."
            )
        return state

    def roles(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """Return the role of each leaf of the arguments: "batch" where it is split."""
        axes = self.in_axes if isinstance(self.in_axes, tuple) else (self.in_axes,) * len(args)
        if len(axes) != len(args):
            raise ValueError(
                "with_exchange: `in_axes` must be 0, None or a tuple with an entry for each of the "
                f"{len(args)} further arguments, got {self.in_axes!r}."
            )
        named = jax.tree.map(
            lambda axis: "shared" if axis is None else "batch", axes, is_leaf=lambda x: x is None
        )
        return tuple(map(jax.tree.broadcast, named, args))

    def split(
        self, args: tuple[PyTree, ...]
    ) -> tuple[list[Any], Callable[[list[Any]], tuple[PyTree, ...]]]:
        """Return the leaves that are split over replicas, and a function that replaces them."""
        leaves, treedef = jax.tree.flatten(args)
        places = [i for i, r in enumerate(jax.tree.leaves(self.roles(args))) if r == "batch"]

        def join(split: list[Any]) -> tuple[PyTree, ...]:
            new = dict(zip(places, split, strict=True))
            return treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])

        return [leaves[i] for i in places], join

    def scan(
        self,
        state: ReplicaState,
        batches: tuple[PyTree, ...],
        weight: jax.Array | None,
        communicate: jax.Array | None,
        **static: Any,
    ) -> tuple[ReplicaState, PyTree]:
        """Run an update for each of several batches."""
        split, join = self.split(batches)

        def one(state: ReplicaState, split: list[Any]) -> tuple[ReplicaState, PyTree]:
            return self.update(state, join(split), weight, communicate, **static)

        return lax.scan(one, state, split)

    def update(
        self,
        state: ReplicaState,
        args: tuple[PyTree, ...],
        weight: jax.Array | None,
        communicate: jax.Array | None,
        *,
        static: bool,
        phase: Phase | None,
        sync: ParameterTransform,
    ) -> tuple[ReplicaState, PyTree]:
        """Run one update of all replicas; `static` is a `communicate` that is known when traced."""
        roles = self.roles(args)
        mesh_kwargs: dict[str, Any] = {"mesh": self.mesh, "axis_name": self.axis_name}
        shared, local = state.exchange.shared, state.exchange._replace(shared=())

        def one(state: PyTree, memory: PyTree, weight: Any, *args: PyTree) -> Any:
            return self._step_replica(state, memory, weight, args, sync.param_specs)

        step = increment(state.step)
        count = unreplicate_number(step, **mesh_kwargs)
        mapped = map_replicas(
            one,
            **mesh_kwargs,
            in_roles=("stacked",) * 3 + roles,
            out_roles=("stacked",) * 4,
            automatic=frozenset(self.mesh.axis_names) - {*axis_names(self.axis_name)},
            map_with=self.map_with,
        )
        new, memory, weight, results = mapped(state.state, local.gradients, weight, *args)

        def exchange(replicas: StackedReplicas, of_replica: Any, shared: PyTree) -> Any:
            old, new, local, weight = of_replica
            before, after = self.params.get(old), self.params.get(new)
            opt_state, means = self.opt_state.get(new), self.statistics.get(new)
            extra: dict[str, Any] = {}
            if sync.algorithm.needs_rate:
                extra["learning_rate"] = optimizer_rate(opt_state)
            params, averaged, done, opt_state = sync.exchange(
                None,
                statistics(means),
                ExchangeState(count - 1, local, shared),
                before,
                after=after,
                moments=opt_state,
                init=lambda params: jax.tree.map(jnp.zeros_like, opt_state),
                communicate=static if communicate is None else communicate,
                phase=phase,
                weight=weight,
                stacked=replicas,
                **extra,
            )
            new = self.params.set(new, params)
            new = self.opt_state.set(new, opt_state)
            new = self.statistics.set(new, with_statistics(means, averaged))
            return (new, done.local), done.shared

        stacked = state.state, new, local.local, weight
        (new, local_state), shared = vmap_replicas(exchange, stacked, shared, **mesh_kwargs)
        return ReplicaState(step, new, StepExchange(local_state, shared, memory)), results

    def _step_replica(
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
        params, weights = self.params.get(state), Weights.from_batch(weight)
        if self.gradients is None:
            returned = self.train_step(state, *args)
        else:
            reduction, memories = self.gradients, [memory]

            def reduce_gradients(grads: PyTree) -> PyTree:
                """Return the gradients reduced over the replicas."""
                is_alike = jax.tree.structure(grads) == jax.tree.structure(params)
                offered = {"weight": weight, "param_specs": specs if is_alike else None}
                accepted = accepted_arguments(spec_of(reduction), memories[0], **offered)
                grads, memories[0] = reduction.update(grads, memories[0], params, **accepted)
                return grads

            weights = weights.after_averaging(
                Averaging.from_transform(reduction, memory, self.axis_name)
            )
            returned = self.train_step(state, *args, reduce_gradients=reduce_gradients)
            (memory,) = memories
        new, results = _checked_results(returned, state)
        if weight is not None:  # the batch of a replica without data counts nowhere
            results = unless_idle(results, weight)
            means = restore_statistics_if(weight <= 0, *map(self.statistics.get, (new, state)))
            new = self.statistics.set(new, means)
        new = old_if_idle(weights.update_weight, new, state)
        return new, memory, weights.exchange_weight, results


def _checked_results(returned: Any, state: PyTree) -> tuple[PyTree, PyTree]:
    """Return what `train_step` returned; raise `ValueError` unless it begins with a state."""
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    before, after = (jax.tree.structure(x) for x in (state, returned[0] if is_pair else returned))
    if is_pair and before == after:
        return returned
    what = type(returned).__name__
    if is_pair:
        what = f"a pair that begins with {type(returned[0]).__name__} of {after.num_leaves} arrays"
    raise ValueError(
        "with_exchange: `train_step` must return (state, metrics) with a state like its own, "
        f"which is {type(state).__name__} of {before.num_leaves} arrays, got {what}."
    )


class ExchangingStep:
    """A step of all replicas; made by `with_exchange`.

    Attributes:
      mesh, axis_name, mode: the arguments of `with_exchange`.
      sync: the exchange, sized for the mesh.
    """

    def __init__(
        self, update: LibraryUpdate, sync: ParameterTransform, mode: Mode, donate: bool
    ) -> None:
        mesh, axis_name = update.mesh, update.axis_name
        self.mesh, self.axis_name, self.mode = mesh, axis_name, mode
        self.sync = sync.bound(dict(mesh.shape))
        self._update, self._donates = update, donate
        self._mesh_kwargs: dict[str, Any] = {"mesh": mesh, "axis_name": axis_name}
        self._placer = BatchPlacer(mesh, axis_name, "local", None)
        self._phases, self._bound = Phases(self.sync, mode), self.sync
        self._names: list[str] = []  # of the parameters of the first state
        self._programs: dict[Any, Any] = {}
        self._in_flight = StepsInFlight()
        self._program_checks = program_checks(
            mesh, axis_name, update.map_with, update.gradients, self.sync
        )

    def __repr__(self) -> str:
        """Return a line: the axes of the mesh, what is exchanged, and the mode."""
        gradients = self._update.gradients
        what = f"sync={self.sync!r}"
        what = what if gradients is None else f"gradients={gradients!r}, {what}"
        return f"<js.with_exchange over {mesh_text(self.mesh)}: {what}; mode={self.mode!r}>"

    def init(self, state: PyTree) -> ReplicaState:
        """Make the states of all replicas from that of one.

        Args:
          state: the library's state of one replica, a tree of arrays and numbers; leaves that are
            sharded over other axes of the mesh stay so. Typed PRNG keys in it become each replica's
            own.

        Raises:
          ValueError: leaves that are no arrays, parameters that are no floating-point arrays,
            functions that do not set what they get, or trees that differ between processes.

        Communication: none between replicas.
        """
        check_arrays("with_exchange", state)
        state = jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), state)
        self._update.check(state)
        stacked = with_own_keys(
            "state", replicate_argument("state", state, **self._mesh_kwargs), **self._mesh_kwargs
        )
        params = self._update.params.get(stacked)
        sync = self._bind(params)
        local, shared = first_states(
            sync, params, param_specs=sync.param_specs, **self._mesh_kwargs
        )
        gradients: PyTree = ()
        if self._update.gradients is not None:
            gradients = make_states(self._update.gradients, params, **self._mesh_kwargs)
        step = replicate(jnp.zeros([], jnp.int32), **self._mesh_kwargs)
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
        if isinstance(communicate, np.bool_):
            communicate = bool(communicate)
        if not isinstance(communicate, bool | jax.Array) or jnp.ndim(communicate):
            raise ValueError(
                f"`communicate` must be True, False or a () bool array, got {communicate!r}."
            )
        self._check_state(state)
        args, weight = self._place(args, weight)
        phase = self._phases.program_phase(state)
        traced = None if isinstance(communicate, bool) else communicate
        program = self._program("update", phase, state, communicate)
        new, results = self._run(program, "update", phase, state, args, weight, traced)
        if communicate is True:
            self._phases.advance(state, new)
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
        self._check_state(state)
        split, join = self._update.split(batches)
        split, weight, length = self._placer.place_batches(
            split, weight, axis_names(self.axis_name)
        )

        def run(phase: Phase | None, state: ReplicaState, split: list[Any]) -> Any:
            program = self._program("scan", phase, state, True)
            return self._run(program, "scan", phase, state, join(split), weight, None)

        return self._phases.scan(state, split, length, run)

    # What the host knows of a state.

    def phase(self, t: int) -> Phase:
        """Return the phase of update t = 1, 2, ...: the names of the exchanges."""
        return self._phases.at_update(t)

    def next_phase(self, state: ReplicaState, later: int = 0) -> Phase:
        """Return the phase of the update `later` updates after the next one, as a host value."""
        self._check_state(state)
        return self._phases.next(state, later)

    def shares(self, state: ReplicaState) -> Shares:
        """Return the replicas' weights in the consensus, `shares=` of `js.consensus`."""
        return self.sync.shares(state.exchange)

    def consensus(self, state: ReplicaState) -> PyTree:
        """Return one exact copy of the parameters: the mean to which the exchange tends.

        Communication: that of `js.consensus`.
        """
        params = self._update.params.get(state.state)
        return consensus(params, shares=self.shares(state), **self._mesh_kwargs)

    def as_train_state(self, state: ReplicaState) -> TrainState:
        """Return the parts of a state; `model_state` is all of the library's state, `rng` is ().

        Leaves may be of any kind, such as NumPy arrays or types of arrays.
        """
        one, no_keys = self._update, cast(Any, ())
        parts = one.params.get(state.state), one.opt_state.get(state.state), state.state
        return TrainState(state.step, *parts, no_keys, state.exchange)

    def from_train_state(self, train_state: TrainState) -> ReplicaState:
        """Return the state with the parts of what `as_train_state` returned."""
        state = self._update.opt_state.set(train_state.model_state, train_state.opt_state)
        state = self._update.params.set(state, train_state.params)
        return ReplicaState(train_state.step, state, train_state.exchange)

    # Programs.

    def lower(self, state: ReplicaState, *args: PyTree, weight: Any = None) -> jax.stages.Lowered:
        """Return the lowered program of a call; nothing runs."""
        self._check_state(state, is_executed=False)
        args, weight = self._place(args, weight, is_executed=False)
        program = self._program("update", self._phases.program_phase(state), state, True)
        return program.lower(state, args, weight, None)

    def compiled(self, *args: Any, **options: Any) -> jax.stages.Compiled:
        """Return the compiled program of `lower`; nothing runs."""
        return self.lower(*args, **options).compile()

    def traced_by_phase(
        self, state: ReplicaState, *args: PyTree
    ) -> dict[str | None, jax.stages.Traced]:
        """Trace the step's programs: by phase name when host-scheduled, else one under None."""
        self._check_state(state, is_executed=False)
        args, _ = self._place(args, None, is_executed=False)

        def trace(phase: Phase | None) -> jax.stages.Traced:
            return self._program("update", phase, state, True).trace(state, args, None, None)

        return self._phases.trace_by_phase(trace)

    def _check_state(self, state: ReplicaState, *, is_executed: bool = True) -> None:
        """Raise `ValueError` unless a step can take the state; the first one sizes the exchange."""
        if not isinstance(state, ReplicaState):
            raise ValueError(
                f"`state` must be of `init` of js.with_exchange, got {type(state).__name__}."
            )
        if is_executed:
            check_not_donated("state", state.step)
        if not self._names:
            self._bind(self._update.params.get(state.state))

    def _bind(self, params: PyTree) -> ParameterTransform:
        """Return the exchange, sized for the first parameters and their layout in a replica."""
        needs = self.sync.algorithm.needs
        if self._names and needs:
            check_same_model(params, self._names)
        if not self._names:
            sync = (
                self.sync.bound(dict(self.mesh.shape), replica_types(params))
                if needs
                else self.sync
            )
            if axes := model_axes(params, self.mesh, self.axis_name):
                sync = sync.with_specs(inner_specs(params, axes))
            self._bound = self._phases.sync = sync
            if not any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
                self._names = leaf_names(params)
        return self._bound

    def _place(
        self, args: tuple[PyTree, ...], weight: Any, *, is_executed: bool = True
    ) -> tuple[tuple[PyTree, ...], Any]:
        """Return arguments and weight on the devices, split where `in_axes` says so."""
        split, join = self._update.split(args)
        place = self._placer.check_and_place if is_executed else self._placer.place
        split, weight = place(split, weight, axis_names(self.axis_name))
        return join(split), weight

    def _run(self, program: Any, method: str, phase: Phase | None, *args: Any) -> Any:
        """Run a program, after the processes have compared it."""
        for before_run in self._program_checks:
            before_run(program, method, phase, *args)
        new, results = program(*args)
        for result in jax.tree.leaves(results)[:1]:
            self._in_flight.add(result)
        return new, results

    def _program(
        self, method: str, phase: Phase | None, state: ReplicaState, communicate: bool | jax.Array
    ) -> Any:
        """Return the program of a phase, whose results lie where those of its first state lie."""
        static = communicate if isinstance(communicate, bool) else True
        key = method, phase, static, isinstance(state.step, Tracer)
        if key not in self._programs:
            out_shardings = None
            places = jax.tree.map(lambda x: getattr(x, "sharding", None), state)
            if all(isinstance(x, NamedSharding) for x in jax.tree.leaves(places)):
                out_shardings = places, None
            update = getattr(self._update, method)
            self._programs[key] = jax.jit(
                functools.partial(update, static=static, phase=phase, sync=self._bound),
                donate_argnums=0 if self._donates else (),
                out_shardings=out_shardings,
            )
        return self._programs[key]


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
      statistics: two functions, which read a part of the state, such as batch statistics, and
        return the state with another one; floating arrays in it are averaged with the parameters.
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
    functions: dict[str, Any] = {
        "train_step": train_step,
        "get_params": get_params,
        "set_params": set_params,
    }
    reads_optimizer = get_opt_state is not None or set_opt_state is not None
    if reads_optimizer:
        functions |= {"get_opt_state": get_opt_state, "set_opt_state": set_opt_state}
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(f"{owner}: `{name}` must be a function, got {value!r}.")
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
            f"{owner}: `in_axes` must hold 0 (split along the first dimension) or None (whole), "
            f"got {wrong[0]!r}."
        )
    check_choice("mode", mode, Mode)
    check_choice("map_with", map_with, MapWith)
    inner = {n for n, size in mesh.shape.items() if size > 1} - {*axis_names(axis_name)}
    if gradients is not None and map_with == "vmap" and inner:
        raise ValueError(
            f'{owner}: `gradients` needs map_with="shard_map" on a mesh with the axes '
            f"{sorted(inner)} inside a replica."
        )
    algorithm = sync.algorithm
    if not reads_optimizer and (algorithm.needs_rate or algorithm.inner_state != "keep"):
        needs = f"`inner_state`={algorithm.inner_state!r}"
        needs = '`learning_rate`="optimizer"' if algorithm.needs_rate else needs
        raise ValueError(f"{owner}: `sync` with {needs} needs `get_opt_state` and `set_opt_state`.")
    is_pair = isinstance(statistics, tuple) and len(statistics) == 2
    if statistics is not None and not (is_pair and all(map(callable, statistics))):
        raise ValueError(
            f"{owner}: `statistics` must be two functions, (get, set), or None, got {statistics!r}."
        )
    opt_state = NO_ACCESS
    if reads_optimizer:
        opt_state = Access("opt_state", functions["get_opt_state"], functions["set_opt_state"])
    update = LibraryUpdate(
        *(train_step, in_axes, mesh, axis_name, map_with),
        params=Access("params", get_params, set_params),
        opt_state=opt_state,
        statistics=NO_ACCESS if statistics is None else Access("statistics", *statistics),
        gradients=None if gradients is None else optax.with_extra_args_support(gradients),
    )
    return ExchangingStep(update, sync, mode, donate)
