"""What checkpoints are written with, all of which the extra `train` brings."""

from .._support.extras import needed_by

with needed_by("jaxslowmo.checkpoint"):
    import orbax.checkpoint as ocp
    import tensorstore as ts
    from etils import epath

__all__ = ["epath", "ocp", "ts"]
