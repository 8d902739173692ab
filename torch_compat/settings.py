"""Settings of a module other than its tensors: modes, flags, numbers and names."""

from collections.abc import Collection
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # names of the package are there without torch
    from torch import nn

_LONGEST = 16  # a longer tuple is data, not a setting


class Attributes:
    """The plain attributes of a module's parts: numbers, strings, None, short tuples of these.

    Args:
      module: module whose current parts are read.
      leave_out: names of attributes to ignore, in all parts.
    """

    def __init__(self, module: "nn.Module", leave_out: Collection[str] = ()) -> None:
        self._values = [
            (".".join(filter(None, [path, name])), vars(part), name, value)
            for path, part in module.named_modules()
            for name, value in vars(part).items()
            if name not in leave_out and is_plain(value)
        ]

    def by_path(self) -> dict[str, Any]:
        """Return the values by path and name."""
        return {path: value for path, _, _, value in self._values}

    def leave_out(self, paths: Collection[str]) -> None:
        """Ignore these paths from now on."""
        self._values = [entry for entry in self._values if entry[0] not in paths]

    def changes(self) -> list[tuple[str, Any, Any]]:
        """Return the changes since construction: path and name, the old value, the new value."""
        return [
            (path, value, attributes[name])
            for path, attributes, name, value in self._values
            if is_plain(attributes.get(name, ...)) and not _is_same(attributes[name], value)
        ]


class Changes(NamedTuple):
    """Changed settings of a module, to be set on a copy of it.

    Attributes:
      trained: maps a parameter's name to its `requires_grad`.
      attributes: maps path and name, such as "layers.0.training", to a value.
    """

    trained: dict[str, bool]
    attributes: dict[str, Any]

    def __bool__(self) -> bool:
        return bool(self.trained or self.attributes)

    def apply(self, module: "nn.Module") -> None:
        """Apply the changes to a copy of the module; settings that the copy lacks are left out."""
        parameters, parts = dict(module.named_parameters()), dict(module.named_modules())
        for name in self.trained.keys() & parameters.keys():
            parameters[name].requires_grad_(self.trained[name])
        for path, value in self.attributes.items():
            part, _, name = path.rpartition(".")
            if part in parts:
                setattr(parts[part], name, value)


class Settings:
    """The settings of a module at one time: `requires_grad`, its modes and plain attributes."""

    def __init__(self, module: "nn.Module") -> None:
        self._module = module
        self._trained = {name: p.requires_grad for name, p in module.named_parameters()}
        self._attributes = Attributes(module).by_path()

    def changes(self) -> Changes:
        """Return the changes since construction, also in parts that were replaced."""
        now = Settings(self._module)
        return Changes(
            {
                name: is_trained
                for name, is_trained in now._trained.items()
                if is_trained != self._trained.get(name)
            },
            {
                path: value
                for path, value in now._attributes.items()
                if path not in self._attributes or not _is_same(value, self._attributes[path])
            },
        )


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None, or a short tuple of these."""
    if isinstance(value, tuple):
        return len(value) <= _LONGEST and all(map(is_plain, value))
    return value is None or isinstance(value, Number | str)


def _is_same(a: Any, b: Any) -> bool:
    if a is b or (a != a and b != b):  # NaN is not equal to itself
        return True
    return isinstance(a, bool) == isinstance(b, bool) and a == b
