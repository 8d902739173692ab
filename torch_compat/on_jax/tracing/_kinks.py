"""Derivatives where functions have kinks, ties or singularities: torch's formulas, not jax's."""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils import _pytree as torch_tree

from jaxslowmo.mesh import vary_over, varying_axes

from ._torchax import Tensor

_DETACH: Any = torch.ops.aten.detach.default

# Operations of aten, without their overloads, whose derivative in jax is another one than in torch
# at some point: the slope of a corner, the choice between equal elements, NaN where a factor is
# infinite. Operations that torch composes of these need no entry.
_NAMES = frozenset(
    """
    _euclidean_dist _safe_softmax abs angle atan2 binary_cross_entropy clamp clamp_max clamp_min
    copysign cummax cummin digamma dist elu fmax fmin hardsigmoid hardswish hardtanh i0 kthvalue
    leaky_relu lgamma linalg_vector_norm log_sigmoid_forward logit max median min mish mode
    nanmedian norm pow renorm scatter_reduce sinc smooth_l1_loss softplus sort special_entr
    special_erfcx special_log_ndtr special_ndtri special_xlog1py std std_mean topk xlogy
    """.split()
)


class _Description(NamedTuple):
    """A tensor's shape and dtype in torch, which has 64 bits where an index in jax has 32."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def has_kink(func: Any) -> bool:
    """Return whether an operation is to have torch's derivative."""
    is_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
    return is_aten and func._opname in _NAMES


def differentiated(
    env: Any, func: Any, run: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Run an operation whose derivative is torch's.

    Derivatives of complex numbers are jax's.

    Args:
      env: the environment.
      func: an operation of aten that is not in place.
      run: function of `(args, kwargs)` that runs it by torchax.
      args: its arguments.
      kwargs: its keyword arguments.
    """
    leaves, structure = torch_tree.tree_flatten((args, kwargs))
    arrays = [x.jax() for x in leaves if isinstance(x, Tensor)]
    if any(map(jnp.iscomplexobj, arrays)):
        return run(args, kwargs)

    def result(*arrays: jax.Array) -> Any:
        rest = iter(arrays)
        filled = [Tensor(next(rest), env) if isinstance(x, Tensor) else x for x in leaves]
        return env.t2j_iso(run(*torch_tree.tree_unflatten(filled, structure)))

    def jvp(primals: Any, tangents: Any) -> Any:
        out = operation(*primals)
        outputs, kind = jax.tree.flatten(out)
        formula = _formula(func, structure, *map(_described, leaves))

        def pulled_back(cotangents: list[jax.Array]) -> list[jax.Array]:
            with env, torch.enable_grad():
                gradients = formula(*map(env.j2t_iso, (*primals, *cotangents, out)))
            likes = [x for x in primals if _is_floating(x)]
            return [
                vary_over(jnp.zeros_like(x) if g is None else g.jax().astype(x.dtype), axes)
                for g, x in zip(gradients, likes, strict=True)
            ]

        likes = [vary_over(jnp.zeros_like(x), axes) for x in outputs if _is_floating(x)]
        pushed = jax.linear_transpose(pulled_back, likes)(
            [t for t, x in zip(tangents, primals, strict=True) if _is_floating(x)]
        )
        moves = iter(pushed[0])
        nothing = jax.dtypes.float0
        return out, jax.tree.unflatten(
            kind, [next(moves) if _is_floating(x) else np.zeros(x.shape, nothing) for x in outputs]
        )

    axes = frozenset().union(*map(varying_axes, arrays))
    operation = jax.custom_jvp(result)
    operation.defjvp(jvp)
    return env.j2t_iso(operation(*(vary_over(x, axes) for x in arrays)))


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _described(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return _Description(tuple(x.shape), torch.int64 if x.dtype == torch.int32 else x.dtype)


# Tracing takes 20 ms, and a deep model has the same operation in every layer.
@functools.lru_cache(maxsize=1024, typed=True)
def _formula(func: Any, structure: Any, *leaves: Any) -> Any:
    """Return torch's backward pass of an operation as a program of torch.

    Its arguments are the tensors among `leaves`, cotangents of the floating results, and what the
    operation returned. It returns the gradients of the floating tensors, None where there is none.
    """

    def outputs(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        rest = iter(inputs)
        filled = [next(rest) if isinstance(x, _Description) else x for x in leaves]
        args, kwargs = torch_tree.tree_unflatten(filled, structure)
        results = torch_tree.tree_leaves(func(*args, **kwargs))
        return [x for x in results if x.is_floating_point()]

    def gradients(inputs: list[torch.Tensor], cotangents: list[torch.Tensor]) -> Any:
        inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        pairs = zip(outputs(inputs), cotangents, strict=True)
        results, cotangents = zip(*((y, g) for y, g in pairs if y.requires_grad), strict=True)
        floating = [x for x in inputs if x.requires_grad]
        return torch.autograd.grad(results, floating, cotangents, allow_unused=True)

    def trace() -> Any:
        tensors = [x for x in leaves if isinstance(x, _Description)]
        inputs = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors]
        return make_fx(gradients)(inputs, outputs(inputs))

    with ThreadPoolExecutor(1) as another:  # a thread without the modes of the trace
        module = another.submit(trace).result()
    graph = module.graph
    forward = next(node for node in graph.nodes if node.target is func)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        forward.replace_all_uses_with(graph.placeholder("result"))
    for node in graph.nodes:
        if node.target is _DETACH:  # it would stop second derivatives
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    graph.set_codegen(CodeGen())  # flat arguments and results
    module.recompile()
    return module
