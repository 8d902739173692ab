"""Tensors that share memory, like torch's views: a write to one changes all others."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from jaxslowmo.mesh import vary_over, varying_axes

from ...memory import overlaps
from ._layouts import empty_tensor, layout_of
from ._torchax import Tensor

# Maps the viewed tensor's array and the view's new one to the viewed tensor's new array.
WriteBack = Callable[[jax.Array, jax.Array], jax.Array]


@jax.custom_jvp
def changed(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return `new`, with the derivative of `old`."""
    del old
    return new


@changed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


class View(Tensor):
    """A tensor whose elements are some of another tensor's.

    Its array is computed at construction, and again if it is read after the other tensor's array
    has changed.

    Attributes:
      parent: the other tensor, which may be a view itself.
      operation: the name of torch's operation that made it.
    """

    parent: Any
    operation: str
    _layout: torch.Tensor
    _array: jax.Array
    _origin_array: jax.Array
    _read: Callable[[jax.Array], jax.Array]
    _write_back: WriteBack | None

    @staticmethod
    def __new__(cls, parent: Any, layout: torch.Tensor, *rest: Any) -> Any:
        del parent, rest
        return empty_tensor(cls, layout)

    def __init__(
        self,
        parent: Any,
        layout: torch.Tensor,
        operation: str,
        array: jax.Array,
        read: Callable[[jax.Array], jax.Array],
        write_back: WriteBack | None = None,
    ) -> None:
        """Make a view of `parent`.

        Args:
          parent: the viewed tensor, which may be a view itself.
          layout: a tensor of the meta device with the shape and strides of torch's view.
          operation: name of torch's operation that makes the view.
          array: the view's elements.
          read: function from the parent's array to the view's; linear unless there is `write_back`.
          write_back: function from the parent's array and the view's new one to the parent's new
            array. None derives it from `read`.
        """
        self._env, self._layout, self.operation = parent._env, layout, operation
        self._array, self._read, self._write_back = array, read, write_back
        attach(self, parent)
        self._origin_array = self._origin()._elem

    @property
    def _elem(self) -> jax.Array:
        """The current elements in the shared memory."""
        array = self._origin()._elem
        if array is not self._origin_array:
            with torch.enable_grad():  # `read` runs operations of torch, and must stay linear
                self._array, self._origin_array = self._read(self.parent._elem), array
        return self._array

    @_elem.setter
    def _elem(self, new: jax.Array) -> None:
        new = self._checked(new)
        if self._is_origin():
            assert self._write_back is not None
            self.parent._elem = self._write_back(self.parent._elem, new)
        else:
            origin, reads, view = self._origin(), [self._read], self.parent
            while view is not origin:
                reads.append(view._read)
                view = view.parent
            with torch.enable_grad():
                origin._elem = _written(reads[::-1], origin._elem, new)
        self._array, self._origin_array = new, self._origin()._elem

    def _checked(self, new: jax.Array) -> jax.Array:
        """Broadcast and cast a written array to the view's shape and dtype.

        Raises:
          ValueError: several elements of the view share memory; the shape is another one.
        """
        shape = tuple(self._layout.shape)
        if overlaps(self._layout):
            raise ValueError(
                f"The module writes in place to the result of {self.operation}, of shape {shape}, "
                "several of whose elements share memory, so that torch does not allow it, either: "
                "write to a copy (x = x.clone())."
            )
        sizes = zip(new.shape[::-1], shape[::-1], strict=False)
        if new.ndim > len(shape) or any(size not in (1, wanted) for size, wanted in sizes):
            raise ValueError(
                f"The module writes a tensor of shape {new.shape} to the result of "
                f"{self.operation}, of shape {shape}: give a tensor of the same shape."
            )
        return jnp.broadcast_to(new, shape).astype(self._array.dtype)

    def _is_origin(self) -> bool:
        """Return whether views of this one write to it, and only this one writes to its parent."""
        return self._write_back is not None and not overlaps(layout_of(self.parent))

    def _origin(self) -> Any:
        """Return the nearest tensor that is written as a whole."""
        view = self.parent
        while isinstance(view, View) and not view._is_origin():
            view = view.parent
        return view


class Detached(View):
    """A tensor that shares its values with another one, but not its derivative."""

    def __init__(self, parent: Any, array: jax.Array | None = None) -> None:
        """Make a tensor with the values of `parent`.

        Args:
          parent: any tensor.
          array: these values, with the derivative of the new tensor. None: no derivative.
        """
        self._env, self._layout = parent._env, layout_of(parent)
        self.operation = getattr(parent, "operation", "aten.detach")
        self._origin_array = parent._elem
        self._array = jax.lax.stop_gradient(parent._elem) if array is None else array
        attach(self, parent)

    @property
    def _elem(self) -> jax.Array:
        """The parent's values, with the derivative of writes to this tensor."""
        array = self.parent._elem
        if array is not self._origin_array:
            self._array, self._origin_array = changed(self._array, array), array
        return self._array

    @_elem.setter
    def _elem(self, new: jax.Array) -> None:
        old, new = self._elem, self._checked(new)
        self._array = new if torch.is_grad_enabled() else changed(old, new)
        self.parent._elem = changed(self.parent._elem, new)
        self._origin_array = self.parent._elem

    def _is_origin(self) -> bool:
        return True

    @staticmethod
    def __new__(cls, parent: Any, array: jax.Array | None = None) -> Any:
        del array
        return empty_tensor(cls, layout_of(parent))


def source(x: Any) -> Any:
    """Return the tensor whose memory a view shares, and any other tensor itself."""
    while isinstance(x, View):
        x = x.parent
    return x


def attach(view: Any, parent: Any) -> None:
    """Make `view` read from `parent`, which keeps a weak reference to it."""
    view.parent = parent
    vars(parent).setdefault("_views", []).append(weakref.ref(view))


def moved_aside(x: Any) -> Any:
    """Move the state of `x` into a new tensor, which views of `x` then use; return it."""
    old = empty_tensor(type(x), layout_of(x))
    vars(old).update(vars(x))
    for reference in vars(x).pop("_views", []):
        view = reference()
        if view is not None and view.parent is x:
            view.parent = old
    return old


def become(x: Any, view: View) -> None:
    """Turn the tensor `x`, to which others may refer, into the view `view`."""
    x.__class__ = type(view)
    vars(x).clear()
    vars(x).update(vars(view))
    attach(x, view.parent)


def _written(
    reads: list[Callable[[jax.Array], jax.Array]], old: jax.Array, new: jax.Array
) -> jax.Array:
    """Return `old`, changed so that reading it through all `reads` gives `new`."""

    def read(array: jax.Array) -> jax.Array:
        for step in reads:
            array = step(array)
        return array

    def spread(values: jax.Array) -> jax.Array:
        # Under shard_map types say over which axes values vary, and both sides must say the same.
        like = vary_over(jnp.zeros(old.shape, values.dtype), varying_axes(old) | varying_axes(new))
        like = vary_over(like, varying_axes(jax.eval_shape(read, like)))
        return jax.linear_transpose(read, like)(vary_over(values, varying_axes(like)))[0]

    if not new.size:
        return old
    # Booleans have no transpose.
    is_bool = old.dtype == jnp.bool_
    values = spread(new.astype(jnp.uint8) if is_bool else new).astype(old.dtype)
    if new.size == old.size:
        return values
    return jnp.where(spread(jnp.ones(new.shape, jnp.uint8)) != 0, values, old)
