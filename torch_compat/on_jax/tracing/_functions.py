"""What torch's functions do in a trace: some in other operations, some on other devices."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.overrides import TorchFunctionMode

from ._internals import no_dispatch, owner_of, weight_norm
from ._values import Values


@contextlib.contextmanager
def cumulative_averages(module: torch.nn.Module) -> Iterator[None]:
    """Run the block with layers of `momentum=None` counting batches in a traced tensor.

    They average over all batches, whose number torch reads as a float.
    """
    layers = [
        m
        for m in module.modules()
        if isinstance(m, BatchNorm)
        and m.training
        and m.momentum is None
        and m.num_batches_tracked is not None
        and type(m).forward is BatchNorm.forward
    ]
    try:
        for layer in layers:
            layer.__dict__["forward"] = functools.partial(_cumulative, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _cumulative(layer: BatchNorm, x: torch.Tensor) -> torch.Tensor:
    layer._check_input_dim(x)
    mean, variance, number = layer.running_mean, layer.running_var, layer.num_batches_tracked
    assert mean is not None
    assert variance is not None
    assert number is not None
    _track(x, mean, variance, 1.0 / number.add_(1).to(torch.float32))
    return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


def _track(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, share: torch.Tensor | float
) -> None:
    with torch.no_grad():
        new_variance, new_mean = torch.var_mean(x.to(mean.dtype), (0, *range(2, x.ndim)))
    mean.lerp_(new_mean, share)
    variance.lerp_(new_variance, share)


def batch_norm(
    x: torch.Tensor,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> torch.Tensor:
    """Compute `F.batch_norm`, whose own has no gradient with respect to statistics."""
    if mean is None or variance is None or not (mean.requires_grad or variance.requires_grad):
        return F.batch_norm(x, mean, variance, weight, bias, training, momentum, eps)
    if training:
        _track(x, mean, variance, momentum)
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
    shift = (0 if bias is None else bias) - mean * scale
    each = (-1, *(1 for _ in x.shape[2:]))
    return x * scale.view(each) + shift.view(each)


_MANY_ROWS = 25  # torch.cdist uses products of matrices above this, unless `compute_mode` forbids
_SUM, _MEAN = 0, 1  # modes of torch's embedding bags; the third is the maximum
_TENSOR: Any = torch.Tensor


class Functions(TorchFunctionMode):
    """Torch's functions, with those of `_FUNCTIONS` replaced.

    All tensors are on one device, whichever a module requests.
    """

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._reads: dict[Any, Callable[..., Any]] = {
            _TENSOR.numpy: lambda x, **_: values.value_of(x, "Tensor.numpy").numpy(),
            _TENSOR.__array__: lambda x, *to: values.value_of(x, "Tensor.numpy").__array__(*to),
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        kwargs = kwargs or {}
        if any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ValueError(
                "torch.autocast has no effect here: give js.make_train_step "
                '`policy=js.gradients.Policy("bfloat16")`.'
            )
        if any(isinstance(x, torch.Generator) for x in jax.tree.leaves((args, kwargs))):
            raise ValueError(
                "The module draws from a torch.Generator, which gives the same numbers in every "
                "step: leave `generator` out."
            )
        is_device = lambda x: isinstance(x, torch.device)  # noqa: E731
        args = jax.tree.map(lambda x: torch.device("cpu") if is_device(x) else x, args)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if (out := kwargs.get("out")) is not None:
            others = {name: x for name, x in kwargs.items() if name != "out"}
            results = func(*args, **others)
            pairs = zip(out, results, strict=True) if isinstance(out, tuple) else [(out, results)]
            for x, result in pairs:
                if x.shape != result.shape and x.numel():
                    raise ValueError(
                        f"`out` must have the result's shape {tuple(result.shape)}, got "
                        f"{tuple(x.shape)}."
                    )
        if func in self._reads:
            with no_dispatch():
                return self._reads[func](*args, **kwargs)
        replaced: Any = _FUNCTIONS.get(func, func)
        return replaced(*args, **kwargs)


def _tensor_to(x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    """Compute `Tensor.to`, on the one device that there is."""
    is_device = lambda y: isinstance(y, str | int) and not isinstance(y, bool)  # noqa: E731
    return _TENSOR.to(x, *("cpu" if is_device(y) else y for y in args), **named)


def _as_strided(x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """Compute `torch.as_strided` from the tensor that owns the memory."""
    base = _owner(x)
    if not base.is_contiguous() or base.dtype != x.dtype:
        raise ValueError(
            "The module uses as_strided on a tensor that is not contiguous, or whose dtype is a "
            "view: call x.contiguous() before."
        )
    offset = x.storage_offset() if storage_offset is None else storage_offset
    view = torch.ops.aten.as_strided(base, size, stride, offset)
    return view if x.requires_grad else view.detach()


def _owner(x: Any) -> Any:
    owner = owner_of(x)
    return _owner(owner.detached_from) if hasattr(owner, "detached_from") else owner


def _remember_owner(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `get`, which shares memory without a derivative, noting whose memory that is.

    torch traces writes through `as_strided` of the owner alone.
    """

    def function(x: Any) -> Any:
        y = get(x)
        y.detached_from = x
        return y

    return function


def _set_data(x: Any, other: torch.Tensor) -> None:
    """Do `x.data = other`: the tensor takes the other's memory, and keeps its derivative."""
    if (other.shape, other.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"`.data` of a tensor of shape {tuple(x.shape)} and {x.dtype} cannot become one of "
            f"{tuple(other.shape)} and {other.dtype}: set the attribute that holds the tensor."
        )
    with torch.no_grad():
        x.set_(other.detach())


def _cdist(
    x: torch.Tensor, y: torch.Tensor, p: float = 2.0, compute_mode: Any = None
) -> torch.Tensor:
    is_many = max(x.shape[-2], y.shape[-2]) > _MANY_ROWS
    never = "donot_use_mm_for_euclid_dist"
    if p == 2 and (compute_mode == "use_mm_for_euclid_dist" or (is_many and compute_mode != never)):
        return torch.ops.aten._euclidean_dist(x, y)
    return torch.linalg.vector_norm(x[..., :, None, :] - y[..., None, :, :], p, -1)


def _pdist(x: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    first, second = torch.triu_indices(len(x), len(x), 1)
    return torch.linalg.vector_norm(x[first] - x[second], p, -1)


def embedding_bag(
    weight: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute `torch.embedding_bag` from other operations."""
    del sparse
    num_bags = len(offsets) - include_last_offset
    starts = torch.zeros(len(ids) + 1, dtype=torch.int64)
    starts = starts.index_add(0, offsets[:num_bags], torch.ones(num_bags, dtype=torch.int64))
    bags = starts.cumsum(0)[:-1] - 1
    rows = torch.embedding(weight, ids, -1, scale_grad_by_freq)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    padding = None if padding_idx is None else padding_idx % len(weight)
    counts = torch.ones_like(ids) if padding is None else (ids != padding).to(ids.dtype)
    sizes = torch.zeros(num_bags, dtype=ids.dtype).index_add(0, bags, counts)
    empty = torch.zeros(num_bags, weight.shape[1], dtype=weight.dtype)
    if mode in (_SUM, _MEAN):
        out = empty.index_add(0, bags, rows.masked_fill(counts[:, None] == 0, 0))
        if mode == _MEAN:
            out = out / sizes.clamp(min=1)[:, None]
    else:
        rows = rows.masked_fill(counts[:, None] == 0, -torch.inf)
        out = empty.scatter_reduce(
            0, bags[:, None].expand_as(rows), rows, "amax", include_self=False
        )
        out = out.masked_fill(sizes[:, None] == 0, 0)
    return out, bags, sizes, sizes


def _random_(x: torch.Tensor, *bounds: int | None, **named: int | None) -> torch.Tensor:
    """Compute `Tensor.random_`; without bounds these are the integers that the dtype holds."""
    *low, high = bounds or (named.get("from", 0), named.get("to"))
    if high is None:
        is_floating = x.is_floating_point()
        last = int(2 / torch.finfo(x.dtype).eps) if is_floating else torch.iinfo(x.dtype).max
        high = min(last, 2**31 - 1)
    return x.copy_(torch.randint(low[0] or 0 if low else 0, high, x.shape))


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _tensor_split(x: torch.Tensor, *places: Any, **named: Any) -> Any:
    """Compute `torch.tensor_split`, which reads tensors of places where torch traces nothing."""
    split: Any = torch.tensor_split
    read = lambda y: y.tolist() if isinstance(y, torch.Tensor) else y  # noqa: E731
    return split(x, *map(read, places), **{name: read(y) for name, y in named.items()})


# Those whose own backward passes are operations that torchax lacks.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.as_strided: _as_strided,
    _TENSOR.as_strided: _as_strided,
    F.batch_norm: batch_norm,
    torch.detach: _remember_owner(torch.detach),
    _TENSOR.detach: _remember_owner(torch.detach),
    _TENSOR.data.__get__: _remember_owner(_TENSOR.data.__get__),
    _TENSOR.random_: _random_,
    torch.tensor_split: _tensor_split,
    _TENSOR.tensor_split: _tensor_split,
    torch.cdist: _cdist,
    torch.pdist: _pdist,
    weight_norm: _weight_norm,
    _TENSOR.data.__set__: _set_data,
    _TENSOR.to: _tensor_to,
    _TENSOR.cuda: lambda x, *_, **__: x,
}
