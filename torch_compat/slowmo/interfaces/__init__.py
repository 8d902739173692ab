"""Interfaces of other classes on the wrapper: FairScale's attributes, DDP's context managers."""

from ._ddp import LikeDDP as LikeDDP
from ._fairscale import NamesOfFairScale as NamesOfFairScale
