"""How embedding tables enter a training step: what is looked up for a batch, and given back."""

from ._asked import Ahead as Ahead
from ._asked import Carry as Carry
from ._asked import WithVectors as WithVectors
from ._lookup import Lookup as Lookup
from ._make import lookup_of as lookup_of
from ._rows import added_rows as added_rows
from ._rows import empty_rows as empty_rows
from ._rows import rows_are_finite as rows_are_finite
from ._rows import summed as summed
