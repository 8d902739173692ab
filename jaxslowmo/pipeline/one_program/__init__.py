"""Run all stages in one program, which scans over the table of a schedule."""

from ._one_program import OneProgram as OneProgram
