"""A function of torch as one of jax: torch traces and differentiates it, jax runs the operations.

torch records both passes as a graph of operations without views and writes in place. Gradients are
therefore torch's, whatever the function writes to and wherever it has a corner.
"""

import contextlib
import functools
import operator
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.custom_derivatives import SymbolicZero
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointFunction

from jaxslowmo.mesh import vary_over, varying_axes

from .._arrays import keeps_values, to_jax
from ._functions import Functions, embedding_bag
from ._internals import (
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    distributions_check,
    get_proxy_mode,
    make_fx,
)
from ._lowerings import decompositions, lowerings
from ._values import Values, without_views

# One thread at a time: tracing replaces tensors of the module, and filters warnings.
_TRACING = threading.RLock()


@dataclass(frozen=True)
class Input:
    """An argument of a traced function.

    Attributes:
      array: its elements.
      dtype: its dtype in torch.
      trained: whether it requires gradients in torch, as a module's code sees it.
    """

    array: jax.Array
    dtype: torch.dtype
    trained: bool = False


def call(
    function: Callable[[Values, list[Any]], list[torch.Tensor]],
    inputs: Sequence[Input],
    rng: jax.Array | None,
    module: torch.nn.Module | None = None,
) -> list[jax.Array]:
    """Return the tensors that a function of torch returns, as arrays.

    Args:
      function: `(values, tensors) -> results`, called in each trace: one, and another for each set
        of inputs that are not trained and by which jax differentiates.
      inputs: its tensors.
      rng: PRNG key of random numbers; None: drawing raises `ValueError`.
      module: module that it calls; errors name its layers.
    """
    if get_proxy_mode() is not None:  # this thread traces
        raise ValueError("A module calls on_jax in its forward pass: call the module itself.")
    trained = frozenset(i for i, x in enumerate(inputs) if x.trained)
    axes = frozenset[str]().union(*(varying_axes(x.array) for x in inputs))
    # Under shard_map the gradient of an array varies over the same axes, which are those of all.
    arrays = [
        vary_over(x.array, axes) if jnp.issubdtype(x.array.dtype, jnp.inexact) else x.array
        for x in inputs
    ]

    @functools.cache
    def program(variables: frozenset[int]) -> _Program:
        # A thread without modes of torch.
        with _TRACING, ThreadPoolExecutor(1) as another:
            return another.submit(_Program, function, inputs, module, variables).result()

    run = jax.custom_jvp(lambda *arguments: program(trained).forward(*arguments)[0])

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def differentiate(primals: Any, tangents: Any) -> Any:
        """Transpose torch's backward pass, which jax transposes again for its reverse mode."""
        moves = {i: t for i, t in enumerate(tangents[1:]) if not isinstance(t, SymbolicZero)}
        of = program(trained.union(moves))
        results, saved = of.forward(*primals)
        moving = {i: t for i, t in moves.items() if of.gradients[i] is not None}

        def backward(*cotangents: jax.Array) -> list[jax.Array]:
            gradients = of.backward(saved, cotangents)
            return [vary_over(gradients[i].astype(t.dtype), axes) for i, t in moving.items()]

        found = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in results]
        if moving:
            _, forward = jax.vjp(backward, *(_any_point(results[i]) for i in of.varied))
            for i, tangent in zip(of.varied, forward([*moving.values()]), strict=True):
                found[i] = tangent
        return results, found

    return run(rng, *arrays)


def _any_point(x: jax.Array) -> jax.Array:
    """Return numbers like `x` at which to differentiate a linear function.

    It has the same derivative everywhere, unless some operation in it has a corner, such as xlogy
    and logcumsumexp at 0: sums of these numbers are not 0 by chance.
    """
    numbers = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
    return vary_over(numbers.astype(x.dtype), varying_axes(x))


class _Program:
    """Both passes of a function as one graph of torch's operations.

    Attributes:
      varied: indices of the results that have gradients.
      gradients: for each input the node that computes its gradient, None without one.
    """

    def __init__(
        self, function: Any, inputs: Sequence[Input], module: Any, variables: frozenset[int]
    ) -> None:
        self.varied: list[int] = []

        def both(*tensors: torch.Tensor) -> Any:
            with (
                FunctionalTensorMode(),
                Values(module) as values,
                _as_plain(values),
                Functions(values),
            ):
                leaves: list[Any] = list(map(FunctionalTensor.to_functional, tensors))
                arguments = list(leaves)
                for i in variables:
                    leaves[i].requires_grad_()
                    if not inputs[i].trained:
                        arguments[i] = leaves[i].clone()  # torch writes to no leaf
                results = function(values, arguments)
                values.refuse_lost_writes()
                self.varied += [i for i, x in enumerate(results) if x.requires_grad]
                varied = [results[i] for i in self.varied]
                cotangents = [torch.zeros(x.shape, dtype=x.dtype) for x in varied]
                found: Any = {}
                if varied and variables:
                    of = [leaves[i] for i in variables]
                    grads = torch.autograd.grad(varied, of, cotangents, allow_unused=True)
                    found = dict(zip(variables, grads, strict=True))
                gradients = map(found.get, range(len(leaves)))
                return [list(map(without_views, x)) for x in (results, cotangents, gradients)]

        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = [torch.empty(x.array.shape, dtype=x.dtype) for x in inputs]
        make = make_fx(both, decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)
        self._module = make(*fakes)
        *nodes, last = self._module.graph.nodes
        returned: Any = last.args[0]
        self._results, self._cotangents, self.gradients = returned
        self._arguments = [n for n in nodes if n.op == "placeholder"]
        changed = set(self._cotangents)
        for n in nodes:
            if any(x in changed for x in n.all_input_nodes):
                changed.add(n)
        self._forward = [n for n in nodes if n not in changed]
        self._backward = [n for n in nodes if n in changed]
        used = {x: None for n in self._backward for x in n.all_input_nodes}
        used.update((g, None) for g in self.gradients if g is not None)
        self._saved = [x for x in used if x not in changed]

    def forward(self, rng: Any, *arrays: jax.Array) -> tuple[list[jax.Array], list[Any]]:
        """Return the results, and what the backward pass needs of this one."""
        values = dict(zip(self._arguments, arrays, strict=True))
        self._run(self._forward, values, rng)
        return [values[x] for x in self._results], [values[x] for x in self._saved]

    def backward(self, saved: list[Any], cotangents: Sequence[jax.Array]) -> list[Any]:
        """Return the gradients of the inputs, None where there is none."""
        values = dict(zip(self._saved, saved, strict=True))
        # Gradients of complex numbers are conjugate in torch.
        moves = [g.conj() for g in cotangents]
        values.update(zip(self._cotangents, moves, strict=True))
        self._run(self._backward, values, None)
        return [None if g is None else values[g].conj() for g in self.gradients]

    def _run(self, nodes: list[torch.fx.Node], values: dict[Any, Any], rng: Any) -> None:
        env = lowerings()
        with warnings.catch_warnings(), env.override_property(prng=rng):
            warnings.filterwarnings("ignore", message="Explicitly requested dtype")
            for n in nodes:
                if n in values:
                    continue
                if n.op == "get_attr":
                    constant = getattr(self._module, str(n.target))
                    if constant.dtype == torch.int64 and not keeps_values(constant):
                        raise ValueError(
                            "The module computes with constant integers of more than jax's 32 "
                            'bits: use smaller ones, or jax.config.update("jax_enable_x64", True).'
                        )
                    values[n] = to_jax(constant)
                elif n.target is operator.getitem:
                    of, index = n.args
                    values[n] = values[of][index]
                else:
                    values[n] = env.run(n, values)


def _refuse_forward(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "The module differentiates in forward mode, which torch does not trace: use "
        "torch.func.grad or jacrev, or jax.jvp of on_jax.as_apply."
    )


def _refuse_reentrant(*_: Any, **__: Any) -> Any:
    raise ValueError("torch.utils.checkpoint works in a trace with use_reentrant=False alone.")


@contextlib.contextmanager
def _as_plain(values: Values) -> Iterator[None]:
    """Run the block without what torch does beside its operations."""
    distributions, mkldnn = torch.distributions.Distribution, torch.backends.mkldnn
    have_checks = distributions_check()
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as patches:
        # Without its hooks torch.utils.checkpoint computes nothing again, with other dropout.
        for name in ("__enter__", "__exit__"):
            patches.enter_context(_patch(saved_tensors_hooks, name, lambda *_: None))
        patches.enter_context(_patch(torch.autograd.forward_ad, "make_dual", _refuse_forward))
        patches.enter_context(_patch(CheckpointFunction, "apply", _refuse_reentrant))
        patches.enter_context(_patch(torch, "embedding_bag", embedding_bag))
        # Libraries then leave out checks of values.
        patches.enter_context(_patch(torch.compiler, "is_compiling", lambda: True))
        read = lambda x: values.value_of(x, "Tensor.tolist").tolist()  # noqa: E731
        patches.enter_context(_patch(FunctionalTensor, "tolist", read))
        patches.enter_context(sdpa_kernel(SDPBackend.MATH))
        torch.backends.mha.set_fastpath_enabled(False)
        # Its fused layers have no derivative here.
        has_mkldnn, *_ = mkldnn.set_flags(False, _fp32_precision=None)
        # Validation needs values, which a trace lacks.
        distributions.set_default_validate_args(False)
        try:
            yield
        finally:
            distributions.set_default_validate_args(have_checks)
            mkldnn.set_flags(has_mkldnn, _fp32_precision=None)
            torch.backends.mha.set_fastpath_enabled(fast_attention)


@contextlib.contextmanager
def _patch(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Run the block with another function in the place of one, for this thread alone."""
    old, here = getattr(owner, name), threading.get_ident()

    @functools.wraps(old)
    def function(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == here else old)(*args, **kwargs)

    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, old)
