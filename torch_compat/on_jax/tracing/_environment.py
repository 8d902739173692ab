"""The environment in which a module is traced: torchax's, with torch's semantics."""

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

from . import _added, _batch_norm, _known, _random, _sharing
from ._errors import is_of_this_package, raise_translated, values_refused
from ._gradients import functions_refused, without_gradient
from ._kinks import differentiated, has_kink
from ._known import VALUE_NEEDED, constants_evaluated
from ._layouts import laid_out
from ._operations import changes_first, is_fixed, out_of_place, plain_index
from ._torchax import Environment, OperatorNotFound, Tensor
from ._views import source

# One thread at a time: tracing replaces tensors of the module, and filters warnings.
_TRACING = threading.RLock()


_STOPS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.Tensor.detach_}
_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__


class TracingEnvironment(Environment):
    """The environment of torchax with eight differences.

    New tensors are arrays of jax, whichever device a module requests. Plain torch tensors among the
    arguments of an operation are constants. Gradients stop where torch's do, and at kinks they are
    torch's. Random numbers come from one key. Views share memory. A tensor that depends only on
    constants has a value if torch needs it. An operation that torchax and jax lack raises an error
    that names the layer.
    """

    has_views = True

    def __init__(self) -> None:
        super().__init__()
        _batch_norm.define(self)
        _random.define(self)
        _added.define(self)
        _known.define(self)
        self.module: torch.nn.Module | None = None  # the module that is traced
        _sharing.define(self)
        self.seen: set[int] = set()  # ids of tensors that were arguments of an operation

    def _should_use_torchax_tensor(self, device: Any) -> bool:
        del device
        return True

    def get_and_rotate_prng_key(self, generator: torch.Generator | None = None) -> jax.Array:
        """Return a key for one operation; raise `ValueError` if no key was passed."""
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
        """Run an operation as torchax does, with constants and torch's rules for gradients."""
        if func == _IS_META:  # torch's own answer is True, and its initialisers skip meta tensors
            return False
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = args[0], plain_index(args[1]), *args[2:]
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ValueError(
                "torch.autocast would have no effect on arrays of jax: leave it out, and give "
                'js.make_train_step `policy=js.Policy("bfloat16")`.'
            )
        if kwargs and kwargs.get("out") is not None and not isinstance(func, torch._ops.OpOverload):
            others = {name: x for name, x in kwargs.items() if name != "out"}
            with self:
                return _added.write_out(kwargs["out"], func(*args, **others))
        tensors = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.seen.update(map(id, tensors))
        if any(isinstance(x, Tensor) for x in tensors):
            first = args[0] if args else None
            outside = isinstance(first, torch.Tensor) and not isinstance(first, Tensor)
            if outside and changes_first(func):
                raise ValueError(
                    "The module writes into a tensor that was made outside of its call and is no "
                    "buffer of it, where the change would be lost: register it as a buffer "
                    "(module.register_buffer)."
                )
            args, kwargs = torch_tree.tree_map_only(torch.Tensor, self.constant, (args, kwargs))
        sources = [source(x) for x in tensors if isinstance(x, Tensor)]
        before = [(x, x._elem) for x in sources]
        try:
            result = self._computed(func, types, args, kwargs, tensors)
        except OperatorNotFound:
            if tensors or not is_fixed(func):
                raise
            with no_dispatch():  # for example torch.promote_types, or a window
                return func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled():
            return without_gradient(result, tensors, before)
        if any(x.requires_grad for x in tensors) and func not in _STOPS:
            for x in torch_tree.tree_leaves(result):
                if isinstance(x, Tensor) and x.dtype.is_floating_point:
                    x.requires_grad = True
        return result

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Run `_written`, with values of constants if they are needed; raise clear errors."""
        try:
            return self._written(func, types, args, kwargs, tensors)
        except Exception as error:
            if is_of_this_package(error) or isinstance(error, jax.errors.JaxRuntimeError):
                raise
            is_below = isinstance(func, torch._ops.OpOverload)
            traced = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if isinstance(error, OperatorNotFound) and not (is_below and traced):
                raise  # torch may decompose or compute it
            if isinstance(error, VALUE_NEEDED):
                for computes in (False, True):
                    with (
                        constants_evaluated(traced, computes=computes) as has_constants,
                        contextlib.suppress(*VALUE_NEEDED),
                    ):
                        if has_constants:
                            return self._written(func, types, args, kwargs, tensors)
            raise_translated(error, self.module, func, args, kwargs)

    def _written(self, func: Any, types: Any, args: Any, kwargs: Any, tensors: Any) -> Any:
        """Run an operation as torchax does; if it is in place, change its first argument."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket):  # torch then tries one of its overloads
            raise OperatorNotFound(func)
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if _sharing.shares_memory(func):
                run = functools.partial(super().dispatch, func, types)
                return _sharing.view(func, run, args, kwargs)
            if func in _sharing.CHANGES_OF_SHAPE:
                func = _sharing.CHANGES_OF_SHAPE[func]
                run = functools.partial(super().dispatch, func, types)
                return _sharing.change_shape(func, run, args, kwargs)
        if not (isinstance(first, Tensor) and changes_first(func)):
            result = self._differentiated(func, types, args, kwargs)
            return laid_out(func, args, kwargs, tensors, result)
        key = self.param.prng
        result = self._changed(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and self.param.prng is key:
            raise ValueError(
                f"The module uses {func}, which torchax draws from its own key: equal numbers in "
                "every step."
            )
        return result

    def _changed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that changes its first argument, and return the argument."""
        if has_kink(out_of_place(func)):
            func = out_of_place(func)
        try:
            if self._get_op_or_decomp(func).is_view_op:  # it writes itself
                return super().dispatch(func, types, args, kwargs)
        except OperatorNotFound:
            func = out_of_place(func)
        target: Any = args[0]
        old = target.jax()
        new = self._differentiated(func, types, (Tensor(old, self), *args[1:]), kwargs).jax()
        target._elem = new.astype(old.dtype)
        return target

    def _differentiated(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation as torchax does, with torch's derivative if jax has another one."""
        run = functools.partial(super().dispatch, func, types)
        return differentiated(self, func, run, args, kwargs)

    def _get_op_or_decomp(self, func: Any) -> Any:
        """Return torchax's operation, or else torch's decomposition."""
        try:
            return super()._get_op_or_decomp(func)
        except OperatorNotFound:
            function = _added.decomposition(func)
            if function is None:
                raise
            self.override_op_definition(func, function)
            return super()._get_op_or_decomp(func)

    def _is_same_device(self, the_tensor: Any, new_device: Any) -> bool:
        """Return True for tensors of torchax, whichever device a module requests."""
        del new_device
        return isinstance(the_tensor, Tensor)

    def constant(self, x: torch.Tensor) -> Any:
        """Return a tensor as one of torchax."""
        return x if isinstance(x, Tensor) else self.to_xla(x.detach())


@functools.cache
def environment() -> TracingEnvironment:
    """Return this process' environment, which is independent of `torchax.default_env()`."""
    with torch.random.fork_rng(devices=[]):
        return TracingEnvironment()


@contextlib.contextmanager
def tracing(
    rng: jax.Array | None, module: torch.nn.Module | None = None
) -> Iterator[TracingEnvironment]:
    """Run the block with torch's operations on torchax's tensors as operations of jax.

    Args:
      rng: PRNG key of random numbers; None: drawing raises `ValueError`.
      module: module that the block calls; errors name its layers.
    """
    env = environment()
    distribution: Any = torch.distributions.Distribution
    validates = distribution._validate_args
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    with _TRACING, warnings.catch_warnings(), env.override_property(prng=rng):
        # torch's integers have 64 bits by default, jax's 32: jax warns at each of them.
        warnings.filterwarnings("ignore", message="Explicitly requested dtype u?int64")
        torch.backends.mha.set_fastpath_enabled(False)  # this path has no gradient and no lowering
        distribution._validate_args = False  # validation needs values, which a trace lacks
        before = env.seen, env.module
        env.seen, env.module = set(), module
        try:
            with values_refused(module), env, functions_refused():
                yield env
        finally:
            env.seen, env.module = before
            distribution._validate_args = validates
            torch.backends.mha.set_fastpath_enabled(fast_attention)
