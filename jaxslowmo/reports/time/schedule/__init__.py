"""What a pipeline's schedule costs: predicted from its table, and read off the compiled program."""

from ._make import schedule_report as schedule_report
from ._report import CompiledPipeline as CompiledPipeline
from ._report import ModelStage as ModelStage
from ._report import ScheduleReport as ScheduleReport
