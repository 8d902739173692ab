"""Forward and backward passes of a torch module on a mesh of jax's devices, a batch for each."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..settings import Settings
from ..tensors import call_model, dumps, loads, loss_of, map_tensors
from ._arrays import jax_dtype, keeps_values, to_numpy, to_torch
from ._functional import Arrays, Functional

_AXIS = "device"


@dataclass(frozen=True)
class _Slot:
    """A placeholder for tensor `index` in the structure of a batch."""

    index: int


@dataclass
class _Batch:
    """The batch of one device: its tensors, and the structure around them."""

    tensors: list[np.ndarray]
    structure: bytes  # pickled, `_Slot`s in the places of tensors

    def shape(self) -> tuple[Any, ...]:
        """Return the key of the program for this batch: structure, shapes and dtypes."""
        return self.structure, *((array.shape, array.dtype) for array in self.tensors)


class MeshProgram:
    """A module on all devices, with equal parameters and separate other state on each.

    Parameters are replicated. Buffers, frozen parameters, sums of gradients, keys of random numbers
    and batches have a leading axis of devices, along which they are sharded.

    Args:
      module: module on the CPU; its tensors are read once, then it is only traced.
      devices: devices of this process.
      seed_base: base of seeds; device i's random key has seed (seed_base + i) modulo 2**32.
      micro_batches: number of calls of `add` before each `exchange`; losses and gradients are means
        over them.
      compress: whether gradients are sent to the host as bfloat16.

    Attributes:
      bytes_to_device: bytes sent so far to all devices together.
      gradient_bytes: bytes of gradients and loss that one `exchange` sends to the host.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        devices: Sequence[Any],
        *,
        seed_base: int,
        micro_batches: int,
        compress: bool,
    ):
        self._module, self._micro_batches, self._compress = module, micro_batches, compress
        self._devices = list(devices)
        self._mesh = Mesh(np.array(self._devices), (_AXIS,))
        self._everywhere = NamedSharding(self._mesh, P())
        self._each = NamedSharding(self._mesh, P(_AXIS))
        self._all_parameters = [name for name, _ in module.named_parameters()]
        self._likes = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.bytes_to_device = 0
        seeds = [np.uint32((seed_base + i) % 2**32) for i in range(len(devices))]
        self._keys = self._spread(
            np.stack([jax.random.key_data(jax.random.key(seed)) for seed in seeds])
        )
        self._trace_again()
        self.load(self._likes.values())

    def change(self, changes: Settings) -> None:
        """Apply changed settings of the model; all programs are traced and compiled again.

        Call it only if nothing has been added since the last `exchange`.

        Raises:
          ValueError: jax cannot train a parameter that now requires gradients.
        """
        changes.apply(self._module)
        count = len(self._devices)
        params, carried = jax.device_get((self._params, self._carried))
        copies = {n: np.broadcast_to(x, (count, *x.shape)) for n, x in params.items()}
        self._trace_again()
        self._place({**copies, **carried})

    def _trace_again(self) -> None:
        self._functional = Functional("TPUManager", self._module)
        trained = set(self._functional.trained)
        self._wide = {
            name: _summed_in(jax_dtype(self._likes[name].dtype))
            for name in self._all_parameters
            if name in trained
        }
        loss_dtype = np.result_type(np.float32, *self._wide.values())
        self._compile = lru_cache(maxsize=32)(self._programs)
        self._exchange = _exchange_program(self._mesh, self._compress)
        count, likes = len(self._devices), self._likes
        sums = {n: np.zeros((count, *likes[n].shape), dtype) for n, dtype in self._wide.items()}
        self._sums, self._losses = self._spread((sums, np.zeros(count, loss_dtype)))
        self.gradient_bytes = loss_dtype.itemsize + sum(
            likes[n].numel() * (2 if self._compress else d.itemsize) for n, d in self._wide.items()
        )

    def load(self, tensors: Iterable[torch.Tensor]) -> None:
        """Load these parameters, then buffers; they have been read when this returns."""
        values = {}
        for (name, like), tensor in zip(self._likes.items(), tensors, strict=True):
            value = to_numpy(tensor.to(like.dtype))
            values[name] = np.broadcast_to(value, (len(self._devices), *value.shape))
        self._place(values)

    def _place(self, values: dict[str, np.ndarray]) -> None:
        """Send the values of each device, (devices, ...), to the devices."""
        params = {name: values[name][0] for name in self._wide}
        self._params = jax.device_put(params, self._everywhere)
        self._carried = self._spread({n: x for n, x in values.items() if n not in params})
        self.bytes_to_device += sum(x.nbytes for x in params.values()) * len(self._devices)

    def add(self, batches: Sequence[Any]) -> None:
        """Run forward and backward, each device on its batch, and add to the sums of gradients.

        Batches of one shape and structure run as one program over all devices, others as one
        program for each.

        Raises:
          ValueError: integers that jax's dtypes do not hold.
          Exception: an error that the module raises while it is traced.
        """
        parts = [_split_batch(batch) for batch in batches]
        if all(batch.shape() == parts[0].shape() for batch in parts):
            tensors = [np.stack(arrays) for arrays in zip(*(b.tensors for b in parts), strict=True)]
            whole, _ = self._compile(parts[0].structure)
            state = self._carried, self._sums, self._losses, self._keys
            after = whole(self._params, *state, self._spread(tensors))
        else:
            after = self._add_one_by_one(parts)
        self._carried, self._sums, self._losses, self._keys = after

    def _add_one_by_one(self, batches: Sequence[_Batch]) -> Any:
        everything = self._params, self._carried, self._sums, self._losses, self._keys
        # All shards are taken before any program runs, since programs donate their arguments.
        shards = [
            jax.tree.map(lambda array, device=device: _shard_on(array, device), everything)
            for device in self._devices
        ]
        parts = []
        for shard, device, batch in zip(shards, self._devices, batches, strict=True):
            _, single = self._compile(batch.structure)
            tensors = [array[None] for array in batch.tensors]
            self.bytes_to_device += sum(array.nbytes for array in tensors)
            parts.append(single(*shard, jax.device_put(tensors, device)))

        def join(*shards: jax.Array) -> jax.Array:
            shape = (len(shards), *shards[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._each, list(shards))

        return jax.tree.map(join, *parts)

    def exchange(self) -> tuple[float, list[torch.Tensor]]:
        """Return mean loss and gradients over devices and microbatches, and reset the sums.

        Communication: one all-reduce of the gradients, and their transfer from one device.

        Returns:
          The loss, and the gradients in the order of the module's parameters, zeros for frozen
          ones; half precision as float32.
        """
        means, (self._sums, self._losses) = self._exchange(self._sums, self._losses)
        loss, means = jax.device_get(jax.tree.map(lambda x: x.addressable_data(0), means))
        gradients = {n: torch.zeros((), dtype=self._likes[n].dtype) for n in self._all_parameters}
        for name, mean in means.items():
            gradients[name] = torch.from_numpy(mean.astype(self._wide[name]))
        return float(loss), [*gradients.values()]

    def buffers(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Return buffers of device 0, on the host."""
        names = list(names)
        arrays = jax.device_get([self._carried[name].addressable_data(0) for name in names])
        return [
            to_torch(array[0], self._likes[name]) for name, array in zip(names, arrays, strict=True)
        ]

    def _spread(self, arrays: Any) -> Any:
        self.bytes_to_device += sum(array.nbytes for array in jax.tree.leaves(arrays))
        return jax.device_put(arrays, self._each)

    def _programs(self, structure: bytes) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Compile two programs for a structure of batches: for all devices, and for one."""
        local = self._local(loads(structure))
        each = P(_AXIS)
        whole = jax.shard_map(
            local,
            mesh=self._mesh,
            in_specs=(P(), each, each, each, each, each),
            out_specs=each,
            check_vma=False,
        )
        donated = (1, 2, 3, 4)
        return jax.jit(whole, donate_argnums=donated), jax.jit(local, donate_argnums=donated)

    def _local(self, structure: Any) -> Callable[..., Any]:
        """Return the program of one device; all but parameters has a leading axis of size 1."""

        def local(
            params: Arrays, carried: Arrays, sums: Arrays, losses: Any, keys: Any, tensors: Any
        ) -> Any:
            key, step_key = jax.random.split(jax.random.wrap_key_data(keys[0]))

            def loss(params: Arrays) -> tuple[jax.Array, Arrays]:
                def run(module: torch.nn.Module, tensors: Any) -> torch.Tensor:
                    batch = map_tensors(structure, lambda slot: tensors[slot.index], _Slot)
                    return loss_of(call_model(module, batch)) / self._micro_batches

                state = _first(carried)
                return self._functional.call(run, params, state, step_key, _first(tensors))

            (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
            sums = {name: sums[name] + gradients[name] for name in sums}  # `sums` are wider
            after = jax.tree.map(lambda array: array[None], after)
            return after, sums, losses + value, jax.random.key_data(key)[None]

        return local


def _exchange_program(mesh: Mesh, compress: bool) -> Callable[..., Any]:
    """Compile the map from sums to (mean loss, mean gradients) and zeros."""

    def local(sums: Arrays, losses: jax.Array) -> Any:
        loss, means = jax.tree.map(lambda x: x[0] / mesh.size, jax.lax.psum((losses, sums), _AXIS))
        if compress:
            means = {name: mean.astype(jnp.bfloat16) for name, mean in means.items()}
        return (loss, means), jax.tree.map(jnp.zeros_like, (sums, losses))

    each = P(_AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=(P(), each), check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


def _split_batch(batch: Any) -> _Batch:
    tensors: list[np.ndarray] = []

    def take(tensor: torch.Tensor) -> _Slot:
        if not tensor.is_floating_point() and not keeps_values(tensor):
            raise ValueError(
                f"A batch has a tensor of {tensor.dtype} with values that jax's 32 bits do not "
                f"hold: between {tensor.min()} and {tensor.max()}."
            )
        tensors.append(to_numpy(tensor))
        return _Slot(len(tensors) - 1)

    structure = map_tensors(batch, take)
    return _Batch(tensors, dumps(structure))


def _shard_on(array: jax.Array, device: Any) -> jax.Array:
    """Return a device's shard of an array."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[0], tree)


def _summed_in(dtype: Any) -> np.dtype:
    """Return float32 for half precision, so that sums lose nothing."""
    return np.dtype(jnp.promote_types(dtype, jnp.float32))
