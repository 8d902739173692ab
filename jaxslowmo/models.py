"""The models of the command line, for `import jaxslowmo.models`."""

from .language.models import *  # noqa: F403
