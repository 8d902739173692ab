"""Training one model on many machines when the network between them is slow.

`import jaxslowmo as js`: optax transforms that make communication rare (`local_sgd`, `slowmo`,
`diloco`), a bucketed gradient all-reduce, the training step around them, and a report of what a
step sends (`comm_report`).
"""

from importlib.metadata import version as _version

from .algorithms import AllReduceGradientsState as AllReduceGradientsState
from .algorithms import Every as Every
from .algorithms import LocalSGDState as LocalSGDState
from .algorithms import OuterState as OuterState
from .algorithms import ParameterTransform as ParameterTransform
from .algorithms import SlowMomentumState as SlowMomentumState
from .algorithms import all_reduce_gradients as all_reduce_gradients
from .algorithms import diloco as diloco
from .algorithms import every as every
from .algorithms import local_sgd as local_sgd
from .algorithms import phase_name as phase_name
from .algorithms import read_anchor as read_anchor
from .algorithms import slow_momentum as slow_momentum
from .algorithms import slowmo as slowmo
from .diagnostics import CommReport as CommReport
from .diagnostics import CommRow as CommRow
from .diagnostics import comm_report as comm_report
from .diagnostics import comm_report_of as comm_report_of
from .mesh import VirtualMesh as VirtualMesh
from .mesh import consensus as consensus
from .mesh import init as init
from .mesh import make_mesh as make_mesh
from .mesh import replicate as replicate
from .mesh import virtual_mesh as virtual_mesh
from .train import Evaluate as Evaluate
from .train import Log as Log
from .train import StepResult as StepResult
from .train import TrainState as TrainState
from .train import TrainStep as TrainStep
from .train import host_mean as host_mean
from .train import make_train_step as make_train_step
from .train import train_loop as train_loop
from .tree import assign_buckets as assign_buckets

__version__ = _version("jaxslowmo")
