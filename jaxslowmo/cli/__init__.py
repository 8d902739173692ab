"""The command line: `jaxslowmo train`, `compare`, `tune` and `inspect`; needs the `train` extra."""

from ._main import main as main
