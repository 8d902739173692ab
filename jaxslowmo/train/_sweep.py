"""Many settings and seeds, trained in one program over virtual replicas: `Sweep`."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._support.checks import checked_int
from .._support.types import Phase, PyTree
from ..mesh import VirtualMesh, consensus, virtual_mesh
from ..transform import ParameterTransform, holds_state
from .step import split_chain

_AXIS = "replica"
Setting = Mapping[str, Any]
"""The values of one setting by name: scalars, traced inside of the program."""


class SweepState(NamedTuple):
    """The state of a `Sweep`: the replicas of all runs.

    Attributes:
      params: leaves of shape (settings, seeds, replicas, *s).
      opt_state: the optimizers' states, likewise.
      count: number of updates so far, an int.
    """

    params: PyTree
    opt_state: PyTree
    count: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """Many training runs in one program: every setting with every seed, over virtual replicas.

    For questions such as: which slow momentum, at which learning rate, and how sure is it? All runs
    have the same shapes, so `jax.vmap` maps one training step over settings, seeds and replicas.
    The update whose exchange is due decides which exchange runs, so a local step computes none.

        sweep = js.Sweep(
            loss_fn=loss_fn,
            make=lambda s: js.chain(
                optax.sgd(s["rate"]),
                js.slowmo("replica", momentum=s["momentum"], learning_rate=s["rate"]),
            ),
            settings={"rate": [0.1, 0.1, 0.2, 0.2], "momentum": [0.2, 0.6, 0.2, 0.6]},
            replicas=8,
        )
        state, losses = sweep.run(sweep.init(params), batches)
        models = sweep.consensus(state)

    Attributes:
      loss_fn: `loss_fn(params, batch)`, the mean loss of a replica's batch, a scalar.
      make: `make(setting)`: the transforms of one setting, as `js.chain` or an optimizer alone.
        They exchange over the axis "replica". It is called with the numbers of every setting, which
        checks them, and then with traced scalars. What runs when must not depend on the setting:
        periods and graphs are those of the first one.
      settings: values by name, each of shape (settings,), of any floating or integer dtype.
      replicas: number of virtual replicas, >= 1.
      at_once: number of settings that are trained side by side, the others after them; None: all.
        On a CPU a program is fastest whose runs fit into the caches together.

    Raises:
      ValueError: no settings, or values of several lengths or that are no vectors; fewer than one
        replica; several parameter transforms in one chain; what `make` raises.

    Communication: none; collectives become reductions over a dimension of an array.
    """

    loss_fn: Callable[[PyTree, PyTree], jax.Array]
    make: Callable[[Setting], optax.GradientTransformation]
    settings: Mapping[str, Any]
    replicas: int
    at_once: int | None = None
    _sync: ParameterTransform | None = field(init=False)
    _values: dict[str, jax.Array] = field(init=False)

    def __post_init__(self) -> None:
        """Check the settings, by making the transforms of each."""
        checked_int("Sweep: `replicas`", self.replicas, 1)
        if self.at_once is not None:
            checked_int("Sweep: `at_once`", self.at_once, 1)
        values = {name: np.asarray(value) for name, value in self.settings.items()}
        shapes = {name: value.shape for name, value in values.items()}
        if len(set(shapes.values())) != 1 or any(len(s) != 1 or not s[0] for s in shapes.values()):
            raise ValueError(
                "Sweep: `settings` must be vectors of one length, at least 1, one number for each "
                f"setting; got shapes {shapes}."
            )
        rows = zip(*(value.tolist() for value in values.values()), strict=True)
        # Traced values are not checked, so all are made once as numbers.
        chains = [self.make(dict(zip(values, row, strict=True))) for row in rows]
        _, _, sync = split_chain(chains[0], None, None)
        sync = sync.bound({_AXIS: self.replicas}) if sync is not None else None
        object.__setattr__(self, "_sync", sync)
        object.__setattr__(self, "_values", {k: jnp.asarray(v) for k, v in values.items()})

    @property
    def mesh(self) -> VirtualMesh:
        """Return the mesh of the virtual replicas."""
        return virtual_mesh({_AXIS: self.replicas})

    def init(self, params: PyTree) -> SweepState:
        """Return the first state; all settings and replicas of a seed start from equal parameters.

        Args:
          params: leaves of shape (seeds, *s).

        Raises:
          ValueError: a parameter transform that is not at the end of a `js.chain`.
        """
        models = self._first(params, self._values)
        if self._sync is None and holds_state(models[1], "parameters"):
            raise ValueError(
                "Sweep: `make` must return a js.chain that ends in its parameter transform, which "
                "says when it exchanges and how replicas are averaged; got a parameter transform "
                "alone, or inside of another one such as optax.chain."
            )
        return SweepState(*models, count=0)

    def run(self, state: SweepState, batches: PyTree) -> tuple[SweepState, jax.Array]:
        """Train on, one update for each step of `batches`.

        A run may be made in several calls; calls with equal shapes share one program.

        Args:
          state: the state, which must not be used again: its buffers are donated.
          batches: leaves of shape (seeds, steps, replicas, *s); a seed's are those of all settings.
            Numbers of examples, which `loss_fn` looks up, take less memory than the examples.

        Returns:
          The state after it, and the losses of all updates, the mean over the replicas:
          (settings, seeds, steps) float32.

        Raises:
          ValueError: leaves whose first three dimensions are not seeds, steps and replicas.
        """
        seeds = jax.tree.leaves(state.params)[0].shape[1]
        shapes = {np.shape(x)[:3] for x in jax.tree.leaves(batches)}
        steps = next((s[1] for s in shapes if len(s) == 3), 0)
        if shapes != {(seeds, steps, self.replicas)} or not steps:
            raise ValueError(
                f"Sweep: `batches` must have leaves of shape ({seeds}, steps, {self.replicas}, "
                f"...), for {seeds} seeds and {self.replicas} replicas; got "
                f"{jax.tree.map(np.shape, batches)}."
            )
        phases = [
            self._phase(t, state.params) for t in range(state.count + 1, state.count + steps + 1)
        ]
        kinds = tuple(sorted(set(phases)))
        which = np.array([kinds.index(phase) for phase in phases], np.int32)
        models = state.params, state.opt_state
        models, losses = self._steps(models, batches, which, self._values, kinds=kinds)
        return SweepState(*models, count=state.count + steps), losses

    def consensus(self, state: SweepState) -> PyTree:
        """Return the model of each run, the mean of its replicas: (settings, seeds, *s)."""
        return self._models(state.params, state.opt_state)

    def _phase(self, t: int, params: PyTree) -> Phase:
        if self._sync is None:
            return ()
        sync = self._sync
        if sync.algorithm.needs:  # its events depend on the parameters, here of all runs
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[3:], x.dtype), params)
            sync = sync.bound(params=one)
        return sync.phase(t)

    @functools.cached_property
    def _first(self) -> Callable[..., Any]:
        def one(params: PyTree, setting: Setting) -> PyTree:
            return params, self.make(setting).init(params)

        over_replicas = jax.vmap(one, (None, None), axis_name=_AXIS, axis_size=self.replicas)
        return jax.jit(jax.vmap(jax.vmap(over_replicas, (0, None)), (None, 0)))

    @functools.cached_property
    def _steps(self) -> Callable[..., Any]:
        def one(models: PyTree, batch: PyTree, setting: Setting, *, phase: Phase) -> PyTree:
            params, state = models
            loss, gradients = jax.value_and_grad(self.loss_fn)(params, batch)
            named = {} if self._sync is None else {"phase": phase}
            updates, state = self.make(setting).update(gradients, state, params, **named)
            return (optax.apply_updates(params, updates), state), loss

        def all_seeds(phase: Phase) -> Callable[..., Any]:
            over_replicas = jax.vmap(
                functools.partial(one, phase=phase), (0, 0, None), axis_name=_AXIS
            )
            return jax.vmap(over_replicas, (0, 0, None))

        @functools.partial(jax.jit, static_argnames="kinds", donate_argnums=0)
        def steps(models: PyTree, batches: PyTree, which: Any, values: Any, *, kinds: Any) -> Any:
            branches = [all_seeds(phase) for phase in kinds]
            by_step = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), batches)

            def of_setting(both: tuple[PyTree, Setting]) -> tuple[PyTree, jax.Array]:
                models, setting = both

                def step(models: PyTree, now: Any) -> Any:
                    batch, kind = now
                    # The number is the same for all runs, so one branch runs, and not all of them.
                    models, losses = jax.lax.switch(kind, branches, models, batch, setting)
                    return models, losses.mean(-1)

                models, losses = jax.lax.scan(step, models, (by_step, which))
                return models, losses.T

            return jax.lax.map(of_setting, (models, values), batch_size=self.at_once)

        return steps

    @functools.cached_property
    def _models(self) -> Callable[..., Any]:
        def one(params: PyTree, state: PyTree) -> PyTree:
            shares = None if self._sync is None else self._sync.shares(state[-1])
            return consensus(params, mesh=self.mesh, shares=shares)

        return jax.jit(jax.vmap(jax.vmap(one)))
