"""Training one model on many machines with a slow network between them.

`import jaxslowmo as js` gives optax transforms that communicate rarely (`local_sgd`, `slowmo`,
`diloco`), a bucketed gradient all-reduce, a training step that uses them, and a report of the bytes
that a step sends (`comm_report`).
"""

import sys as _sys
from typing import TYPE_CHECKING

from . import topology as topology
from ._version import __version__ as __version__

# `_api` loads jax and optax. It is imported at the first use of one of its names, because programs
# without jax, such as those with torch, also use `jaxslowmo.topology`.
if TYPE_CHECKING:
    from ._api import *  # noqa: F403
else:  # hidden from type checkers, to which `__getattr__` would make every name a valid one

    def __getattr__(name: str) -> object:
        """Return a name of `_api`, or a package that is loaded with it (`jaxslowmo.train`)."""
        # Python and its tools look up underscored names in every module, and `_api` has none.
        if name == "__all__" or not name.startswith("_"):
            try:
                from . import _api
            except AttributeError as error:  # `hasattr` and `from` would hide it
                raise ImportError(f"cannot import jaxslowmo._api: {error}") from error
            public = {key: value for key, value in vars(_api).items() if not key.startswith("_")}
            public["__all__"] = sorted({*public, "topology"})
            globals().update(public | globals())  # names that were set since are kept
            if name in globals():
                return globals()[name]
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=_sys.modules[__name__])

    def __dir__() -> list[str]:
        return sorted({*__getattr__("__all__"), *globals()} - {"TYPE_CHECKING"})
