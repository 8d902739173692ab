"""Which gradients lie in which bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..._support.types import PyTree
from ...mesh import typed_specs
from ...transform import TreePacking, planned_by_group
from ...tree import BufferPlan, leaf_names, plan_buffers

Order = Literal["reverse", "forward"] | Sequence[int | str]


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
    ) -> TreePacking:
        """The buckets of `grads`; where leaves are sharded, of each device's own blocks.

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
        order = () if explicit else self._order(names, ready_order)

        def plan(blocks: list[Any], place: Mapping[int, int]) -> BufferPlan:
            if explicit is not None:
                own = [[place[i] for i in bucket if i in place] for bucket in explicit]
                return plan_buffers(blocks, buckets=[bucket for bucket in own if bucket])
            return plan_buffers(
                blocks,
                limits=self.limits,
                order=[place[i] for i in order if i in place],
                max_buckets=self.max_buckets,
                alone_bytes=self.alone_bytes,
                split_large=self.split_large,
            )

        return planned_by_group(treedef, leaves, specs, plan)

    def _order(self, names: Sequence[str], ready_order: Sequence[int] | None) -> Sequence[int]:
        if ready_order is not None and self.order == "reverse":
            return _leaf_positions("ready_order", ready_order, names, whole=True)
        if self.order in ("reverse", "forward"):
            return range(len(names))[:: -1 if self.order == "reverse" else 1]
        return _leaf_positions("order", self.order, names, whole=True)


def checked_order(owner: str, order: Order) -> Order:
    """At construction: return `order`; raise `ValueError` unless it can be one."""
    if isinstance(order, str) and order == "ready":
        raise ValueError(
            f'{owner}: `order`="ready" is known once the step is traced: use '
            'js.make_train_step(order="ready"), or pass order=js.ready_order(loss_fn, params, '
            "batch)."
        )
    is_known = order in ("reverse", "forward") if isinstance(order, str) else True
    if not is_known or not isinstance(order, Sequence):
        raise ValueError(
            f'{owner}: `order` must be "reverse", "forward" or a sequence of leaf positions or '
            f"names, got {order!r}."
        )
    return order


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
