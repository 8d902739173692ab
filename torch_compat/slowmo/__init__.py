"""SlowMo, local SGD and stochastic gradient push for scripts under torch_xla's `xmp.spawn`."""

from ._options import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from ._wrapper import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
