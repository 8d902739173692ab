"""Reports on the time that a training step spends, measured while it runs."""

from ...tree import Bucket as Bucket
from ._measured import MeasuredStep as MeasuredStep
from ._measured import measured as measured
from ._schedule_grid import schedule_grid as schedule_grid
from ._schedule_grid import schedule_title as schedule_title
from ._schedule_picture import COLOURS as COLOURS
from ._schedule_picture import schedule_picture as schedule_picture
from ._schedule_report import CompiledPipeline as CompiledPipeline
from ._schedule_report import ModelStage as ModelStage
from ._schedule_report import ScheduleReport as ScheduleReport
from ._schedule_report import schedule_report as schedule_report
from ._step_report import KindOfStep as KindOfStep
from ._step_report import StepReport as StepReport
from ._times import StepTimes as StepTimes
