"""Collectives between processes, as traced graphs that are the same on all of them.

Processes whose programs differ wait for each other for ever. So:

- A value that differs between processes (a weight, whether a process contributes) is data on the
  device, never a constant of the graph.
- A graph with a collective takes only tensors that a previous graph has made for it. A parameter or
  gradient may be a view, and the computation of a view is part of the graph.
- It writes into no tensor that existed before: torch_xla orders the results of a graph by the age
  of the tensors, which may differ between processes. Results are written afterwards.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ._flat import by_dtype
from ._graphs import Writes, device_data, launch, own_graph, write_between_passes
from ._places import Places
from .backends import Backend, Exchange, Kind, Peers


class Collectives:
    """The collectives of one process; call them inside `graph`, and in all processes.

    There is one collective per dtype, and none with a single process.

    Attributes:
      num_updates: number of calls of `perform_slowmo` so far.
      num_missed: steps without a call so far, less calls without a step; see `Steps`.
    """

    def __init__(self, places: Places, backend: Backend) -> None:
        self.places = places
        self.backend = backend
        self._masks: dict[tuple[bool, torch.device], torch.Tensor] = {}
        self.num_updates = self.num_missed = 0
        self.forget_absent()

    # For a join context: which processes have no more data.

    def forget_absent(self) -> None:
        """Let all processes take part again."""
        self.averages_over_all = True
        self.absent: dict[int, int] = {}
        self._heard: Exchange | None = None

    def open_round(self, *, has_data: bool, can_step: bool) -> None:
        """Exchange with all processes which of them still have data.

        Args:
          has_data: whether this process still has data.
          can_step: whether this process can take part in slow steps without data.

        Raises:
          ValueError: a process has no data and cannot step; all processes name it.

        Communication: `Backend.meet`.
        """
        if self.places.world_size == 1:
            return
        headers = self._tell(has_data=has_data, can_step=can_step)
        absent = {r: call.num_bytes for r, call in headers.items() if call.kind == Kind.NO_DATA}
        helpless = [rank for rank, updates in absent.items() if updates < 0]
        if helpless:
            raise ValueError(
                "In join() every process must have called perform_slowmo(optimizer) before its "
                f"data ends; process {', '.join(map(str, sorted(helpless)))} of "
                f"{self.places.world_size} has not."
            )
        self.absent = absent

    def hear(self) -> Kind:
        """Return the kind of the next exchange of processes with data; the next `graph` joins it.

        Communication: `Backend.meet`.
        """
        headers = self._tell(has_data=False, can_step=True)
        self._heard = next(call for call in headers.values() if call.kind != Kind.NO_DATA)
        return self._heard.kind

    def _tell(self, *, has_data: bool, can_step: bool) -> dict[int, Exchange]:
        if has_data:
            header = Exchange(Kind.ROUND, 0, self.num_updates, self.num_missed)
        else:
            before = self.absent.get(self.places.rank, self.num_updates)
            header = Exchange(Kind.NO_DATA, before if can_step else -1, self.num_updates)
        return self.backend.meet(header, torch.device("cpu"))

    @property
    def first(self) -> int:
        """The process whose values all receive: the first that has data."""
        return next(r for r in range(self.places.world_size) if r not in self.absent)

    @property
    def first_of_node(self) -> int:
        """The process of this node that has had data for longest."""
        ranks = self.places.node_groups[self.places.node]
        return max(ranks, key=lambda rank: (self.absent.get(rank, float("inf")), -rank))

    @property
    def _counted_nodes(self) -> list[int]:
        """The nodes whose parameters count in averages."""
        groups = self.places.node_groups
        if self.averages_over_all:
            return list(range(len(groups)))
        return [k for k, ranks in enumerate(groups) if not self.absent.keys() >= set(ranks)]

    @property
    def num_gradients_in_node(self) -> int:
        """The divisor of the sum of gradients in the node."""
        ranks = self.places.node_groups[self.places.node]
        with_data = [rank for rank in ranks if rank not in self.absent]
        return len(ranks if self.averages_over_all or not with_data else with_data)

    @contextmanager
    def graph(
        self,
        device: torch.device,
        kind: Kind,
        tensors: Iterable[torch.Tensor],
        edges: Iterable[tuple[int, int]] | None = None,
    ) -> Iterator[Writes]:
        """Run the block as `own_graph` does, with collectives that all processes begin together.

        Args:
          device: the device of this process.
          kind: kind of the exchange in the block.
          tensors: contribution of this process; the exchange sends at most their bytes.
          edges: pairs of nodes that exchange data; None for exchanges between all processes.

        Raises:
          UnlikeCallsError: another process is in a different exchange.
          PeerLostError: another process has ended.

        Communication: `Backend.meet`: 40 bytes over gloo, to every process; only to those of the
          node for `Kind.GRADIENTS`; to these and the peers of the node if there are `edges`.
        """
        launch(device)
        if self._heard is not None:
            self._heard = None
        elif self.places.world_size > 1:
            num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            exchange = Exchange(kind, num_bytes, self.num_updates, self.num_missed)
            self.backend.meet(exchange, device, self._peers(kind, edges))
        with own_graph(device) as writes:
            yield writes

    def _peers(self, kind: Kind, edges: Iterable[tuple[int, int]] | None) -> Peers | None:
        """Return the ranks to send to, and the ranks to receive from; None for all."""
        places = self.places
        if self.absent:  # processes without data learn from the headers what is exchanged
            return None
        node = [rank for rank in places.node_groups[places.node] if rank != places.rank]
        if kind == Kind.GRADIENTS:
            return node, node
        if edges is None:
            return None
        pairs = [(places.masters[i], places.masters[k]) for i, k in edges]
        targets = {target for source, target in pairs if source == places.rank}
        sources = {source for source, target in pairs if target == places.rank}
        return sorted({*node, *targets}), sorted({*node, *sources})

    # Local computations: what each process contributes to a sum.

    def shares(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return this node's part of the sum that is the mean over nodes; new tensors."""
        return [tensor.detach() / len(self._counted_nodes) for tensor in tensors]

    def shares_of_all(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Return this process' part of the sum that is the mean over processes, on `device`."""
        num_counted = len(self._counted_nodes) * self.places.nprocs_per_node
        shares = [tensor.detach().to(device) / num_counted for tensor in tensors]
        counts = self.places.node in self._counted_nodes
        return shares if counts else [torch.zeros_like(share) for share in shares]

    def only_masters(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return `tensors` on the masters of nodes, zeros on other processes."""
        counts = self.places.node in self._counted_nodes
        if self.places.nprocs_per_node == 1 and len(self._counted_nodes) == self.places.num_nodes:
            return list(tensors)
        return self._zero_unless(self.places.is_master and counts, tensors)

    def only_of(
        self, rank: int, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> list[torch.Tensor]:
        """Return `tensors` on the process `rank`, zeros on others, on `device`.

        Tensors of bool become int32.
        """
        numbers = [tensor.detach().to(device) for tensor in tensors]
        numbers = [t.to(torch.int32) if t.dtype == torch.bool else t for t in numbers]
        return self._zero_unless(self.places.rank == rank, numbers)

    # Collectives.

    def total(
        self, tensors: Sequence[torch.Tensor], groups: list[list[int]] | None = None
    ) -> list[torch.Tensor]:
        """Return sums over all processes, or those of each group; `tensors` may be overwritten.

        Communication: one all-reduce over all processes, or in each group, of the bytes of
          `tensors`.
        """
        if self.places.world_size == 1:
            return list(tensors)
        sums = {id(tensor): tensor for tensor in tensors}  # empty tensors stay as they are
        for same in by_dtype(tensors):
            sums |= dict(zip(map(id, same), self.backend.all_reduce(same, groups), strict=True))
        return [sums[id(tensor)] for tensor in tensors]

    def total_in_node(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return sums over the processes of this node; `tensors` may be overwritten.

        Communication: one all-reduce inside every node, of the bytes of `tensors`; none with one
          process per node.
        """
        if self.places.nprocs_per_node == 1:
            return list(tensors)
        return self.total(tensors, self.places.node_groups)

    def scatter_mean(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this process' part (n,) of the mean of `flat` (world_size * n,) over processes.

        Communication: one reduce-scatter over all processes.
        """
        world = self.places.world_size
        if world == 1:
            return flat
        nodes = self._counted_nodes
        if len(nodes) < self.places.num_nodes:
            world = len(nodes) * self.places.nprocs_per_node
            flat = flat if self.places.node in nodes else torch.zeros_like(flat)
        return self.backend.reduce_scatter(flat / world)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts (n,) of all processes in order of rank, (world_size * n,).

        Communication: one all-gather over all processes.
        """
        if self.places.world_size == 1:
            return part
        return self.backend.all_gather(part)

    def permute(self, value: torch.Tensor, edges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the value of the master that sends to this one by `edges` of nodes, or 0.

        Communication: one collective-permute, of the bytes of `value`.
        """
        masters = self.places.masters
        return self.backend.permute(value, [(masters[i], masters[k]) for i, k in edges])

    def _zero_unless(
        self, contributes: bool, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return `tensors`, or zeros if this process does not contribute; 0 * NaN would be NaN."""
        if not tensors:
            return []
        key = contributes, tensors[0].device
        if key not in self._masks:
            self._masks[key] = device_data([float(contributes)], torch.float32, key[1])
        mask = (self._masks[key] > 0).reshape(())  # scalars stay scalars
        return [torch.where(mask, t.detach(), torch.zeros_like(t)) for t in tensors]


def broadcast(
    buffers: Sequence[torch.Tensor],
    collectives: Collectives,
    device: torch.device,
    kind: Kind = Kind.BUFFERS,
) -> None:
    """Overwrite `buffers` with those of rank 0; with another `kind` they are other tensors.

    As with DDP, graphs of earlier forward passes that have saved them can still be differentiated.

    Communication: one all-reduce of their bytes; nothing without any.
    """
    if not buffers or collectives.places.world_size == 1:
        return
    with own_graph(device):
        sent = collectives.only_of(collectives.first, buffers, device)
    with collectives.graph(device, kind, sent):
        sums = collectives.total(sent)
    write_between_passes(zip(buffers, sums, strict=True))
    launch(device)


def average_buffers(
    buffers: Sequence[torch.Tensor], collectives: Collectives, device: torch.device
) -> None:
    """Overwrite floating buffers with their mean over all processes.

    Communication: one all-reduce of their bytes per dtype; nothing without any.
    """
    if not buffers or collectives.places.world_size == 1:
        return
    with own_graph(device):
        shares = collectives.shares_of_all(buffers, device)
    with collectives.graph(device, Kind.BUFFER_AVERAGE, shares) as writes:
        writes.extend(zip(buffers, collectives.total(shares), strict=True))


def average_gradients(
    params: Iterable[torch.Tensor], collectives: Collectives, device: torch.device
) -> None:
    """Overwrite the gradients of parameters with their mean over the processes of the node.

    A missing gradient counts as zero if another process of the node has one. If none has, `grad`
    stays None; in a graph in which values cannot be read (`torch_xla.compile(full_graph=True)`) it
    becomes zero.

    Communication: with several processes per node one all-reduce inside every node, of their bytes
      and of two numbers per parameter; sparse gradients are sent whole. A process that lacks a
      gradient then reads these numbers, and waits for an XLA device.
    """
    trained = [param for param in params if param.numel()]
    if not trained or collectives.places.nprocs_per_node == 1:
        return
    # Another process may have a gradient where this one has none, and all must send the same.
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        sparse_dims = [grad.sparse_dim() if grad.is_sparse else 0 for grad in grads]
        dense = [grad.to_dense() if grad.is_sparse else grad for grad in grads]
        shares = [grad.detach() / collectives.num_gradients_in_node for grad in dense]
        # In any dtype the sum of these flags is zero only if all of them are.
        present = [float(param.grad is not None) for param in trained]
        shares.append(device_data([*present, *sparse_dims], shares[0].dtype, device))
    del grads, dense
    with collectives.graph(device, Kind.GRADIENTS, shares):
        *means, numbers = collectives.total_in_node(shares)
    if not all(present):
        totals = [1.0] * len(trained)
        if collectives.backend.may_read():
            totals, dims = numbers.cpu().abs().reshape(2, -1).tolist()
            for i, total in enumerate(totals):
                if total and not present[i]:  # take the layout of the others' gradients
                    sparse_dims[i] = round(dims[i] / total)
        present = totals
    for param, mean, number, sparse_dim in zip(trained, means, present, sparse_dims, strict=True):
        if number:
            param.grad = mean.to_sparse(sparse_dim) if sparse_dim else mean
