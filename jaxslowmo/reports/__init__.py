"""Reports on what a program sends, and on how a step spends its time."""

from .communication import CommReport as CommReport
from .communication import CommRow as CommRow
from .communication import comm_report as comm_report
from .communication import comm_report_of as comm_report_of
from .time import Bucket as Bucket
from .time import KindOfStep as KindOfStep
from .time import MeasuredStep as MeasuredStep
from .time import StepReport as StepReport
from .time import StepTimes as StepTimes
from .time import measured as measured
