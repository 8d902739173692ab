"""One program per stage and operation, dispatched by the host."""

from ._host_pipeline import HostPipeline as HostPipeline
from ._host_pipeline import Results as Results
