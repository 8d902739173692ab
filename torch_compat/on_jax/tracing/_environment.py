"""What torch does while a module is traced: torchax, where it must mean what torch means."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import torch
from torch.utils import _pytree as torch_tree
from torch.utils._mode_utils import no_dispatch

from . import _batch_norm, _random
from ._gradients import functions_refused, without_gradient
from ._operations import changes_first, is_fixed, out_of_place, source
from ._torchax import Environment, OperatorNotFound, Tensor, View

# Tracing swaps tensors of the module, and filters warnings: one thread at a time.
_TRACING = threading.RLock()


_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__


class TracingEnvironment(Environment):
    """torchax's environment with four differences.

    Whatever is created inside is an array of jax, whichever device was asked for: the module's own
    is the CPU, as it believes. Plain torch tensors beside traced ones are constants. Gradients stop
    where torch's do. Random numbers come from one key alone.
    """

    def __init__(self) -> None:
        super().__init__()
        _batch_norm.define(self)
        _random.define(self)
        self.seen: set[int] = set()  # ids of tensors that an operation was given

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        del device
        return True

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        """A key for one operation; `ValueError` where there is none to take it from."""
        if generator is not None:
            raise ValueError(
                "The module draws from a torch.Generator, which would give the same numbers in "
                "every step: leave `generator` out, and numbers come from the step's key."
            )
        if self.param.prng is None:
            raise ValueError(
                "The module draws random numbers (dropout in training, torch.rand), and was given "
                "no key: pass `rng`, as js.make_train_step does, or call module.eval() before."
            )
        return super().get_and_rotate_prng_key()

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """As torchax; with constants, and without gradients where torch has none."""
        if func == _IS_META:  # torchax's tensors are, to torch, whose initialisers then do nothing
            return False
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ValueError(
                "torch.autocast would have no effect on arrays of jax: leave it out, and give "
                'js.make_train_step `policy=js.Policy("bfloat16")`.'
            )
        tensors = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.seen.update(map(id, tensors))
        if any(isinstance(x, Tensor | View) for x in tensors):
            args, kwargs = torch_tree.tree_map_only(torch.Tensor, self.constant, (args, kwargs))
        sources = [source(x) for x in tensors if isinstance(x, Tensor | View)]
        before = [(x, x._elem) for x in sources]
        try:
            result = self._written(func, types, args, kwargs)
        except OperatorNotFound:
            if tensors or not is_fixed(func):
                raise
            with no_dispatch():  # such as torch.promote_types, or a window
                return func(*args, **(kwargs or {}))
        return result if torch.is_grad_enabled() else without_gradient(result, before)

    def _written(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """As torchax; what changes its first argument in place does so, whichever operation."""
        if not (args and isinstance(args[0], Tensor | View) and changes_first(func)):
            return super().dispatch(func, types, args, kwargs)
        key = self.param.prng
        result = self._changed(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and self.param.prng is key:
            raise ValueError(
                f"The module uses {func}, which torchax draws from numbers of its own: the same in "
                "every step."
            )
        return result

    def _changed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The first argument, after an operation that changes it."""
        try:
            if self._get_op_or_decomp(func).is_view_op:  # writes by itself
                return super().dispatch(func, types, args, kwargs)
        except OperatorNotFound:
            func = out_of_place(func)
        target: Any = args[0]
        old = target.jax()
        new = super().dispatch(func, types, (Tensor(old, self), *args[1:]), kwargs).jax()
        if isinstance(target, View):
            target.update(new.astype(old.dtype))
        else:
            target._elem = new.astype(old.dtype)
        return target

    def constant(self, x: torch.Tensor) -> Any:
        """A tensor as one that can be traced."""
        return x if isinstance(x, Tensor | View) else self.to_xla(x.detach())


@functools.cache
def environment() -> TracingEnvironment:
    """The one of this process, apart from `torchax.default_env()` and its settings."""
    with torch.random.fork_rng(devices=[]):
        return TracingEnvironment()


@contextlib.contextmanager
def tracing(rng: jax.Array | None) -> Iterator[TracingEnvironment]:
    """Inside, torch's operations on torchax's tensors are jax's.

    Args:
      rng: the PRNG key that random numbers are drawn from; None: drawing raises `ValueError`.
    """
    env = environment()
    distribution: Any = torch.distributions.Distribution
    validates = distribution._validate_args
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    with _TRACING, warnings.catch_warnings(), env.override_property(prng=rng):
        # torch's integers have 64 bits by default, jax's 32: it says so at every one.
        warnings.filterwarnings("ignore", message="Explicitly requested dtype u?int64")
        torch.backends.mha.set_fastpath_enabled(False)  # it has no gradient and no lowering
        distribution._validate_args = False  # it would ask for values, which a trace has not
        seen, env.seen = env.seen, set()
        try:
            with env, functions_refused():
                yield env
        finally:
            env.seen = seen
            distribution._validate_args = validates
            torch.backends.mha.set_fastpath_enabled(fast_attention)
