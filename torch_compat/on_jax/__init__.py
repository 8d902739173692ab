"""torch modules on jax's engine: trained by `js.make_train_step`, through torchax.

The one part of `torch_compat` that needs jax, jaxslowmo and torchax (extra `torchax`).
"""

from . import tracing as tracing  # first: says what is missing
from ._apply import as_apply as as_apply
from ._load import load_arrays as load_arrays
from ._load import load_back as load_back
from ._loss import as_loss as as_loss
