"""Training with torch_xla when the network, or the host, is the slow part."""

from . import runtime as runtime
from .data import QueueDataset as QueueDataset
from .data import TPUDataManager as TPUDataManager
from .errors import TPUWorkerError as TPUWorkerError
from .manager import TPUManager as TPUManager
from .messages import StepStatistics as StepStatistics
from .slowmo import SlowMoBaseAlgorithm as SlowMoBaseAlgorithm
from .slowmo import SlowMoDistributedDataParallel as SlowMoDistributedDataParallel
from .synchronizer import TPUSynchronizer as TPUSynchronizer
