"""All stages in one program: a scan over the table of a schedule."""

from ._pipelined import Pipelined as Pipelined
from ._pipelined import pipelined as pipelined
