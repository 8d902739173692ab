"""What both executors of a pipeline share: its loss function, what it is made of, how it ends."""

from ._data import Ending as Ending
from ._data import Totals as Totals
from ._data import gathered as gathered
from ._data import in_microbatches as in_microbatches
from ._data import laid_out as laid_out
from ._data import microbatch_of as microbatch_of
from ._data import microbatch_specs as microbatch_specs
from ._data import only_over as only_over
from ._data import share_of_microbatches as share_of_microbatches
from ._pipelined import Pipelined as Pipelined
from ._plan import Plan as Plan
from ._plan import StageKind as StageKind
from ._plan import stage_kinds as stage_kinds
