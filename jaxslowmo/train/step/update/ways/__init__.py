"""Ways to run the update of an optimizer."""

from ._validated import Made as Made
from ._validated import validated as validated
