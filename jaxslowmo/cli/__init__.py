"""The command line: `jaxslowmo train`, `compare` and `inspect`; needs the `train` extra."""

from ._main import main as main
