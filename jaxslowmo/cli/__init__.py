"""The command line: `jaxslowmo train`, `jaxslowmo compare`; needs the `train` extra."""

from ._main import main as main
