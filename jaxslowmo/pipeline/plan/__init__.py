"""The parts that both executors of a pipeline share: loss function, plan, and end of a step."""

from ._pipelined import Pipelined as Pipelined
from ._pipelined import in_microbatches as in_microbatches
from ._pipelined import microbatch_of as microbatch_of
from ._pipelined import microbatch_specs as microbatch_specs
from ._pipelined import share_of_microbatches as share_of_microbatches
from ._plan import Ending as Ending
from ._plan import Plan as Plan
from ._plan import Segments as Segments
from ._plan import StageKind as StageKind
from ._plan import Totals as Totals
from ._plan import gathered as gathered
