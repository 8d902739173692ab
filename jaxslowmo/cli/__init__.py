"""The command line: `jaxslowmo train`, `compare`, `sample`, and so on; extra `train`."""

from ._main import main as main
