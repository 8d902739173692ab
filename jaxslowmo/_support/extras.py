"""Errors about missing optional packages, which name the extra that installs them."""

import contextlib
from collections.abc import Iterator

# The packages of extras that jaxslowmo imports, and their extra.
_EXTRAS = {
    **dict.fromkeys(
        (
            "etils", "filelock", "flax", "matplotlib", "orbax", "rich", "safetensors",
            "tensorboardX", "tyro", "yaml",
        ),
        "train",
    ),
    "obstore": "islands",
}  # fmt: skip
# pip adds an extra to an installed package without downloading the package again.
INSTALL = "pip install 'jaxslowmo[{0}]' (in a checkout: '.[{0}]')"


def missing_extra(who: str, error: ModuleNotFoundError) -> str | None:
    """Return the message for a failed import; None for packages of no extra.

    Args:
      who: name that users know of the module or command that needs the import.
      error: error of the failed import.
    """
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return None
    what = f"{who} needs {package}, which is not installed; the extra `{extra}` has it"
    return f"{what}: {INSTALL.format(extra)}"


@contextlib.contextmanager
def needed_by(who: str) -> Iterator[None]:
    """Make imports of extras' packages fail with advice within the block.

    Args:
      who: name that users know of the module that needs the imports.

    Raises:
      ModuleNotFoundError: a package is missing; the message names it and what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        message = missing_extra(who, error)
        if message is None:
            raise
        raise ModuleNotFoundError(message, name=error.name) from error
