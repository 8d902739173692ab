"""Reports on what a program sends, and on how a step spends its time."""

from ..tree import Bucket as Bucket
from ._comm_report import CommReport as CommReport
from ._comm_report import CommRow as CommRow
from ._comm_report import comm_report as comm_report
from ._comm_report import comm_report_of as comm_report_of
from ._measured import KindOfStep as KindOfStep
from ._measured import MeasuredStep as MeasuredStep
from ._measured import StepReport as StepReport
from ._measured import measured as measured
from ._step_times import StepTimes as StepTimes
