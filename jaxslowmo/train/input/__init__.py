"""Batches loaded and put on the devices ahead of the steps that use them."""

from ._scan_pipeline import ScanBatches as ScanBatches
from ._scan_pipeline import ScanPipeline as ScanPipeline
from ._train_pipeline import InputPipelineReport as InputPipelineReport
from ._train_pipeline import InputStageTimes as InputStageTimes
from ._train_pipeline import Partial as Partial
from ._train_pipeline import StepResult as StepResult
from ._train_pipeline import TrainPipeline as TrainPipeline
from ._train_pipeline import check_accumulation as check_accumulation
