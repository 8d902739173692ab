"""Calls of torch's operations and modules with torch's own samples, in torch and in jax.

torch ships inputs for every operation and module with all its options, for its own tests.
"""

import copy
import functools
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._python_dispatch import TorchDispatchMode

import torch_compat
from torch_compat import on_jax
from torch_compat.on_jax._arrays import jax_dtype, to_jax

LIST = Path(__file__).with_name("outcomes.txt")
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 6e-2}  # of the largest element, at least of 1
# Their elements have any values.
UNINITIALISED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty")
UNINITIALISED += ("new_empty_strided", "nn.functional.dropout.empty")


@dataclass
class Call:
    """A call of a module.

    Attributes:
      module: the module.
      tensors: its arguments.
      by: which of them it is differentiated by.
      text: what tells it from others.
      has_values: False if its results are random, or uninitialised.
    """

    module: nn.Module
    tensors: list[torch.Tensor]
    by: list[int]
    text: str
    has_values: bool = True


class Function(nn.Module):
    """A function of tensors, or of a module and tensors."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.inner = function, inner

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        out = self.function(*tensors) if self.inner is None else self.function(self.inner, *tensors)
        return [x for x in jax.tree.leaves(out) if isinstance(x, torch.Tensor)]


def _open(tree: Any) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Return the tensors in arguments, and the function that returns these with other tensors."""
    leaves, structure = jax.tree.flatten(tree)
    # Others, which no array can be, are constants of the program.
    places = [
        i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.layout == torch.strided
    ]
    tensors = [leaves[i].detach().clone() for i in places]

    def closed(new: tuple[torch.Tensor, ...]) -> Any:
        filled = list(leaves)
        for i, old, x in zip(places, tensors, new, strict=True):
            # jax has no int32 beside int64 as long as it has 32 bits.
            filled[i] = x.to(old.dtype) if old.dtype == torch.int32 else x
        return jax.tree.unflatten(structure, filled)

    return [x.contiguous() for x in tensors], closed


def _of_operation(op: Any, dtype: torch.dtype) -> Iterator[Call]:
    if not op.supports_dtype(dtype, "cpu"):
        return
    for sample in op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd):
        tensors, closed = _open((sample.input, list(sample.args), dict(sample.kwargs)))

        def function(*new: torch.Tensor, sample: Any = sample, closed: Any = closed) -> Any:
            value, args, kwargs = closed(new)
            return sample.output_process_fn_grad(op(value, *args, **kwargs))

        by = [i for i, x in enumerate(tensors) if op.supports_autograd and x.is_floating_point()]
        text = sample.summary() if hasattr(sample, "summary") else str(sample)
        has_values = op.name not in UNINITIALISED
        yield Call(Function(function), tensors, by, text, has_values)


def _of_module(info: Any, dtype: torch.dtype) -> Iterator[Call]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        samples = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for sample in samples:
            made, given = sample.constructor_input, sample.forward_input
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            tensors, closed = _open((list(given.args), dict(given.kwargs)))

            def function(m: nn.Module, *new: torch.Tensor, closed: Any = closed) -> Any:
                args, kwargs = closed(new)
                return m(*args, **kwargs)

            by = [i for i, x in enumerate(tensors) if x.is_floating_point()]
            text = f"{made.args} {made.kwargs} {sample.desc} {training=}"
            yield Call(Function(function, module), tensors, by, text)


@functools.cache
def subjects() -> dict[str, Callable[[torch.dtype], Iterator[Call]]]:
    """Return functions that return the calls of each operation and module, by its name."""
    found: dict[str, Callable[[torch.dtype], Iterator[Call]]] = {}
    for op in op_db:
        name = ".".join(filter(None, [op.name, op.variant_test_name]))
        if op.supports_dtype(torch.float32, "cpu") and not op.name.startswith("jiterator"):
            found[name] = functools.partial(_of_operation, op)
    for info in module_db:
        found[f"Module {info.name}"] = functools.partial(_of_module, info)
    return found


class _Draws(TorchDispatchMode):
    """Notes whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _weights(shape: Any) -> torch.Tensor:
    return torch.cos(torch.arange(int(np.prod(shape)), dtype=torch.float32)).reshape(shape)


@dataclass
class Wanted:
    """The results of torch.

    Attributes:
      results: the results.
      varied: which of them have gradients.
      gradients: the gradients of the sum of all values by parameters and arguments; or None.
      is_random: whether numbers were drawn.
    """

    results: list[torch.Tensor]
    varied: list[bool] = field(default_factory=list)
    gradients: dict[Any, torch.Tensor] | None = None
    is_random: bool = False


def in_torch(call: Call, *, differentiated: bool) -> Wanted:
    """Return what torch computes; raise its own error."""
    tensors = [x.clone() for x in call.tensors]
    variables: dict[Any, torch.Tensor] = {}
    if differentiated:
        variables = {i: tensors[i].requires_grad_() for i in call.by}
        variables |= {n: p for n, p in call.module.named_parameters() if p.requires_grad}
    with _Draws() as draws, torch.set_grad_enabled(differentiated):
        found = call.module(*(x.clone() if x.requires_grad else x for x in tensors))
    wanted = Wanted([x.detach() for x in found], [x.requires_grad for x in found])
    wanted.is_random = draws.any
    of = [x for x in found if x.requires_grad]
    if variables and of:
        total = sum((torch.real(x).float() * _weights(x.shape)).sum() for x in of)
        gradients = torch.autograd.grad(total, [*variables.values()], allow_unused=True)
        wanted.gradients = {
            key: torch.zeros_like(x) if g is None else g
            for (key, x), g in zip(variables.items(), gradients, strict=True)
        }
    return wanted


def in_jax(call: Call, wanted: Wanted) -> tuple[list[jax.Array], dict[Any, jax.Array]]:
    """Return the results and gradients on_jax computes."""
    apply = on_jax.as_apply(call.module)
    params = {n: to_jax(p) for n, p in call.module.named_parameters() if p.requires_grad}
    held = {**dict(call.module.named_parameters()), **dict(call.module.named_buffers())}
    state = {n: to_jax(x) for n, x in held.items() if n not in params}
    arrays = [to_jax(x) for x in call.tensors]

    def compute(variables: dict[Any, jax.Array]) -> Any:
        own = {n: variables.get(n, x) for n, x in params.items()}
        given = [variables.get(str(i), x) for i, x in enumerate(arrays)]
        found = apply(own, state, *given, rng=jax.random.key(0))
        of = [x for x, is_varied in zip(found, wanted.varied, strict=True) if is_varied]
        parts = [jnp.real(x).astype(jnp.float32) * _weights(x.shape).numpy() for x in of]
        return sum(map(jnp.sum, parts), jnp.zeros(())), found

    if wanted.gradients is None:
        return jax.jit(lambda: compute({})[1])(), {}
    variables = {str(key): {**dict(enumerate(arrays)), **params}[key] for key in wanted.gradients}
    (_, found), gradients = jax.jit(jax.value_and_grad(compute, has_aux=True))(variables)
    return found, {key: gradients[str(key)] for key in wanted.gradients}


def difference(found: Any, wanted: torch.Tensor, tolerance: float, has_values: bool) -> str | None:
    """Return how an array differs from a tensor, or None."""
    if tuple(found.shape) != tuple(wanted.shape):
        return f"shape {tuple(found.shape)} for {tuple(wanted.shape)}"
    if found.dtype != jax_dtype(wanted.dtype):
        return f"dtype {found.dtype} for {wanted.dtype}"
    if not has_values or not found.size:
        return None
    wide = np.complex128 if wanted.is_complex() else np.float64
    exact = torch.complex128 if wanted.is_complex() else torch.float64
    a = np.asarray(found).astype(wide)
    b = wanted.resolve_conj().resolve_neg().to(exact).numpy()
    with np.errstate(invalid="ignore"):
        scale = max(1.0, np.max(np.abs(b), where=np.isfinite(b), initial=0.0))
        near = np.abs(a - b) <= tolerance * scale
    wrong = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not wrong.any():
        return None
    i = np.flatnonzero(wrong)[0]
    return f"{wrong.sum()} of {wrong.size} elements, such as {a.flat[i]:.6g} for {b.flat[i]:.6g}"


def outcome(call: Call, dtype: torch.dtype) -> str | None:
    """Return "agrees", or "refused" or "differs" with the reason; None if torch cannot do it."""
    if dtype == torch.bfloat16 and not any(x.numel() for x in call.tensors):
        return None  # torch takes empty matrices where neither it nor XLA has that dtype
    try:
        try:
            wanted = in_torch(call, differentiated=True)
        except Exception:
            wanted = in_torch(call, differentiated=False)
    except Exception:
        return None
    if any(x.layout != torch.strided for x in wanted.results):
        return _refusal(call, wanted) or "differs: a sparse result"
    if any(jax_dtype(x.dtype) is None for x in wanted.results):
        return _refusal(call, wanted) or "differs: a dtype that jax lacks"
    try:
        found, gradients = in_jax(call, wanted)
    except Exception as error:
        return _as_refusal(error) or f"differs: {type(error).__name__} {str(error)[:200]}"
    has_values, tolerance = call.has_values and not wanted.is_random, TOLERANCES[dtype]
    pairs = {f"result {i}": pair for i, pair in enumerate(zip(found, wanted.results, strict=True))}
    pairs |= {f"gradient {k}": (g, (wanted.gradients or {})[k]) for k, g in gradients.items()}
    for name, (array, tensor) in pairs.items():
        how = difference(array, tensor, tolerance, has_values)
        if how and not _is_nearer(array, tensor, _exact(call, wanted).get(name)):
            return f"differs: {name}, {how}"
    return "agrees"


def _exact(call: Call, wanted: Wanted) -> dict[str, torch.Tensor]:
    """Return results and gradients in float64, by name; nothing where torch has none."""
    wide = copy.deepcopy(call.module).double()
    tensors = [x.double() if x.is_floating_point() else x for x in call.tensors]
    try:
        of = in_torch(Call(wide, tensors, call.by, ""), differentiated=wanted.gradients is not None)
    except Exception:
        return {}
    results = {f"result {i}": x for i, x in enumerate(of.results)}
    return results | {f"gradient {k}": x for k, x in (of.gradients or {}).items()}


def _is_nearer(found: jax.Array, wanted: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """Return whether an array is nearer to exact values than torch's, as far as both are finite."""
    if exact is None or exact.dtype != torch.float64 or tuple(found.shape) != tuple(exact.shape):
        return False
    errors = [
        np.abs(x - exact.numpy()) for x in (np.asarray(found, np.float64), wanted.double().numpy())
    ]
    factor = 1.5 if wanted.dtype == torch.float32 else 4.0  # roundings fall elsewhere
    return bool(np.nanmax(errors[0], initial=0) <= factor * np.nanmax(errors[1], initial=0))


def _refusal(call: Call, wanted: Wanted) -> str | None:
    try:
        in_jax(call, Wanted([], [False] * len(wanted.results)))
    except Exception as error:
        return _as_refusal(error)
    return None


def _as_refusal(error: Exception) -> str | None:
    """Return "refused" with what is refused if on_jax has raised an error about it."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = [
        f for f in frames if Path(f.filename).is_relative_to(Path(torch_compat.__file__).parent)
    ]
    if type(error) is not ValueError or not is_ours:
        return None
    name = re.search(r" uses ([\w.]+)", str(error))
    return f"refused {name[1]}" if name else f"refused: {str(error)[:60]}"


def outcomes(name: str, dtype: torch.dtype, number: int | None = None) -> dict[str, list[str]]:
    """Return the calls with each outcome, of all of an operation or so many of them."""
    found: dict[str, list[str]] = {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            calls = list(subjects()[name](dtype))
        except NotImplementedError:  # torch cannot make them in this dtype
            return {}
        if number is not None and number < len(calls):
            calls = [calls[(i + 1) * len(calls) // number - 1] for i in range(number)]
        for call in calls:
            if (result := outcome(call, dtype)) is not None:
                found.setdefault(result, []).append(call.text)
    return found


def listed() -> dict[str, str]:
    """Return what the list says of each operation and module."""
    rows = (row.split(" | ") for row in LIST.read_text().splitlines() if not row.startswith("#"))
    return {name.strip(): outcome for name, outcome in rows}
