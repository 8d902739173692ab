"""Torch's operations as operations of jax: torchax's, and those that it lacks."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from .._arrays import jax_dtype
from ._errors import name_of, refusal
from ._internals import decomposition_table, schema_of
from ._operations import OPERATIONS
from ._torchax import Environment, OperatorNotFound, Tensor

_ATEN: Any = torch.ops.aten

# torchax's are of other arguments or values than torch's: torch decomposes them, or see below.
_NOT_BY_TORCHAX = (
    _ATEN.max_pool2d_with_indices_backward,
    _ATEN.native_layer_norm_backward,
    _ATEN.native_batch_norm,
    _ATEN._native_batch_norm_legit,
    _ATEN.linalg_vector_norm,
    _ATEN.max_unpool2d,
    _ATEN.max_unpool3d,
    _ATEN.special_log_ndtr,
)

# torch's backward passes of these need factors, of a transpose or not.
_DETERMINANTS = (_ATEN._linalg_det.default, _ATEN._linalg_slogdet.default)

_NORMAL = ("Tensor_Tensor", "Tensor_float", "float_Tensor", "float_float")
_WITHOUT_MEANING = {"device", "generator", "layout", "memory_format", "pin_memory"}


class Lowerings(Environment):
    """The environment of torchax with torch's values where its own are others."""

    def __init__(self) -> None:
        super().__init__()
        for packet in _NOT_BY_TORCHAX:
            for name in (packet, *(getattr(packet, n) for n in packet.overloads())):
                self._ops.pop(name, None)
                self._decomps.pop(name, None)
        draws = {
            _ATEN.multinomial.default: self._multinomial,
            _ATEN.normal_functional.default: lambda x, mean=0.0, std=1.0: self._normal(
                mean + jnp.zeros_like(x), std
            ),
            _ATEN.rand.default: lambda size, dtype: self._rand(size, jax_dtype(dtype)),
            _ATEN.rand_like.default: lambda x, dtype=None: self._rand(
                x.shape, jax_dtype(dtype) if dtype else x.dtype
            ),
            _ATEN.uniform.default: lambda x, low=0.0, high=1.0: (
                low + (high - low) * self._rand(x.shape, x.dtype)
            ),
        }
        draws |= {getattr(_ATEN.normal, name): self._normal for name in _NORMAL}
        for name, function in {**OPERATIONS, **draws}.items():
            self.override_op_definition(name, self._of_arrays(function))

    def _of_arrays(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.t2j_iso((args, kwargs))
            return self.j2t_iso(function(*args, **kwargs))

        return operation

    def _rand(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        """Compute `aten.rand`; torchax rounds to 1.0 in half precision."""
        return jax.random.uniform(self.get_and_rotate_prng_key(), shape, dtype)

    def _normal(
        self, mean: Any, std: Any = 1.0, size: Sequence[int] = (), dtype: Any = None
    ) -> jax.Array:
        """Compute `aten.normal`; torchax takes the second of two arguments for the mean."""
        del dtype  # what calls this casts
        shape = jnp.broadcast_shapes(size, jnp.shape(mean), jnp.shape(std))
        kind = jnp.result_type(mean, std)
        return mean + std * jax.random.normal(self.get_and_rotate_prng_key(), shape, kind)

    def _multinomial(
        self, weights: jax.Array, num_samples: int, replacement: bool = False
    ) -> jax.Array:
        """Compute `aten.multinomial`; torchax draws the same for all rows."""

        def row(key: jax.Array, p: jax.Array) -> jax.Array:
            return jax.random.choice(key, p.size, (num_samples,), replacement, p)

        keys = jax.random.split(self.get_and_rotate_prng_key(), weights.shape[:-1])
        wide = weights.astype(jnp.promote_types(weights.dtype, jnp.float32))
        return (jax.vmap(row) if weights.ndim == 2 else row)(keys, wide)

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
            if isinstance(x, list):
                return [*map(argument, x)]
            return _int_for_jax(layer, x) if has_integers and type(x) is int else x

        args = tuple(map(argument, node.args))
        named = {name: x for name, x in node.kwargs.items() if name not in _WITHOUT_MEANING}
        kwargs = {name: argument(x) for name, x in named.items()}
        if not node.all_input_nodes and any(a.name == "dtype" for a in schema_of(target).arguments):
            kwargs["dtype"] = result.dtype
        if target in _DETERMINANTS:
            matrix = node.all_input_nodes[0].meta["val"]
            kwargs = {"is_transposed": matrix.is_contiguous() and not matrix.is_complex()}
        try:
            with self:
                return _cast_like(result, self.t2j_iso(self.dispatch(target, (), args, kwargs)))
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


def _cast_like(like: Any, found: Any) -> Any:
    """Return the results of an operation in the dtypes of `like`, torch's; shapes must be equal."""
    if isinstance(like, list | tuple):
        return [_cast_like(*pair) for pair in zip(like, found, strict=True)]
    dtype = jax_dtype(like.dtype) if isinstance(like, torch.Tensor) else None
    if dtype is None:
        return found
    if found.shape != tuple(like.shape):
        raise TypeError(f"torch has the shape {tuple(like.shape)}, and not {found.shape}")
    return found if found.dtype == dtype else found.astype(dtype)


def _int_for_jax(layer: str, number: int) -> int:
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
    names = [argument.name for argument in schema_of(packet.default).arguments]
    count = len(schema_of(func).returns)

    def operation(*args: Any, **kwargs: Any) -> Any:
        arguments = schema_of(func).arguments
        given = {a.name: a.default_value for a in arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        cotangent = given[arguments[0].name]
        if "input_size" in given:  # a linear operation, such as interpolation
            given[names[0]] = jnp.zeros(given["input_size"], cotangent.dtype)
        if "adaptive" in name:
            given["output_size"] = cotangent.shape[-2:] if "2d" in name else cotangent.shape[-3:]
        wanted = dict(zip(names, given.get("output_mask", [True] * count), strict=False))
        if wanted.get("bias"):
            given["bias"] = jnp.zeros(given["bias_sizes"], cotangent.dtype)
        variables = [n for n in names[:count] if wanted[n] and given.get(n) is not None]
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
