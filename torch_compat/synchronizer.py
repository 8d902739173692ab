"""The master model's replicas on XLA devices, and transfers between both."""

from collections.abc import Callable, Iterable
from copy import deepcopy

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from . import runtime
from .autograd_threads import ensure_autograd_threads
from .master import MasterModel


class TPUSynchronizer(MasterModel):
    """The master model in shared memory, and transfers between it and its replicas.

    Args:
      model: module on the CPU; it becomes the master.
      post_init: function that is called with every replica once it is on its device, instead of the
        replica's `tie_weights()`.
      compress_grads: whether summed gradients are sent to the host as bfloat16.

    Raises:
      ValueError: the model has no parameters, or a tensor that is not on the CPU.
      OSError: shared memory, or the limit of open files, is exhausted.
    """

    def get_device_model_replica(self, device: torch.device, tie_weights: bool = True) -> nn.Module:
        """Copy the master to `device`, with zero gradients and without a second copy on the host.

        Parameters that share a tensor in the master share one in the replica.

        Args:
          device: device of the replica.
          tie_weights: whether to call `post_init`, or the replica's `tie_weights()` if it has one.
        """
        with torch.no_grad():
            hosts = [*self.master_model.parameters(), *self.master_model.buffers()]
            memo: dict[int, torch.Tensor] = {}
            for host, on_device in zip(hosts, runtime.to_device(hosts, device), strict=True):
                if isinstance(host, nn.Parameter):
                    on_device = nn.Parameter(on_device, requires_grad=host.requires_grad)
                memo[id(host)] = on_device
            # deepcopy uses the tensors in its memo instead of copying them.
            replica = deepcopy(self.master_model, memo)
            if tie_weights:
                self.finish_replica(replica)
            for parameter in replica.parameters():
                parameter.grad = torch.zeros_like(parameter)
        ensure_autograd_threads(device)
        return replica

    def send_params_to_device(self, replica: nn.Module) -> None:
        """Copy the master's parameters and buffers to this device's replica.

        It is one transfer of their size; copies inside the device are part of its next graph.
        """
        with torch.no_grad():
            targets = [*replica.parameters(), *replica.buffers()]
            sources = runtime.to_device(self.host_tensors(), targets[0].device)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def aggregate_grads_on_host(
        self,
        replica: nn.Module,
        *,
        add: bool,
        scale: float = 1.0,
        extra: Iterable[torch.Tensor] = (),
        before_write: Callable[[], object] | None = None,
    ) -> list[torch.Tensor]:
        """Sum gradients over all devices into the master's, and zero those of the replica.

        Call it for every device, each from its thread, after all of them have finished their
        previous graphs. It makes one all-reduce of the size of the gradients (half precision as
        float32), then one transfer to the host, by ordinal 0 only.

        Args:
          replica: replica of this device.
          add: whether to add to the master's gradients instead of replacing them.
          scale: factor of the sums.
          extra: further tensors on the device to sum and scale.
          before_write: function that ordinal 0 calls between the transfer and the writing.

        Returns:
          The sums of `extra` on the host, at ordinal 0; an empty list at other ordinals.
        """
        with torch.no_grad():
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in replica.parameters()
            ]
            runtime.run_pending()
            # Clones: the all-reduce overwrites its tensors, and the replica keeps its gradients.
            sums = [_wide(tensor).clone() for tensor in [*gradients, *extra]]
            xm.all_reduce(xm.REDUCE_SUM, sums, scale=scale, pin_layout=False)
            # With one device torch_xla skips the all-reduce, and the scale with it.
            if scale != 1.0 and xr.world_size() == 1:
                sums = [tensor * scale for tensor in sums]
            for gradient in gradients:
                gradient.zero_()
            if self.compress_grads:
                sums[: len(gradients)] = [g.bfloat16() for g in sums[: len(gradients)]]
            runtime.run_pending()
            if xr.global_ordinal() != 0:
                return []
            on_host = runtime.to_host(sums)
            if before_write is not None:
                before_write()
            self.write_gradients(on_host[: len(gradients)], add=add)
            return on_host[len(gradients) :]

    def fetch_buffers(self, replica: nn.Module) -> None:
        """Copy the replica's persistent buffers into the master's, as after its last step."""
        buffers = dict(replica.named_buffers())
        if self.persistent_buffers:
            self.write_buffers(runtime.to_host([buffers[n] for n in self.persistent_buffers]))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return half precision as float32, so that sums over devices lose nothing."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
