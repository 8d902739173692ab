"""Connections between the processes of a run: by torch_xla, or by `torch.distributed`."""

from ._base import Backend as Backend
from ._base import Peers as Peers
from ._header import Exchange as Exchange
from ._header import Kind as Kind
