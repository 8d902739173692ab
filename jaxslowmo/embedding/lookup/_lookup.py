"""The protocol by which parameters that a batch looks up enter a training step."""

from collections.abc import Callable
from typing import Any

import jax

from ..._typing import AxisName, PyTree
from ...mesh import AnyMesh, replicate
from ...sparse import Rows
from ...tracing import FullLoss
from ...transform import ParameterTransform
from ._asked import Ahead, Carry
from ._shards import Kinds, on_shards


class Lookup:
    """A step looks up for its batches what this says: here nothing; `TableLookup` has tables.

    Parameters of a step are dense ones, which its optimizer knows, and stored ones, of which a
    batch asks for some and which are updated where they lie. Methods that take values of one device
    are called where `axis` is bound.

    Attributes:
      embeddings: `Embeddings`, the tables; None without.
      axis: name of an axis of the mesh, between whose devices a replica's stored parameters are
        sharded; None: they are not.
      nested: the same where the compiler has it, and it is bound around what needs it.
    """

    embeddings: Any = None
    axis: Any = None
    nested: Any = None

    # Trees of parameters, of their specs, or of the states of their optimizers.

    def dense(self, tree: PyTree) -> PyTree:
        """The part of the dense parameters."""
        return tree

    def stored(self, tree: PyTree) -> PyTree:
        """The part of the stored parameters."""
        del tree

    def joined(self, dense: PyTree, stored: PyTree) -> PyTree:
        """Both parts as one tree."""
        del stored
        return dense

    @property
    def specs(self) -> Any:
        """The kinds of the stored parameters; see `on_shards`."""
        return None

    @property
    def optimizer_specs(self) -> Any:
        """The kinds of the state of their optimizer."""
        return None

    def init_optimizer(self, stored: PyTree) -> PyTree:
        """The state of their optimizer on a device."""
        del stored

    def stacked(self, params: PyTree, seed: int, *, mesh: AnyMesh, axis_name: AxisName) -> PyTree:
        """Parameters of all replicas, equal on them.

        Args:
          params: of one; stored ones that are missing are made.
          seed: of those.
          mesh: of the step.
          axis_name: of its replicas.

        Communication: none.
        """
        del seed
        return replicate(params, mesh=mesh, axis_name=axis_name)

    # The parts of a step.

    def of_sync(self, sync: ParameterTransform | None) -> ParameterTransform | None:
        """A parameter transform that knows how stored parameters lie, for its state too."""
        return sync

    def of_loss(self, loss: FullLoss) -> FullLoss:
        """A loss function of batches as `seen` makes them."""
        return loss

    def on_devices(
        self, fn: Callable[..., Any], *args: Any, kinds: tuple[Kinds, ...], out: Kinds
    ) -> Any:
        """`fn` of each device's own parts; see `on_shards`."""
        return on_shards(self.nested, fn, *args, kinds=kinds, out=out)

    # A batch.

    def requested(
        self,
        stored: PyTree,
        batch: PyTree,
        carry: Carry | None,
        weight: jax.Array | None,
        axes: tuple[str, ...],
    ) -> Any:
        """A batch, and what it asked for.

        Args:
          stored: of this device.
          batch: its part of one.
          carry: what was asked for it before; None: nothing.
          weight: () the replica's share; metrics are zeros for 0.
          axes: inside a replica, over which its batch is split.
        """
        del stored, carry, weight, axes
        return batch

    def counts(self, requested: Any) -> dict[str, jax.Array]:
        """What the metrics of a replica say of its requests."""
        del requested
        return {}

    def refused(self, requested: Any) -> jax.Array | None:
        """() int32, because of how many requests no update must be made; None: never."""
        del requested
        return None

    def seen(self, requested: Any, params: PyTree) -> PyTree:
        """The batch as the loss function sees it, with the dense parameters of this device."""
        del params
        return requested

    def seen_by_loss(self, params: PyTree, share: PyTree) -> tuple[PyTree, PyTree]:
        """Types of the parameters and the batch that a loss function is given.

        Args:
          params: types of those of one replica.
          share: types of what one device has of a batch.
        """
        return params, share

    def differentiated(
        self,
        requested: Any,
        params: PyTree,
        compute: Callable[..., tuple[Any, PyTree, PyTree]],
        *operands: PyTree,
    ) -> tuple[Any, PyTree, Rows, PyTree]:
        """What a batch gives.

        Args:
          requested: the batch.
          params: the dense parameters; varying over the axes over which gradients are averaged
            later.
          compute: `compute(params, batch, *operands)`: results, gradients, and those of what was
            looked up.
          *operands: of `compute`.

        Returns:
          The results; gradients of the dense parameters, and of the rows that this device holds;
          the batch as it was given to `compute`.
        """
        results, grads, _ = compute(params, requested, *operands)
        return results, grads, {}, requested

    def applied(
        self,
        stored: PyTree,
        state: PyTree,
        rows: Rows,
        active: jax.Array | None,
        read: PyTree,
    ) -> tuple[PyTree, PyTree, Any]:
        """Stored parameters and the state of their optimizer after an update.

        Args:
          stored: of this device.
          state: of their optimizer.
          rows: gradients of rows.
          active: () bool, whether there is an update; None: always.
          read: what was read of them, and must be so before they change.

        Returns:
          Both, and the numbers of the rows that have changed, by table.
        """
        del rows, active, read
        return stored, state, {}

    # The batch after.

    def following(
        self, stored: PyTree, upcoming: PyTree, ahead: Ahead
    ) -> tuple[Carry | None, PyTree]:
        """What a batch to come asks for, None without one, and what was read for it."""
        del stored, upcoming, ahead
        return None, ()

    def asked_anew(self, stored: PyTree, carry: Carry) -> Carry:
        """What was asked for a batch, with rows as these stored parameters have them."""
        del stored
        return carry

    def patched(
        self,
        stored: PyTree,
        carry: Carry,
        changed: Any,
        moved_all: bool | jax.Array,
        ahead: Ahead,
        axes: tuple[str, ...],
    ) -> tuple[Carry, dict[str, jax.Array]]:
        """What was asked for a batch, with the rows that have changed since sent again.

        Args:
          stored: of the replica.
          carry: what was asked for the batch.
          changed: numbers of the rows that have changed, by table.
          moved_all: whether all have.
          ahead: how much is done ahead.
          axes: inside a replica, over which its batch is split.

        Returns:
          That, and metrics of what was sent again.
        """
        del stored, changed, moved_all, ahead, axes
        return carry, {}

    # On the host.

    def check(self, batch: PyTree, num_parts: int) -> bool:
        """Raise `ValueError` for a batch of the host that asks for what there is not.

        Args:
          batch: as a step takes it.
          num_parts: equal parts that it is split into, a device each.

        Returns:
          Whether all that it asks for could be looked at.
        """
        del batch, num_parts
        return True

    def refuse(self, metrics: dict[str, Any]) -> None:
        """Raise `ValueError` where metrics tell of what was asked for, and there is not."""
        del metrics
