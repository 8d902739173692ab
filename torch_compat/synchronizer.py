"""A model and its gradients in shared host memory, and its replicas on the devices."""

from collections.abc import Iterable
from copy import deepcopy

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from . import runtime


class TPUSynchronizer:
    """The master model in shared memory, which every process sees, and transfers to and from it.

    The model itself becomes the master: its parameters, gradients and buffers move into shared
    memory in place. Every parameter has a gradient there, zero where nothing has come yet, and
    stays so for frozen and unused ones.

    Args:
        model: on the CPU; its parameters are floating-point.

    Raises:
        ValueError: if the model has no parameters, or one that is not on the CPU.
    """

    def __init__(self, model: nn.Module):
        named = list(model.named_parameters())
        if not named:
            raise ValueError("`model` has no parameters.")
        for name, tensor in [*named, *model.named_buffers()]:
            if tensor.device.type != "cpu":
                raise ValueError(f"`model` must be on the CPU; {name!r} is on {tensor.device}.")
        self.master_model = model.share_memory()
        self._gradients = []
        for _, parameter in named:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = parameter.grad.share_memory_()
            self._gradients.append(parameter.grad)

    def attach_gradients(self) -> None:
        """Make the shared gradients those of the master's parameters again.

        `optimizer.zero_grad()` by default drops a gradient; here that means to zero it. A gradient
        that was put in its place is copied.
        """
        with torch.no_grad():
            for parameter, shared in zip(
                self.master_model.parameters(), self._gradients, strict=True
            ):
                if parameter.grad is None:
                    shared.zero_()
                elif parameter.grad is not shared:
                    shared.copy_(parameter.grad)
                parameter.grad = shared

    def zero_grad(self) -> None:
        """Set the master's gradients to zero."""
        self.attach_gradients()
        for gradient in self._gradients:
            gradient.zero_()

    def get_aggregated_gradients(self, *, copy: bool = True) -> list[torch.Tensor]:
        """The master's gradients in the order of `model.parameters()`, zeros where there are none.

        Args:
            copy: False for the shared tensors themselves, which the next step adds to.
        """
        self.attach_gradients()
        return [gradient.clone() if copy else gradient for gradient in self._gradients]

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copy into the master's parameters.

        Args:
            new_host_parameters: as many tensors as `model.parameters()`, of the same shapes and
                dtypes, on the CPU. The master's own are left as they are.

        Raises:
            ValueError: if they do not fit; then nothing has been copied.
        """
        named = list(self.master_model.named_parameters())
        new = list(new_host_parameters)
        if len(new) != len(named):
            raise ValueError(
                f"`new_host_parameters` must have the model's {len(named)} tensors, got {len(new)}."
            )
        for (name, old), tensor in zip(named, new, strict=True):
            for what in ("shape", "dtype", "device"):
                if getattr(tensor, what) != getattr(old, what):
                    raise ValueError(
                        f"`new_host_parameters`: {name!r} has {what} {getattr(old, what)} in the "
                        f"model, got {getattr(tensor, what)}."
                    )
        with torch.no_grad():
            for (_, old), tensor in zip(named, new, strict=True):
                if tensor.data_ptr() != old.data_ptr():
                    old.copy_(tensor)

    def get_device_model_replica(self, device: torch.device, tie_weights: bool = True) -> nn.Module:
        """A copy of the master on `device`, with zero gradients; no second copy on the host.

        Parameters that share a tensor in the master share one in the replica.

        Args:
            device: where to.
            tie_weights: also call the replica's `tie_weights()`, where it has one.
        """
        with torch.no_grad():
            hosts = [*self.master_model.parameters(), *self.master_model.buffers()]
            memo: dict[int, torch.Tensor] = {}
            for host, moved in zip(hosts, runtime.to_device(hosts, device), strict=True):
                if isinstance(host, nn.Parameter):
                    moved = nn.Parameter(moved, requires_grad=host.requires_grad)
                memo[id(host)] = moved
            # deepcopy takes what is in its memo instead of copying it.
            replica = deepcopy(self.master_model, memo)
            tie = getattr(replica, "tie_weights", None)
            if tie_weights and tie is not None:
                tie()
            for parameter in replica.parameters():
                parameter.grad = torch.zeros_like(parameter)
        return replica

    def send_params_to_device(self, replica: nn.Module) -> None:
        """Copy the master's parameters and buffers to this device's replica.

        One transfer of their size; the copies inside the device join its next graph.
        """
        with torch.no_grad():
            targets = [*replica.parameters(), *replica.buffers()]
            hosts = [*self.master_model.parameters(), *self.master_model.buffers()]
            sources = runtime.to_device(hosts, targets[0].device)
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source)

    def aggregate_grads_on_host(
        self,
        replica: nn.Module,
        *,
        add: bool,
        scale: float = 1.0,
        extra: Iterable[torch.Tensor] = (),
    ) -> list[torch.Tensor]:
        """Sum the gradients over all devices, move them into the master's, zero the replica's.

        To be called for every device, each from its thread, after all of them have finished what
        came before: one all-reduce of the size of the gradients (half precision as float32), then
        one transfer to the host, by ordinal 0 alone.

        Args:
            replica: this device's.
            add: to the master's gradients, instead of in their place.
            scale: factor of the sums.
            extra: further tensors on the device to be summed and scaled along.

        Returns:
            The extra sums on the host, at ordinal 0; an empty list elsewhere.
        """
        with torch.no_grad():
            gradients = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for parameter in replica.parameters()
            ]
            runtime.run_pending()
            # The all-reduce writes into what it is given, and the replica keeps its gradients.
            sums = [_wide(tensor).clone() for tensor in [*gradients, *extra]]
            xm.all_reduce(xm.REDUCE_SUM, sums, scale=scale, pin_layout=False)
            if scale != 1.0 and xr.world_size() == 1:  # then the all-reduce is left out, scale too
                sums = [tensor * scale for tensor in sums]
            for gradient in gradients:
                gradient.zero_()
            runtime.run_pending()
            if xr.global_ordinal() != 0:
                return []
            on_host = runtime.to_host(sums)
            for host, total in zip(self._gradients, on_host, strict=False):
                if add:
                    host.add_(total)
                else:
                    host.copy_(total)
            return on_host[len(gradients) :]

    def fetch_buffers(self, replica: nn.Module) -> None:
        """Copy the replica's persistent buffers into the master's, as after its last step."""
        state = replica.state_dict(keep_vars=True)
        names = [name for name, _ in replica.named_buffers() if name in state]
        if not names:
            return
        masters = dict(self.master_model.named_buffers())
        on_host = runtime.to_host([state[name] for name in names])
        with torch.no_grad():
            for name, value in zip(names, on_host, strict=True):
                masters[name].copy_(value)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Half precision as float32, so that sums over devices lose nothing."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
