"""What a training step spends its time on, measured while it runs."""

from ._measured import MeasuredStep as MeasuredStep
from ._measured import measured as measured
from ._step_report import Bucket as Bucket
from ._step_report import KindOfStep as KindOfStep
from ._step_report import StepReport as StepReport
from ._times import StepTimes as StepTimes
from .schedule import CompiledPipeline as CompiledPipeline
from .schedule import ModelStage as ModelStage
from .schedule import ScheduleReport as ScheduleReport
from .schedule import schedule_report as schedule_report
