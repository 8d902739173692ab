"""Reports on the time that a training step spends, measured while it runs."""

from ...tree import Bucket as Bucket
from ._measured import MeasuredStep as MeasuredStep
from ._measured import measured as measured
from ._step_report import KindOfStep as KindOfStep
from ._step_report import StepReport as StepReport
from ._times import StepTimes as StepTimes
