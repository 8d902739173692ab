"""Checkpoints of a run, which can be restored on another number of replicas; needs orbax."""

from ._checkpoints import Checkpoints as Checkpoints
from ._checkpoints import Restored as Restored
from ._export import consensus_extra as consensus_extra
from ._export import export_consensus as export_consensus
from ._export import load_consensus as load_consensus
from ._record import CheckpointError as CheckpointError
from ._record import UnansweredError as UnansweredError
