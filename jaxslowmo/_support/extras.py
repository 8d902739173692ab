"""What needs more than the core says which extra brings it: one form for library and commands."""

import contextlib
from collections.abc import Iterator

# What the `train` extra installs and jaxslowmo imports.
_TRAIN = frozenset(
    {"etils", "flax", "matplotlib", "orbax", "rich", "tensorboardX", "tensorstore", "typer"}
)
# pip adds an extra to a package that is installed without asking an index for the package.
INSTALL = "pip install 'jaxslowmo[train]' (in a checkout: '.[train]')"


def missing_extra(who: str, error: ModuleNotFoundError) -> str | None:
    """What to say about a failed import, None if no part of the `train` extra is missing.

    Args:
      who: what needs the import, as users call it.
      error: the failure.
    """
    package = (error.name or "").partition(".")[0]
    if package not in _TRAIN:
        return None
    return f"{who} needs {package}, which is not installed; the extra `train` has it: {INSTALL}"


@contextlib.contextmanager
def needed_by(who: str) -> Iterator[None]:
    """Around imports of what the `train` extra brings: a missing one says how to get it.

    Args:
      who: the module that needs them, as users call it.

    Raises:
      ModuleNotFoundError: with the name of what is missing, and what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = missing_extra(who, error)
        if message is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from error
