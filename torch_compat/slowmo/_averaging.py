"""What the base algorithms do to parameters: exact averages, and exchanges with peers."""

from collections.abc import Sequence

import torch

from ._collectives import Collectives, own_graph
from ._flat import pack, times, unpack
from ._gossip import Gossip
from ._half import Masters
from ._push_sum import PushSum


class Averaging:
    """Averages of the parameters of one process with those of others; all take part alike.

    Attributes:
      exchanges: exchanges with peers so far, which tell the round of the next.
    """

    def __init__(self, collectives: Collectives, gossip: Gossip, push_sum: PushSum) -> None:
        self._collectives = collectives
        self._gossip = gossip
        self._push_sum = push_sum
        self.exchanges = 0

    def average(
        self, params: Sequence[torch.Tensor], masters: Masters | None, device: torch.device
    ) -> None:
        """Parameters become their mean over nodes, the push-sum weight 1.

        Communication: one all-reduce of their bytes, and of 4 where weights move.
        """
        weights = [self._push_sum.weight] if self._push_sum.moves else []
        with own_graph(device):
            numerators = self._push_sum.numerators(params)
            shares = self._collectives.shares([*numerators, *weights])
            sent = [] if masters is None else shares[: len(params)]
            shares = self._collectives.only_masters(shares)
        residuals = []
        if masters is not None:
            # Shares in half precision are rounded, and the residual must know how: only now are
            # they values, which no optimisation computes again at another precision.
            with own_graph(device):
                sent = [share.float() * self._collectives.places.num_nodes for share in sent]
                residuals = masters.residuals(sent)
        with own_graph(device):
            sums = self._collectives.total(shares)
        with own_graph(device) as writes:
            means = sums[: len(params)]
            if self._push_sum.moves:
                means = [times(mean, 1 / sums[-1]) for mean in means]
                self._push_sum.reset()
            writes.extend(
                zip(params, means, strict=True)
                if masters is None
                else masters.restored(residuals, means)
            )
        self._push_sum.is_numerator = False

    def exchange(
        self, params: Sequence[torch.Tensor], masters: Masters | None, device: torch.device
    ) -> None:
        """One exchange with the peers of the round.

        Communication: that of `Gossip.exchange`.
        """
        push_sum = self._push_sum
        with own_graph(device):
            numerators = push_sum.numerators(params)
            residuals = masters.residuals(numerators) if masters else []
            flats = pack(numerators)
        with own_graph(device):
            flats, push_sum.weight = self._gossip.exchange(self.exchanges, flats, push_sum.weight)
        with own_graph(device) as writes:
            new = unpack(params, flats)
            writes.extend(
                zip(params, push_sum.estimates(new), strict=True)
                if masters is None
                else masters.restored(residuals, new)
            )
        # Masters stay numerators, and parameters with them until the next forward pass.
        push_sum.is_numerator = masters is not None
        self.exchanges += 1
