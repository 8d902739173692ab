"""The device process of a `TPUManager` that uses jax."""

from ._group import MeshGroup as MeshGroup
from ._group import is_started as is_started
from ._group import open_devices as open_devices
