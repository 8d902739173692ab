"""The command line: `jaxslowmo train`, `compare`, `tune`, `inspect`, `launch`; extra `train`."""

from ._main import main as main
