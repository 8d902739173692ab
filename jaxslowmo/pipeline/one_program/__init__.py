"""All stages in one program: a scan over the table of a schedule."""

from ._step import OneProgram as OneProgram
