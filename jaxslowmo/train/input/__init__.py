"""Batches loaded and put on the devices ahead of the steps that use them."""

from ._loader import at_most as at_most
from ._pipeline import TrainPipeline as TrainPipeline
from ._pipeline import check_accumulation as check_accumulation
from ._report import PipelineReport as PipelineReport
from ._report import StageTimes as StageTimes
from ._runner import Partial as Partial
