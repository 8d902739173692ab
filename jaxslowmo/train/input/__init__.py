"""Batches loaded and put on the devices ahead of the steps that use them."""

from ._input_report import InputPipelineReport as InputPipelineReport
from ._input_report import InputStageTimes as InputStageTimes
from ._loader import at_most as at_most
from ._train_pipeline import TrainPipeline as TrainPipeline
from ._train_pipeline import check_accumulation as check_accumulation
from ._updates import Partial as Partial
from ._updates import StepResult as StepResult
