"""Gradients of parameters of which several stages hold one copy each."""

from ._sum import TiedGroup as TiedGroup
from ._sum import TiedGroups as TiedGroups
from ._sum import checked_groups as checked_groups
from ._sum import sum_over_holders as sum_over_holders
from ._sum import sum_tied_gradients as sum_tied_gradients
from ._sum import tied_members as tied_members
