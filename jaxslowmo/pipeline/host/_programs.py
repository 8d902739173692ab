"""The compiled programs of one stage of the model, on the devices of its stage."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..._typing import PyTree
from ...mesh import map_replicas, own_keys
from ...tree import at_least_float32
from ..model import Keyed, quotient
from ..split import StageProgram, split_stage
from ._submeshes import SubMesh


class Microbatches(NamedTuple):
    """The types of one device's part of a microbatch, and whether keys come with it."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    tree: Any
    keyed: bool

    def of(self, leaves: Any, key: Any) -> PyTree:
        """The microbatch as the layers are given it."""
        batch = self.tree.unflatten(leaves)
        return Keyed(batch, key, jnp.int32(0)) if self.keyed else batch

    def types(self) -> PyTree:
        """Its types."""
        if not self.keyed:
            return self.tree.unflatten(self.leaves)
        return jax.eval_shape(self.of, self.leaves, jax.random.key(0))


class StagePrograms:
    """F, B, W and BW of one stage of the model on its sub-mesh.

    Activations, stash and what is kept have a leading dimension of replicas times data shards, one
    row per device (or group of devices along automatic axes); weights have one of replicas. No
    program holds a collective over replicas or data axes.

    Attributes:
      at: the devices.
      reads: per leaf of the microbatch, whether this stage looks at it.
      y: types of the stage's result on one device.
    """

    def __init__(
        self,
        fn: Callable[..., PyTree],
        at: SubMesh,
        weights: PyTree,
        x: PyTree,
        microbatches: Microbatches,
        *,
        is_last: bool,
        remat: bool,
    ) -> None:
        self.at = at
        self._fn, self._microbatches, self._is_last = fn, microbatches, is_last
        types = microbatches.types()
        self._split: StageProgram = split_stage(fn, weights, x, types, loss=is_last, remat=remat)
        self.y = self._split.y
        self.reads = self._split.reads[: len(microbatches.leaves)]
        mapped = partial(self._mapped, at)
        self.forward = jax.jit(
            mapped(self._forward, ("stacked", "device", "batch", "shared"), ("device", "device"))
        )
        ins = ("stacked", "batch", "shared", "device")
        self.backward_input = jax.jit(
            mapped(self._backward_input, (*ins, "device"), ("device", "device"))
        )
        self.backward_weight = jax.jit(
            mapped(self._backward_weight, (*ins, "device", "device"), "device"), donate_argnums=5
        )
        self.backward = jax.jit(
            mapped(self._backward, (*ins, "device", "device"), ("device", "device")),
            donate_argnums=5,
        )
        self.evaluate = jax.jit(
            mapped(self._evaluate, ("stacked", "device", "batch", "shared"), "device")
        )

    @staticmethod
    def _mapped(at: SubMesh, fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
        # Layers need not know that they are mapped: without types of what varies, loops of theirs
        # that begin with constants are as they would be on one device.
        return map_replicas(
            fn,
            mesh=at.mesh,
            axis_name=at.replica_axis,
            in_roles=ins,
            out_roles=outs,
            automatic=at.automatic,
            check_vma=False,
        )

    def _microbatch(self, data: list[jax.Array], key: jax.Array | None) -> PyTree:
        """The microbatch of this device, from the leaves that this stage reads."""
        given = iter(data)
        leaves = [
            next(given) if read else jnp.zeros(t.shape, t.dtype)
            for t, read in zip(self._microbatches.leaves, self.reads, strict=True)
        ]
        if key is not None:
            key = own_keys(key, (self.at.replica_axis, *self.at.data_axes))
        return self._microbatches.of(leaves, key)

    def _forward(self, weights: PyTree, x: PyTree, data: Any, key: Any) -> Any:
        return self._split.forward(weights, x, self._microbatch(data, key))

    def _evaluate(self, weights: PyTree, x: PyTree, data: Any, key: Any) -> Any:
        return self._fn(weights, x, self._microbatch(data, key))

    def _backward_input(self, weights: PyTree, data: Any, key: Any, stash: Any, dy: Any) -> Any:
        microbatch = self._microbatch(data, key)
        return self._split.backward_input(weights, microbatch, stash, self._seed(dy))

    def _backward_weight(
        self, weights: PyTree, data: Any, key: Any, stash: Any, kept: Any, total: PyTree
    ) -> PyTree:
        microbatch = self._microbatch(data, key)
        return _added(total, self._split.backward_weight(weights, microbatch, stash, kept))

    def _backward(
        self, weights: PyTree, data: Any, key: Any, stash: Any, dy: Any, total: PyTree
    ) -> tuple[PyTree, PyTree]:
        microbatch = self._microbatch(data, key)
        dx, grads = self._split.backward(weights, microbatch, stash, self._seed(dy))
        return dx, _added(total, grads)

    def _seed(self, dy: PyTree) -> PyTree:
        """The loss of a microbatch counts 1; what of the batch that is is told at the end."""
        return 1.0 if self._is_last else dy


class GradientPrograms:
    """What is done with the gradients of one stage of the model once per step.

    Attributes:
      zeros: of stacked weights, where each device sums the gradients of its microbatches.
      mean: of these sums, the mean over microbatches and data shards, stacked per replica; the one
        reduction over the data axes in a step.
      cast: gradients in the dtypes of the weights, over the mean weight of a microbatch where the
        loss is the quotient of a sum and a weight.
    """

    def __init__(self, at: SubMesh, num_microbatches: int) -> None:
        self._axes = at.data_axes
        self._share = 1.0 / (num_microbatches * at.shards)
        mapped = partial(
            map_replicas,
            mesh=at.mesh,
            axis_name=at.replica_axis,
            automatic=at.automatic,
            check_vma=False,
        )
        self.zeros = jax.jit(mapped(_zeros, in_roles=("stacked",), out_roles="device"))
        self.mean = jax.jit(mapped(self._mean, in_roles=("device",), out_roles="stacked"))
        self.cast = jax.jit(_cast)

    def _mean(self, total: PyTree) -> PyTree:
        def of_all(x: jax.Array) -> jax.Array:
            return (lax.psum(x, self._axes) if self._axes else x) * self._share

        return jax.tree.map(of_all, total)


def _zeros(weights: PyTree) -> PyTree:
    """At least in float32, so that many microbatches of half precision add up."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, at_least_float32(w.dtype)), weights)


def _added(total: PyTree, grads: PyTree) -> PyTree:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)


def _cast(grads: PyTree, like: PyTree, weight: jax.Array | None) -> PyTree:
    def one(x: jax.Array, like: jax.Array) -> jax.Array:
        if weight is not None:
            x = quotient(x, weight.reshape(-1, *[1] * (x.ndim - 1)))
        return x.astype(like.dtype)

    return jax.tree.map(one, grads, like)
