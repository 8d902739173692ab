"""`jaxslowmo sample`."""

from pathlib import Path

from .._errors import usage_errors
from ._config import SampleConfig
from ._generate import generate
from ._model import find_model


def sample(config: SampleConfig, run: Path) -> int:
    """Prints what the model of a run goes on with, and returns the exit code.

    Raises:
      CommandError: there is no model, or it cannot be read.
    """
    with usage_errors():
        model, params = find_model(run, config.step)
    print(generate(model, params, config).decode("utf-8", "replace"))
    return 0
