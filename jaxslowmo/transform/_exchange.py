"""What an exchange between replicas is over: one value in place of four arguments."""

import dataclasses
from dataclasses import dataclass

from .._typing import AxisName, PyTree
from ..codecs import Codec


@dataclass(frozen=True)
class Exchange:
    """Over which axes trees are exchanged, in which pieces, and in which form.

    Attributes:
      axis_name: mapped axis of the replicas, or several.
      local_axis_name: axis of the devices inside a replica, which hold equal trees: each then
        exchanges 1/L of them. None: every device exchanges all.
      param_specs: `PartitionSpec` per leaf (or prefix of the tree) over automatic axes inside a
        replica. None: leaves are whole there, or their types tell (Explicit axes).
      bucket_bytes: at which size a flat buffer closes; None: one buffer per dtype.
      codec: the form in which buffers travel that it narrows; None: as they are.
    """

    axis_name: AxisName
    local_axis_name: AxisName | None = None
    param_specs: PyTree | None = None
    bucket_bytes: int | None = None
    codec: Codec | None = None

    def with_specs(self, param_specs: PyTree) -> "Exchange":
        """The same for leaves of which the layout is known; specs that were given stay."""
        if self.param_specs is not None:
            return self
        return dataclasses.replace(self, param_specs=param_specs)
