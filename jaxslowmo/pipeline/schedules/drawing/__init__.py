"""Drawings of schedules: a grid of text, and a picture to scale."""

from ._grid import Piece as Piece
from ._grid import grid as grid
from ._grid import grid_lines as grid_lines
from ._picture import COLOURS as COLOURS
from ._picture import picture as picture
