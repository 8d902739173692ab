"""Run a pipeline as one program per stage and operation, which the host dispatches."""

from ._host_pipeline import HostPipeline as HostPipeline
from ._host_pipeline import Results as Results
