"""Torch's operations as operations of jax: torchax's, and those that it lacks."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.node import map_aggregate

from ._errors import name_of, refusal
from ._internals import arguments_of, decomposition_table, number_of_results
from ._torchax import Environment, OperatorNotFound, Tensor, torchax_tensor

_ATEN: Any = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's reductions of losses; the third is the sum

# torchax's are of other arguments or values than torch's: torch decomposes them, or see below.
_NOT_BY_TORCHAX = (
    _ATEN.max_pool2d_with_indices_backward,
    _ATEN.native_layer_norm_backward,
    _ATEN.native_batch_norm,
    _ATEN._native_batch_norm_legit,
    _ATEN.linalg_vector_norm,
    _ATEN.special_log_ndtr,
)

_WITHOUT_MEANING = {"device", "generator", "layout", "memory_format", "pin_memory"}


class Lowerings(Environment):
    """The environment of torchax with torch's values where its own are others."""

    def __init__(self) -> None:
        super().__init__()
        for packet in _NOT_BY_TORCHAX:
            for name in (packet, *(getattr(packet, n) for n in packet.overloads())):
                self._ops.pop(name, None)
                self._decomps.pop(name, None)
        for name, function in _OPERATIONS.items():
            self.override_op_definition(name, self._of_arrays(function))

    def _of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.t2j_iso((args, kwargs))
            return self.j2t_iso(function(*args, **kwargs))

        return operation

    def run(self, node: torch.fx.Node, values: Mapping[torch.fx.Node, Any]) -> Any:
        """Run an operation of a graph on arrays.

        Args:
          node: the operation, with nodes among its arguments.
          values: the arrays of these nodes.

        Raises:
          ValueError: torchax and jax cannot do it; it draws random numbers, and no key was passed.
        """
        target: Any = node.target
        layer = node.meta.get("layer", "The backward pass")
        if self.param.prng is None and torch.Tag.nondeterministic_seeded in target.tags:
            raise ValueError(
                "The module draws random numbers (dropout in training, torch.rand), and was given "
                "no key: pass `rng`, as js.make_train_step does, or call module.eval() before."
            )
        result = node.meta["val"]
        has_integers = isinstance(result, torch.Tensor) and not result.is_floating_point()

        def argument(x: Any) -> Any:
            if isinstance(x, torch.fx.Node):
                return Tensor(values[x], self)
            return _held(layer, x) if has_integers and type(x) is int else x

        named = {name: x for name, x in node.kwargs.items() if name not in _WITHOUT_MEANING}
        args: Any = map_aggregate(node.args, argument)
        kwargs = dict(map_aggregate(named, argument))
        if target is _ATEN._linalg_det.default:
            matrix = node.all_input_nodes[0].meta["val"]
            kwargs = {"is_transposed": matrix.is_contiguous() and not matrix.is_complex()}
        try:
            with self:
                return self.t2j_iso(self.dispatch(target, (), args, kwargs))
        except Exception as error:
            raise refusal(name_of(target), layer) from error

    def _get_op_or_decomp(self, func: Any) -> Any:
        try:
            return super()._get_op_or_decomp(func)
        except OperatorNotFound:
            function = _derivative(func)
            if function is None:
                raise
            self.override_op_definition(func, self._of_arrays(function))
            return super()._get_op_or_decomp(func)


def _held(layer: str, number: int) -> int:
    """Return a number for jax's integers; limits of 64 bits become those of 32 if it has no 64."""
    limits, wide = jnp.iinfo(jax.dtypes.canonicalize_dtype(jnp.int64)), torch.iinfo(torch.int64)
    number = {wide.max: limits.max, wide.min: limits.min}.get(number, number)
    if not limits.min <= number <= limits.max:
        raise ValueError(
            f"{layer} computes with the integer {number}, and jax has 32 bits by default: use a "
            'smaller one, or jax.config.update("jax_enable_x64", True).'
        )
    return number


@functools.cache
def lowerings() -> Lowerings:
    """Return this process' operations, which are independent of `torchax.default_env()`."""
    with torch.random.fork_rng(devices=[]):
        return Lowerings()


@functools.cache
def decompositions() -> dict[Any, Any]:
    """Return torch's decompositions of the operations that torchax lacks."""
    env = lowerings()
    has = set(env._ops)
    return {
        op: function
        for op, function in decomposition_table.items()
        if isinstance(op, type(_ATEN.add.Tensor)) and not has & {op, op.overloadpacket}
    }


def _derivative(func: Any) -> Callable[..., Any] | None:
    """Return a backward pass that torchax lacks as jax's derivative of its forward pass.

    Their arguments have the same names. The results are the gradients of the forward pass' first
    arguments.
    """
    own = getattr(func, "overloadpacket", func).__name__  # torchax also looks up torch.device
    name = own.removesuffix("_backward")
    packet = getattr(_ATEN, f"{name}_forward", None) or getattr(_ATEN, name, None)
    if packet is None or name == own:
        return None
    names = [argument.name for argument in arguments_of(packet.default)]
    count = number_of_results(func)

    def operation(*args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(func)
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        cotangent = given[arguments[0].name]
        if "input_size" in given:  # a linear operation, such as interpolation
            given[names[0]] = jnp.zeros(given["input_size"], cotangent.dtype)
        if "adaptive" in name:
            given["output_size"] = cotangent.shape[-2:] if "2d" in name else cotangent.shape[-3:]
        if given.get("bias_sizes") is not None:
            given["bias"] = jnp.zeros(given["bias_sizes"], cotangent.dtype)
        variables = [n for n in names[:count] if given.get(n) is not None]
        rest = {n: given.get(n) for n in names if n not in variables}
        env = lowerings()

        def forward(*arrays: jax.Array) -> jax.Array:
            named = {**rest, **dict(zip(variables, arrays, strict=True))}
            tensors = env.j2t_iso([named[n] for n in names])
            out = env.dispatch(packet.default, (), tuple(tensors), {})
            return env.t2j_iso(out[0] if isinstance(out, tuple) else out)

        _, pullback = jax.vjp(forward, *(given[n] for n in variables))
        found = dict(zip(variables, pullback(cotangent), strict=True))
        return found[names[0]] if count == 1 else tuple(found.get(n) for n in names[:count])

    return operation


def _det(x: jax.Array, is_transposed: bool) -> tuple[jax.Array, ...]:
    """Compute `aten._linalg_det`, whose backward pass needs the factors, of a transpose or not."""
    lu, pivots = jax.scipy.linalg.lu_factor(jnp.swapaxes(x, -1, -2) if is_transposed else x)
    return jnp.linalg.det(x), lu, pivots + 1


def _solve(
    a: jax.Array, b: jax.Array, *, left: bool = True, check_errors: bool = False
) -> tuple[jax.Array, ...]:
    """Solve for one vector, or a matrix of them for each matrix of a batch."""
    del check_errors
    if not left:
        x = jnp.swapaxes(jnp.linalg.solve(*(jnp.swapaxes(y, -1, -2) for y in (a, b))), -1, -2)
    elif b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]):
        x = jnp.linalg.solve(a, b[..., None])[..., 0]
    else:
        x = jnp.linalg.solve(a, b)
    lu, pivots = jax.scipy.linalg.lu_factor(a)
    return x, lu, pivots + 1, jnp.zeros(a.shape[:-2], jnp.int32)


def _lu_solve(
    lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    if left:
        return jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=2 if adjoint else 0)
    b = jnp.swapaxes(b, -1, -2)
    if adjoint:
        x = jax.scipy.linalg.lu_solve((lu, pivots - 1), b.conj()).conj()
    else:
        x = jax.scipy.linalg.lu_solve((lu, pivots - 1), b, trans=1)
    return jnp.swapaxes(x, -1, -2)


def _angle(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.pi, 0.0))  # 0 for -0.0


def _put(x: jax.Array, index: jax.Array, values: jax.Array, accumulate: bool = False) -> jax.Array:
    elements = x.ravel().at[index.ravel()]
    return (elements.add if accumulate else elements.set)(values.ravel()).reshape(x.shape)


def _multilabel_margin_loss(
    x: jax.Array, labels: jax.Array, reduction: int = _MEAN
) -> tuple[jax.Array, jax.Array]:
    """Compute `aten.multilabel_margin_loss_forward`; labels end at the first -1."""
    rows, row_labels = jnp.atleast_2d(x), jnp.atleast_2d(labels)
    counts = jnp.cumprod(row_labels != -1, axis=-1) > 0
    of_labels = jnp.take_along_axis(rows, jnp.where(counts, row_labels, 0), axis=-1)
    is_label = row_labels[..., None] == jnp.arange(rows.shape[-1])
    is_target = jnp.any(is_label & counts[..., None], axis=-2)
    margins = jax.nn.relu(1 - of_labels[..., None] + rows[..., None, :])
    pairs = counts[..., None] & ~is_target[..., None, :]
    losses = jnp.sum(jnp.where(pairs, margins, 0), (-2, -1)) / rows.shape[-1]
    if reduction == _NONE:
        loss = losses.reshape(x.shape[:-1])
    else:
        loss = jnp.mean(losses) if reduction == _MEAN else jnp.sum(losses)
    return loss, is_target.reshape(x.shape).astype(x.dtype)


def _of_maxima(dims: int) -> Callable[..., Any]:
    """Return the backward pass of max pooling, whose last argument are places of the maxima."""

    def operation(cotangent: jax.Array, x: jax.Array, *rest: Any) -> jax.Array:
        kept = x.shape[:-dims]
        rows = jnp.zeros((math.prod(kept), math.prod(x.shape[-dims:])), x.dtype)
        places, values = (y.reshape(len(rows), -1) for y in (rest[-1], cotangent))
        return rows.at[jnp.arange(len(rows))[:, None], places].add(values).reshape(x.shape)

    return operation


def _scatter(x: jax.Array, dim: int, index: jax.Array, value: float) -> jax.Array:
    places: list[Any] = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return x.at[tuple(places)].set(jnp.asarray(value, x.dtype))


def _diagonal_scatter(
    x: jax.Array, diagonal: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    matrices, number = jnp.moveaxis(x, (dim1, dim2), (-2, -1)), jnp.arange(diagonal.shape[-1])
    places = matrices.at[..., number + max(-offset, 0), number + max(offset, 0)]
    return jnp.moveaxis(places.set(diagonal), (-2, -1), (dim1, dim2))


def _slice_scatter(
    x: jax.Array,
    part: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    return x.at[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)].set(part)


def _masked_scatter_backward(
    cotangent: jax.Array, mask: jax.Array, sizes: Sequence[int]
) -> jax.Array:
    mask = jnp.broadcast_to(mask, cotangent.shape).ravel()
    places = jnp.where(mask, jnp.cumsum(mask) - 1, math.prod(sizes))  # what is outside is dropped
    source = jnp.zeros(math.prod(sizes), cotangent.dtype)
    return source.at[places].add(cotangent.ravel(), mode="drop").reshape(sizes)


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    _ATEN._efficientzerotensor.default: lambda size, dtype=None, **_: jnp.zeros(
        size, torchax_tensor.mappings.t2j_dtype(dtype or torch.float32)
    ),
    _ATEN._linalg_det.default: _det,
    _ATEN._linalg_solve_ex.default: _solve,
    _ATEN.linalg_lu_solve.default: _lu_solve,
    _ATEN.angle.default: _angle,
    _ATEN.diagonal_scatter.default: _diagonal_scatter,
    _ATEN.slice_scatter.default: _slice_scatter,
    _ATEN.normal_functional.default: lambda x, mean=0, std=1: (
        mean + std * jax.random.normal(lowerings().get_and_rotate_prng_key(), x.shape, x.dtype)
    ),
    _ATEN.put.default: _put,
    _ATEN.scatter.value: _scatter,
    _ATEN.special_erfcx.default: jax.scipy.special.erfcx,
    _ATEN.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    _ATEN.masked_scatter_backward.default: _masked_scatter_backward,
    _ATEN.max_pool2d_with_indices_backward.default: _of_maxima(2),
    _ATEN.max_pool3d_with_indices_backward.default: _of_maxima(3),
}
