"""`jaxslowmo sample`."""

import sys
import unicodedata
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
    print(_shown(generate(model, params, config), sys.stdout.encoding or "utf-8"))
    return 0


def _shown(text: bytes, encoding: str) -> str:
    """What stdout can take: other bytes, and what would steer a terminal, have a stand-in."""
    letters = text.decode("utf-8", "replace")
    plain = "".join("\ufffd" if _steers(letter) else letter for letter in letters)
    return plain.encode(encoding, "replace").decode(encoding)


def _steers(letter: str) -> bool:
    return unicodedata.category(letter) == "Cc" and not letter.isspace()
