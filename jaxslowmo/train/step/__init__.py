"""The training step: one update of all replicas, and the programs that run it."""

from ._ahead import AheadMode as AheadMode
from ._ahead import AheadStep as AheadStep
from ._gradients import GradientWindow as GradientWindow
from ._gradients import mean_metrics as mean_metrics
from ._gradients import metric_weight as metric_weight
from ._gradients import weighted_metrics as weighted_metrics
from ._in_flight import BoundedStep as BoundedStep
from ._in_flight import bounded as bounded
from ._train_step import TrainStep as TrainStep
from ._train_step import make_train_step as make_train_step
from ._train_step import recommended_compiler_options as recommended_compiler_options
