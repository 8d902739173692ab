"""Optimizers that remember parameters: which, and how their copies follow an exchange."""

from ._chain import Chain as Chain
from ._chain import chain as chain
from ._chain import note_followed as note_followed
from ._chain import noting_followed as noting_followed
from ._copies import has_origin as has_origin
from ._copies import moved_copies as moved_copies
from ._copies import moving_states as moving_states
from ._copies import remembers_parameters as remembers_parameters
from ._copies import shifted_copies as shifted_copies
