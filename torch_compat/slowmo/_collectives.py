"""Collectives between processes, as traced graphs that are the same on all of them.

Processes with different programs wait for each other for ever. So:

- What differs between processes (who speaks, with which weight) is data on the device, never a
  constant of the graph.
- A graph with a collective takes only tensors that a graph before has made for it. A parameter or
  gradient may be a view of something, and then how it is computed belongs to the graph.
- It writes into nothing that existed before: torch_xla orders what a graph returns by the age of
  the tensors, which may have been made in another order elsewhere. Results are written afterwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ._graphs import Writes, device_data, launch, own_graph
from ._places import Places
from .backends import Backend


class Collectives:
    """The collectives of one process, to be used inside `graph`, by all processes alike.

    One collective per dtype; none with a single process.
    """

    def __init__(self, places: Places, backend: Backend) -> None:
        self.places = places
        self._backend = backend
        self._speaks: dict[tuple[str, torch.device], torch.Tensor] = {}

    @contextmanager
    def graph(self, device: torch.device) -> Iterator[Writes]:
        """`own_graph` with collectives inside, in which all processes begin together.

        Raises:
          PeerLostError: another process will not come.
        """
        launch(device)
        if self.places.world_size > 1:
            self._backend.meet()
        with own_graph(device) as writes:
            yield writes

    # Local: what each process adds.

    def shares(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Each node's part of the sum that is the mean over nodes; new tensors."""
        return [tensor.detach() / self.places.num_nodes for tensor in tensors]

    def only_masters(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`tensors` of the masters of nodes, zeros elsewhere."""
        if self.places.nprocs_per_node == 1:
            return list(tensors)
        return self._silenced(tensors, "master", self.places.is_master)

    def only_first(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`tensors` of rank 0, zeros elsewhere; bool as int32."""
        numbers = [t.to(torch.int32) if t.dtype == torch.bool else t.detach() for t in tensors]
        return self._silenced(numbers, "first", self.places.rank == 0)

    # Collective.

    def total(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum over all processes; `tensors` may be written.

        Communication: one all-reduce over all processes, of the bytes of `tensors`.
        """
        return self._sum(list(tensors))

    def total_in_node(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum over the processes of this node; `tensors` may be written.

        Communication: one all-reduce inside every node, of the bytes of `tensors`; none with one
          process per node.
        """
        if self.places.nprocs_per_node == 1:
            return list(tensors)
        return self._sum(list(tensors), self.places.node_groups)

    def scatter_mean(self, flat: torch.Tensor) -> torch.Tensor:
        """This process' part of the mean of `flat` (world_size * n,) over all processes, (n,).

        Communication: one reduce-scatter over all processes.
        """
        world = self.places.world_size
        if world == 1:
            return flat
        return self._backend.reduce_scatter(flat / world)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts (n,) of all processes in order of rank, (world_size * n,).

        Communication: one all-gather over all processes.
        """
        if self.places.world_size == 1:
            return part
        return self._backend.all_gather(part)

    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """What the master that sends to this one by `edges` of nodes holds; 0 where none does.

        Communication: one collective-permute, of the bytes of `value`.
        """
        masters = self.places.masters
        return self._backend.permute(value, [(masters[i], masters[k]) for i, k in edges])

    def _sum(
        self, tensors: list[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        if self.places.world_size == 1:
            return tensors
        sums = {id(tensor): tensor for tensor in tensors}  # what has no elements stays
        for same in _by_dtype(tensors):
            new = self._backend.all_reduce(same, groups)
            sums |= dict(zip(map(id, same), new, strict=True))
        return [sums[id(tensor)] for tensor in tensors]

    def _silenced(
        self, tensors: Sequence[torch.Tensor], role: str, speaks: bool
    ) -> list[torch.Tensor]:
        """`tensors`, or zeros where this process does not speak. 0 * NaN would be heard."""
        if not tensors:
            return []
        key = role, tensors[0].device
        if key not in self._speaks:
            self._speaks[key] = device_data([float(speaks)], torch.float32, key[1])
        mask = (self._speaks[key] > 0).reshape(())  # scalars stay scalars
        return [torch.where(mask, t.detach(), torch.zeros_like(t)) for t in tensors]


def broadcast(
    buffers: Sequence[torch.Tensor], collectives: Collectives, device: torch.device
) -> None:
    """All processes get rank 0's buffers.

    Communication: one all-reduce of their bytes.
    """
    with own_graph(device):
        spoken = collectives.only_first(buffers)
    with collectives.graph(device) as writes:
        writes.extend(zip(buffers, collectives.total(spoken), strict=True))


def average_gradients(
    trained: Sequence[torch.nn.Parameter], collectives: Collectives, device: torch.device
) -> None:
    """Gradients become their mean over the processes of the node.

    Communication: one all-reduce inside every node, of the bytes of `trained`; sparse gradients
      are sent whole.
    """
    # Another process may have a gradient where this one has none, and all must send alike.
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        sparse = [grad.sparse_dim() if grad.is_sparse else None for grad in grads]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        shares = [grad.detach() / collectives.places.nprocs_per_node for grad in dense]
    del grads, dense
    with collectives.graph(device):
        means = collectives.total_in_node(shares)
    for param, mean, rows in zip(trained, means, sparse, strict=True):
        param.grad = mean if rows is None else mean.to_sparse(rows)


def flatten(tensors: Sequence[torch.Tensor], length: int | None = None) -> torch.Tensor:
    """All elements in order, as (length,), never a view.

    Zeros follow where `length` is larger than their number.
    """
    parts = [tensor.detach().reshape(-1) for tensor in tensors]
    missing = 0 if length is None else length - sum(part.numel() for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing))
    return parts[0].clone() if len(parts) == 1 else torch.cat(parts)


def unflatten(like: Iterable[torch.Tensor], flat: torch.Tensor) -> list[torch.Tensor]:
    """The elements of `flat` in the shapes and dtypes of `like`, in order; new tensors."""
    parts, offset = [], 0
    for tensor in like:
        part = flat[offset : offset + tensor.numel()].reshape(tensor.shape)
        # A view would keep all of `flat` alive.
        parts.append(part.to(tensor.dtype, copy=True))
        offset += tensor.numel()
    return parts


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors that have elements, those of one dtype together, in order of first appearance."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def pack(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """One vector per dtype, new ones."""
    return [flatten(same) for same in _by_dtype(tensors)]


def unpack(like: Sequence[torch.Tensor], flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The inverse of `pack`, for tensors of the shapes, dtypes and order of `like`."""
    parts = {id(tensor): tensor for tensor in like}  # what has no elements stays
    for same, flat in zip(_by_dtype(like), flats, strict=True):
        parts |= dict(zip(map(id, same), unflatten(same, flat), strict=True))
    return [parts[id(tensor)] for tensor in like]


def times(value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`value * factor`, a (1,) one, computed at least in float32, in the dtype of `value`."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return (value.to(wide) * factor.to(wide).reshape(())).to(value.dtype)
