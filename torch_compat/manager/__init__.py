"""A model in shared host memory, trained by the devices of another process."""

from ._manager import TPUManager as TPUManager
