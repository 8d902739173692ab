"""The version of this package, installed or not."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jaxslowmo")
except PackageNotFoundError:  # on the path, as in a script that runs in a checkout
    __version__ = "0+checkout"
