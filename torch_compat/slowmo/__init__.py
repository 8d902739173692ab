"""SlowMo, local SGD and stochastic gradient push for the processes of a torch program."""

from ._options import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from ._start import broadcast_parameters as broadcast_parameters
from ._wrapper import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
