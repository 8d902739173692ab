"""Which gradients lie in which bucket."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from .._scopes import GRADIENTS
from .._typing import PyTree
from ..mesh import typed_specs
from ..transform import BlockGroup, block_groups
from ..tree import BufferPlan, leaf_names, note_buffers, plan_buffers

Order = Literal["reverse", "forward"] | Sequence[int | str]


class BucketGroup(NamedTuple):
    """Buckets of leaves that are sharded alike inside a replica: of each device's own blocks.

    Attributes:
      leaves: which these are.
      plan: of the buckets, over a list of the blocks.
      names: of the leaves.
      first: number of the first bucket.
    """

    leaves: BlockGroup
    plan: BufferPlan
    names: tuple[str, ...]
    first: int


class Buckets(NamedTuple):
    """All buckets of a tree of gradients.

    Attributes:
      treedef: of the gradients.
      groups: of leaves that are sharded alike; one where none are sharded.
    """

    treedef: Any
    groups: tuple[BucketGroup, ...]

    @property
    def count(self) -> int:
        """How many there are."""
        return sum(len(group.plan.buffers) for group in self.groups)

    def each(self, fn: Callable[[BucketGroup, list[Any]], Any], grads: PyTree) -> list[Any]:
        """`fn` of each group and its leaves."""
        leaves = self.treedef.flatten_up_to(grads)
        for group in self.groups:
            note_buffers(GRADIENTS, group.plan, group.names)
        return [fn(group, [leaves[i] for i in group.leaves.indices]) for group in self.groups]

    def tree(self, by_group: Sequence[Sequence[Any]]) -> PyTree:
        """The gradients, of the leaves of all groups."""
        leaves: list[Any] = [None] * self.treedef.num_leaves
        for group, own in zip(self.groups, by_group, strict=True):
            for i, leaf in zip(group.leaves.indices, own, strict=True):
                leaves[i] = leaf
        return self.treedef.unflatten(leaves)


@dataclass(frozen=True)
class BucketLayout:
    """How gradients are put into buckets; see `all_reduce_gradients`."""

    limits: tuple[int, ...]
    order: Order = "reverse"
    buckets: tuple[tuple[int | str, ...], ...] | None = None
    max_buckets: int | None = None
    alone_bytes: int | None = None
    split_large: bool = False

    def planned(
        self,
        grads: PyTree,
        param_specs: PyTree | None = None,
        ready_order: Sequence[int] | None = None,
    ) -> Buckets:
        """The buckets of `grads`.

        Args:
          grads: arrays or types.
          param_specs: a `PartitionSpec` per leaf, or a prefix of the tree; None: leaves are whole
            inside a replica, or their types tell (Explicit axes).
          ready_order: takes the place of the default order.

        Raises:
          ValueError: specs that don't fit the tree; leaves that the gradients do not have.
        """
        names, (leaves, treedef) = leaf_names(grads), jax.tree.flatten(grads)
        specs = typed_specs(grads) if param_specs is None else param_specs
        explicit = None
        if self.buckets is not None:
            explicit = [_leaf_positions("buckets", bucket, names) for bucket in self.buckets]
            plan_buffers(grads, buckets=explicit)  # whether all leaves are there, once
        order = None if explicit else self._order(names, ready_order)
        groups, first = [], 0
        for group in block_groups(grads, specs):
            plan = self._plan(group, leaves, explicit, order)
            own = tuple(names[i] for i in group.indices)
            groups.append(BucketGroup(group, plan, own, first))
            first += len(plan.buffers)
        return Buckets(treedef, tuple(groups))

    def _plan(
        self,
        group: BlockGroup,
        leaves: Sequence[Any],
        explicit: list[list[int]] | None,
        order: Sequence[int] | None,
    ) -> BufferPlan:
        """The buckets of one group's blocks, which are alike on all devices."""
        shapes = zip(group.indices, group.block_shapes(), strict=True)
        blocks = [jax.ShapeDtypeStruct(shape, leaves[i].dtype) for i, shape in shapes]
        place = {i: k for k, i in enumerate(group.indices)}
        if explicit is not None:
            own = [[place[i] for i in bucket if i in place] for bucket in explicit]
            return plan_buffers(blocks, buckets=[bucket for bucket in own if bucket])
        assert order is not None, "there is one where buckets were not given"
        return plan_buffers(
            blocks,
            limits=self.limits,
            order=[place[i] for i in order if i in place],
            max_buckets=self.max_buckets,
            alone_bytes=self.alone_bytes,
            split_large=self.split_large,
        )

    def _order(self, names: Sequence[str], ready_order: Sequence[int] | None) -> Sequence[int]:
        if ready_order is not None and self.order == "reverse":
            return _leaf_positions("ready_order", ready_order, names, whole=True)
        if self.order == "reverse":
            return range(len(names))[::-1]
        if self.order == "forward":
            return range(len(names))
        return _leaf_positions("order", self.order, names, whole=True)


def check_order(owner: str, order: object) -> None:
    """At construction: `ValueError` unless it can be an order."""
    if isinstance(order, str):
        if order == "ready":
            raise ValueError(
                f'{owner}: `order`="ready" is known once the step is traced: use '
                'js.make_train_step(order="ready"), or pass order=js.ready_order(loss_fn, params, '
                "batch)."
            )
        if order not in ("reverse", "forward"):
            raise ValueError(
                f'{owner}: `order` must be "reverse", "forward" or a sequence of leaves, got '
                f"{order!r}."
            )
    elif not isinstance(order, Sequence):
        raise ValueError(
            f'{owner}: `order` must be "reverse", "forward" or a sequence of leaf positions or '
            f"names, got {type(order).__name__}."
        )


def _leaf_positions(
    argument: str, leaves: Sequence[int | str], names: Sequence[str], *, whole: bool = False
) -> list[int]:
    """Leaves given by position or name, as positions.

    Args:
      argument: for messages.
      leaves: positions in flattening order, or names such as `"dense/kernel"`.
      names: of all leaves.
      whole: every leaf must be there, once.

    Raises:
      ValueError: a name or position that the tree does not have; with `whole`, leaves that are
        missing or named twice.
    """
    position = {name: i for i, name in enumerate(names)}
    found = []
    for leaf in leaves:
        i = position.get(leaf) if isinstance(leaf, str) else int(leaf)
        if i is None or not 0 <= i < len(names):
            raise ValueError(
                f"`{argument}` names leaf {leaf!r}, which the gradients do not have "
                f"({len(names)} leaves: {', '.join(names)})."
            )
        found.append(i)
    if whole and sorted(found) != list(range(len(names))):
        missing = [name for i, name in enumerate(names) if i not in found]
        twice = [name for i, name in enumerate(names) if found.count(i) > 1]
        raise ValueError(
            f"`{argument}` must name every gradient once: missing {missing}, more than once "
            f"{twice}."
        )
    return found
