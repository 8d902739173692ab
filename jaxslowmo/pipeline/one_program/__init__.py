"""All stages in one program: a scan over the table of a schedule."""

from ._one_program import OneProgram as OneProgram
