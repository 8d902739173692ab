"""Training of torch modules by `js.make_train_step`, on jax through torchax.

Only this part of `torch_compat` needs jax, jaxslowmo and torchax (extra `torchax`).
"""

from . import tracing as tracing  # first: its error names missing packages
from ._load import load_arrays as load_arrays
from ._load import load_back as load_back
from ._loss import as_apply as as_apply
from ._loss import as_loss as as_loss
