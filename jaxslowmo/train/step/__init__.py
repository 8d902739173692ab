"""One update of all replicas: what it consists of, and the program that runs it."""

from ._ahead import AheadMode as AheadMode
from ._ahead import AheadStep as AheadStep
from ._in_flight import bounded as bounded
from ._make import make_train_step as make_train_step
from ._placing import count_here as count_here
from ._step import TrainStep as TrainStep
from .update import GradientWindow as GradientWindow
