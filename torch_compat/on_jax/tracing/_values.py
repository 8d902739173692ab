"""Values of tensors that depend only on constants, and the layers that make operations."""

import itertools
import sys
import traceback
from typing import Any

import jax
import torch
from torch.fx.node import map_arg

from ...tensors import overlaps
from .._arrays import PLAIN_TENSORS
from ._errors import layer_of, name_of, refusal
from ._internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FunctionalTensor,
    TorchDispatchMode,
    get_proxy_mode,
    get_proxy_slot,
    has_changed,
    no_dispatch,
    schema_of,
)

_ATEN: Any = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
_INDEXING = {
    _ATEN.index,
    _ATEN.index_put,
    _ATEN.index_put_,
    _ATEN._unsafe_index_put,
    _ATEN.masked_select,
}
_NEED_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def constant(x: torch.Tensor) -> Any:
    """Return a tensor that was made outside of the trace as one of it."""
    with no_dispatch():
        x = x.detach()
    return FunctionalTensor.to_functional(x)


def without_views(x: Any) -> Any:
    """Return the tensor of the graph in a tensor that views may share."""
    return x.from_functional() if isinstance(x, FunctionalTensor) else x


class Values(TorchDispatchMode):
    """Computes what torch needs to know of constants, notes layers, and refuses lost writes.

    It is entered in a trace, after the modes of the trace.

    Attributes:
      seen: ids of tensors that were arguments of an operation.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        super().__init__()
        self._names = {} if module is None else {id(m): name for name, m in module.named_modules()}
        self.seen = set[int]()
        self._outside: dict[int, tuple[torch.Tensor, Any]] = {}  # by id: itself, and traced
        tracer: Any = get_proxy_mode()
        self._tracer = tracer.tracer
        self._known: dict[torch.fx.Node, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of a trace."""
        kwargs = kwargs or {}
        leaves = jax.tree.leaves((args, kwargs))
        self.seen.update(id(x) for x in leaves if isinstance(x, torch.Tensor))
        self._refuse_writes(func, args, kwargs)
        if func is not _ATEN.lift_fresh.default:
            args, kwargs = jax.tree.map(self._as_traced, (args, kwargs))
        nodes = self._tracer.graph.nodes
        last = next(reversed(nodes), None)
        try:
            if func is _ATEN._linalg_check_errors.default:  # of values
                return None
            if func.overloadpacket in _INDEXING:
                return self._index(func, *args, **kwargs)
            if not _NEED_VALUES.isdisjoint(func.tags):
                return self._known_result(func, args, kwargs)
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._known_result(func, args, kwargs)
        finally:
            layer = layer_of(self._names, self._frames())
            for node in itertools.takewhile(lambda n: n is not last, reversed(nodes)):
                node.meta["layer"] = layer

    def value_of(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the value of a constant; raise `ValueError` that names `name` for others."""
        value = self._value(x)
        if value is None:
            raise refusal(name, layer_of(self._names, self._frames()), needs_value=True)
        return value

    def refuse_lost_writes(self) -> None:
        """Raise `ValueError` if views of tensors that were made outside have been written to."""
        if any(has_changed(traced) for _, traced in self._outside.values()):
            raise _lost_write_error("")

    def _as_traced(self, x: Any) -> Any:
        """Return a tensor of the trace for one that was made outside, such as a global."""
        if type(x) not in PLAIN_TENSORS:
            return x
        if x.layout != torch.strided:
            raise refusal(f"{x.layout} tensors", layer_of(self._names, self._frames()))
        if id(x) not in self._outside:
            self._outside[id(x)] = x, constant(x)
        return self._outside[id(x)][1]

    @staticmethod
    def _frames() -> Any:
        return (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))

    def _known_result(self, func: Any, args: Any, kwargs: Any) -> Any:
        def known_value(x: Any) -> Any:
            return self.value_of(x, name_of(func)) if isinstance(x, torch.Tensor) else x

        args, kwargs = jax.tree.map(known_value, (args, kwargs))
        with no_dispatch(), torch.no_grad():
            result = func(*args, **kwargs)
        return jax.tree.map(lambda x: constant(x) if isinstance(x, torch.Tensor) else x, result)

    def _value(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the value of a tensor if it depends only on constants, else None."""
        x = without_views(x)
        slot: Any = get_proxy_slot(x, self._tracer, None)
        if slot is None:
            return x
        node = slot.proxy.node
        ancestors, pending = set(self._known), [node]
        while pending:
            n = pending.pop()
            if n in ancestors:
                continue
            is_random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
            if n.op == "placeholder" or is_random:
                return None
            ancestors.add(n)
            pending += n.all_input_nodes
        with no_dispatch(), torch.no_grad():
            for n in self._tracer.graph.nodes:
                if n in ancestors and n not in self._known:
                    self._known[n] = self._compute(n)
        return self._known[node]

    def _compute(self, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(self._tracer.root, str(node.target))
        target: Any = node.target
        args: Any = map_arg((node.args, node.kwargs), self._known.__getitem__)
        return target(*args[0], **args[1])

    def _index(self, func: Any, x: torch.Tensor, index: Any, *rest: Any, **named: Any) -> Any:
        """Index by masks: by the places where they are true, if these are known."""
        name = name_of(func)
        if func is _ATEN.masked_select.default:
            x, mask = torch.broadcast_tensors(x, index)
            func, index = _ATEN.index.Tensor, [mask]
        places: list[Any] = []
        for part in index:
            if part is None or part.dtype not in _MASKS:
                places.append(part)
                continue
            value = self.value_of(part, name) if func is _ATEN.index.Tensor else self._value(part)
            if value is None:
                places.append(part)  # writes need no places
                continue
            with no_dispatch():
                found = value.nonzero().unbind(-1)
            places += map(constant, found)
        return func(x, places, *rest, **named)

    @staticmethod
    def _refuse_writes(func: Any, args: Any, kwargs: Any) -> None:
        for i, argument in enumerate(schema_of(func).arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            if not is_written or not isinstance(x, torch.Tensor):
                continue
            if overlaps(x):
                raise ValueError(
                    f"The module writes in place to a tensor of shape {tuple(x.shape)} and strides "
                    f"{x.stride()}, whose elements share memory: write to a copy (x.clone())."
                )
            if not isinstance(x, FunctionalTensor | FakeTensor):
                raise _lost_write_error("in `out` " if argument.is_out else "")


def _lost_write_error(place: str) -> ValueError:
    return ValueError(
        f"The module writes {place}into a tensor from outside of its call, where the change would "
        "be lost: make it a buffer (module.register_buffer)."
    )
