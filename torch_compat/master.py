"""A model and its gradients in shared host memory."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from .tensors import separate


class MasterModel:
    """The master model in shared memory, which all processes access.

    The model itself becomes the master: its parameters, gradients and buffers move into shared
    memory in place. Tensors whose elements share memory, such as expanded ones, become contiguous.
    Every parameter has a gradient there, initially zero; those of frozen and unused parameters stay
    zero. `tie_weights()` is called again if the model has it.

    Args:
      model: module on the CPU.
      post_init: function that is called with every replica once it is on its device, instead of the
        replica's `tie_weights()`.
      compress_grads: whether summed gradients are sent to the host as bfloat16.

    Raises:
      ValueError: the model has no parameters, or a tensor that is not on the CPU.
      OSError: shared memory, or the limit of open files, is exhausted.
    """

    def __init__(
        self,
        model: nn.Module,
        post_init: Callable[[nn.Module], object] | None = None,
        compress_grads: bool = False,
    ):
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.device.type != "cpu":
                raise ValueError(f"`model` must be on the CPU; {name!r} is on {tensor.device}.")
        self.compress_grads, self._post_init = compress_grads, post_init
        _tie_weights(model)  # before tensors are counted: the replicas' are tied
        parameters = list(model.parameters())
        if not parameters:
            raise ValueError("`model` has no parameters.")
        separate([*parameters, *model.buffers()])
        try:
            self.master_model = model.share_memory()
            self._gradients = _shared_like(parameters)
        except RuntimeError as error:
            raise OSError(
                f"`model` does not fit into shared memory ({error}): each parameter needs an open "
                "file (`ulimit -n`) and room in /dev/shm."
            ) from error
        # The tensors that the devices' process sees, even if the model later refers to others.
        self._parameters = [parameter.detach() for parameter in parameters]
        self._buffers = dict(model.named_buffers())
        state = model.state_dict(keep_vars=True)
        self.persistent_buffers = [name for name in self._buffers if name in state]
        for parameter, shared in zip(parameters, self._gradients, strict=True):
            if parameter.grad is not None:
                shared.copy_(parameter.grad)
            parameter.grad = shared

    def attach_gradients(self) -> None:
        """Make the shared tensors the gradients of the master's parameters again.

        `optimizer.zero_grad()` by default sets a gradient to None; then the shared one becomes
        zero. A gradient that has replaced the shared one is copied.
        """
        with torch.no_grad():
            for parameter, shared in zip(self._parameters_now(), self._gradients, strict=True):
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
        """Return the master's gradients in the order of `model.parameters()`, zeros if missing.

        Args:
          copy: whether to copy; False returns the shared tensors, to which the next step adds.
        """
        self.attach_gradients()
        return [gradient.clone() if copy else gradient for gradient in self._gradients]

    def set_host_parameters(self, new_host_parameters: Iterable[torch.Tensor]) -> None:
        """Copy values into the master's parameters, in shared memory.

        Tensors that have replaced the model's (`p.data = ...`, `load_state_dict(assign=True)`),
        buffers too, are copied as well, and the model then refers to the shared ones again.

        Args:
          new_host_parameters: as many tensors as `model.parameters()`, of the same shapes and
            dtypes, on the CPU; the master's own are valid.

        Raises:
          ValueError: the tensors do not fit; then nothing has been copied.
        """
        params = self._parameters_now()
        new = self._check_parameters(new_host_parameters)
        buffers = dict(self.master_model.named_buffers())
        if changed := sorted(buffers.keys() ^ self._buffers.keys()):
            raise ValueError(f"`model` must keep its buffers; it has gained or lost {changed}.")
        for name, old in self._buffers.items():
            _check_like("model", name, buffers[name], old)
        with torch.no_grad():
            pointers = {tensor.untyped_storage().data_ptr() for tensor in self._parameters}
            # A tensor that is a view of another parameter must be read before that is written.
            sources = [
                tensor.clone()
                if tensor.untyped_storage().data_ptr() in pointers and not _is_same(tensor, target)
                else tensor
                for tensor, target in zip(new, self._parameters, strict=True)
            ]
            for param, target, source in zip(params, self._parameters, sources, strict=True):
                if not _is_same(source, target):
                    target.copy_(source)
                if not _is_same(param, target):
                    param.data = target
            for name, target in self._buffers.items():
                if not _is_same(buffers[name], target):
                    target.copy_(buffers[name])
                    buffers[name].data = target

    def sample_parameters(self) -> list[bytes]:
        """Return some elements of every parameter, to notice that an optimizer has changed them."""
        # Not their versions, which fused optimizers and writes through `.data` leave as they are.
        flat = [parameter.detach().flatten() for parameter in self._parameters_now()]
        parts = [values[:: max(1, values.numel() // 32)].contiguous() for values in flat]
        return [part.view(torch.uint8).numpy().tobytes() for part in parts]

    def _parameters_now(self) -> list[nn.Parameter]:
        parameters = list(self.master_model.parameters())
        if len(parameters) != len(self._gradients):
            raise ValueError(
                f"`model` must keep its {len(self._gradients)} parameters while it is the master, "
                f"and has {len(parameters)}."
            )
        return parameters

    def _check_parameters(self, new: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        rule = "`new_host_parameters` must be tensors like those of model.parameters()"
        if isinstance(new, Mapping | nn.Module | torch.Tensor) or not isinstance(new, Iterable):
            raise ValueError(f"{rule}, got a {type(new).__name__}.")
        tensors, names = list(new), [name for name, _ in self.master_model.named_parameters()]
        if len(tensors) != len(names):
            raise ValueError(f"{rule}, {len(names)} of them; got {len(tensors)}.")
        for name, old, tensor in zip(names, self._parameters, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{rule}, got a {type(tensor).__name__} for {name!r}.")
            _check_like("new_host_parameters", name, tensor, old)
        return [tensor.detach() for tensor in tensors]

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the shared parameters, then the shared buffers, in a replica's order."""
        return [*self._parameters, *self._buffers.values()]

    def finish_replica(self, replica: nn.Module) -> None:
        """Call `post_init`, or else `tie_weights()`, for a copy of the master on its device.

        Raises:
          ValueError: it then has another number of parameters than the master.
        """
        (self._post_init or _tie_weights)(replica)
        count = len(list(replica.parameters()))
        if count != len(self._gradients):
            raise ValueError(
                f"`post_init`, tie_weights() and copy.deepcopy(model) must keep the number of "
                f"parameters: the replica has {count} and the master {len(self._gradients)}."
            )

    def write_gradients(self, values: Iterable[torch.Tensor], *, add: bool) -> None:
        """Write into the shared gradients, in a device process.

        Args:
          values: tensors on the CPU like `model.parameters()`; half precision is added in float32.
          add: whether to add to the gradients instead of replacing them.
        """
        with torch.no_grad():
            for shared, value in zip(self._gradients, values, strict=True):
                if add:
                    shared.add_(value)
                else:
                    shared.copy_(value)

    def write_buffers(self, values: Iterable[torch.Tensor]) -> None:
        """Write into the shared persistent buffers, in the order of `persistent_buffers`."""
        with torch.no_grad():
            for name, value in zip(self.persistent_buffers, values, strict=True):
                self._buffers[name].copy_(value)


def _tie_weights(model: nn.Module) -> None:
    getattr(model, "tie_weights", lambda: None)()


def _shared_like(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Return zeros like the parameters, in one block of shared memory per dtype."""
    views: dict[int, torch.Tensor] = {}
    for dtype in {parameter.dtype for parameter in parameters}:
        same = [parameter for parameter in parameters if parameter.dtype == dtype]
        sizes = [parameter.numel() for parameter in same]
        parts = torch.zeros(sum(sizes), dtype=dtype).share_memory_().split(sizes)
        views |= {id(p): part.view(p.shape) for p, part in zip(same, parts, strict=True)}
    return [views[id(parameter)] for parameter in parameters]


def _check_like(argument: str, name: str, tensor: torch.Tensor, old: torch.Tensor) -> None:
    for field in ("shape", "dtype", "device"):
        if getattr(tensor, field) != getattr(old, field):
            raise ValueError(
                f"`{argument}`: {name!r} has {field} {getattr(old, field)} in the master, got "
                f"{getattr(tensor, field)}."
            )


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether both tensors are the same elements of memory in the same order."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
