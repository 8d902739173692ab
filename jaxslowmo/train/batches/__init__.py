"""Batches as a process gives them, and on the devices that use them."""

from ._compared import Comparison as Comparison
from ._placed import HostBatch as HostBatch
from ._placed import as_arrays as as_arrays
from ._placed import from_parts as from_parts
from ._placed import is_of_processes as is_of_processes
from ._placed import lies_there as lies_there
from ._placed import own_parts as own_parts
from ._placed import parts_given as parts_given
from ._placed import placed_batch as placed_batch
from ._placed import placed_weight as placed_weight
from ._placed import processes_of as processes_of
from ._placed import topic_of as topic_of
