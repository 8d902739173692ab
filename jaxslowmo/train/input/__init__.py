"""Batches loaded and put on the devices ahead of the steps that use them."""

from ._iterator import at_most as at_most
from ._pipeline import TrainPipeline as TrainPipeline
from ._report import PipelineReport as PipelineReport
from ._report import StageTimes as StageTimes
