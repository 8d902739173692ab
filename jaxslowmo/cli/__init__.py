"""The command line: `jaxslowmo train`, `compare`, `sample`, and so on; extra `train`."""

from ._app import main as main
