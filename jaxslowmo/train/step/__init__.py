"""One update of all replicas: what it consists of, and the program that runs it."""

from ._ahead import AheadMode as AheadMode
from ._ahead import AheadStep as AheadStep
from ._make_step import make_train_step as make_train_step
from ._step_programs import bounded as bounded
from ._train_step import TrainStep as TrainStep
from .update import GradientWindow as GradientWindow
