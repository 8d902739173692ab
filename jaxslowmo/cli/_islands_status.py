"""`jaxslowmo islands status`: who takes part in a run of islands."""

import jaxslowmo as js

from ._errors import CommandError
from .config._commands import IslandsStatusConfig


def islands_status(config: IslandsStatusConfig) -> int:
    """Print the state of a run and of its islands; return the exit code.

    Raises:
      CommandError: no such URL, no run there, or the store does not answer.
    """
    try:
        print(js.islands.status(config.url))
    except (ValueError, js.islands.IslandsError) as error:
        raise CommandError(str(error)) from error
    return 0
