"""Derivatives where functions have kinks, ties or singularities: torch's formulas, not jax's."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as torch_tree

from jaxslowmo.mesh import vary_over, varying_axes

from ._layouts import Description, described
from ._torchax import Tensor

_ATEN: Any = torch.ops.aten
# The position of a tensor for which torch has no gradient, and refuses to look for one.
_CONSTANT = {_ATEN.binary_cross_entropy.default: 2}

# Operations of aten, without their overloads, whose derivative in jax is another one than in torch
# at some point: the slope of a corner, the choice between equal elements, NaN where a factor is
# infinite. Operations that torch composes of these need no entry.
_NAMES = set(
    """
    _euclidean_dist _safe_softmax abs atan2 binary_cross_entropy celu clamp clamp_max clamp_min
    copysign cummax cummin digamma dist elu fmax fmin hardsigmoid hardswish hardtanh i0 kthvalue
    leaky_relu lgamma linalg_vector_norm log_sigmoid_forward logit max median min mish mode
    nanmedian norm pow renorm scatter_reduce sinc smooth_l1_loss softplus sort special_entr
    special_erfcx special_ndtri special_xlog1py std std_mean topk xlogy
    """.split()  # noqa: SIM905
)


def has_kink(func: Any) -> bool:
    """Return whether an operation is to have torch's derivative."""
    is_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
    return is_aten and func._opname in _NAMES


def differentiated(
    env: Any, func: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Run an operation, with torch's derivative if jax has another one.

    Args:
      env: the environment.
      func: the operation.
      run: function of `(args, kwargs)` that runs it by torchax.
      args: its arguments.
      kwargs: its keyword arguments.

    Raises:
      TypeError: jax differentiates it forwards.
    """
    leaves, structure = torch_tree.tree_flatten((args, kwargs))
    arrays = [x.jax() for x in leaves if isinstance(x, Tensor)]
    if _is_inside.get() or not (has_kink(func) and any(map(_is_floating, arrays))):
        return run(args, kwargs)
    # Under shard_map a gradient varies over the axes of its array, which are then those of all.
    axes = frozenset[str]().union(*map(varying_axes, arrays))

    def result(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        filled = [Tensor(next(rest), env) if isinstance(x, Tensor) else x for x in leaves]
        with _inside():
            out = env.t2j_iso(run(*torch_tree.tree_unflatten(filled, structure)))
        has_run.append(True)
        return out

    def forward(*arrays: jax.Array) -> Any:
        out = result(*arrays)
        return out, (arrays, out)

    def backward(residuals: Any, cotangents: Any) -> Any:
        arrays, out = residuals
        # Gradients of complex numbers are conjugate in torch.
        moves = [g.conj() for g in jax.tree.leaves(cotangents) if _is_floating(g)]
        formula = _formula(func, structure, *map(described, leaves))
        with warnings.catch_warnings(), env, torch.enable_grad(), _inside():
            warnings.filterwarnings("ignore", message="Explicitly requested dtype .*64")
            gradients = formula(*map(env.j2t_iso, (*arrays, *moves, out)))
        return tuple(
            None if gradient is None else vary_over(gradient.jax().conj().astype(x.dtype), axes)
            for gradient, x in zip(gradients, arrays, strict=True)
        )

    operation = jax.custom_vjp(result)
    operation.defvjp(forward, backward)
    has_run: list[bool] = []
    try:
        return env.j2t_iso(operation(*(vary_over(x, axes) for x in arrays)))
    except TypeError as error:
        if not has_run:
            raise
        raise TypeError(
            f"{func} has torch's derivative, which has no forward mode (jax.jvp, jax.jacfwd): use "
            "jax.grad, of which jax.jvp works."
        ) from error


# jax has no forward mode through custom_vjp: within an operation and its backward pass, which
# Hessians differentiate forwards, derivatives are jax's.
_is_inside = ContextVar("_is_inside", default=False)


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


# Tracing takes 20 ms, and a deep model has the same operation in every layer.
@functools.lru_cache(maxsize=1024, typed=True)
def _formula(func: Any, structure: Any, *leaves: Any) -> Any:
    """Return torch's backward pass of an operation as a program of torch.

    Its arguments are the tensors among `leaves`, cotangents of the floating results, and what the
    operation returned. It returns the gradients of the tensors, None where there is none.
    """

    def outputs(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(inputs)
        filled = [next(rest) if isinstance(x, Description) else x for x in leaves]
        args, kwargs = torch_tree.tree_unflatten(filled, structure)
        results = torch_tree.tree_leaves(func(*args, **kwargs))
        return [x for x in results if x.is_floating_point() or x.is_complex()]

    def gradients(inputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> Any:
        constant = _CONSTANT.get(func)
        inputs = [
            x.detach().requires_grad_((x.is_floating_point() or x.is_complex()) and i != constant)
            for i, x in enumerate(inputs)
        ]
        results, variables = outputs(inputs), [x for x in inputs if x.requires_grad]
        cotangents = [g for y, g in zip(results, cotangents, strict=True) if y.requires_grad]
        results = [y for y in results if y.requires_grad]
        found = iter(torch.autograd.grad(results, variables, cotangents, allow_unused=True))
        return [next(found) if x.requires_grad else None for x in inputs]

    def trace() -> Any:
        shapes = [(x.shape, x.dtype) for x in leaves if isinstance(x, Description)]
        wide = {torch.int32: torch.int64}  # torch requires 64 bits of indices
        inputs = [torch.empty(n, dtype=wide.get(t, t), device="meta") for n, t in shapes]
        return make_fx(gradients)(inputs, outputs(inputs))

    with ThreadPoolExecutor(1) as another:  # a thread without the modes of the trace
        module = another.submit(trace).result()
    graph = module.graph
    forward = next(node for node in graph.nodes if node.target is func)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        forward.replace_all_uses_with(graph.placeholder("result"))
    for node in graph.nodes:
        if node.target is _ATEN.detach.default:  # it would stop second derivatives
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    graph.set_codegen(CodeGen())  # flat arguments and results
    module.recompile()
    return module
