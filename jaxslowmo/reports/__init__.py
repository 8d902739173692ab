"""Reports on what a program sends, and on how a step spends its time."""

from .communication import CommReport as CommReport
from .communication import CommRow as CommRow
from .communication import comm_report as comm_report
from .communication import comm_report_of as comm_report_of
from .time import Bucket as Bucket
from .time import CompiledPipeline as CompiledPipeline
from .time import KindOfStep as KindOfStep
from .time import MeasuredStep as MeasuredStep
from .time import ModelStage as ModelStage
from .time import ScheduleReport as ScheduleReport
from .time import StepReport as StepReport
from .time import StepTimes as StepTimes
from .time import measured as measured
from .time import schedule_grid as schedule_grid
from .time import schedule_picture as schedule_picture
from .time import schedule_report as schedule_report
