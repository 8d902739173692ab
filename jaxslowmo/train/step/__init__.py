"""One update of all replicas: what it consists of, and the program that runs it."""

from ._in_flight import bounded as bounded
from ._make import make_train_step as make_train_step
from ._parts import from_parts as from_parts
from ._parts import is_of_processes as is_of_processes
from ._parts import own_parts as own_parts
from ._parts import processes_of as processes_of
from ._parts import topic_of as topic_of
from ._step import TrainStep as TrainStep
