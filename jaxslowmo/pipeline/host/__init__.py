"""One program per stage and operation, dispatched by the host."""

from ._pipeline import HostPipeline as HostPipeline
from ._results import Results as Results
