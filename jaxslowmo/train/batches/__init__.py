"""Batches as a process gives them, and on the devices that use them."""

from ._placing import HostBatch as HostBatch
from ._placing import Placing as Placing
from ._placing import as_arrays as as_arrays
from ._placing import count_here as count_here
from ._placing import from_parts as from_parts
from ._placing import is_of_processes as is_of_processes
from ._placing import own_parts as own_parts
from ._processes import Comparison as Comparison
from ._processes import processes_of as processes_of
from ._processes import topic_of as topic_of
