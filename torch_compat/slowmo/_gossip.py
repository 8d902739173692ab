"""One exchange of stochastic gradient push."""

from collections.abc import Sequence

import torch

from ._collectives import Collectives, device_data
from ._graphs import GossipPlan


class Gossip:
    """The exchanges of a plan, for one process.

    Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019
      (arXiv:1811.10792), algorithm 1.
    """

    def __init__(self, plan: GossipPlan, collectives: Collectives) -> None:
        self.plan = plan
        self.collectives = collectives
        self._shares: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def exchange(
        self, number: int, numerators: Sequence[torch.Tensor], weight: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Send to the peers of exchange `number` and mix in what arrives.

        x <- P x and w <- P w, the rows of this process' node; all processes of a node then hold
        what its master computed. To be called inside `own_graph`.

        Args:
          number: 0, 1, ...; the plan starts over after its last round.
          numerators: w * parameters, packed in one vector per floating dtype.
          weight: (1,) float32.

        Returns:
          The new numerators, and the new weight: `weight` itself where weights stay 1.

        Communication: per dtype one collective-permute between masters for every permutation of the
          round, of the bytes of `numerators`; 4 bytes of w where weights move; then
          `Collectives.total_in_node` of the same.
        """
        index = number % len(self.plan.rounds)
        new = [self._of_master(self._mixed(index, flat)) for flat in numerators]
        if self.plan.weight_moves:
            weight = self._of_master(self._mixed(index, weight))
        return new, weight

    def _of_master(self, value: torch.Tensor) -> torch.Tensor:
        return self.collectives.total_in_node(self.collectives.only_masters([value]))[0]

    def _mixed(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """This node's row of P times `value` of all nodes, at least in float32."""
        wide = torch.promote_types(value.dtype, torch.float32)
        kept, *received = self._own_shares(index, wide, value.device).split(1)
        mixed = kept * value.to(wide)
        for share, edges in zip(received, self.plan.rounds[index].permutations, strict=True):
            mixed = mixed + share * self.collectives.permute(value, edges).to(wide)
        return mixed.to(value.dtype)

    def _own_shares(self, index: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What this node keeps, then its share of what arrives by each permutation."""
        key = index, dtype, device
        if key not in self._shares:
            node, round_ = self.collectives.places.node, self.plan.rounds[index]
            shares = [round_.kept[node], *round_.received[:, node]]
            self._shares[key] = device_data(shares, dtype, device)
        return self._shares[key]
