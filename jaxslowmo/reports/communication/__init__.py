"""Reports on what a training step communicates."""

from ._collectives import COLLECTIVES as COLLECTIVES
from ._comm_report import comm_report as comm_report
from ._comm_report import comm_report_of as comm_report_of
from ._comm_rows import CommReport as CommReport
from ._comm_rows import CommRow as CommRow
from ._comm_rows import align_columns as align_columns
from ._hlo_text import Instruction as Instruction
from ._hlo_text import parse_module as parse_module
from ._hlo_text import parse_phase as parse_phase
from ._hlo_text import parse_scope as parse_scope
