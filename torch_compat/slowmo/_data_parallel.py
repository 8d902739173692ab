"""What processes share besides parameters: buffers, and gradients inside a node."""

from collections.abc import Sequence

import torch

from ._collectives import Collectives, own_graph


def broadcast(
    buffers: Sequence[torch.Tensor], collectives: Collectives, device: torch.device
) -> None:
    """All processes get rank 0's buffers.

    Communication: one all-reduce of their bytes.
    """
    with own_graph(device):
        spoken = collectives.only_first(buffers)
    with own_graph(device) as writes:
        writes.extend(zip(buffers, collectives.total(spoken), strict=True))


def average_gradients(
    trained: Sequence[torch.nn.Parameter], collectives: Collectives, device: torch.device
) -> None:
    """Gradients become their mean over the processes of the node.

    Communication: one all-reduce inside every node, of the bytes of `trained`.
    """
    # Another process may have a gradient where this one has none, and all must send alike.
    with torch.no_grad():
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        shares = [grad.detach() / collectives.places.nprocs_per_node for grad in grads]
    del grads
    with own_graph(device):
        means = collectives.total_in_node(shares)
    for param, mean in zip(trained, means, strict=True):
        param.grad = mean
