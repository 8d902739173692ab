"""Ways to run the update of an optimizer."""

from ._as_varying import run_as_varying as run_as_varying
from ._validated import Made as Made
from ._validated import check_asked as check_asked
from ._validated import check_late as check_late
from ._validated import validated as validated
