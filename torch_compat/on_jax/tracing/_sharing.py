"""Operations of torch that return views, in place of torchax's versions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._mode_utils import no_dispatch

from ._layouts import layout_of, on_layouts
from ._torchax import Tensor
from ._views import Detached, View, WriteBack, become, changed, moved_aside

_ATEN: Any = torch.ops.aten
_TENSOR: Any = torch.Tensor
_is_alias_of: Any = vars(torch._C)["_is_alias_of"]

# By their schemas the results may share memory, but torchax's never do.
_COPIES = (_ATEN.lift_fresh, _ATEN.pin_memory, _ATEN.to)

_WRITE_BACK: dict[Any, WriteBack] = {
    _ATEN.view_as_real.default: lambda _, new: jax.lax.complex(new[..., 0], new[..., 1]),
    _ATEN.view_as_complex.default: lambda _, new: jnp.stack([new.real, new.imag], -1),
}

# Dtypes of a () tensor that selects like a number; other dtypes are masks.
_POSITIONS = (torch.int8, torch.int16, torch.int32, torch.int64)

# Maps an operation that changes a tensor's shape in place to the one that is not in place.
CHANGES_OF_SHAPE: dict[Any, Any] = {
    _ATEN.as_strided_.default: _ATEN.as_strided.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
}


def shares_memory(func: Any) -> bool:
    """Return whether an operation's result may share memory with its first argument."""
    return isinstance(func, torch._ops.OpOverload) and _shares_memory(func)


@functools.cache
def _shares_memory(func: Any) -> bool:
    aliases = [x.alias_info for x in func._schema.returns]
    return func.overloadpacket not in _COPIES and any(a and not a.is_write for a in aliases)


def view(func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation whose result may share memory with its first argument.

    Args:
      func: the operation.
      run: function of `(args, kwargs)` that runs it by torchax.
      args: its arguments, the first a tensor of torchax.
      kwargs: its keyword arguments.
    """
    parent, rest, operation = args[0], args[1:], str(func.overloadpacket)
    env = parent._env
    if func is _ATEN.detach.default:
        return Detached(parent)
    layout = layout_of(parent)
    layouts = on_layouts(func, (layout, *rest), kwargs)
    if layouts is layout:  # such as x.contiguous()
        return parent
    is_list = isinstance(layouts, list | tuple)
    layouts = list(layouts) if is_list else [layouts]
    if not all(_is_alias_of(layout, part) for part in layouts):
        return run(args, kwargs)
    if func is _ATEN.as_strided.default:
        parent, rest = _contiguous_source(parent), (*rest[:2], layouts[0].storage_offset())

    def read(x: Any) -> list[jax.Array]:
        out = run((x, *rest), kwargs)
        return [part.jax() for part in (out if is_list else [out])]

    write_back = _WRITE_BACK.get(func) or _by_index(_index_of(func, parent, rest, kwargs))
    views = [
        View(parent, part, operation, array, lambda x, i=i: read(Tensor(x, env))[i], write_back)
        for i, (part, array) in enumerate(zip(layouts, read(parent), strict=True))
    ]
    return views if is_list else views[0]


def _index_of(func: Any, parent: Any, rest: Any, kwargs: Any) -> Any:
    """Return the index that is equivalent to an operation, or None."""
    if kwargs or func not in (_ATEN.select.int, _ATEN.slice.Tensor):
        return None
    dim, *where = rest or (0,)
    if func is _ATEN.select.int:
        index = where[0]
    else:
        start, end, step = (*where, None, None, None)[:3]
        index = slice(start, end, step)
    return (slice(None),) * (dim % len(parent.shape)) + (index,)


def _by_index(index: Any) -> WriteBack | None:
    return None if index is None else lambda old, new: old.at[index].set(new)


def _contiguous_source(x: Any) -> Any:
    """Return the contiguous tensor whose memory `x` shares.

    Raises:
      ValueError: it is not contiguous, or has another dtype.
    """
    root, links = x, []
    while isinstance(root, View):
        links.append(root)
        root = root.parent
    if not layout_of(root).is_contiguous() or root.dtype != x.dtype:
        raise ValueError(
            "The module uses as_strided on a tensor that is not contiguous, or on complex numbers "
            "as real ones, whose memory arrays of jax do not have: call x.contiguous() before."
        )
    return Detached(root) if any(isinstance(link, Detached) for link in links) else root


def change_shape(func: Any, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Change the shape of the first argument in place, as in `aten.unsqueeze_`.

    Existing views of it keep their elements.

    Args:
      func: the operation that is not in place, such as `aten.unsqueeze`.
      run: function of `(args, kwargs)` that runs it by torchax.
      args: the arguments, the first a tensor of torchax.
      kwargs: the keyword arguments.
    """
    x, rest = args[0], args[1:]
    become(x, view(func, run, (moved_aside(x), *rest), kwargs))
    with no_dispatch(), torch._C.DisableTorchFunction():  # update the shape in torch's C++ tensor
        torch.Tensor.as_strided_(x, x._layout.shape, x._layout.stride())
    return x


def rebind(x: Any, other: Any) -> None:
    """Do `x.data = other`: the tensor takes the other's memory, and keeps its derivative.

    Raises:
      ValueError: `other` has another shape or dtype.
    """
    other = x._env.constant(other)
    if (other.shape, other.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"The module sets `.data` of a tensor of shape {tuple(x.shape)} and {x.dtype} to one "
            f"of {tuple(other.shape)} and {other.dtype}, which torchax's tensors cannot do: set "
            "the attribute that holds the tensor."
        )
    if other is not x:
        become(x, Detached(other, changed(moved_aside(x)._elem, other._elem)))


def define(env: Any) -> None:
    """Define the operations of this module in an environment of torchax."""

    def get(x: Any, key: Any) -> Any:
        index = _basic_index(key)
        if index is None:
            if isinstance(key, list):
                key = (key,) if all(isinstance(i, int) for i in key) else tuple(key)
            return Tensor(x._elem[env.t2j_iso(key)], env)
        for_layout = tuple(0 if isinstance(i, jax.Array) else i for i in index)
        layout = on_layouts(_TENSOR.__getitem__, (layout_of(x), for_layout), {})
        read, write_back = lambda array: array[index], _by_index(index)
        return View(x, layout, "indexing", read(x._elem), read, write_back)

    def put(x: Any, key: Any, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=x.dtype)
        if _basic_index(key) is None:
            _put_by_torchax(x, key, value)
        else:
            target, new = get(x, key), env.constant(value).jax()
            extra = max(new.ndim - target.ndim, 0)
            # As in torch, leading dimensions of size 1 are dropped.
            target._elem = new.reshape(new.shape[extra:]) if set(new.shape[:extra]) == {1} else new

    def copy(x: Any, y: Any, non_blocking: bool = False) -> Any:
        del non_blocking
        new = y.jax().astype(x._elem.dtype)
        # torchax's attention adds a mask of more dimensions in place.
        has_more = not isinstance(x, View) and new.ndim > len(x.shape)
        x._elem = new if has_more else jnp.broadcast_to(new, x.shape)
        return x

    def detach(x: Any) -> Any:
        become(x, Detached(moved_aside(x)))
        return x

    env.override_op_definition(_TENSOR.__getitem__, get, is_view_op=True)
    for name in (_TENSOR.detach_, _ATEN.detach_.default):
        env.override_op_definition(name, detach, is_view_op=True)
    env.override_op_definition(_TENSOR.__setitem__, put, is_view_op=True)
    env.override_op_definition(_ATEN.copy_, copy, is_view_op=True)
    env._ops[_ATEN.unbind.int] = env._ops[_ATEN.unbind_copy]
    env._ops[_ATEN.contiguous] = env._ops[_ATEN.clone]
    del env._ops[torch.tensor_split]  # torch decomposes it into slices


def _basic_index(key: Any) -> tuple[Any, ...] | None:
    """Return a torch index that makes a view as an index of jax; None if it copies."""
    index = []
    for item in key if isinstance(key, tuple) else (key,):
        if isinstance(item, Tensor) and item.shape == () and item.dtype in _POSITIONS:
            index.append(item.jax())
        elif isinstance(item, bool):  # a mask
            return None
        elif item is None or item is Ellipsis or isinstance(item, slice | int | np.integer):
            index.append(item)
        else:
            return None
    return tuple(index)


def _method(name: str) -> Any:
    """Return torch's own method for tensors of an environment with views, else torchax's."""
    by_torchax, by_torch = vars(Tensor)[name], getattr(torch.Tensor, name)

    @functools.wraps(by_torchax)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (by_torch if _has_views(self) else by_torchax)(self, *args, **kwargs)

    return method


def _has_views(x: Any) -> bool:
    return getattr(x._env, "has_views", False)


def _requires_grad() -> property:
    by_torch: Any = vars(torch._C.TensorBase)["requires_grad"]

    def get(x: Any) -> bool:
        return vars(x).get("_is_trained", False) if _has_views(x) else by_torch.__get__(x)

    def put(x: Any, value: bool) -> None:
        if _has_views(x):
            x._is_trained = value
        else:
            by_torch.__set__(x, value)

    return property(get, put)


def _data() -> property:
    by_torchax = vars(Tensor)["data"]

    def get(x: Any) -> Any:
        if not _has_views(x):
            return by_torchax.fget(x)
        return x._env.dispatch(_ATEN.detach.default, (), (x,), {})

    def put(x: Any, other: Any) -> None:
        (rebind if _has_views(x) else by_torchax.fset)(x, other)

    return property(get, put)


_put_by_torchax = vars(Tensor)["__setitem__"]
for _name in ("__setitem__", "detach", "flatten", "type_as"):
    setattr(Tensor, _name, _method(_name))
setattr(Tensor, "data", _data())  # noqa: B010
setattr(Tensor, "requires_grad", _requires_grad())  # noqa: B010
