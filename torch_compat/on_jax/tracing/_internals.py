"""The names of torch that are not public: look here first if another version of torch fails.

Attributes of operations and tensors that are not public have a function here, too.
"""

from typing import Any

import torch

# What torch composes of other operations, by operation.
from torch._decomp import decomposition_table as decomposition_table

# A module compiled by torch.compile, which is refused.
from torch._dynamo import OptimizedModule as OptimizedModule

# Tensors without elements: FakeTensorMode makes them. An operation that needs elements, or whose
# result has a size that depends on them, raises one of the errors.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# Tensors that record views and writes in place as operations without either.
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode

# The tracer, and the node of the graph that computes a tensor.
from torch.fx.experimental.proxy_tensor import get_proxy_mode as get_proxy_mode
from torch.fx.experimental.proxy_tensor import get_proxy_slot as get_proxy_slot
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

# Running operations on constants outside of the trace, and seeing each operation in it.
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_TORCH: Any = torch
# The function that torch.nn.utils.weight_norm computes with.
weight_norm = _TORCH._weight_norm
# torch's spare device, which is named "jax" if the program imported torchax before.
spare_device = torch.device(_TORCH._C._get_privateuse1_backend_name(), 0)


def has_changed(x: Any) -> bool:
    """Return whether the trace has written to a tensor."""
    return _TORCH._functionalize_has_data_mutation(x.elem)


def owner_of(x: Any) -> Any:
    """Return the tensor of whose memory another is a view, maybe itself."""
    return x if x._base is None else x._base


def schema_of(func: Any) -> Any:
    """Return what an operation declares: `arguments`, with names and defaults, and `returns`."""
    return func._schema


def as_parameter(x: Any) -> None:
    """Let `isinstance(x, torch.nn.Parameter)` be true."""
    x._is_param = True


def distributions_check() -> bool:
    """Return whether distributions check their arguments by default."""
    return _TORCH.distributions.Distribution._validate_args
