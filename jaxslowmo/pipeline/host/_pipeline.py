"""A pipeline whose stages are programs of their own, dispatched by the host."""

import numbers
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from ..._typing import PyTree
from ...mesh import consensus, replicate
from ...transform import init
from ...tree import check_floating
from ..model import (
    Block,
    LayeredModel,
    Loss,
    LossTerms,
    as_axes,
    check_pipeline,
    model_blocks,
    specs_of,
)
from ..partition import partition_by_bytes
from ..schedules import Schedule
from ._batch import HostBatch
from ._check import check_like, check_placed
from ._dispatch import Feed, Pass, evaluate
from ._programs import GradientPrograms, Microbatches, StagePrograms
from ._submeshes import SubMesh, sub_meshes
from ._ties import copies_of, sum_over_copies
from ._update import Updates

_OWNER = "HostPipeline"
Metrics = dict[str, jax.Array]


class HostState(NamedTuple):
    """State of a run of `HostPipeline`.

    Attributes:
      step: () int32, updates so far; on the host.
      params: one tree per layer, stacked per replica, on the devices of its stage.
      opt_state: of each stage of the model the state of its optimizer, stacked per replica.
    """

    step: Any
    params: list[PyTree]
    opt_state: list[PyTree]


class HostPipeline:
    """A model over stages that have programs and devices of their own, dispatched by one process.

    Every stage of the model is compiled for itself, one program per operation, on the devices that
    `mesh` has at its place of the stage axis. The host dispatches them in the schedule's order and
    moves activations and cotangents by `jax.device_put`; what does not depend on each other runs at
    the same time. Stages may have activations of any types, and no stage waits for others at the
    end of a tick, as in one program: the bubble is that of `schedule.simulate()`. One process must
    see all devices: a host with several accelerators, not several hosts.

        pipe = js.HostPipeline(model, params, js.schedules.zero_bubble(4, 16), mesh=mesh)
        state = pipe.init(tx, params)
        state, metrics = pipe.step(state, batch)

    Args:
      model: the layers.
      params: one tree per layer, or types of them.
      schedule: which stage computes what, in which order.
      parts: which layers each stage holds, as `js.partition_balanced` and its kin return it. None:
        such that the stage with the most bytes of parameters has as few as can be.
      mesh: a mesh with `axis_name`; every other axis lies inside of a stage.
      axis_name: the axis over stages, of the size of the schedule's.
      replica_axis: the axis over replicas; a mesh without it has one replica.
      data_axes: axes inside a replica over which each microbatch is split. Other axes are left to
        the compiler.
      param_specs: per layer a tree of `PartitionSpec` over axes that are left to the compiler, or
        a prefix of that. None: weights lie whole on every device of their stage.
      remat: F keeps a stage's input alone, and B computes the rest again.
      max_norm: clips the norm of a replica's gradients, over all stages and with every parameter
        counted once, as `optax.clip_by_global_norm` does in a model on one device. In `tx` that
        would clip each stage by its own norm.
      only_finite: an update in which a gradient of any stage or replica is not finite is left out
        everywhere.
      donate: whether `step` updates parameters and optimizer state in place.

    Attributes:
      blocks: [start, end) of the layers of each stage of the model.
      param_types: types of `params`.

    Raises:
      ValueError: a mesh without the stage axis or of another size, `data_axes` or `param_specs` of
        other axes, devices of several processes, stages without layers, parameters that do not fit
        the model or are no floating arrays, `max_norm` that is not positive.

    Communication: per microbatch and hop one copy of the activations, and one of their cotangents,
      from a stage's devices to the next one's. Over `data_axes` one all-reduce of the gradients per
      step. Over the replica axis nothing but what `tx` exchanges.
    """

    def __init__(
        self,
        model: LayeredModel,
        params: Sequence[PyTree],
        schedule: Schedule,
        *,
        parts: Sequence[Any] | None = None,
        mesh: Mesh,
        axis_name: str = "stage",
        replica_axis: str = "replica",
        data_axes: str | Sequence[str] = (),
        param_specs: PyTree | None = None,
        remat: bool = False,
        max_norm: float | None = None,
        only_finite: bool = False,
        donate: bool = True,
    ) -> None:
        check_pipeline(model, schedule)
        if model.takes_state:
            raise ValueError(
                f"{_OWNER}: `model` must have no layers that take `state`, which js.pipelined "
                "carries from microbatch to microbatch."
            )
        model.check_params(params)
        check_floating(_OWNER, params)
        if max_norm is not None and not (isinstance(max_norm, numbers.Real) and max_norm > 0):
            raise ValueError(f"{_OWNER}: `max_norm` must be a number > 0, got {max_norm!r}.")
        self.model, self.schedule, self.mesh = model, schedule, mesh
        stages, chunks = schedule.num_stages, schedule.num_chunks
        if parts is None:
            parts = partition_by_bytes(params, stages, chunks)
        self.blocks = model_blocks(len(model.layers), stages, chunks, parts)
        meshes = sub_meshes(
            mesh,
            schedule.num_stages,
            axis_name=axis_name,
            replica_axis=replica_axis,
            data_axes=as_axes(data_axes),
        )
        self._at = [meshes[stage] for stage in schedule.placement]
        self.param_types = [jax.eval_shape(lambda x: x, layer) for layer in params]
        self._specs = None if param_specs is None else specs_of(params, param_specs)
        self._copies = copies_of(model.tied, self.blocks, params)
        self.remat, self._donate = remat, donate
        self._max_norm, self._only_finite = max_norm, only_finite
        self._gradients = [GradientPrograms(at, schedule.num_microbatches) for at in self._at]
        self._programs: dict[Microbatches, list[StagePrograms]] = {}
        self._updates: Updates | None = None

    @property
    def num_shares(self) -> int:
        """Devices of a stage between which a batch is split: replicas times data shards."""
        return self._at[0].positions

    def place(self, params: Sequence[PyTree]) -> list[PyTree]:
        """One copy of the parameters, stacked for every replica, on the devices of its stages.

        Args:
          params: one tree per layer, leaves of shapes `s`.

        Returns:
          One tree per layer, leaves (replicas, *s); tied leaves are equal.

        Raises:
          ValueError: parameters of other trees, shapes or dtypes than those of the pipeline.
        """
        self.model.check_params(params)
        check_like(params, self.param_types)
        placed: list[PyTree] = []
        whole = self.model.as_one(params)
        for block, at in zip(self.blocks, self._at, strict=True):
            for i in range(block.start, block.end):
                own = whole[i] if self._specs is None else _laid_out(whole[i], self._specs[i], at)
                placed.append(replicate(own, mesh=at.mesh, axis_name=at.replica_axis))
        return placed

    def consensus(self, placed: Sequence[PyTree]) -> list[PyTree]:
        """One copy of placed parameters: the mean over replicas, as `js.consensus` makes it.

        Communication: per layer one all-reduce over the replica axis.
        """
        found: list[PyTree] = []
        for layers, at in zip(self._by_stage(placed), self._at, strict=True):
            found.extend(consensus(layers, mesh=at.mesh, axis_name=at.replica_axis))
        return found

    def value_and_grad(
        self, placed: Sequence[PyTree], batch: PyTree, *, rng: jax.Array | None = None
    ) -> tuple[Loss, list[PyTree]]:
        """Losses and gradients of a batch, of every replica.

        Args:
          placed: what `place` returned.
          batch: leaves of (replicas * local batch, ...), replica by replica. NumPy arrays wait in
            host memory, and only the microbatch in use is moved, to the stages that read it.
          rng: the key that microbatches fold their index into; of it each replica and data shard
            has its own.

        Returns:
          What the model's loss gives, its leaves (replicas,) means over the replica's batch; and
          gradients like `placed`, of the replica's own batch.

        Raises:
          ValueError: parameters that are not placed for this pipeline or whose buffers were
            donated, a batch that does not divide by replicas, data shards and microbatches, a
            schedule without backward operations.
        """
        if self.schedule.forward_only:
            raise ValueError(
                f"{_OWNER}: `schedule` {self.schedule.name!r} holds forward operations only, which "
                "make no gradients: call `evaluate`."
            )
        weights = self._by_stage(placed)
        programs, feed = self._prepared(batch, rng)
        totals = [program.zeros(own) for program, own in zip(self._gradients, weights, strict=True)]
        one_pass = Pass(self.schedule, programs, weights, feed, totals)
        one_pass.run()
        grads = [
            program.mean(total)
            for program, total in zip(self._gradients, one_pass.totals, strict=True)
        ]
        grads = sum_over_copies(self._copies, grads)
        terms = self._mean(one_pass.results)
        in_their_dtypes = [
            program.cast(own, like, jax.device_put(terms.weight, at.whole))
            for program, own, like, at in zip(
                self._gradients, grads, weights, self._at, strict=True
            )
        ]
        return terms.value(1), [layer for own in in_their_dtypes for layer in own]

    def evaluate(
        self, placed: Sequence[PyTree], batch: PyTree, *, rng: jax.Array | None = None
    ) -> Metrics:
        """Metrics of a batch, "loss" among them, by forward passes alone; as `step` gives them."""
        weights = self._by_stage(placed)
        programs, feed = self._prepared(batch, rng)
        count = self.schedule.num_microbatches
        return _metrics(self._mean(evaluate(programs, weights, feed, count)).value(1))

    def init(
        self,
        tx: optax.GradientTransformation | Callable[[PyTree], optax.GradientTransformation],
        params: Sequence[PyTree],
    ) -> HostState:
        """The state before the first step; later steps are made with `tx`.

        Args:
          tx: a chain of optax transforms and of ours over the replica axis, such as
            `js.chain(optax.adamw(1e-3), js.slowmo("replica", ...))`. Each stage of the model has
            one of its own for its layers. Where `param_specs` were given, a function that makes it
            of the specs of a stage's layers, which transforms of ours want to know:
            `lambda specs: js.slowmo("replica", param_specs=specs, ...)`.
          params: one copy, one tree per layer.
        """
        placed = self.place(params)
        txs = [self._tx_of(tx, block) for block in self.blocks]
        states = [
            init(own_tx, own, mesh=at.mesh, axis_name=at.replica_axis)
            for own_tx, own, at in zip(txs, self._by_stage(placed), self._at, strict=True)
        ]
        behind = {copy for group in self._copies for copy in group[1:]}
        counted = [
            [(k, i) not in behind for i in range(len(jax.tree.leaves(own)))]
            for k, own in enumerate(self._by_stage(placed))
        ]
        self._updates = Updates(
            txs,
            self._at,
            counted,
            max_norm=self._max_norm,
            only_finite=self._only_finite,
            donate=self._donate,
        )
        return HostState(np.zeros((), np.int32), placed, states)

    def _tx_of(self, tx: Any, block: Block) -> optax.GradientTransformation:
        if isinstance(tx, optax.GradientTransformation):
            return tx
        if not callable(tx):
            raise ValueError(
                f"{_OWNER}: `tx` must be an optax.GradientTransformation, or a function of the "
                f"specs of a stage that makes one, got {tx!r}."
            )
        make = cast(Callable[[PyTree], optax.GradientTransformation], tx)
        return make(None if self._specs is None else tuple(self._specs[block.start : block.end]))

    def step(
        self, state: HostState, batch: PyTree, *, rng: jax.Array | None = None
    ) -> tuple[HostState, Metrics]:
        """One update on every replica.

        Args:
          state: what `init` or the step before returned; its buffers are donated.
          batch: as `value_and_grad` takes it.
          rng: likewise.

        Returns:
          The next state, and metrics stacked per replica, (replicas,): "loss", those of the model's
          loss, and "gradient_norm", before clipping, where there is a `max_norm`.

        Raises:
          ValueError: as `value_and_grad`; a step before `init`.
        """
        if self._updates is None:
            raise ValueError(
                f"{_OWNER}: `step` needs the optimizer that `init(tx, params)` is given: call that "
                "first, for a restored state, too."
            )
        if not isinstance(state, HostState):
            raise ValueError(
                f"{_OWNER}: `state` must be a HostState, of `init` or the step before, got "
                f"{type(state).__name__}."
            )
        value, grads = self.value_and_grad(state.params, batch, rng=rng)
        new, states, norm = self._updates(
            self._by_stage(state.params), state.opt_state, self._by_stage(grads)
        )
        metrics = _metrics(value)
        if norm is not None:
            metrics["gradient_norm"] = norm
        params = [layer for own in new for layer in own]
        return HostState(state.step + np.int32(1), params, states), metrics

    def _by_stage(self, layers: Sequence[PyTree]) -> list[tuple[PyTree, ...]]:
        """Trees of layers by stage of the model."""
        check_placed(layers, self.param_types, self._at[0].replicas)
        return [tuple(layers[block.start : block.end]) for block in self.blocks]

    def _prepared(self, batch: PyTree, rng: Any) -> tuple[list[StagePrograms], Feed]:
        """The programs for batches of this type, and what feeds them with this one."""
        whole = HostBatch(batch, self.schedule.num_microbatches, self._at[0], rng)
        types = whole.types
        if types not in self._programs:
            self._programs[types] = self._made(types)
        programs = self._programs[types]
        return programs, lambda k, m: whole.put(m, programs[k].reads, programs[k].at)

    def _made(self, types: Microbatches) -> list[StagePrograms]:
        programs: list[StagePrograms] = []
        x: PyTree = None
        last = len(self.blocks) - 1
        for k, (block, at) in enumerate(zip(self.blocks, self._at, strict=True)):
            own = tuple(self.param_types[block.start : block.end])
            fn = self.model.stage(block.start, block.end)
            program = StagePrograms(fn, at, own, x, types, is_last=k == last, remat=self.remat)
            programs.append(program)
            x = program.y
        return programs

    def _mean(self, results: dict[int, LossTerms]) -> LossTerms:
        """Means per replica over microbatches and data shards."""
        return _means([results[m] for m in sorted(results)], self._at[-1].replicas)


def _laid_out(tree: PyTree, specs: PyTree, at: SubMesh) -> PyTree:
    """A layer's parameters over the automatic axes of their stage's devices."""

    def put(x: Any, spec: Any) -> jax.Array:
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        named = {name for entry in entries for name in entry if name is not None}
        if wrong := sorted(named - at.automatic):
            raise ValueError(
                f"{_OWNER}: `param_specs` may name axes that are left to the compiler, "
                f"{sorted(at.automatic)}, got {wrong}."
            )
        return jax.device_put(x, NamedSharding(at.mesh, spec))

    return jax.tree.map(put, tree, specs)


def _metrics(value: Loss) -> Metrics:
    loss, more = value if isinstance(value, tuple) else (value, {})
    return {"loss": loss, **more}


@partial(jax.jit, static_argnums=1)
def _means(results: list[PyTree], replicas: int) -> PyTree:
    def mean(*of_microbatches: jax.Array) -> jax.Array:
        stacked = jnp.stack(of_microbatches, axis=1).astype(jnp.float32)
        return stacked.reshape(replicas, -1).mean(axis=1)

    return jax.tree.map(mean, *results)
