"""Batches of text, for `import jaxslowmo.data`."""

from .language.data import *  # noqa: F403
