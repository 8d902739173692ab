"""What both executors of a pipeline share: its loss function, what it is made of, how it ends."""

from ._check import BatchMemory as BatchMemory
from ._check import as_axes as as_axes
from ._check import check_arguments as check_arguments
from ._check import check_not_mapped as check_not_mapped
from ._check import check_pipeline as check_pipeline
from ._kinds import StageKind as StageKind
from ._kinds import stage_kinds as stage_kinds
from ._microbatches import gathered as gathered
from ._microbatches import in_microbatches as in_microbatches
from ._microbatches import laid_out as laid_out
from ._microbatches import microbatch_of as microbatch_of
from ._microbatches import microbatch_specs as microbatch_specs
from ._microbatches import only_over as only_over
from ._microbatches import share_of_microbatches as share_of_microbatches
from ._pipelined import Pipelined as Pipelined
from ._plan import Ending as Ending
from ._plan import Plan as Plan
from ._plan import Totals as Totals
