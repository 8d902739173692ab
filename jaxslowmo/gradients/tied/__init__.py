"""Parameters that several stages hold one copy each of."""

from ._groups import TiedGroup as TiedGroup
from ._groups import TiedGroups as TiedGroups
from ._groups import checked_groups as checked_groups
from ._groups import tied_members as tied_members
from ._holders import sum_over_holders as sum_over_holders
from ._sum import sum_tied_gradients as sum_tied_gradients
