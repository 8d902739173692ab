"""What a training step does, seen from outside: its communication."""

from ._comm_report import comm_report as comm_report
from ._comm_report import comm_report_of as comm_report_of
from ._report import CommReport as CommReport
from ._rows import CommRow as CommRow
from .readers import COLLECTIVES as COLLECTIVES
from .readers import Instruction as Instruction
from .readers import parse_module as parse_module
from .readers import phase_of as phase_of
